"""Filled: how many of an engine's slots its steps used while requests waited for one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import retrieval_attn as ra

__all__ = ["Filled"]

LOOK_SECONDS = 0.004


class Filled:
    """Looks at an engine's counts while the block runs. Steps between two looks count if a request waited at both.

    A request waits from its arrival until the engine admits it, also where it is not submitted yet because the
    requests before it must end first.

    Attributes:
        submitted: submitted requests, of those whose arrival is known; the submitting thread counts them.
        peak_bytes: most bytes that the prefix cache had at a look.
    """

    def __init__(self, engine: ra.Engine, slots: int) -> None:
        """slots: of a step."""
        self._engine, self._slots = engine, slots
        self._began, self._arrivals = 0.0, list[float]()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._steps = self._rows = 0.0
        self.submitted = self.peak_bytes = 0

    def begin(self, began: float, arrivals: Sequence[float]) -> None:
        """began: perf_counter's time from which the arrivals, in seconds and ascending, count."""
        self._began, self._arrivals = began, list(arrivals)

    @property
    def share(self) -> float | None:
        """Of the slots of these steps; None: there was no such step."""
        return self._rows / (self._steps * self._slots) if self._steps else None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _counts(self) -> tuple[bool, int, float]:
        """Whether a request waits, steps so far, and rows of them all."""
        now = time.perf_counter() - self._began
        unsubmitted = sum(arrival <= now for arrival in self._arrivals) - self.submitted
        stats = self._engine.stats
        self.peak_bytes = max(self.peak_bytes, stats["shared"].nbytes)
        return (
            unsubmitted + stats["waiting"] > 0,
            stats["steps"],
            stats["slot_utilization"] * stats["steps"] * self._slots,
        )

    def _look(self) -> None:
        before = self._counts()
        while not self._end.wait(LOOK_SECONDS):
            now = self._counts()
            if before[0] and now[0]:
                self._steps += now[1] - before[1]
                self._rows += now[2] - before[2]
            before = now
