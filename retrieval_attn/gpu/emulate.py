"""A captured graph where there is no device that could: recorded operations, run again into the same memory.

Every operation that PyTorch dispatches while a step is recorded is kept with its arguments; a replay runs each again
and writes what it returns into the tensors that it returned first, as a CUDA graph writes to the same addresses. So
what a real graph would get wrong goes wrong here too: a number that Python computed stays what it was, and a tensor
that was made anew for a step is not seen. Reading a tensor's value while recording is refused, as a capture refuses
it. The host function is called from another thread; of the memory that it shares with the device each side has its own,
and what one side must not look at is made wrong: results are NaN until the call has joined, and queries that change
meanwhile are an error. It is no faster than running eagerly: for tests and for looking into problems.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrieval_attn.errors import CaptureError
from retrieval_attn.gpu.graph import HostCall, Shared

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
    """See the module. `calls` counts host functions that were called."""

    processors = 2

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "retrieval_attn-emulated")
        self._recorder: _Recorder | None = None
        self.calls = 0

    def shared(self, count: int) -> Shared:
        return Shared(torch.zeros(count, dtype=torch.float32), torch.zeros(count, dtype=torch.float32))

    def begin(self, call: HostCall) -> _Pending:
        call.queries.host.copy_(call.queries.device)
        call.results.device.fill_(torch.nan)
        pending = _Pending(self, call)
        self._do(pending.start)
        return pending

    def join(self, begun: _Pending) -> None:
        self._do(begun.wait)
        begun.call.results.device.copy_(begun.call.results.host)

    def warm_up(self, record: Callable[[], None]) -> None:
        record()

    def capture(self, record: Callable[[], None]) -> Callable[[], None]:
        recorder = self._recorder = _Recorder()
        try:
            with recorder:
                record()
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"{type(error).__name__}: {error}") from error
        finally:
            self._recorder = None
        return recorder.replay

    def synchronize(self) -> None:
        self._thread.submit(int).result()

    def submit(self, call: HostCall) -> Future[None]:
        """Call the host function on the other thread."""
        self.calls += 1
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call.function)
        return self._thread.submit(function, call.argument)

    def _do(self, action: Callable[[], None]) -> None:
        action()
        if self._recorder is not None:
            self._recorder.nodes.append(action)


class _Pending:
    """A host call that has begun."""

    def __init__(self, runtime: EmulatedRuntime, call: HostCall) -> None:
        self._runtime, self.call = runtime, call
        self._running: Future[None] | None = None
        # bits, without PyTorch: a look at values would be recorded
        self._taken, self._given = (part.numpy().view(np.int32) for part in (call.queries.host, call.queries.device))

    def start(self) -> None:
        self._running = self._runtime.submit(self.call)

    def wait(self) -> None:
        assert self._running is not None
        self._running.result()
        if not np.array_equal(self._taken, self._given):
            raise CaptureError("queries were written while the host could read them")


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


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
