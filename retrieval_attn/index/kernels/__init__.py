"""Compiled kernels that several kinds of index share."""
