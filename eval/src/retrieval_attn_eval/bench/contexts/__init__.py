"""`retrieval-attn bench contexts`: what saving a context costs, and how soon it is back."""
