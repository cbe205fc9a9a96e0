"""PagePool: the free and the held pages of a fixed buffer, by number. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieval_attn.engine.ids import int32_row
from retrieval_attn.errors import ConfigError, OutOfPagesError, ReleasedError, ShapeError

__all__ = ["PageCounts", "PagePool"]

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
        """Pages that nobody has; another thread may take them right after."""
        return self._free

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens take, the last one maybe in part; none take none."""
        return -(-tokens // self.page_tokens)

    def take(self, n: int) -> PageIds:
        """n free pages, int32 (n,), each taken once; what lies in them is undefined. n may be 0.

        Raises OutOfPagesError where fewer are free.
        """
        if n < 0:
            raise ShapeError(f"the number of pages to take must be 0 or more, but is {n}")
        with self._lock:
            return self._take(n)

    def free(self, ids: Sequence[int] | PageIds) -> int:
        """Give pages back; their number.

        Raises ReleasedError for a page that is free already, or given twice.
        """
        given = self._checked(ids)
        with self._lock:
            once, times = np.unique(given, return_counts=True)
            wrong = once[(times > 1) | ~self._held[once]]
            if wrong.size:
                raise ReleasedError(f"pages {wrong.tolist()} are freed more often than taken")
            self._held[given] = False
            self._stack[self._free : self._free + len(given)] = given[::-1]
            self._free += len(given)
            return len(given)

    def counts(self) -> PageCounts:
        """Free, held and all pages, of one moment."""
        with self._lock:
            return PageCounts(self._free, int(self._held.sum()), self.pages)

    def check(self) -> None:
        """Raise AssertionError unless every page is free or held, once, and all are accounted for. O(pages)."""
        free, held, total = self.counts()
        with self._lock:
            stack = self._stack[: self._free]
            if free + held != total:
                raise AssertionError(f"{free} free + {held} held pages are not {total}")
            if len(np.unique(stack)) != len(stack) or self._held[stack].any():
                raise AssertionError("a page is free twice, or free and held")

    def _take(self, n: int) -> PageIds:
        if n > self._free:
            held = self.pages - self._free
            raise OutOfPagesError(
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
