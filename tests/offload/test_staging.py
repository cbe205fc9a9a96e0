"""Arrays on their way between a device and ordinary memory."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retrieval_attn.offload.staging import MAX_RUNS, brought, copy_runs

CYCLES = 2_000_000_000
"""About a second of a device."""


def test_a_copy_is_its_own() -> None:
    tensor = torch.arange(12).view(3, 4)[:, 1:3]
    array = brought(tensor)
    tensor.zero_()
    assert array.tolist() == [[1, 2], [5, 6], [9, 10]] and brought(tensor[:0]).shape == (0, 2)


class Copies(TorchDispatchMode):
    """Sources of all copies."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sources.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("shape", "runs"), [((1, 8, 30, 16), 8), ((2, 3, 4, 5, 6), 24), ((1, 1, 50, 16), 1), ((7, 3), 1), ((0, 5, 4), 0)]
)
def test_a_window_is_copied_in_runs(shape: tuple[int, ...], runs: int) -> None:
    """From tokens [3, n - 2) of a buffer: a copy of each head, of which none is gathered on the device before."""
    tokens = -2 if len(shape) > 2 else 0
    buffer = torch.arange(4096 * 8).float()[: math.prod(shape)].view(shape)
    window = buffer.narrow(tokens, 1, shape[tokens] - 3) if shape[tokens] > 3 else buffer
    into = torch.full(window.shape, -1.0)
    with Copies() as copies:
        copy_runs(into, window)
    assert torch.equal(into, window) and len(copies.sources) == runs
    assert all(one.is_contiguous() for one in copies.sources)


def test_many_runs_are_one_copy() -> None:
    transposed = torch.arange(4.0 * MAX_RUNS).view(2, -1).T
    into = torch.zeros(transposed.shape)
    with Copies() as copies:
        copy_runs(into, transposed)
    assert torch.equal(into, transposed) and len(copies.sources) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8])
def test_any_layout_from_a_gpu(dtype: torch.dtype) -> None:
    tensor = torch.arange(4096, device="cuda").to(dtype).view(8, 16, 32)[:, 3:9, ::2]
    assert np.array_equal(brought(tensor), tensor.cpu().numpy())
    assert brought(tensor[:0]).shape == (0, 6, 16)


@pytest.mark.cuda
def test_who_launches_meanwhile_does_not_wait() -> None:
    """A copy to ordinary memory would hold the driver until the device is done."""
    tensor = torch.zeros(1 << 20, device="cuda")
    brought(tensor)
    torch.cuda._sleep(CYCLES)
    tensor += 1
    found: list[np.ndarray] = []
    began = time.perf_counter()
    thread = threading.Thread(target=lambda: found.append(brought(tensor)))
    thread.start()
    time.sleep(0.05)
    launched = time.perf_counter()
    for _ in range(10):
        tensor.mul_(1)
    launched = time.perf_counter() - launched
    thread.join()
    waited = time.perf_counter() - began
    assert float(found[0].min()) == float(found[0].max()) == 1.0
    assert launched < waited / 4, (launched, waited)
