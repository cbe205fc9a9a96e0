"""Vector indexes over attention keys: which keys matter for a query. NumPy and Numba only; never imports torch."""

from __future__ import annotations

from retrieval_attn.index.base import KeyIndex, SearchResult, available, create, register
from retrieval_attn.index.flat import FlatIndex
from retrieval_attn.index.formats import Format

__all__ = ["FlatIndex", "Format", "KeyIndex", "SearchResult", "available", "create", "register"]
