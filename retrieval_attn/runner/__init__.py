"""Reading and generating: prefill, the token loop, and the step as a CUDA graph."""
