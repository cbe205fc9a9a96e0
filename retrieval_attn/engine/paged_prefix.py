"""Device pages for prefixes that requests attend to exactly: `PagedKVPool` of an engine, `PageAllocation` of one
request.

Where a prefix lies is decided by its length and the engine's options, never by load: a request that finds too few free
pages waits, and holds nothing meanwhile.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.paged_prefix import PagedLayers, PagedPrefix, PagedSpan
from retrieval_attn.config import Config
from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.pages import PageCounts, PagePool
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.sizes import Sizes
from retrieval_attn.errors import AdmissionError, ConfigError, OutOfPagesError
from retrieval_attn.gpu.shared.plan import PAGE_TOKENS, pages_for
from retrieval_attn.memory.host import HostSize
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.memory.shared_room import exact_device_bytes

__all__ = ["PagedKVPool", "PageAllocation"]

COLLECT_SECONDS = 1.0
"""Between two looks for pages that nobody uses and that were not given back yet."""
PARTS = 8
"""Of a prefix, each of which may leave a page in part."""


class PagedKVPool:
    """Pages and who has them. Belongs to the thread of an engine, but for `counts`, `check` and the constants.

    tokens: prefixes of a prompt that end there or before lie in pages. layers: the memory.
    """

    def __init__(self, tokens: int, pages: int, *, int8: bool = False) -> None:
        """pages: of all prefixes together. int8: of int8 rows with a step each, half the bytes.

        Raises ConfigError for fewer pages than one of `tokens` tokens takes.
        """
        self.tokens = tokens
        self.layers = PagedLayers(pages, int8=int8)
        self._pool = PagePool(pages, PAGE_TOKENS)
        self._collected_at = 0.0
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

        model, config: whose rows are beside the pages, which get a part of the memory that is free where no number is
        given. int8: as in `PagedKVPool`. Raises ConfigError.
        """
        for name, value in (("paged_prefix_tokens", tokens), ("paged_prefix_pages", pages)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ConfigError(f"{name} must be a whole number >= 0, got {value!r}")
        if not tokens:
            return None
        if pages is None:
            room = exact_device_bytes(model, config, limits.rows + limits.ahead)
            room = limits.host_bytes // 4 if room is None else room
            stored = config.replace(host_dtype="int8" if int8 else "auto")
            token_bytes = HostSize(model_shape(model), stored).token_bytes
            each = pages_for(tokens) + PARTS
            pages = max(each, min(each * limits.rows, room // (max(1, token_bytes) * PAGE_TOKENS)))
        return cls(tokens, pages, int8=int8)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return self._pool.pages_for(tokens)

    def take(self, lengths: Sequence[int], tree: RadixCache | None) -> list[PagedSpan] | None:
        """Spans for so many tokens each; None where there are too few pages, also after the tree gave up prefixes that
        nobody uses.
        """
        counts = [self._pool.pages_for(length) for length in lengths]
        while self.free_pages < sum(counts):
            if (tree is None or not tree.evict(Sizes(pages=1)).pages) and not self._collected():
                return None
        try:
            taken = self._pool.take(sum(counts))
        except OutOfPagesError:  # no other thread takes any
            return None
        tables = np.split(taken, np.cumsum(counts)[:-1])
        return [PagedSpan(table, length, self._returned.append) for table, length in zip(tables, lengths, strict=True)]

    def _collected(self) -> bool:
        """Objects that refer to each other keep pages until the collector comes, which need not be soon where all wait:
        let it, once in a while; whether it was let.
        """
        now = time.monotonic()
        if now - self._collected_at < COLLECT_SECONDS:
            return False
        self._collected_at = now
        gc.collect()
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

    def check(self) -> None:
        """Raise AssertionError unless every page is free or held, once."""
        self._pool.check()


class PageAllocation:
    """The pages that parts of one prompt are read into. waiting: too few were free so far, and none are held."""

    def __init__(self, pool: PagedKVPool, parts: Sequence[Sequence[int]]) -> None:
        """parts: of the prompt; the last one, which nobody shares, lies in no pages.

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
        """What the cache reads next goes to pages, if this part does: not where it holds tokens elsewhere, as of an
        answer that it continues.
        """
        span = self._spans.pop(part, None)
        before = PagedPrefix(self._pool.layers) if cache.batch.exact is None else cache.batch.exact
        if span is not None and before.tokens == cache.get_seq_length():
            cache.batch.exact = before.opened(span)
