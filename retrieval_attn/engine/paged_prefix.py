"""Device pages for prefixes that requests attend to exactly: `PagedKVPool` of an engine, `PageAllocation` of one
request.

Where a prefix lies is decided by its length and the engine's options, never by load: a request that finds too few free
pages waits, and holds nothing meanwhile.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.paged_prefix import PagedLayers, PagedPrefix, PagedSpan
from retrieval_attn.config import Config
from retrieval_attn.engine.ids import int32_row
from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.node import PrefixCacheError, Sizes
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.errors import AdmissionError, ConfigError, ShapeError
from retrieval_attn.gpu.shared.plan import PAGE_TOKENS, pages_for
from retrieval_attn.memory.device_room import exact_device_bytes
from retrieval_attn.memory.host import HostSize
from retrieval_attn.memory.shape import model_shape

__all__ = ["PageAllocation", "PageCounts", "PagePool", "PagedKVPool"]


PageIds = NDArray[np.int32]


class PageCounts(NamedTuple):
    """free + held == total."""

    free: int
    held: int
    total: int


class PagePool:
    """Pages by number, each free or held once. Every operation takes O(1) per page.

    Deterministic: the page that was freed last is taken first, since its memory is most likely still in a cache. All
    methods may be called by any thread. An operation that raises has changed nothing.
    """

    def __init__(self, pages: int, page_tokens: int = 64) -> None:
        """pages: of the buffer, 0 or more. page_tokens: tokens of one page. Raises ConfigError out of range."""
        if not 0 <= pages < 2**31:
            raise ConfigError(f"pages must be from 0 to 2^31 - 1, but is {pages}")
        if page_tokens < 1:
            raise ConfigError(f"page_tokens must be at least 1, but is {page_tokens}")
        self.pages = pages
        self.page_tokens = page_tokens
        self._lock = threading.Lock()
        self._held = np.zeros(pages, bool)
        self._stack = np.arange(pages, dtype=np.int32)[::-1].copy()  # its first _free entries are free
        self._free = pages

    @property
    def free_pages(self) -> int:
        """Free pages; another thread may take them right after."""
        return self._free

    def pages_for(self, tokens: int) -> int:
        """Return the pages that `tokens` fill, the last one partly; 0 for no tokens."""
        return -(-tokens // self.page_tokens)

    def take(self, n: int) -> PageIds:
        """n free pages, int32 (n,), each taken once; what lies in them is undefined. n may be 0.

        Raises PrefixCacheError where fewer are free.
        """
        if n < 0:
            raise ShapeError(f"the number of pages to take must be 0 or more, but is {n}")
        with self._lock:
            return self._take(n)

    def free(self, ids: Sequence[int] | PageIds) -> int:
        """Give pages back; their number.

        Raises PrefixCacheError for a page that is free already, or given twice.
        """
        given = self._checked(ids)
        with self._lock:
            once, times = np.unique(given, return_counts=True)
            wrong = once[(times > 1) | ~self._held[once]]
            if wrong.size:
                raise PrefixCacheError(f"pages {wrong.tolist()} are freed more often than taken")
            self._held[given] = False
            self._stack[self._free : self._free + len(given)] = given[::-1]
            self._free += len(given)
            return len(given)

    def counts(self) -> PageCounts:
        """Free, held and all pages, of one moment."""
        with self._lock:
            return PageCounts(self._free, int(self._held.sum()), self.pages)

    def _take(self, n: int) -> PageIds:
        if n > self._free:
            held = self.pages - self._free
            raise PrefixCacheError(
                f"{n} pages of {self.page_tokens} tokens are needed, but {self._free} of {self.pages} are free and "
                f"{held} are in use; wait until a sequence ends, or give the engine more pages"
            )
        self._free -= n
        ids = self._stack[self._free : self._free + n][::-1].copy()
        self._held[ids] = True
        return ids

    def _checked(self, ids: Sequence[int] | PageIds) -> PageIds:
        given = int32_row(ids, "page ids")
        if given.size and not (given.min() >= 0 and given.max() < self.pages):
            raise ShapeError(f"page ids must be from 0 to {self.pages - 1}, but lie in [{given.min()}, {given.max()}]")
        return given


COLLECT_SECONDS = 1.0
"""Least time from the end of one garbage collection for pages to the next."""
COLLECT_SHARE = 0.05
"""Of the time, at most, that goes into them: one takes over a second where a process holds many objects."""
PARTS = 8
"""Of a prefix, each of which may leave a page in part."""


class PagedKVPool:
    """Pages and who has them. Belongs to the thread of an engine, but for `counts`, `check` and the constants.

    tokens: prefixes of a prompt that end there or before lie in pages. layers: the memory. nbytes: bytes of all pages
    once they are allocated.
    """

    def __init__(self, tokens: int, pages: int, *, int8: bool = False) -> None:
        """pages: of all prefixes together. int8: of int8 rows with a step each, half the bytes.

        Raises ConfigError for fewer pages than one of `tokens` tokens takes.
        """
        self.tokens = tokens
        self.nbytes = 0
        self.layers = PagedLayers(pages, int8=int8)
        self._pool = PagePool(pages, PAGE_TOKENS)
        self._next_collection = 0.0
        self._returned: deque[NDArray[np.int32]] = deque()  # a finalizer may run anywhere, where a lock is held, too
        if self._pool.pages_for(tokens) > pages:
            raise ConfigError(
                f"prefixes of paged_prefix_tokens={tokens} take {self._pool.pages_for(tokens)} pages of {PAGE_TOKENS} "
                f"tokens, got paged_prefix_pages={pages}; give more of these, or fewer of those"
            )

    @classmethod
    def of(
        cls, tokens: Any, pages: Any, limits: Limits, model: PreTrainedModel, config: Config, int8: bool = False
    ) -> Self | None:
        """For an engine's options `paged_prefix_tokens` and `paged_prefix_pages`; None where no prefix lies in pages.

        model, config: of the rows that share the memory with the pages, which get a part of what is free without a
        number. int8: as in `PagedKVPool`. Raises ConfigError.
        """
        for name, value in (("paged_prefix_tokens", tokens), ("paged_prefix_pages", pages)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ConfigError(f"{name} must be a whole number >= 0, got {value!r}")
        if not tokens:
            return None
        stored = config.replace(host_dtype="int8" if int8 else "auto")
        token_bytes = HostSize(model_shape(model), stored).token_bytes
        if pages is None:
            room = exact_device_bytes(model, config, limits.rows + limits.ahead)
            room = limits.host_bytes // 4 if room is None else room
            each = pages_for(tokens) + PARTS
            pages = max(each, min(each * limits.rows, room // (max(1, token_bytes) * PAGE_TOKENS)))
        pool = cls(tokens, pages, int8=int8)
        pool.nbytes = pages * PAGE_TOKENS * token_bytes
        return pool

    def pages_for(self, tokens: int) -> int:
        """Return the pages that `tokens` fill."""
        return self._pool.pages_for(tokens)

    def take(self, lengths: Sequence[int], tree: RadixCache | None) -> list[PagedSpan] | None:
        """Return a span for each of `lengths` tokens; None if there are too few pages even after idle prefixes of the
        prefix cache were evicted.
        """
        counts = [self._pool.pages_for(length) for length in lengths]
        while self.free_pages < sum(counts):
            if (tree is None or not tree.evict(Sizes(pages=1)).pages) and not self._collected():
                return None
        try:
            taken = self._pool.take(sum(counts))
        except PrefixCacheError:  # no other thread takes any
            return None
        tables = np.split(taken, np.cumsum(counts)[:-1])
        return [PagedSpan(table, length, self._returned.append) for table, length in zip(tables, lengths, strict=True)]

    def _collected(self) -> bool:
        """Objects that refer to each other keep pages until the collector comes, which need not be soon where all wait:
        let it, once in a while; whether it was let.
        """
        began = time.monotonic()
        if began < self._next_collection:
            return False
        gc.collect()
        ended = time.monotonic()
        self._next_collection = ended + max(COLLECT_SECONDS, (ended - began) / COLLECT_SHARE)
        return True

    @property
    def free_pages(self) -> int:
        """Pages that no span has."""
        while self._returned:
            self._pool.free(self._returned.popleft())
        return self._pool.free_pages

    @property
    def counts(self) -> PageCounts:
        """Free, held and all pages. Those that were given back since pages were taken count as held."""
        return self._pool.counts()


class PageAllocation:
    """The pages that parts of one prompt are read into. waiting: too few were free so far, and none are held."""

    def __init__(self, pool: PagedKVPool, parts: Sequence[Sequence[int]]) -> None:
        """parts: of the prompt; the last one, which no other request shares, gets no pages.

        Raises AdmissionError for one that needs more pages than there are, the numbers named.
        """
        self._pool = pool
        ends = accumulate(map(len, parts[:-1]))
        self._lengths = [len(part) for part, end in zip(parts[:-1], ends, strict=True) if end <= pool.tokens]
        self._spans: dict[int, PagedSpan] = {}
        self._asked = self.waiting = False
        needed, pages = sum(map(pool.pages_for, self._lengths)), pool.layers.pages
        if needed > pages:
            raise AdmissionError(
                f"the prompt's shared parts take {needed} pages of {PAGE_TOKENS} tokens, the engine has {pages}; make "
                "it with more paged_prefix_pages, or a smaller paged_prefix_tokens"
            )

    def take(self, done: int, tree: RadixCache | None) -> bool:
        """Pages for all parts from `done` on, at once: who had some of its pages would keep others waiting. Later calls
        give back those of parts that need none any more. False: it must wait.
        """
        if self._asked:
            self._spans = {part: span for part, span in self._spans.items() if part >= done}
            return True
        parts = range(done, len(self._lengths))
        spans = self._pool.take(self._lengths[done:], tree) if parts else []
        self._asked, self.waiting = spans is not None, spans is None
        if spans is not None:
            self._spans = dict(zip(parts, spans, strict=True))
        return self._asked

    def open(self, part: int, cache: RetrievalCache) -> None:
        """Let the cache write its next tokens to pages, if this part has some: not if it holds tokens elsewhere, as
        those of an answer that it continues.
        """
        span = self._spans.pop(part, None)
        before = PagedPrefix(self._pool.layers) if cache.batch.paged_prefix is None else cache.batch.paged_prefix
        if span is not None and before.tokens == cache.get_seq_length():
            cache.batch.paged_prefix = before.opened(span)
