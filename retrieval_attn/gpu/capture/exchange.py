"""How a graph's layers exchange queries and results with the host, and the plain way of doing it.

"host_node": copies to and from page-locked memory on a side stream, with one of CUDA's host nodes between them.
"polling" (`polling.py`): no node; kernels write requests, and the thread that launched the replay answers them.
"mapped": the same, but answers and results stay in the host's memory, from where kernels fetch them: the thread that
answers calls no driver, which another thread may keep. A runtime has one of them, "mapped" where nobody asks for
another.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from retrieval_attn.errors import CaptureError, ConfigError
from retrieval_attn.gpu.attention.libraries import host_function_launcher

HostCallback = Literal["polling", "mapped", "host_node"]
"""How a running graph calls host code."""
VARIABLE = "RETRIEVAL_ATTN_HOST_CALLBACK"
"""Environment variable: how graphs call the host, a `HostCallback`; empty or unset: "mapped" if it works."""
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
    """A graph's work, as a function that launches it once more. serves: all host calls are over when it returns."""

    serves: bool

    def __call__(self, launched: Callable[[], None] | None = None) -> None:
        """Launch, and serve its calls. Raises BackendError if that failed; the launched work ends all the same.

        launched: called once the device works and before it waits for this thread; must be quick and not raise.
        """

    @property
    def generation(self) -> int:
        """The number of the last launch."""

    def failure(self, generation: int | None = None) -> str | None:
        """Which host call got no answer, in the last replay or that of a number, once it is over; None: all did."""


class Calls(Protocol):
    """The host calls of what is recorded, or run as it will be recorded, on the current stream."""

    def begin(self, call: HostCall) -> Any:
        """See `Runtime.begin`."""

    def join(self, begun: Any) -> None:
        """See `Runtime.join`."""

    def replay(self, launch: Callable[[], None]) -> Replay:
        """The recorded work, which `launch` launches."""


class Exchange(Calls, Protocol):
    """A runtime's way of exchanging. By itself for what is not captured.

    turn: held while a graph's calls are served.
    """

    turn: threading.Lock

    def queries(self, count: int) -> Shared:
        """Memory that the device writes and the host reads, zeros. Raises CaptureError if it cannot be had."""

    def results(self, count: int) -> Shared:
        """The same for the other direction."""

    def open(self) -> Calls:
        """For a capture that is about to begin."""

    def renew(self) -> None:
        """A capture failed: streams that took part in it are not to be used again."""


def requested_host_callback() -> HostCallback | None:
    """What the environment asks for. Raises ConfigError for anything unknown."""
    requested = os.environ.get(VARIABLE, "")
    if requested not in ("", *get_args(HostCallback)):
        known = ", ".join(f'"{name}"' for name in get_args(HostCallback))
        raise ConfigError(f"{VARIABLE} must be one of {known}, or not be set, got {requested!r}")
    return requested or None  # type: ignore[return-value]


class HostNodeExchange:
    """ "host_node", see the module."""

    def __init__(self, device: torch.device) -> None:
        """Raises BackendError if neither CUDA's runtime nor its driver library offers host functions."""
        self._device, self.turn = device, threading.Lock()
        self._launch = host_function_launcher()
        self.renew()

    def renew(self) -> None:
        self._side = torch.cuda.Stream(self._device)

    def queries(self, count: int) -> Shared:
        return Shared(torch.zeros(count, dtype=torch.float32, device=self._device), page_locked(count))

    def results(self, count: int) -> Shared:
        return self.queries(count)

    def open(self) -> HostNodeExchange:
        return self

    def begin(self, call: HostCall) -> torch.cuda.Event:
        # a host node holds up its stream: on a side stream, what follows in the main one runs beside the host's search.
        # A capture takes the side stream in by the first event, and must be joined by the second.
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            self._side.wait_event(ready)
            call.queries.host.copy_(call.queries.device, non_blocking=True)
            self._launch(self._side.cuda_stream, call.function, call.argument)
            call.results.device.copy_(call.results.host, non_blocking=True)
            done.record(self._side)
        return done

    def join(self, begun: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(begun)

    def replay(self, launch: Callable[[], None]) -> Replay:
        return PlainReplay(launch)


class PlainReplay:
    """One that serves itself."""

    serves, generation = False, 0

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch = launch

    def __call__(self, launched: Callable[[], None] | None = None) -> None:
        self._launch()
        if launched is not None:
            launched()

    def failure(self, generation: int | None = None) -> None:
        """See `Replay`."""


def page_locked(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros in host memory that the device can reach. Raises CaptureError if they cannot be had."""
    try:
        return torch.zeros(count, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        size = count * dtype.itemsize
        raise CaptureError(f"{size} bytes of page-locked memory cannot be had: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
