"""KeptPages: device pages for answers that attend to all keys, and whose tokens lie there.

A model keeps them from one answer to the next: captured steps know where they lie, and the next question on the same
text finds its keys there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.paged_prefix import PagedLayers, PagedPrefix, PagedSpan
from retrieval_attn.gpu.shared.plan import pages_for
from retrieval_attn.runner.graph.registry import retire

__all__ = ["FullKVPages", "keep", "kept_pages", "let_go"]


class FullKVPages:
    """See the module. For one thread at a time."""

    def __init__(self, pages: int, *, int8: bool) -> None:
        self.layers = PagedLayers(pages, int8=int8)
        self._users: weakref.WeakSet[PagedPrefix] = weakref.WeakSet()
        self._of: tuple[weakref.ref[RetrievalCache], int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.layers.nbytes_per_page * self.layers.pages

    @property
    def in_use(self) -> bool:
        """Whether an answer attends to them."""
        return bool(self._users)

    def held(self, cache: RetrievalCache) -> int:
        """How many of the first tokens of `cache`, as it is now, lie there."""
        if self._of is None:
            return 0
        known, rewritten, tokens = self._of
        return tokens if known() is cache and rewritten == cache.batch.rewritten else 0

    def has_room(self, tokens: int) -> bool:
        """Whether so many tokens have room there."""
        return self.layers.pages >= pages_for(tokens)

    def take(self, cache: RetrievalCache, tokens: int, bring: Callable[[PagedSpan, int], None]) -> PagedPrefix:
        """The first `tokens` tokens of `cache`, as a prefix; bring: puts those from one on there, that are missing."""
        span = PagedSpan(np.arange(pages_for(tokens), dtype=np.int32), tokens, lambda pages: None)
        held = self.held(cache)
        if held < tokens:
            self._of = None
            bring(span, held)
            self._of = weakref.ref(cache), cache.batch.rewritten, tokens
        prefix = PagedPrefix(self.layers, (span,))
        self._users.add(prefix)
        return prefix


_kept: weakref.WeakKeyDictionary[PreTrainedModel, FullKVPages] = weakref.WeakKeyDictionary()


def kept_pages(model: PreTrainedModel) -> FullKVPages | None:
    """Those that the model keeps."""
    return _kept.get(model)


def keep(model: PreTrainedModel, pages: FullKVPages) -> None:
    """Keep these, and no others: their memory is free once no answer uses them."""
    let_go(model)
    _kept[model] = pages


def let_go(model: PreTrainedModel) -> None:
    """Keep none: neither pages nor steps that were captured over them."""
    pages = _kept.pop(model, None)
    if pages is not None:
        retire(model, pages.layers)
