"""Where compiled kernels are kept, and how they are compiled ahead, in parallel. Imports neither NumPy nor torch."""
