"""Decode steps of one sequence that verify drafts: eager steps, and captured steps on a GPU."""

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
from retrieval_attn.runner.decode import DecodeSteps, TokenCopy
from retrieval_attn.runner.drafts import BlockCosts, DraftBlock, Drafts, LookupDrafter
from retrieval_attn.runner.graph.support import runtime_for
from retrieval_attn.runner.rows import can_draft, step, tokens_before_spill

__all__ = ["CapturedDrafts", "DraftedSteps", "drafted_steps", "steps_eagerly"]


def steps_eagerly(model: PreTrainedModel, graph: GraphMode) -> bool:
    """Return whether decode steps are eager, on a CPU."""
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
        self._block, self._accepted, self._logits, self._newest = DraftBlock([]), 0, None, -1

    _logits: Tensor | None
    """Of the newest token and the drafts of the block."""

    def step(self, token: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
        """See `DecodeSteps.step`, of the token noted last. mask: None."""
        number = self._newest
        if (accepted := self._accepted_logits()) is not None:
            return accepted
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

    def note(self, token: list[int]) -> None:
        """See `DecodeSteps.note`."""
        (self._newest,) = token
        self._left -= 1
        self._note_token(self._newest)

    def _accepted_logits(self) -> Tensor | None:
        """Return the logits after the newest token if it is the next draft; otherwise end the block."""
        drafts = self._block.drafts
        if self._logits is not None and drafts[self._accepted : self._accepted + 1] == [self._newest]:
            self._accepted += 1
            return self._logits[self._accepted, None]
        self._end_block(missed=self._accepted < len(drafts))
        return None

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
            self._drop_wrong(wrong)
        self._note_block(block, self._accepted, missed=missed)

    def _drop_wrong(self, count: int) -> None:
        """Remove the last `count` drafts from the cache."""
        self._cache.crop(-count)


class CapturedDrafts(DraftedSteps):
    """The same by captured steps: a block is one replay of a graph of that many tokens (`GraphPool.launch_block`).

    The device appends all drafts behind the end of the windows; those that are accepted are counted, token by token.
    Without drafts a step of one token is launched ahead of its token, as in `DecodeSteps`.
    """

    def __init__(self, model: PreTrainedModel, cache: RetrievalCache, ids: NDArray[Any], tokens: int) -> None:
        """See `DraftedSteps`. The cache's options demand or allow graphs."""
        super().__init__(model, cache, ids, tokens)
        self._graph, self._eager = cache.config.graph, False
        self._token_copy, self._choices = TokenCopy(input_device(model)), list[int]()
        self._confirmed = 0  # tokens of the block

    def step(self, token: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
        """See `DecodeSteps.step`, of the token noted last. mask: None."""
        if (accepted := self._accepted_logits()) is not None:
            return accepted
        block = self._proposed()
        if block.drafts:
            foreground.note()
            assert self.pool is not None
            found = self.pool.launch_block(self._cache, [self._newest, *block.drafts], position)
            if found is not None:
                self.replays += 1
                self._block, self._accepted, self._logits, self._choices, self._confirmed = block, 0, found, [], 0
                return found[:1]
        return DecodeSteps.step(self, token, position, mask)

    @property
    def chosen(self) -> Tensor | None:
        """See `DecodeSteps.chosen`: after the last accepted draft of a block."""
        chosen = super().chosen
        return chosen if chosen is None or self._logits is None else chosen[self._accepted : self._accepted + 1]

    def launch_next(self) -> bool:
        """See `DecodeSteps.launch_next`. In a block wait for it, and return whether the next token is the next draft.
        Otherwise return False if there are drafts: the next step verifies them.
        """
        if self._logits is None:
            if self._proposed().drafts:
                self.drafts.wait()
                return False
            return super().launch_next()
        if not self._choices and self.pool is not None:
            self._token_copy.send(self.pool.chosen)
            self._choices = self._token_copy.read()
        drafts, number = self._block.drafts, self._accepted
        if drafts[number : number + 1] != self._choices[number : number + 1]:
            return False
        self._accepted += 1
        return True

    def discard(self) -> None:
        """See `DecodeSteps.discard`."""
        if self._logits is None:
            super().discard()
        else:
            self._accepted = self._confirmed - 1

    def confirm(self) -> None:
        """See `DecodeSteps.confirm`: of a block, commit its next token."""
        if self.pool is None:
            super().confirm()
            self.drafts.restart()
        elif self._logits is None:
            super().confirm()
            self.drafts.end_replay(1, self.pool.captures, self.pool.blocks.take_delay())
        elif self._confirmed:
            self.pool.commit_drafts(self._cache, 1)
            self._confirmed += 1
        else:
            self.pool.confirm()
            self._confirmed = 1
            self.drafts.end_replay(len(self._logits), self.pool.captures, self.pool.blocks.take_delay())

    def _proposed(self) -> DraftBlock:
        """Return the drafts that follow the newest token, or none."""
        if self.pool is None:
            return DraftBlock([])
        most = min(self._left, self.pool.block_room(self._cache)) - 1
        return self.drafts.timed_block(most, self.pool.blocks)

    def _drop_wrong(self, count: int) -> None:
        """Nothing counts them."""


def drafted_steps(model: PreTrainedModel, cache: RetrievalCache, ids: Tensor, tokens: int) -> DraftedSteps | None:
    """Return steps of one sequence after ids (1, columns), or None if it cannot have drafts.

    tokens: the most that are generated.
    """
    if cache.config.drafts is not True or len(ids) != 1 or not can_draft(cache):
        return None
    graph = cache.config.graph
    if steps_eagerly(model, graph):
        kind: type[DraftedSteps] = DraftedSteps
    elif graph is False or is_spread(model):
        return None
    else:
        kind = CapturedDrafts
    return kind(model, cache, ids[0].cpu().numpy().astype(np.int32), tokens)
