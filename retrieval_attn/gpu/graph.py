"""Capturing one decode step as a CUDA graph, with calls to host code as nodes of it.

`CudaRuntime` records on streams of its own: the main one computes, a side one copies queries to page-locked memory,
calls a C function there (`cudaLaunchHostFunc`) and copies its results back, while the main one goes on; both join where
the results are needed. The C function runs on a thread of CUDA's and must not call CUDA, nor need Python.

`Runtime` says what a graph needs; `emulate.py` has the one that runs on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from retrieval_attn.errors import BackendError, CaptureError

logger = logging.getLogger(__name__)


class Shared(NamedTuple):
    """float32 (count,), of which calls copy one to the other; the host's is page-locked where that means something."""

    device: Tensor
    host: Tensor


@dataclass(frozen=True)
class HostCall:
    """A call of host code from the device, and the memory it goes through, from `Runtime.shared`.

    queries: the device writes them before the call begins, and not again before it has joined. results: until then,
    what the device would find there is undefined. function: address of a C function void f(void *), argument: what it
    gets; both outlive the graph.
    """

    queries: Shared
    results: Shared
    function: int
    argument: int


class Runtime(Protocol):
    """Where a step is recorded and replayed."""

    processors: int
    """Multiprocessors, for choosing how many parts to cut work into."""

    def shared(self, count: int) -> Shared:
        """Memory for queries or results, zeros. Raises CaptureError if it cannot be had."""

    def begin(self, call: HostCall) -> object:
        """Call with the queries that were written; what follows does not wait for it. Returns what `join` takes."""

    def join(self, begun: Any) -> None:
        """What follows waits for the call and sees its results."""

    def warm_up(self, record: Callable[[], None]) -> None:
        """Run what is to be recorded, as it will be recorded, and wait for it."""

    def capture(self, record: Callable[[], None]) -> Callable[[], None]:
        """The recorded work as a function that replays it. Raises CaptureError with the reason."""

    def synchronize(self) -> None:
        """Wait for everything that was launched."""


class CudaRuntime:
    """See the module. One per device (`cuda_runtime`): all its graphs take their memory from one pool."""

    def __init__(self, device: torch.device) -> None:
        """Raises BackendError if neither CUDA's runtime nor its driver library offers host functions."""
        self._device = device
        self._launch = host_function_launcher()
        with torch.cuda.device(device):
            self._open_pool()
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def shared(self, count: int) -> Shared:
        try:
            host = torch.zeros(count, dtype=torch.float32, pin_memory=True)
        except RuntimeError as error:
            raise CaptureError(
                f"{4 * count} bytes of page-locked memory cannot be had: {_first_line(error)}"
            ) from error
        return Shared(torch.zeros(count, dtype=torch.float32, device=self._device), host)

    def begin(self, call: HostCall) -> torch.cuda.Event:
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

    def warm_up(self, record: Callable[[], None]) -> None:
        with self._on_main():
            record()
        self.synchronize()

    def capture(self, record: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        self.synchronize()
        with self._on_main(), _no_collection():
            # other threads (Numba's, index builds) may call CUDA meanwhile: only this one is held to the rules
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                record()
            except BaseException as error:
                self._give_up(graph)
                if isinstance(error, Exception):
                    raise CaptureError(_first_line(error)) from error
                raise
            try:
                graph.capture_end()
            except RuntimeError as error:
                self._give_up(graph)
                raise CaptureError(_first_line(error)) from error
        return graph.replay

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

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
        """New streams and a new pool with a graph in it that is never replayed.

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
        outer, main = torch.cuda.current_stream(self._device), self._main
        main.wait_stream(outer)
        with torch.cuda.device(self._device), torch.cuda.stream(main):
            yield
        outer.wait_stream(main)


@functools.cache
def cuda_runtime(index: int) -> CudaRuntime:
    """The runtime of CUDA device `index`. Raises BackendError where host functions cannot be had."""
    return CudaRuntime(torch.device("cuda", index))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage that is freed in the middle of a capture may call CUDA, which would break it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def host_function_launcher() -> Callable[[int, int, int], None]:
    """f(stream handle, function address, argument): enqueue a host function there; in a capture, a host node.

    By the CUDA runtime that torch has loaded, or else by the driver's equivalent, whose streams are the same.
    Raises BackendError if there is neither; the launcher raises it for CUDA's error codes.
    """
    tried = []
    for name in _libraries():
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            tried.append(f"{name}: {error}")
            continue
        symbol = "cuLaunchHostFunc" if Path(name).name.startswith("libcuda.so") else "cudaLaunchHostFunc"
        function = getattr(library, symbol, None)
        if function is None:
            tried.append(f"{name}: has no {symbol}")
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        function.restype = ctypes.c_int
        logger.info("host functions by %s of %s", symbol, name)
        return functools.partial(_call, function, symbol)
    raise BackendError(
        f"no CUDA library offers host functions; tried {'; '.join(tried) or 'nothing'}. Decode with graph=False."
    )


def _call(function: Any, symbol: str, stream: int, address: int, argument: int) -> None:
    code = function(stream, address, argument)
    if code:
        raise BackendError(f"{symbol} failed with CUDA error {code}; decode with graph=False")


def _libraries() -> list[str]:
    """CUDA runtimes that could be torch's, the loaded one first, then the driver."""
    found = _loaded("libcudart")
    major = (torch.version.cuda or "13").split(".")[0]
    found.append(f"libcudart.so.{major}")
    site = Path(torch.__file__).resolve().parents[1] / "nvidia"
    found += [str(path) for path in sorted(site.glob(f"*/lib/libcudart.so.{major}"))]
    return list(dict.fromkeys([*found, "libcudart.so.13", "libcudart.so.12", *_loaded("libcuda.so"), "libcuda.so.1"]))


def _loaded(name: str) -> list[str]:
    """Files of this process whose names begin with `name`: a second copy of a runtime would know no stream of ours."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = [line.split(maxsplit=5)[5] for line in lines if "/" in line]
    return list(dict.fromkeys(path for path in paths if Path(path).name.startswith(name)))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
