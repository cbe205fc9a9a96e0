"""A decode step as one CUDA graph: captured once, bound to one cache after the other, launched per token."""
