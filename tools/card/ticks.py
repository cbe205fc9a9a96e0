"""What an engine's ticks took while prompts were read beside decoding rows, by the kind of their chunks.

A tick is a step of all rows and the chunks that were granted beside it. Times between tokens are long for one of three
reasons: chunks of some kind take long, something took longer than expected, or so much was granted.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

from retrieval_attn.engine.prefill_budget import PrefillBudget, chunk_kind
from retrieval_attn.engine.resource_pool import ScheduledRequest
from tools.card.subject import in_ms

__all__ = ["Ticks"]


class Tick(NamedTuple):
    """kind: of its chunks. seconds: that it took; expected: of these. step: of them, the decoding of all rows. margin:
    that was kept free.
    """

    kind: str
    chunks: int
    seconds: float
    expected: float
    step: float
    margin: float


class Ticks:
    """Within, notes the ticks of all engines that read while rows decode."""

    def __init__(self) -> None:
        self.ticks: list[Tick] = []
        self._lock, self._stack = threading.Lock(), ExitStack()
        self._granted: dict[int, tuple[str, int]] = {}  # by the engine's grants: of the tick under way

    def __enter__(self) -> Self:
        usual = PrefillBudget.plan

        def plan(
            grants: PrefillBudget, reading: Iterable[ScheduledRequest], rows: int, now: float
        ) -> tuple[tuple[str, int], ...]:
            entries = {entry.job.id: entry for entry in reading}
            self._note(grants, now)
            shares = usual(grants, entries.values(), rows, now)
            kinds = {chunk_kind(entries[name]) for name, _ in shares}
            with self._lock:
                self._granted[id(grants)] = "+".join(sorted(kinds)), sum(chunks for _, chunks in shares)
            return shares

        setattr(PrefillBudget, "plan", plan)  # noqa: B010  not an assignment: that is no method's for mypy
        self._stack.callback(setattr, PrefillBudget, "plan", usual)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _note(self, grants: PrefillBudget, now: float) -> None:
        """What the plan before this one took."""
        with self._lock:
            granted = self._granted.get(id(grants))
            if grants._expected is None or granted is None:  # or it was planned before these were watched
                return
            (began, expected), (kind, chunks) = grants._expected, granted
            self.ticks.append(Tick(kind, chunks, now - began, expected, grants._decode, grants._margin.seconds))

    def report(self) -> Mapping[str, Any]:
        """By kind: chunks in all, and of ticks in milliseconds what they took, beyond what was expected, and of it the
        step and the margin.
        """
        by_kind: dict[str, list[Tick]] = defaultdict(list)
        for tick in self.ticks:
            by_kind[tick.kind].append(tick)
        return {
            kind: {
                "chunks": sum(one.chunks for one in ticks),
                "took_ms": in_ms([one.seconds for one in ticks]),
                "late_ms": in_ms([one.seconds - one.expected for one in ticks]),
                "step_ms": in_ms([one.step for one in ticks]),
                "margin_ms": in_ms([one.margin for one in ticks]),
            }
            for kind, ticks in sorted(by_kind.items())
        }
