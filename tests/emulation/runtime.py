"""A captured graph where there is no device that could: recorded operations, run again into the same memory.

Every operation that PyTorch dispatches while a step is recorded is kept with its arguments; a replay runs each again
and writes what it returns into the tensors that it returned first, as a CUDA graph writes to the same addresses. So
what a real graph would get wrong goes wrong here too: a number that Python computed stays what it was, and a tensor
that was made anew for a step is not seen. Reading a tensor's value while recording is refused, as a capture refuses
it. What one side must not look at is made wrong: results are NaN until the call has joined, and queries that change
meanwhile are an error. It is no faster than running eagerly: for tests and for looking into problems.

The recorded operations run on another thread, the caller's serves them by the same compiled function as on a device
(`polling.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.capture.exchange import HostCall, Replay, Shared
from retrieval_attn.gpu.capture.polling import Numbers, ServerOf
from tests.emulation.polling import EmulatedPolling

# Operations whose result's shape, or whose result, has to be known on the CPU: a capture ends with an error there.
READS_VALUES = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
    "item",
}


class EmulatedRuntime:
    """See the module. calls: calls of host functions so far, of replays those that were answered.

    patience: seconds that an emulated device waits for an answer, and its host for a request. latency: seconds from a
    launch to its beginning.
    """

    processors = 2

    def __init__(self, server_of: ServerOf) -> None:
        self._thread = ThreadPoolExecutor(1, "retrieval_attn-emulated")
        self._capture: _Capture | None = None
        self.server_of = server_of
        self.numbers = Numbers()
        self.patience, self.latency = 60.0, 0.0
        self.calls = 0

    def queries(self, count: int) -> Shared:
        host = torch.zeros(count, dtype=torch.float32)
        return Shared(host, host)

    def results(self, count: int) -> Shared:
        return Shared(torch.zeros(count, dtype=torch.float32), torch.zeros(count, dtype=torch.float32))

    def begin(self, call: HostCall) -> Any:
        call.results.device.fill_(torch.nan)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call.function)(call.argument)
        self.calls += 1
        number = 0
        if self._capture is not None:
            polling = self._capture.polling
            number = polling.add(call)
            self._capture.recorder.nodes.append(lambda: polling.ask(number))
        return call, number

    def join(self, begun: Any) -> None:
        call, number = begun
        if self._capture is not None:
            polling = self._capture.polling
            self._capture.recorder.nodes.append(lambda: polling.wait(number))
        call.results.device.numpy()[:] = call.results.host.numpy()  # not recorded: in a replay `wait` does it

    def parallel(self, record: Callable[[], None]) -> object:
        record()
        return None

    def after(self, begun: Any) -> None:
        """It was done at once."""

    def opaque(self, function: Callable[..., None], *arguments: Any) -> None:
        def action() -> None:
            with _disable_current_modes(), torch.no_grad():
                function(*arguments)

        self._do(action)

    def warm_up(self, record: Callable[[], None]) -> None:
        record()

    def capture(self, record: Callable[[], None]) -> Replay:
        recorder, polling = self._capture = _Capture(_Recorder(), EmulatedPolling(self))
        try:
            with recorder:
                record()
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"{type(error).__name__}: {error}") from error
        finally:
            self._capture = None
        if not polling.calls:
            return PlainReplay(recorder.replay)
        polling.work = recorder.replay
        return polling

    def synchronize(self) -> None:
        self._thread.submit(int).result()

    def mark(self) -> None:
        """What is launched is done at once, or by the other thread in order."""

    def wait(self, mark: None) -> None:
        self.synchronize()

    def submit(self, action: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run it on the other thread."""
        return self._thread.submit(action, *arguments)

    def _do(self, action: Callable[[], None]) -> None:
        action()
        if self._capture is not None:
            self._capture.recorder.nodes.append(action)


class PlainReplay:
    """A replay of work without host calls, on the thread that launches it."""

    generation = 0

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch = launch

    def __call__(self, launched: Callable[[], None] | None = None) -> None:
        self._launch()
        if launched is not None:
            launched()

    def failure(self, generation: int | None = None) -> None:
        """See `Replay`."""


class _Recorder(TorchDispatchMode):
    """Keeps what is dispatched as functions that do it again."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        mask = any(isinstance(item, Tensor) and item.dtype == torch.bool for item in tree_leaves(args[1:2]))
        if name in READS_VALUES or (name in ("index", "index_put_", "_index_put_impl_") and mask):
            raise CaptureError(f"the step reads a tensor's values on the CPU (aten::{name})")
        result = function(*args, **kwargs)
        inputs = {_memory(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        outputs = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        fresh = [item for item in outputs if _memory(item) not in inputs]
        # what returns only views of its inputs, and writes nothing, has nothing to do again
        if fresh or function._schema.is_mutable:
            self.nodes.append(_Node(function, args, kwargs, [_memory(item) not in inputs for item in outputs], outputs))
        return result  # a view of an input: it shows what a replay writes there

    def replay(self) -> None:
        with torch.no_grad():
            for node in self.nodes:
                node()


class _Node:
    """One operation, to be run again into the memory of its first results."""

    def __init__(self, function: Any, args: Any, kwargs: Any, fresh: list[bool], outputs: list[Tensor]) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._fresh, self._outputs = fresh, outputs

    def __call__(self) -> None:
        result = self._function(*self._args, **self._kwargs)
        again = [item for item in tree_leaves(result) if isinstance(item, Tensor)]
        for fresh, old, new in zip(self._fresh, self._outputs, again, strict=True):
            if fresh:
                old.copy_(new)


class _Capture(NamedTuple):
    """A capture under way. polling: its host calls."""

    recorder: _Recorder
    polling: EmulatedPolling


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
