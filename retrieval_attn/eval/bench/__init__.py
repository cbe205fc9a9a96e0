"""Benchmarks: `retrieval-attn bench`."""
