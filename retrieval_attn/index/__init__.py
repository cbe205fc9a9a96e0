"""Vector indexes over attention keys: which keys matter for a query. NumPy and Numba only; never imports torch."""

from __future__ import annotations

import retrieval_attn.compile.numba_cache  # noqa: F401  # before any kernel is defined
from retrieval_attn.index.auto import AutoIndex
from retrieval_attn.index.base import KeyIndex, SearchResult
from retrieval_attn.index.device import DeviceIndex
from retrieval_attn.index.flat import FlatIndex, FullIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.roargraph.index import RoarGraphIndex
from retrieval_attn.index.sketch.index import SketchIndex
from retrieval_attn.index.spec import IndexSpec, available, create, register

# The root also shows this folder as the link `index`: imported through it, every class would exist twice.
if not __name__.startswith("retrieval_attn."):
    raise ImportError("index is a link to retrieval_attn/index; write `import retrieval_attn.index` instead")

__all__ = [
    "AutoIndex",
    "DeviceIndex",
    "FlatIndex",
    "Format",
    "FullIndex",
    "IndexSpec",
    "KeyIndex",
    "RoarGraphIndex",
    "SearchResult",
    "SketchIndex",
    "available",
    "create",
    "register",
]
