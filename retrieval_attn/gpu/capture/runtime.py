"""The contract for recording a decode step; `cuda.py` implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from retrieval_attn.gpu.capture.exchange import HostCall, Replay, Shared


class Runtime(Protocol):
    """Where a step is recorded and replayed."""

    processors: int
    """Multiprocessors, for choosing how many parts to cut work into."""

    def queries(self, count: int) -> Shared:
        """Memory that the device writes and the host reads, zeros. Raises CaptureError if it cannot be had."""

    def results(self, count: int) -> Shared:
        """The same for the other direction."""

    def begin(self, call: HostCall) -> object:
        """Call with the queries that were written; what follows does not wait for it. Returns what `join` takes."""

    def join(self, begun: Any) -> None:
        """What follows waits for the call and sees its results."""

    def beside(self, record: Callable[[], None]) -> object:
        """Record work that runs beside what follows. Returns what `after` takes; nothing else may look at it before."""

    def after(self, begun: Any) -> None:
        """What follows waits for work that `beside` began."""

    def opaque(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run, and at every replay, a function that looks up in memory what it works on."""

    def warm_up(self, record: Callable[[], None]) -> None:
        """Run what is to be recorded, as it will be recorded, and wait for it."""

    def capture(self, record: Callable[[], None]) -> Replay:
        """The recorded work as a function that replays it. Raises CaptureError with the reason."""

    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    def mark(self) -> object:
        """What was launched so far on the current stream, for `wait`."""

    def wait(self, mark: Any) -> None:
        """Wait for what was launched before the mark, whatever follows it."""
