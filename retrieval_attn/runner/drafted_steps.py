"""DraftedSteps: the eager decode steps of one sequence, some of which verify drafts in one forward."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.config import GraphMode
from retrieval_attn.model.placement import input_device, is_spread
from retrieval_attn.offload.threads import foreground
from retrieval_attn.runner.decode import DecodeSteps
from retrieval_attn.runner.drafts import BlockCosts, DraftBlock, Drafts, LookupDrafter
from retrieval_attn.runner.graph.support import runtime_for
from retrieval_attn.runner.rows import can_draft, step, tokens_before_spill

__all__ = ["DraftedSteps", "steps_eagerly"]


def steps_eagerly(model: PreTrainedModel, graph: GraphMode) -> bool:
    """Return whether decode steps are eager, on a CPU: captured steps take one token of each sequence."""
    if graph is True or input_device(model).type != "cpu" or is_spread(model):
        return False
    return graph is False or runtime_for(model) is None


class DraftedSteps(DecodeSteps):
    """Steps of one sequence. The logits of drafts that turn out right are returned without a forward.

    drafts: of the sequence.
    """

    def __init__(self, model: PreTrainedModel, cache: RetrievalCache, ids: NDArray[Any], tokens: int) -> None:
        """ids: of the prompt. tokens: the most that are generated."""
        super().__init__(model, cache, False)
        self.drafts, self._costs, self._left = Drafts(LookupDrafter(ids)), BlockCosts(), tokens
        self._block, self._accepted, self._logits = DraftBlock([]), 0, None

    _logits: Tensor | None
    """Of the newest token and the drafts of the block."""

    @classmethod
    def of(cls, model: PreTrainedModel, cache: RetrievalCache, ids: Tensor, tokens: int) -> DraftedSteps | None:
        """Return steps of one sequence after ids (1, columns), or None if it cannot have drafts."""
        serves = cache.config.drafts and len(ids) == 1 and can_draft(cache) and steps_eagerly(model, cache.config.graph)
        return cls(model, cache, ids[0].cpu().numpy().astype(np.int32), tokens) if serves else None

    def step(self, token: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
        """See `DecodeSteps.step`. mask: None."""
        number, self._left = int(token), self._left - 1
        self._note_token(number)
        drafts = self._block.drafts
        if self._logits is not None and self._accepted < len(drafts) and drafts[self._accepted] == number:
            self._accepted += 1
            return self._logits[self._accepted, None]
        self._end_block(missed=self._accepted < len(drafts))
        most = min(self._left - 1, tokens_before_spill(self._cache) - 1)
        block, began = self._next_block(token, position, most), time.perf_counter()
        if not block.drafts:
            logits = super().step(token, position, mask)
            self._costs.note(1, time.perf_counter() - began)
            return logits
        foreground.note()
        first, count = int(position), 1 + len(block.drafts)
        places = range(first, first + count)
        found = step(self._model, [self._cache], [number, *block.drafts], places, counts=[count])
        self._costs.note(count, time.perf_counter() - began)
        self._block, self._accepted, self._logits = block, 0, found
        return found[:1]

    def _note_token(self, number: int) -> None:
        """Append a token of the text."""
        self.drafts.add((number,))

    def _next_block(self, token: Tensor, position: Tensor, most: int) -> DraftBlock:
        """Return up to `most` drafts that follow the newest token, or none."""
        return self.drafts.block(most, partial(self._costs.extra, 1))

    def close(self) -> None:
        """Crop drafts that were not accepted."""
        self._end_block()
        super().close()

    def _note_block(self, block: DraftBlock, accepted: int, *, missed: bool) -> None:
        """Take in how many drafts were right. missed: the next one was wrong; False: the text ended, or has all."""
        self.drafts.note(block, accepted)

    def _end_block(self, *, missed: bool = False) -> None:
        if self._logits is None:
            return
        block, self._logits, self._block = self._block, None, DraftBlock([])
        if wrong := len(block.drafts) - self._accepted:
            self._cache.crop(-wrong)
        self._note_block(block, self._accepted, missed=missed)
