"""`retrieval-attn bench serve`: many requests at once, beside the same ones after each other."""
