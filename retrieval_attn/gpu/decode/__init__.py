"""Kernels of a captured decode step over buffers that keep their place."""
