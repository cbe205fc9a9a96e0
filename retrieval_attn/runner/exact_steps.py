"""ExactSteps: full attention over keys in host memory, verified in blocks of tokens that retrieval drafts.

Full attention reads every key for each token. A forward of a block of tokens reads them once, and the sampler chooses
each token from its logits, so that the text is full attention's (Leviathan et al. 2023; with a drafter that retrieves:
TriForce, Sun et al. 2024). Drafts are cropped before the block is verified: a cache holds rows of full attention only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache, retrieves
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.config import FullAttention
from retrieval_attn.model.placement import is_spread
from retrieval_attn.runner.decode import ChooseTokens, DecodeSteps
from retrieval_attn.runner.drafted_steps import DraftedSteps
from retrieval_attn.runner.drafts import BlockCosts, DraftBlock
from retrieval_attn.runner.rows import can_draft

BLOCK_SIZES = (3, 7, 15, 31, 63)
"""Numbers of drafts that a block may have."""
MEASURE_AFTER = 32
"""Passes without drafts before the time of a drafted token is measured again."""
FADING = 0.95
"""Weight of older blocks for each newer one."""
LEAST_GAIN = 0.9
"""Expected time of a token with drafts, of that without, from which on there are drafts."""
PRIOR_HITS, PRIOR_TRIES = 9.5, 10.0
RETRIEVED = -1
"""Certainty of a block that retrieval drafted, see `DraftBlock`."""


class PassCosts(BlockCosts):
    """Measure the time of passes over all keys. single: of one token, which a CPU's kernels serve in another way; None
    before the first.
    """

    single: float | None = None

    def note(self, tokens: int, seconds: float) -> None:
        """Take in a pass of `tokens` tokens."""
        if tokens > 1:
            super().note(tokens, seconds)
        else:
            self.single = seconds if self.single is None else (self.single + seconds) / 2


class BlockLength:
    """Choose how many tokens to draft before a pass over all keys, for the fewest seconds per token of the text.

    hits, tries: drafts of the text, and those that were compared with it: none after the first wrong one of a block.
    """

    def __init__(self) -> None:
        self.hits = self.tries = 0
        self._recent = 0.0, 0.0
        self._draft_seconds: float | None = None
        self._without = 0  # passes in turn

    @property
    def agreement(self) -> float | None:
        """Share of compared drafts that the text has; None before the first."""
        return self.hits / self.tries if self.tries else None

    def choose(self, most: int, costs: PassCosts) -> int:
        """Return a number of drafts, 0 for none, at most `most`."""
        draft, single = self._draft_seconds, costs.single
        sizes = [0, *(size for size in BLOCK_SIZES if size <= most)]
        if draft is None or self._without >= MEASURE_AFTER:
            self._without = 0
            return min(BLOCK_SIZES[0], sizes[-1])
        if single is None:
            return 0
        hits, tries = self._recent
        chance = (hits + PRIOR_HITS) / (tries + PRIOR_TRIES)

        def seconds_per_token(count: int) -> float:
            if not count:
                return single * LEAST_GAIN
            return (count * draft + costs.seconds(1 + count)) * (1 - chance) / (1 - chance ** (1 + count))

        best = min(sizes, key=seconds_per_token)
        self._without = 0 if best else self._without + 1
        return best

    def note_seconds(self, seconds: float) -> None:
        """Take in the seconds of a drafted token."""
        before = self._draft_seconds
        self._draft_seconds = seconds if before is None else (before + seconds) / 2

    def note(self, accepted: int, missed: bool) -> None:
        """Take in a verified block. missed: its next draft was wrong."""
        hits, tries = self._recent
        self.hits, self.tries = self.hits + accepted, self.tries + accepted + missed
        self._recent = FADING * hits + accepted, FADING * tries + accepted + missed


class ExactSteps(DraftedSteps):
    """Steps of one sequence that attends to all keys (`Batch.attends_to_all`).

    Retrieval drafts by ordinary steps, captured ones on a GPU, and the sampler's choices at their positions. With
    `Config.drafts` lookup drafts come first. length: of blocks that retrieval drafts. passes, bytes_read: forwards, and
    the bytes of keys and values on the host that they read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: RetrievalCache,
        ids: Tensor,
        tokens: int,
        choose: Callable[[], ChooseTokens] | None = None,
    ) -> None:
        """ids: (1, columns) of the prompt. tokens: the most that are generated. choose: makes a function that chooses
        drafts; None: the likeliest tokens.
        """
        self._looks_up = cache.config.drafts is True
        super().__init__(model, cache, ids[0, : None if self._looks_up else 0].cpu().numpy().astype(np.int32), tokens)
        self._costs: PassCosts = PassCosts()
        self.length, self.passes, self.bytes_read = BlockLength(), 0, 0
        self._choose, self._sequences = choose, ids

    def _note_token(self, number: int) -> None:
        if self._looks_up:
            super()._note_token(number)
        if self._choose is not None:
            self._sequences = torch.cat([self._sequences, self._sequences.new_tensor([[number]])], dim=1)

    def _next_block(self, token: Tensor, position: Tensor, most: int) -> DraftBlock:
        """Count a pass and return the drafts that it verifies."""
        self.passes += 1
        self.bytes_read += host_bytes(self._cache)
        block = super()._next_block(token, position, most) if self._looks_up else DraftBlock([])
        if block.drafts or not retrieves(self._cache):
            return block
        count = self.length.choose(most, self._costs)
        return DraftBlock(self._drafted(token, position, count), RETRIEVED) if count > 0 else block

    def _drafted(self, token: Tensor, position: Tensor, count: int) -> list[int]:
        """Decode `count` tokens with retrieval after the newest one, and crop what they appended to the cache."""
        cache, found, seconds = self._cache, list[int](), list[float]()
        steps = DecodeSteps(self._model, cache)
        choose, sequences = None if self._choose is None else self._choose(), self._sequences
        cache.batch.attends_to_all = False
        try:
            while len(found) < count:
                began, position = time.perf_counter(), position + 1
                logits = steps.step(token, position - 1, None)
                token = logits.argmax(dim=-1) if choose is None else choose(sequences, logits, position)
                if choose is not None:
                    sequences = torch.cat([sequences, token[:, None]], dim=1)
                found.append(int(token))
                steps.confirm()
                seconds.append(time.perf_counter() - began)
        finally:
            steps.close()
            cache.batch.attends_to_all = True
        cache.crop(-count)
        self.length.note_seconds(statistics.median(seconds))
        return found

    def _note_block(self, block: DraftBlock, accepted: int, *, missed: bool) -> None:
        if block.certainty != RETRIEVED:
            super()._note_block(block, accepted, missed=missed)
            return
        counts = self.drafts.length
        counts.drafted, counts.accepted = counts.drafted + len(block.drafts), counts.accepted + accepted
        self.length.note(accepted, missed)


