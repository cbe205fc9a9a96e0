"""HeldCache: what a node of the tree holds, a cache that ends where the node ends and that nobody changes."""

from __future__ import annotations

import threading

from retrieval_attn.batch.node import Held
from retrieval_attn.batch.saved_text import OpenedText
from retrieval_attn.cache.cache import RetrievalCache

__all__ = ["HeldCache"]


class HeldCache:
    """The cache that read a prefix. Requests continue forks of it, which share its keys and indexes.

    nbytes: on the host and on the device, beyond what the node before it holds; maps of a store's files count as well.
    opened: the saved context that it is, or continues.
    """

    def __init__(self, cache: RetrievalCache, nbytes: int, whole_bytes: int, opened: OpenedText | None = None) -> None:
        """whole_bytes: with all that is before it."""
        self._cache, self.nbytes, self.whole_bytes, self.opened = cache, nbytes, whole_bytes, opened
        self._lock = threading.Lock()

    @classmethod
    def beyond(cls, cache: RetrievalCache, before: Held | None, opened: OpenedText | None = None) -> HeldCache:
        """Of a cache that nobody changes from now on, which continued `before`."""
        whole = cache.host_nbytes + cache.device_nbytes
        known = before.whole_bytes if isinstance(before, HeldCache) else 0
        return cls(cache, max(0, whole - known), whole, opened)

    def fork(self) -> RetrievalCache:
        """To be continued. Any thread."""
        with self._lock:
            return self._cache.fork()
