"""The contract for recording a decode step and its calls of the host; `cuda.py` and `polling.py` implement it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from retrieval_attn.errors import CaptureError

REPORT_SHIFT = 1024
"""A device that waited in vain reports the replay's number times this, plus the call's."""


class Shared(NamedTuple):
    """float32 (count,) as the device and as the host see it: the same memory, or two that calls copy from one another.

    The host's is page-locked where that means something.
    """

    device: Tensor
    host: Tensor


@dataclass(frozen=True)
class HostCall:
    """A call of host code from the device, and the memory it goes through, from the runtime.

    queries: the device writes them before the call begins, and not again before it has joined. results: until then,
    what the device would find there is undefined. function: address of a C function void f(void *), argument: what it
    gets; both outlive the graph. name: in errors.
    """

    queries: Shared
    results: Shared
    function: int
    argument: int
    name: str = "a host call"


class Replay(Protocol):
    """A graph's work, as a function that launches it once more. All host calls are over when it returns."""

    def __call__(self, launched: Callable[[], None] | None = None) -> None:
        """Launch, and serve its calls. Raises BackendError if that failed; the launched work ends all the same.

        launched: called once the device works and before it waits for this thread; must be quick and not raise.
        """

    @property
    def generation(self) -> int:
        """The number of the last launch."""

    def failure(self, generation: int | None = None) -> str | None:
        """Which host call got no answer, in the last replay or that of a number, once it is over; None: all did."""


def page_locked(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros in host memory that the device can reach. Raises CaptureError if they cannot be had."""
    try:
        return torch.zeros(count, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        size = count * dtype.itemsize
        raise CaptureError(
            f"{size / 2**20:.1f} MiB of page-locked memory are needed, but the allocation failed: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


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
        """Make later work wait for the call and see its results."""

    def parallel(self, record: Callable[[], None]) -> object:
        """Record work that runs in parallel to later work; return the argument of `after`, opaque to the caller."""

    def after(self, begun: Any) -> None:
        """Make later work wait for the work that `parallel` began."""

    def opaque(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run, and at every replay, a function that looks up in memory what it works on."""

    def warm_up(self, record: Callable[[], None]) -> None:
        """Run what is to be recorded, as it will be recorded, and wait for it."""

    def capture(self, record: Callable[[], None]) -> Replay:
        """The recorded work as a function that replays it. Raises CaptureError with the reason."""

    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    def mark(self) -> object:
        """Mark the work launched so far on the current stream, for `wait`."""

    def wait(self, mark: Any) -> None:
        """Wait for what was launched before the mark, whatever follows it."""
