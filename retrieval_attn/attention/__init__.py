"""The cache that transformers sees, and its layers."""
