"""Refusals: caches that no graph serves, until what refused them has changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from retrieval_attn.attention.cache import RetrievalCache

__all__ = ["RETRY_STEPS", "EagerFallbacks"]

RETRY_STEPS = 256
"""Steps from one look at what refused a cache to the next. A row that joins may cost the others a capture."""


@dataclass(frozen=True)
class _Refused:
    """situation: as it was then. until: the step at which it is looked at again."""

    situation: object
    until: int


class EagerFallbacks:
    """See the module. No cache is kept alive."""

    def __init__(self) -> None:
        self._caches: weakref.WeakKeyDictionary[RetrievalCache, _Refused] = weakref.WeakKeyDictionary()
        self._step = 0

    def __contains__(self, cache: RetrievalCache) -> bool:
        return cache in self._caches

    def __len__(self) -> int:
        return len(self._caches)

    def count_step(self) -> None:
        """A step begins."""
        self._step += 1

    def note(self, cache: RetrievalCache, situation: object) -> None:
        """No graph serves this cache as things are. situation: all that may change that; equal while nothing did."""
        self._caches[cache] = _Refused(situation, self._step + RETRY_STEPS)

    def stands(self, cache: RetrievalCache, situation: Callable[[], object]) -> bool:
        """Whether a cache that was refused still is. situation: as it is now; asked once in RETRY_STEPS steps."""
        known = self._caches.get(cache)
        if known is None:
            return False
        if self._step < known.until:
            return True
        now = situation()
        if now == known.situation:
            self.note(cache, now)
            return True
        del self._caches[cache]
        return False
