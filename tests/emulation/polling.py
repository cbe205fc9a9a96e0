"""The exchange of `polling.py` without a device: its order of events, as strict as a device may be (`runtime.py`).

The recorded operations run on the device's thread, the caller's thread serves. Every moment at which a mistake in the
order could be seen is used: results appear only where a layer waits for them, and are NaN before; a call that is not
answered, or answered before it was asked, is an error of the replay.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.gpu.capture.exchange import REPORT_SHIFT, HostCall
from retrieval_attn.gpu.capture.polling import MAX_CALLS, Functions, Numbers, ServerOf, failure_of, serve

NOT_READY = 600
LOOK_SECONDS = 1e-4
_QUERY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64)


class Owner(Protocol):
    """What the replays of one graph ask of their runtime."""

    server_of: ServerOf
    numbers: Numbers
    patience: float
    latency: float
    calls: int

    def submit(self, action: Callable[..., Any], *arguments: Any) -> Any: ...


class EmulatedPolling:
    """The calls of one graph, and its replay. work: what the device does, with `ask` and `wait` in it."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.work: Callable[[], None] = lambda: None
        self.calls: list[HostCall] = []
        self._requests, self._answers = np.zeros(MAX_CALLS, np.int64), np.zeros(MAX_CALLS, np.int64)
        self._asked: list[npt.NDArray[np.int32]] = []  # bits of the queries that the host may read
        self.generation = self._report = 0
        self._running = False
        self._mistakes: list[str] = []
        self._functions = _QUERY(self._state), _QUERY(lambda event: 0)  # kept: compiled code calls them by address
        functions = Functions(*[ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self._functions])
        self.server = owner.server_of(functions, owner.patience)

    def add(self, call: HostCall) -> int:
        """One call more; returns its number."""
        number = len(self.calls)
        if number == MAX_CALLS:
            raise CaptureError(f"a captured step can have at most {MAX_CALLS} layers that search on the host")
        self.calls.append(call)
        self._asked.append(np.zeros(0, np.int32))
        self.server.add(
            request=int(self._requests[number:].ctypes.data),
            function=call.function,
            argument=call.argument,
            answer=int(self._answers[number:].ctypes.data),
        )
        return number

    def ask(self, number: int) -> None:
        """What the kernel of that name does, on the device's thread."""
        call = self.calls[number]
        if self._answers[number] == self.generation:
            self._mistakes.append(f"{call.name} was answered before it was asked")
        self._asked[number] = _bits(call).copy()
        self._requests[number] = self.generation

    def wait(self, number: int) -> None:
        """What the kernels that wait and fetch do."""
        call, generation = self.calls[number], self.generation
        patience = 0.0 if self._report // REPORT_SHIFT == generation else self._owner.patience
        until = time.monotonic() + patience
        while self._answers[number] != generation and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        if self._answers[number] == generation:
            call.results.device.numpy()[:] = call.results.host.numpy()
            self._owner.calls += 1
        elif patience:
            self._report = generation * REPORT_SHIFT + number
        if not np.array_equal(_bits(call), self._asked[number]):
            raise CaptureError("queries were written while the host could read them")

    def __call__(self, launched: Callable[[], None] | None = None) -> None:
        """See `Replay`. Raises CaptureError for a mistake in the order."""
        count = len(self.calls)
        self.generation = self._owner.numbers.next()
        self._mistakes.clear()
        if self.generation in self._requests or self.generation in self._answers:
            raise CaptureError(f"flags of an earlier replay have this one's number, {self.generation}")
        self.server.prepare(self.generation, 0, 0)
        begun: list[Any] = []

        def launch() -> None:
            self._running = True
            begun.append(self._owner.submit(self._work))
            if launched is not None:
                launched()

        try:
            serve(self.server, launch, self.calls, self._owner.patience)
        except BackendError:
            for future in begun:
                future.result()  # its error, if it has one, is the cause
            raise
        finally:
            for future in begun:
                future.exception()  # waits, as for a device
        if self._mistakes:
            raise CaptureError(self._mistakes[0])
        begun[0].result()
        missed = np.flatnonzero(self._answers[:count] != self.generation)
        if len(missed) and self.failure() is None:
            raise CaptureError(f"{self.calls[missed[0]].name} was never answered")

    def failure(self, generation: int | None = None) -> str | None:
        return failure_of(self._report, generation or self.generation, self.calls, self.server)

    # -- the device's side --------------------------------------------------------------------------

    def _work(self) -> None:
        time.sleep(self._owner.latency)
        try:
            self.work()
        finally:
            self._running = False

    def _state(self, stream: int) -> int:
        return NOT_READY if self._running else 0


def _bits(call: HostCall) -> npt.NDArray[np.int32]:
    bits: npt.NDArray[np.int32] = call.queries.host.numpy().view(np.int32)
    return bits
