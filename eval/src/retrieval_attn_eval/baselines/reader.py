"""Reads contexts: one exact prefill serves every method that decodes from one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval_attn.config import Config
from retrieval_attn.testing import forward, using_retrieval
from retrieval_attn_eval.baselines.cache import ContextCache, PolicyFactory

__all__ = ["ContextReader", "feed", "forward_at"]


class ContextReader:
    """Keeps the last context it read, with its keys and values, until another one or `release`.

    Methods say with `attach` that they want to watch; a method that reads in its own way has a reader to itself.
    """

    def __init__(self, model: Any, config: Config | None = None) -> None:
        self.model = model
        self.config = Config(index="flat") if config is None else config
        self._factories: dict[str, PolicyFactory] = {}
        self._ids: NDArray[np.int64] | None = None
        self._cache: ContextCache | None = None

    def attach(self, name: str, factory: PolicyFactory) -> None:
        """`name` watches every context from now on.  Raises UnsupportedModelError if the model cannot be read."""
        ContextCache(self.model, {}, self.config)
        self._factories[name] = factory
        self.release()

    def open(self, ids: NDArray[np.int64]) -> tuple[ContextCache, float]:
        """The cache of a context, as it was after reading, and the seconds reading took now (0.0: it was there)."""
        if self._cache is not None and self._ids is not None and np.array_equal(ids, self._ids):
            self._cache.rewind()
            return self._cache, 0.0
        self.release()  # before, not after: two contexts may not fit
        began = time.perf_counter()
        cache = ContextCache(self.model, self._factories, self.config)
        feed(self.model, cache, ids.tolist(), 0, self.config.prefill_chunk)
        cache.context_tokens = len(ids)
        self._cache, self._ids = cache, np.array(ids)
        return cache, time.perf_counter() - began

    def release(self) -> None:
        """Free the context's memory."""
        self._cache = self._ids = None


@torch.no_grad()
def forward_at(model: Any, cache: Any, ids: Sequence[int], start: int) -> torch.Tensor:
    """The last token's logits (1, vocabulary) float32, of tokens from position `start` on, over any cache."""
    tokens = torch.tensor([list(ids)], device=model.device)
    place = torch.arange(start, start + len(ids), device=model.device)[None]
    return forward(model, cache, tokens, mask=None, position_ids=place)


def feed(model: Any, cache: ContextCache, ids: Sequence[int], start: int, chunk: int) -> torch.Tensor:
    """Run the model on tokens from position `start` on; returns the last one's logits (1, vocabulary) float32."""
    cache.require_room(len(ids), start)
    with using_retrieval(model, chunk):
        logits = forward_at(model, cache, ids, start)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return logits