def is_exact(cache: RetrievalCache, mode: FullAttention | None) -> bool:
    """Return whether an answer is to be that of full attention. mode: of the answer; None: the cache's options."""
    return (cache.config.full_attention if mode is None else mode) == "exact"


def attends_to_all(cache: RetrievalCache, mode: FullAttention | None, tokens: int) -> bool:
    """Return whether an answer needs `Batch.attends_to_all`: it is exact, and its options retrieve some of the keys.

    tokens: of the text, the answer included.
    """
    config = cache.config
    return is_exact(cache, mode) and config.retrieve != "all" and not config.keeps_all and tokens > config.window


def exact_steps(
    model: PreTrainedModel, cache: RetrievalCache, ids: Tensor, tokens: int, choose: Callable[[], ChooseTokens] | None
) -> DecodeSteps:
    """Return steps of a cache that attends to all keys; see `ExactSteps`.

    Batches, layers with a state and models on several devices have no drafts: each token is a pass.
    """
    drafts = can_draft(cache) and not is_spread(model)
    return ExactSteps(model, cache, ids, tokens, choose) if drafts else DecodeSteps(model, cache, False)


def host_bytes(cache: RetrievalCache) -> int:
    """Return the bytes of keys and values of one sequence that a pass reads from the host."""
    held = [layer.held for layer in cache.layers if isinstance(layer, RetrievalLayer) and layer.held is not None]
    rows = [one.first_row() for one in held]
    return sum(host.token_bytes * max(0, stop - start) for host, (start, stop) in rows)
