"""Vector indexes over attention keys: which keys matter for a query. NumPy and Numba only; never imports
torch.
"""

from __future__ import annotations

from retrieval_attn.index.auto import AutoIndex
from retrieval_attn.index.base import KeyIndex, SearchResult, available, create, register
from retrieval_attn.index.device import DeviceIndex
from retrieval_attn.index.faiss_index import HnswIndex, IvfIndex
from retrieval_attn.index.flat import FlatIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.postings import PostingsIndex
from retrieval_attn.index.roargraph.index import RoarGraphIndex
from retrieval_attn.index.sketch.index import SketchIndex

# The root also shows this folder as the link `index`: imported through it, every class would exist twice.
if not __name__.startswith("retrieval_attn."):
    raise ImportError("index is a link to retrieval_attn/index; write `import retrieval_attn.index` instead")

__all__ = [
    "AutoIndex",
    "DeviceIndex",
    "FlatIndex",
    "Format",
    "HnswIndex",
    "IvfIndex",
    "KeyIndex",
    "PostingsIndex",
    "RoarGraphIndex",
    "SearchResult",
    "SketchIndex",
    "available",
    "create",
    "register",
]
