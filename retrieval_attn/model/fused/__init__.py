"""Fused decode layers: which modules of transformers they replace, and how."""
