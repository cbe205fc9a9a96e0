"""StepAhead: a step of a bucket that was launched, as it is before anybody has asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.attention.sequence import has_position
from retrieval_attn.runner.graph.decoder import CapturedStep, StepKind
from retrieval_attn.runner.graph_sampling import GraphSampling
from retrieval_attn.runner.graph_slot import GraphSlot
from retrieval_attn.sampling.sampling_params import SamplingParams

__all__ = ["Inputs", "OverlappedStep", "can_go_ahead", "columns_of"]

Inputs = Mapping[int, tuple[int, int]]
"""Token and position of rows, by place."""


class OverlappedStep(NamedTuple):
    """See the module: for these inputs, of rows that choose so. graph: what was launched, of this kind. drawing: where
    it leaves what they chose; None: it is not drawn. over: a mark behind all of it, see `Runtime.mark`.
    """

    inputs: Inputs
    draws: Mapping[int, SamplingParams] | None
    kind: StepKind
    graph: CapturedStep
    drawing: GraphSampling | None
    over: object

    def serves(self, inputs: Inputs, draws: Mapping[int, SamplingParams] | None, kind: StepKind) -> bool:
        """Whether it is the step that is asked for, or that of more rows: what the others got does not count."""
        if draws is None or self.draws is None or kind != self.kind:
            return False
        return all(
            self.inputs.get(place) == own and self.draws.get(place) == draws.get(place) for place, own in inputs.items()
        )


def can_go_ahead(row: GraphSlot, under_way: int = 0) -> bool:
    """Whether its next step needs nothing but the token that its last one chose. under_way: steps that are not over
    before it.
    """
    cache, tokens = row.cache, under_way + 1
    if cache is None or row.stale or row.room < tokens:
        return False
    return has_position(cache.batch, cache.max_positions, tokens)


def columns_of(inputs: Inputs, size: int) -> Tensor:
    """int64 (2, size), tokens and positions, zeros in places that nobody has."""
    found = torch.zeros(2, size, dtype=torch.int64)
    found[:, list(inputs)] = torch.tensor(list(inputs.values()), dtype=torch.int64).T
    return found
