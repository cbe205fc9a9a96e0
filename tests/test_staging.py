"""Arrays on their way between a device and ordinary memory."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from retrieval_attn.offload.staging import brought

CYCLES = 2_000_000_000
"""About a second of a device."""


def test_a_copy_is_its_own() -> None:
    tensor = torch.arange(12).view(3, 4)[:, 1:3]
    array = brought(tensor)
    tensor.zero_()
    assert array.tolist() == [[1, 2], [5, 6], [9, 10]] and brought(tensor[:0]).shape == (0, 2)


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
