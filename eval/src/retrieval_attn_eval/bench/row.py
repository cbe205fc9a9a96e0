"""Row: what came of one method on one context, also when nothing could be measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Row", "Spread", "median_ms", "same_tokens"]


@dataclass(frozen=True)
class Spread:
    """Median and the 10th and 90th percentile of single-token times, milliseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Of at least one time in seconds."""
        milliseconds = sorted(1000 * item for item in seconds)
        last = len(milliseconds) - 1
        low, high = milliseconds[round(0.1 * last)], milliseconds[round(0.9 * last)]
        return cls(statistics.median(milliseconds), low, high)


@dataclass
class Row:
    """One method at one context length; None: not known, or not measured.

    status: "ok", "wrong" (with the reason in note), "does not fit", "not installed", "failed". how: "graph" or eager.
    ms: milliseconds per step. error: largest relative logit error against the method's definition, where checked.
    device_*: bytes of device memory while decoding: tensors, at most, whole process at most; prepare_peak: the process
    at most while the context was placed. host_*: bytes of the context on the host, and of the process at most.
    *_touched: bytes of keys and values read per step on each side. wait: share of a step that the device waits.
    chosen: the tokens of the first sequence.
    search, attend, copy, gpu: milliseconds per step of host search, host attention, copies, device kernels.
    """

    context: int
    batch: int
    method: str
    status: str
    note: str = ""
    how: str = ""
    beyond: bool = False
    ms: Spread | None = None
    tokens_per_second: float | None = None
    steps: int = 0
    error: float | None = None
    prepare_seconds: float | None = None
    device_allocated: int | None = None
    device_peak: int | None = None
    device_process: int | None = None
    prepare_peak: int | None = None
    host_bytes: int | None = None
    host_peak: int | None = None
    device_touched: int | None = None
    host_touched: int | None = None
    wait: float | None = None
    search: float | None = None
    attend: float | None = None
    host: float | None = None
    copy: float | None = None
    gpu: float | None = None
    recall: float | None = None
    mass: float | None = None
    captured: float | None = None
    scanned: float | None = None
    chosen: list[int] = field(default_factory=list)

    def line(self) -> str:
        """For the log of a run that is still going."""
        shown = (
            "" if self.ms is None else f"{self.ms.median:.2f} ms ({self.ms.low:.2f} to {self.ms.high:.2f}) {self.how}"
        )
        return f"{self.context:>9,} {self.method}: {self.status} {shown} {self.note}".rstrip()


def same_tokens(row: Row, rows: Sequence[Row]) -> float | None:
    """Share of the tokens that are full attention's, up to the first that is not; None without such a row."""
    for full in rows:
        if full.context == row.context and full.method.startswith("full-") and full is not row and full.chosen:
            count = min(len(full.chosen), len(row.chosen))
            first = next((i for i in range(count) if row.chosen[i] != full.chosen[i]), count)
            return first / count if count else None
    return None


def median_ms(rows: Sequence[Row], method: str, context: int) -> float | None:
    """Of the row of this method and context, if it has a speed."""
    times = [row.ms.median for row in rows if row.method == method and row.context == context and row.ms]
    return statistics.median(times) if times else None
