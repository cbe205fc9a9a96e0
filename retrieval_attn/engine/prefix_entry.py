"""HeldCache: what a node of the tree holds, a cache that ends where the node ends and that nobody changes."""

from __future__ import annotations

import threading

from torch import Tensor

from retrieval_attn.attention.cache import RetrievalCache, own_tensors, pack
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.store import rows_bytes
from retrieval_attn.engine.node import Payload
from retrieval_attn.engine.saved_text import OpenedText
from retrieval_attn.engine.sizes import Sizes

__all__ = ["PrefixEntry"]


class PrefixEntry:
    """The cache that read a prefix. Requests continue forks of it, which share its keys and indexes.

    sizes: beyond what the node before it holds; maps of a store's files count as well. opened: the saved context that
    it is, or continues.
    """

    def __init__(self, cache: RetrievalCache, sizes: Sizes, shared: Sizes, opened: OpenedText | None) -> None:
        """shared: of what forks have together, with all that is before it."""
        self._cache, self.sizes, self.shared, self.opened = cache, sizes, shared, opened
        self._lock = threading.Lock()

    @classmethod
    def beyond(cls, cache: RetrievalCache, before: Payload | None, opened: OpenedText | None = None) -> PrefixEntry:
        """Of a cache that nobody changes from now on, which continued `before`. Its windows keep no room."""
        pack(cache)
        own, shared = _sizes(cache)  # every node has windows of its own
        known = before.shared if isinstance(before, PrefixEntry) else Sizes()
        return cls(cache, own.plus(shared.beyond(known)), shared, opened)

    def fork(self) -> RetrievalCache:
        """To be continued. Any thread."""
        with self._lock:
            return self._cache.fork()


def on_device(tensor: Tensor) -> bool:
    """Whether it lies beside host memory."""
    return tensor.device.type != "cpu"


def _sizes(cache: RetrievalCache) -> tuple[Sizes, Sizes]:
    """Of what a fork has a copy of, and of what forks share. Codes and clusters lie where windows do. Rows that a
    device reads do not count: they go before a text has to.
    """
    tensors = list(own_tensors(cache))
    own = sum(one.nbytes for one in tensors)
    apart = sum(one.nbytes for one in tensors if on_device(one))
    pages = 0 if cache.batch.exact is None else cache.batch.exact.nbytes
    codes = cache.device_nbytes - own - pages
    paths = [host for layer in cache.layers if isinstance(layer, RetrievalLayer) for host in layer.hosts]
    host = cache.host_nbytes - rows_bytes(paths)
    shared = Sizes(host, codes, pages) if apart else Sizes(host + codes, 0, pages)
    return Sizes(own - apart, apart), shared
