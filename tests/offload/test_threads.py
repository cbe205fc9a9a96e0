"""Threads that come and go, and the ring of pinned memory."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from retrieval_attn.offload.staging import LARGE_BYTES, Staging, brought_together, page_locked, pinned
from retrieval_attn.offload.threads import SWITCH_SECONDS, ThreadPool, TurnLock
from retrieval_attn.offload.traffic import traffic
from tests.waiting import WAIT_SECONDS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


CREWS = tuple(f"retrieval_attn-{name}" for name in ("copy", "layer", "index"))
"""Names of threads that end by themselves; an emulated device's, for one, stays."""


def workers(patience: float = 10.0) -> list[str]:
    """Threads of the pools that are still there after so many seconds."""
    until = time.monotonic() + patience
    while True:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith(CREWS)]
        if not names or time.monotonic() > until:
            return names
        time.sleep(0.02)


def test_long_work_lets_others_take_the_lock_between_pieces() -> None:
    """With a plain lock the thread that releases it has it again before one that waits has run."""
    lock, order = TurnLock(), list[str]()

    def asks() -> None:
        with lock, lock:  # reentrant
            order.append("question")

    for _ in range(20):
        with lock.later():
            other = threading.Thread(target=asks)
            other.start()
            while not lock._waiting:
                time.sleep(0.001)
        with lock.later():
            order.append("next piece")
        other.join()
    assert order == ["question", "next piece"] * 20


@pytest.mark.parametrize("before,after", [(0.005, SWITCH_SECONDS), (SWITCH_SECONDS / 10, SWITCH_SECONDS / 10)])
def test_who_launches_does_not_wait_for_others_python(before: float, after: float) -> None:
    usual = sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        traffic(torch.device("cpu"))
        assert sys.getswitchinterval() == pytest.approx(before)
        traffic.__wrapped__(torch.device("cuda"))
        assert sys.getswitchinterval() == pytest.approx(after)
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.parametrize("device", DEVICES)
def test_staging_brings_every_piece_once_and_in_order(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """More pieces than buffers, strided tensors, two dtypes; without pinned memory it says so."""
    ring = Staging(torch.device(device), size=4096, count=3)
    source = torch.randn(4, 100, 8, device=device)
    half = source.transpose(0, 1).bfloat16()
    got: list[tuple[np.ndarray, np.ndarray]] = []
    ready = None
    if device == "cuda":
        ready = torch.cuda.Event()
        ready.record()
    pieces = [
        ((source[:, i : i + 10], half[i : i + 10]), lambda a, b: got.append((a.copy(), b.copy())))
        for i in range(0, 100, 10)
    ]
    ring.bring(iter(pieces), ready)
    np.testing.assert_array_equal(np.concatenate([a for a, _ in got], axis=1), source.cpu().numpy())
    np.testing.assert_array_equal(np.concatenate([b for _, b in got]), half.cpu().view(torch.uint16).numpy())
    if device == "cuda":
        assert all(buffer.is_pinned() for buffer in ring._buffers)


def test_refused_pinned_memory_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def refusing(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: cannot pin")
        return real(*args, **options)

    monkeypatch.setattr(torch, "empty", refusing)
    monkeypatch.setattr("retrieval_attn.offload.page_lock._said", set())
    with caplog.at_level(logging.WARNING):
        ring = Staging(torch.device("cpu"), 64, 2)
    assert not caplog.messages, "a CPU's copies need no pinned memory"
    with caplog.at_level(logging.WARNING):
        ring._buffers = [pinned(64) for _ in range(2)]
    assert caplog.messages == [
        "page-locked memory was refused (CUDA error: cannot pin; `ulimit -l` shows a limit): keys and values are "
        "copied through ordinary memory, slower"
    ]
    got: list[list[int]] = []
    ring.bring([([torch.arange(4)], lambda array: got.append(array.tolist()))], None)
    assert got == [[0, 1, 2, 3]]


def test_a_pool_works_at_once_keeps_order_and_goes_home() -> None:
    pool = ThreadPool(3, "retrieval_attn-test")
    together = threading.Barrier(3)

    def work(number: int) -> int:
        if number < 3:
            together.wait(WAIT_SECONDS)  # breaks unless three run at the same time
        return number * number

    assert pool.map(work, range(10)) == [number * number for number in range(10)]
    with pytest.raises(ZeroDivisionError):
        pool.map(lambda number: 1 // number, [1, 0, 2])
    assert pool.submit(lambda: 7).result(WAIT_SECONDS) == 7
    assert not workers() and pool.busy == 0


@pytest.mark.cuda
@pytest.mark.parametrize("size", [100, LARGE_BYTES, 3 * LARGE_BYTES + 1])
def test_page_locked_memory_is_known_to_the_driver(size: int) -> None:
    """Large memory is registered; given back, its addresses can be registered again."""
    for _ in range(2):
        room = page_locked(size)
        part = room[size // 2 :]
    assert room.shape == (size,) and room.is_pinned() and part.is_pinned()
    given = torch.arange(size, device="cuda").to(torch.uint8)
    room.copy_(given, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(part, given[size // 2 :].cpu())


@pytest.mark.cuda
def test_tensors_are_brought_together() -> None:
    """Of any shape, dtype and stride, in one room; one on the CPU is itself."""
    given = [torch.randn(4, 300, 64, device="cuda", dtype=torch.bfloat16)[:, 10:200], torch.arange(7, device="cuda")]
    given += [torch.randn(2, 1 << 20, device="cuda"), torch.ones(3), torch.empty(0, 5, device="cuda")]
    found = brought_together(given)
    assert found[3] is given[3] and all(one.device.type == "cpu" for one in found)
    for one, own in zip(found, given, strict=True):
        assert one.dtype == own.dtype and torch.equal(one, own.cpu())
