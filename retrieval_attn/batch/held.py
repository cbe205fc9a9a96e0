"""HeldCache: what a node of the tree holds, a cache that ends where the node ends and that nobody changes."""

from __future__ import annotations

import threading

from retrieval_attn.batch.node import Held
from retrieval_attn.batch.saved_text import OpenedText
from retrieval_attn.cache.cache import RetrievalCache, own_bytes, pack

__all__ = ["HeldCache"]


class HeldCache:
    """The cache that read a prefix. Requests continue forks of it, which share its keys and indexes.

    nbytes: on the host and on the device, beyond what the node before it holds; maps of a store's files count as well.
    opened: the saved context that it is, or continues.
    """

    def __init__(self, cache: RetrievalCache, nbytes: int, shared_nbytes: int, opened: OpenedText | None) -> None:
        """shared_nbytes: of what forks have together, with all that is before it."""
        self._cache, self.nbytes, self.shared_nbytes, self.opened = cache, nbytes, shared_nbytes, opened
        self._lock = threading.Lock()

    @classmethod
    def beyond(cls, cache: RetrievalCache, before: Held | None, opened: OpenedText | None = None) -> HeldCache:
        """Of a cache that nobody changes from now on, which continued `before`. Its windows keep no room."""
        pack(cache)
        own = own_bytes(cache)  # every node has windows of its own
        shared = cache.host_nbytes + cache.device_nbytes - own
        known = before.shared_nbytes if isinstance(before, HeldCache) else 0
        return cls(cache, own + max(0, shared - known), shared, opened)

    def fork(self) -> RetrievalCache:
        """To be continued. Any thread."""
        with self._lock:
            return self._cache.fork()
