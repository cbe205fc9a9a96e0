"""Chooser: the next tokens of a step's rows, brought to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.sampling.penalties import History, Penalties
from retrieval_attn.sampling.sampling_params import SamplingParams, SamplingState, choose

__all__ = ["SampledToken", "Sampler"]


class SampledToken(NamedTuple):
    """A row's next token. logprob, top: see `SamplingParams.logprobs`; top has pairs of an id and its
    log-probability.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Knows what each slot of its table was written with, so that only what changed is written."""

    def __init__(self, rows: int, device: torch.device) -> None:
        """rows: most rows of a step."""
        self._table = SamplingState(rows, device)
        self._drawn: list[SamplingParams | None] = [None] * rows
        self._penalties = Penalties()

    def __call__(
        self,
        draws: Sequence[SamplingParams],
        logits: Tensor,
        positions: Sequence[int],
        histories: Sequence[History | None] = (),
    ) -> list[SampledToken | None]:
        """For each row of logits (rows, vocabulary) float32 its choice; None: they hold NaN or infinity.

        positions: of the tokens that are chosen. histories: of each row, or none at all: no score is changed.
        """
        for slot, known in enumerate(self._drawn):
            draw = draws[slot] if slot < len(draws) else None
            if draw != known:
                self._table.write(slot, SamplingParams() if draw is None else draw)
                self._drawn[slot] = draw
        scores = self._penalties(logits, histories)
        found = choose(logits, self._table, torch.tensor(positions, device=logits.device), scores=scores)
        wrong, ids = found.failed.tolist(), found.ids.tolist()
        logprobs = [None] * len(ids) if found.logprobs is None else found.logprobs.tolist()
        tops: list[list[tuple[int, float]]] = [[] for _ in ids]
        if found.top_ids is not None and found.top_logprobs is not None:
            pairs = zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
            tops = [list(zip(top, of, strict=True)) for top, of in pairs]
        choices: list[SampledToken | None] = []
        for draw, failed, token, logprob, top in zip(draws, wrong, ids, logprobs, tops, strict=True):
            choice = SampledToken(token, logprob if draw.logprobs else None, tuple(top[: draw.logprobs]))
            choices.append(None if failed else choice)
        return choices
