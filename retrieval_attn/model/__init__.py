"""How an unmodified transformers model is hooked, loaded, placed and rotated."""
