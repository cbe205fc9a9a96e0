"""A trial of a runtime's exchange, before anything is decoded with it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.capture.exchange import HostCall
from retrieval_attn.gpu.capture.runtime import Runtime
from retrieval_attn.gpu.decode.kernels import stage_queries

COUNT = 64
"""Numbers that go there and back."""


def load_probe(device: torch.device) -> None:
    """Compile, or load, what `probe` launches."""
    _stage(torch.zeros(COUNT, device=device), torch.zeros(COUNT, device=device))


def _stage(numbers: Tensor, target: Tensor) -> None:
    stage_queries(numbers.view(1, 1, 1, COUNT), target.view(1, COUNT), None)


def probe(runtime: Runtime, device: torch.device) -> None:
    """One call in a graph, replayed twice. Raises BackendError if other numbers come back than should."""
    queries, results = runtime.queries(COUNT), runtime.results(COUNT)
    taken, given = queries.host.numpy(), results.host.numpy()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def double(argument: int) -> None:
        given[:] = 2 * taken

    address = ctypes.cast(double, ctypes.c_void_p).value or 0
    call = HostCall(queries, results, address, 0, "the probe")
    numbers = torch.arange(COUNT, dtype=torch.float32, device=device)
    out = torch.zeros_like(numbers)

    def record() -> None:
        numbers.add_(1)
        _stage(numbers, queries.device)
        runtime.join(runtime.begin(call))
        out.copy_(results.device)

    runtime.warm_up(record)
    replay = runtime.capture(record)
    for step in (2, 3):
        replay()
        runtime.synchronize()
        failure, seen = replay.failure(), out.tolist()
        if failure is not None:
            raise BackendError(failure)
        if seen != [2.0 * (i + step) for i in range(COUNT)]:
            raise BackendError(f"of {COUNT} numbers other ones came back, {seen[:2]} first")
