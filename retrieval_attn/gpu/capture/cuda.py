"""Capturing one decode step as a CUDA graph, with calls to host code inside it.

`CudaRuntime` records on a stream of its own. How a layer's queries reach the host and results come back while the
device goes on is left to its exchange (`exchange.py`, `polling.py`), chosen once: "mapped" where a trial works.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from retrieval_attn.compile.collection import no_collection
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.gpu.capture.exchange import (
    Calls,
    Exchange,
    HostCall,
    HostCallback,
    HostNodeExchange,
    Replay,
    Shared,
    first_line,
)
from retrieval_attn.gpu.capture.polling import PollingExchange, ServerOf
from retrieval_attn.gpu.capture.probe import probe

logger = logging.getLogger(__name__)


class CudaRuntime:
    """See the module. One per device and exchange (`cuda_runtime`): all its graphs take their memory from one pool.

    host_callback: the exchange it uses.
    """

    def __init__(self, device: torch.device, server_of: ServerOf, host_callback: HostCallback | None = None) -> None:
        """host_callback: the only one to use; None: "mapped" if it works. Raises BackendError where none works."""
        self._device = device
        self._lock = threading.RLock()
        self._calls: Calls | None = None
        self._collects = False  # the trial needs no memory that garbage may hold
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        with torch.cuda.device(device):
            self.host_callback: HostCallback = self._choose(server_of, host_callback)
        self._collects = True

    def _choose(self, server_of: ServerOf, host_callback: HostCallback | None) -> HostCallback:
        reason = "as requested"
        if host_callback != "host_node":
            try:
                self._try_polling(server_of, mapped=host_callback != "polling")
            except Exception as error:
                reason = f"{host_callback or 'mapped'} does not work here: {first_line(error)}"
                if host_callback is not None:
                    raise BackendError(f"{reason}. Any device takes the exchange by host nodes.") from error
            else:
                found = host_callback or "mapped"
                logger.info("graphs call the host by %s: %s", found, reason if host_callback else "a trial worked")
                return found
        self._use(HostNodeExchange(self._device))
        logger.log(logging.INFO if host_callback else logging.WARNING, "graphs call the host by host nodes: %s", reason)
        return "host_node"

    def _try_polling(self, server_of: ServerOf, mapped: bool) -> None:
        exchange = PollingExchange(self._device, server_of, mapped)
        # a device where this hangs must not cost every start the whole wait
        patience = exchange.polls, exchange.limit_seconds
        exchange.polls, exchange.limit_seconds = patience[0] // 8, patience[1] / 8
        self._use(exchange)
        probe(self, self._device)
        exchange.polls, exchange.limit_seconds = patience

    def _use(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._open_pool()

    def queries(self, count: int) -> Shared:
        return self.exchange.queries(count)

    def results(self, count: int) -> Shared:
        return self.exchange.results(count)

    def begin(self, call: HostCall) -> object:
        return (self._calls or self.exchange).begin(call)

    def join(self, begun: Any) -> None:
        (self._calls or self.exchange).join(begun)

    def beside(self, record: Callable[[], None]) -> object:
        # memory of the side stream is taken again only behind the next of these waits: when nobody looks at it any more
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
            calls, graph = self.exchange.open(), torch.cuda.CUDAGraph()
            if self._collects:  # now, with the memory that garbage holds: a capture forbids to free it
                gc.collect()
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
        with self._on_main(), no_collection():
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
            self.exchange.renew()

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


@functools.cache
def cuda_runtime(index: int, server_of: ServerOf, host_callback: HostCallback | None = None) -> CudaRuntime:
    """The runtime of CUDA device `index`, see `CudaRuntime`. Raises BackendError where there cannot be one."""
    return CudaRuntime(torch.device("cuda", index), server_of, host_callback)
