"""Capturing one decode step as a CUDA graph, with calls to host code inside it.

`CudaRuntime` records on a stream of its own. Its exchange (`polling.py`) brings a layer's queries to the host and
results back while the device goes on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from retrieval_attn.compile.gc_pause import no_gc
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.gpu.capture.exchange import HostCall, Replay, Shared, first_line
from retrieval_attn.gpu.capture.polling import PollingCalls, PollingExchange, ServerOf


class CudaRuntime:
    """See the module. One per device (`cuda_runtime`): all its graphs take their memory from one pool."""

    def __init__(self, device: torch.device, server_of: ServerOf) -> None:
        """Raises BackendError if the device and the host cannot exchange data."""
        self._device = device
        self._lock = threading.RLock()
        self._calls: PollingCalls | None = None
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        with torch.cuda.device(device):
            try:
                self.exchange = PollingExchange(device, server_of)
            except Exception as error:
                raise BackendError(
                    f"CUDA graphs cannot exchange data with the host on this device: {first_line(error)}"
                ) from error
            self._open_pool()

    def queries(self, count: int) -> Shared:
        return self.exchange.queries(count)

    def results(self, count: int) -> Shared:
        return self.exchange.results(count)

    def begin(self, call: HostCall) -> int | None:
        if self._calls is None:
            self.exchange.run(call)
            return None
        return self._calls.begin(call)

    def join(self, begun: int | None) -> None:
        if self._calls is not None and begun is not None:
            self._calls.join(begun)

    def parallel(self, record: Callable[[], None]) -> object:
        # memory of the side stream is taken again only behind the next of these waits: when it is not read any more
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            record()
        return self._side.record_event()

    def after(self, begun: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(begun)

    def opaque(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    def warm_up(self, record: Callable[[], None]) -> None:
        with self._lock, self._on_main():
            record()
        self.synchronize()

    def capture(self, record: Callable[[], None]) -> Replay:
        with self._lock:
            calls, graph = PollingCalls(self.exchange), torch.cuda.CUDAGraph()
            gc.collect()  # now, with the memory that garbage holds: a capture forbids to free it
            self.synchronize()
            self._calls = calls
            try:
                self._capture(graph, record)
            finally:
                self._calls = None
        return calls.replay(graph.replay)

    def synchronize(self) -> None:
        # while another thread captures, waiting for the device is an error; while one answers a graph, it could hold
        # that up
        with self._lock, self.exchange.turn:
            torch.cuda.synchronize(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        with self._lock, self.exchange.turn:  # as above
            mark.synchronize()

    def _capture(self, graph: torch.cuda.CUDAGraph, record: Callable[[], None]) -> None:
        with self._on_main(), no_gc():
            # other threads (Numba's, index builds) may call CUDA meanwhile: only this one is held to the rules
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                record()
            except BaseException as error:
                self._give_up(graph)
                if isinstance(error, Exception):
                    raise CaptureError(first_line(error)) from error
                raise
            try:
                graph.capture_end()
            except RuntimeError as error:
                self._give_up(graph)
                raise CaptureError(first_line(error)) from error

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed. The pool may be left half-taken, so the next capture gets a new one."""
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)  # it failed at its beginning
            graph.capture_end()
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):
            # where ending failed, the allocator still believes that a capture is under way
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        with contextlib.suppress(RuntimeError):
            # and the random number generator would refuse to work outside one, until a capture ends well: this one
            self._open_pool()

    def _open_pool(self) -> None:
        """A new stream and a new pool with a graph in it that is never replayed.

        A pool whose last graph is gone is dead: PyTorch refuses its handle with a failed assertion. This graph keeps
        the pool while decoders come and go.
        """
        self._main, self._side = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._main):
            scratch, keeper = torch.zeros(1, device=self._device), torch.cuda.CUDAGraph()
            self._main.synchronize()
            keeper.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            scratch.add_(1)
            keeper.capture_end()
        self._keeper = keeper, scratch

    @contextlib.contextmanager
    def _on_main(self) -> Iterator[None]:
        # the legacy default stream cannot be captured; both waits keep the caller's order of work
        outer, main = torch.cuda.current_stream(self._device), self._main
        main.wait_stream(outer)
        with torch.cuda.device(self._device), torch.cuda.stream(main):
            yield
        outer.wait_stream(main)


def cuda_runtime(index: int, server_of: ServerOf) -> CudaRuntime:
    """The runtime of CUDA device `index`, see `CudaRuntime`. Raises BackendError, the same one, at every call."""
    made = _made_once(index, server_of)
    if isinstance(made, str):
        raise BackendError(made)
    return made


@functools.cache
def _made_once(index: int, server_of: ServerOf) -> CudaRuntime | str:
    """The runtime, or the reason why there is none: it is not tried again for each answer."""
    try:
        return CudaRuntime(torch.device("cuda", index), server_of)
    except BackendError as error:
        return str(error)
