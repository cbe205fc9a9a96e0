"""StepAhead: a step of a bucket that was launched before anybody asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from retrieval_attn.batch.bucket_row import BucketRow
from retrieval_attn.batch.draw import RowDraw
from retrieval_attn.cache.sequence import has_position
from retrieval_attn.engine.graph.decoder import CapturedStep, StepKind

__all__ = ["Inputs", "StepAhead", "can_go_ahead"]

Inputs = Mapping[int, tuple[int, int]]
"""Token and position of rows, by place."""


class StepAhead(NamedTuple):
    """See the module: for these inputs, of rows that choose so. graph: what was launched, of this kind."""

    inputs: Inputs
    draws: Mapping[int, RowDraw] | None
    kind: StepKind
    graph: CapturedStep

    def serves(self, inputs: Inputs, draws: Mapping[int, RowDraw] | None, kind: StepKind) -> bool:
        """Whether it is the step that is asked for, or that of more rows: what the others got does not count."""
        if draws is None or self.draws is None or kind != self.kind:
            return False
        return all(
            self.inputs.get(place) == own and self.draws.get(place) == draws[place] for place, own in inputs.items()
        )


def can_go_ahead(row: BucketRow) -> bool:
    """Whether its next step needs nothing but the token that its last one chose."""
    cache = row.cache
    return cache is not None and not row.stale and row.room > 0 and has_position(cache.batch, cache.max_positions)
