"""PagePool: which pages of a fixed buffer are taken, and by how many. It knows numbers only. Imports no torch."""

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
    """free + held + shared == total. held: pages that one has; shared: pages that several have."""

    free: int
    held: int
    shared: int
    total: int


class PagePool:
    """Pages by number, each with a count of those who have it. Every operation takes O(1) per page.

    Deterministic: the page that was freed last is taken first, since its memory is most likely still in a cache. All
    methods may be called by any thread: in an engine, the thread that plans steps takes and shares pages, and the one
    whose copies to the host have landed frees them. An operation that raises has changed nothing.
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
        self._refs = np.zeros(pages, np.int32)
        self._stack = np.arange(pages, dtype=np.int32)[::-1].copy()  # its first _free entries are free
        self._free = pages
        self._order = np.zeros(pages, np.int64)

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

    def share(self, ids: Sequence[int] | PageIds) -> None:
        """One more has each of these pages. Raises ReleasedError for a page that nobody has."""
        given = self._checked(ids)
        with self._lock:
            if not self._refs[given].all():
                raise ReleasedError(f"pages {given[self._refs[given] == 0].tolist()} are free and cannot be shared")
            np.add.at(self._refs, given, 1)

    def free(self, ids: Sequence[int] | PageIds) -> int:
        """One fewer has each of these pages; how many became free.

        Raises ReleasedError for a page that fewer have than give it back.
        """
        given = self._checked(ids)
        with self._lock:
            np.subtract.at(self._refs, given, 1)
            left = self._refs[given]
            if left.size and left.min() < 0:
                np.add.at(self._refs, given, 1)
                raise ReleasedError(f"pages {sorted(set(given[left < 0].tolist()))} are freed more often than taken")
            empty = given[left == 0]
            self._order[empty] = np.arange(len(empty))  # of a page given twice, its last place stays
            empty = empty[self._order[empty] == np.arange(len(empty))]
            self._stack[self._free : self._free + len(empty)] = empty[::-1]
            self._free += len(empty)
            return len(empty)

    def copy_on_write(self, page: int) -> tuple[int, bool]:
        """The page to write to in place of one that this caller has, and whether to copy what lies in it first.

        Of a shared page a new one is taken and the old one is given back by this caller. Raises OutOfPagesError where
        none is free, ReleasedError for a page that nobody has.
        """
        (given,) = self._checked([page])
        with self._lock:
            if self._refs[given] == 0:
                raise ReleasedError(f"page {page} is free and cannot be written to; take one first")
            if self._refs[given] == 1:
                return int(given), False
            (new,) = self._take(1)
            self._refs[given] -= 1
            return int(new), True

    def counts(self) -> PageCounts:
        """Free, held, shared and all pages, of one moment."""
        with self._lock:
            return PageCounts(self._free, int((self._refs == 1).sum()), int((self._refs > 1).sum()), self.pages)

    def check(self) -> None:
        """Raises AssertionError unless every page is free or had, once, and all are accounted for. O(pages)."""
        free, held, shared, total = self.counts()
        with self._lock:
            stack = self._stack[: self._free]
            if free + held + shared != total or (self._refs < 0).any():
                raise AssertionError(f"{free} free + {held} held + {shared} shared pages are not {total}")
            if len(np.unique(stack)) != len(stack) or self._refs[stack].any():
                raise AssertionError("a page is free twice, or free and had")

    def _take(self, n: int) -> PageIds:
        if n > self._free:
            held = self.pages - self._free
            raise OutOfPagesError(
                f"{n} pages of {self.page_tokens} tokens are needed, but {self._free} of {self.pages} are free and "
                f"{held} are in use; wait until a sequence ends, or give the engine more pages"
            )
        self._free -= n
        ids = self._stack[self._free : self._free + n][::-1].copy()
        self._refs[ids] = 1
        return ids

    def _checked(self, ids: Sequence[int] | PageIds) -> PageIds:
        given = int32_row(ids, "page ids")
        if given.size and not (given.min() >= 0 and given.max() < self.pages):
            raise ShapeError(f"page ids must be from 0 to {self.pages - 1}, but lie in [{given.min()}, {given.max()}]")
        return given
