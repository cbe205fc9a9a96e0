"""`retrieval-attn bench session`: what a user waits for, through the public API alone."""
