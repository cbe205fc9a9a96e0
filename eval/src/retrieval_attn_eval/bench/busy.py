"""How long the device works for one token: kernels and copies of a few steps, from PyTorch's profiler.

Recorded apart from the timing, because recording costs time; kernels take as long either way. What is left of a
token's time is the device waiting. A process that was recorded launches more slowly ever after: nothing is timed in it
any more (a step of 12.8 ms took 14.6 on an H100; the profiler does not take its hooks out).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)

SKIPPED, RECORDED = 3, 4
"""Steps before the recording begins (the first may capture a graph), and steps recorded."""


@dataclass(frozen=True)
class Busy:
    """Milliseconds per token: kernels, copies between host and device, and the time in which any of them ran."""

    kernels: float
    copies: float
    any: float


class Recorder:
    """Give it every token of a decode as `on_token`; it records RECORDED steps of it."""

    steps = SKIPPED + RECORDED + 2
    """With one more, which a loop launches before it tells the token that ends the recording."""

    def __init__(self) -> None:
        self._seen = 0
        self._profile: Any = None
        self.failed: str | None = None

    def __call__(self, tokens: list[int]) -> None:
        self._seen += 1
        if self.failed is None and self._seen == SKIPPED + 1:
            try:
                torch.cuda.synchronize()  # a step that is under way would be seen in part
                self._profile = torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
                )
                self._profile.start()
            except (RuntimeError, AssertionError) as error:
                self._give_up(error)
        elif self._profile is not None and self._seen == SKIPPED + 1 + RECORDED:
            self._stop()

    def _stop(self) -> None:
        try:
            torch.cuda.synchronize()
            self._profile.stop()
            events = [
                (event.name, event.time_range.start, event.time_range.end)
                for event in self._profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
            ]
        except (RuntimeError, AssertionError) as error:
            self._give_up(error)
            return
        self.busy = busy_of(events, RECORDED) if events else None
        if not events:
            self.failed = "the profiler saw nothing on the device"

    def _give_up(self, error: Exception) -> None:
        self.failed = f"the profiler failed: {error}"
        log.warning("no share of device time: %s", self.failed)

    busy: Busy | None = None


def busy_of(events: Iterable[tuple[str, float, float]], steps: int) -> Busy:
    """Of (name, start, end) in microseconds, over `steps` steps. Copies are those of names that begin with Memcpy."""
    spans = sorted((start, end, name.startswith("Memcpy")) for name, start, end in events)
    kernels = sum(end - start for start, end, copy in spans if not copy)
    copies = sum(end - start for start, end, copy in spans if copy)
    total, reached = 0.0, float("-inf")
    for start, end, _ in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return Busy(*(part / 1000 / steps for part in (kernels, copies, total)))
