"""The "polling" exchange without a device: its order of events, as strict as a device may be (`emulate.py`).

The recorded operations run on the device's thread, the caller's thread serves. Every moment at which a mistake in the
order could be seen is used: results that were copied appear only where a layer waits for them, and are NaN before and
after; a flag is seen at once, so what is copied after it is late; a call that is answered twice, not at all, or before
it was asked, is an error of the replay.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.gpu.capture.exchange import REPORT_SHIFT, HostCall, HostCallback
from retrieval_attn.gpu.capture.polling import MAX_CALLS, Functions, Numbers, ServerOf, failure_of, serve

NOT_READY = 600
MAPPED_LOOK_SECONDS = 1e-4
_COPY = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_uint64] * 4)
_WRITE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
_QUERY = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64)


class Owner(Protocol):
    """What the replays of one graph ask of their runtime."""

    server_of: ServerOf
    host_callback: HostCallback
    driver: threading.Lock
    numbers: Numbers
    patience: float
    latency: float
    calls: int

    def submit(self, action: Callable[..., Any], *arguments: Any) -> Any: ...


class EmulatedPolling:
    """The calls of one graph, and its replay. work: what the device does, with `ask` and `wait` in it."""

    serves = True

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.work: Callable[[], None] = lambda: None
        self.calls: list[HostCall] = []
        self._requests, self._answers = np.zeros(MAX_CALLS, np.int64), np.zeros(MAX_CALLS, np.int64)
        self._taken = np.zeros(MAX_CALLS, np.int64)  # answers that the device has seen
        self._arrived: list[npt.NDArray[np.float32]] = []  # results that were copied, and are not seen yet
        self._asked: list[npt.NDArray[np.int32]] = []  # bits of the queries that the host may read
        self._changed = threading.Condition()
        self.generation = self._report = 0
        self._running = False
        self._mistakes: list[str] = []
        # kept: compiled code calls them by address
        self._functions = _COPY(self._copy), _WRITE(self._write), _QUERY(self._state), _QUERY(lambda event: 0)
        functions = Functions(*[ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self._functions])
        self._mapped = owner.host_callback == "mapped"
        if self._mapped:
            functions = functions._replace(copy=0, write=0)
        self.server = owner.server_of(functions, 0, owner.patience)

    def add(self, call: HostCall) -> int:
        """One call more; returns its number."""
        number = len(self.calls)
        if number == MAX_CALLS:
            raise CaptureError(f"a step has more than {MAX_CALLS} layers that search")
        arrived = np.full(call.results.host.numel(), np.nan, np.float32)
        self.calls.append(call)
        self._arrived.append(arrived)
        self._asked.append(np.zeros(0, np.int32))
        self.server.add(
            request=int(self._requests[number:].ctypes.data),
            function=call.function,
            argument=call.argument,
            target=int(arrived.ctypes.data),
            source=call.results.host.data_ptr(),
            size=call.results.host.nbytes,
            answer=int(self._answers[number:].ctypes.data),
        )
        return number

    def ask(self, number: int) -> None:
        """What the kernel of that name does, on the device's thread."""
        with self._changed:
            self._asked[number] = _bits(self.calls[number]).copy()
            self._requests[number] = self.generation

    def wait(self, number: int) -> None:
        """What the kernel of that name does, and the results' appearance."""
        generation = self.generation
        with self._changed:
            patience = 0.0 if self._report // REPORT_SHIFT == generation else self._owner.patience
            if self._mapped:
                self._fetch(number, patience)
            if self._changed.wait_for(lambda: self._answers[number] == generation, 0.0 if self._mapped else patience):
                self.calls[number].results.device.numpy()[:] = self._arrived[number]
                self._arrived[number][:] = np.nan
            elif patience:
                self._report = generation * REPORT_SHIFT + number
            self._taken[number] = generation
            self._changed.notify_all()
            if not np.array_equal(_bits(self.calls[number]), self._asked[number]):
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
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def _fetch(self, number: int, patience: float) -> None:
        """Look at the host's word until the answer is there, and take the results from the host's memory."""
        until = time.monotonic() + patience
        while self._answers[number] != self.generation and time.monotonic() < until:
            time.sleep(MAPPED_LOOK_SECONDS)
        if self._answers[number] == self.generation:
            self._arrived[number][:] = self.calls[number].results.host.numpy()
            self._owner.calls += 1

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        with self._owner.driver:
            pass  # who is inside may wait for the device there
        ctypes.memmove(target, source, size)
        return 0

    def _write(self, stream: int, address: int, value: int, flags: int) -> int:
        """The device sees the flag at once: what the host does next comes too late for it."""
        with self._owner.driver:
            pass
        number = (address - int(self._answers.ctypes.data)) // self._answers.itemsize
        with self._changed:
            name = self.calls[number].name
            if self._answers[number] == value:
                self._mistakes.append(f"{name} was answered twice")
            if self._requests[number] != value:
                self._mistakes.append(f"{name} was answered before it was asked")
            self._owner.calls += 1
            self._answers[number] = value
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._taken[number] == self.generation or not self._running)
        return 0

    def _state(self, stream: int) -> int:
        return NOT_READY if self._running else 0


def _bits(call: HostCall) -> npt.NDArray[np.int32]:
    bits: npt.NDArray[np.int32] = call.queries.host.numpy().view(np.int32)
    return bits
