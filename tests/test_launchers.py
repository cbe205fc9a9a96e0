"""Launchers of Triton's kernels: one thread at a time loads them, so that none gets another's."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from retrieval_attn.gpu.decode.kernels import in_turn, load_launchers_in_turn

THREADS, VARIANTS = 6, 24


def test_one_thread_at_a_time_makes_a_launcher() -> None:
    inside, most = 0, 0
    lock = threading.Lock()

    def make(source: str, metadata: object) -> str:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.001)
        with lock:
            inside -= 1
        return f"launcher of {source}"

    driver = SimpleNamespace(launcher_cls=make)
    in_turn(driver)
    once = driver.launcher_cls
    in_turn(driver)
    assert driver.launcher_cls is once
    with ThreadPoolExecutor(THREADS) as threads:
        made = list(threads.map(lambda number: driver.launcher_cls(str(number), None), range(40)))
    assert made == [f"launcher of {number}" for number in range(40)]
    assert most == 1


@pytest.mark.cuda
def test_threads_that_load_kernels_get_their_own_launchers() -> None:
    load_launchers_in_turn()
    assert mixed_up() == []


def mixed_up() -> list[str]:
    """What goes wrong where threads launch variants of two kernels with other numbers of arguments."""
    kernels = pytest.importorskip("tests.launched_triton")
    out = torch.zeros(THREADS, VARIANTS, 2, device="cuda")
    begin, found = threading.Barrier(THREADS), list[str]()

    def launch(thread: int) -> None:
        begin.wait()
        for variant in range(VARIANTS):
            try:
                kernels.launch(out[thread, variant], VARIANTS * thread + variant)
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            for done in [threads.submit(launch, thread) for thread in range(THREADS)]:
                done.result()
    finally:
        sys.setswitchinterval(usual)
    torch.cuda.synchronize()
    numbers = torch.arange(THREADS * VARIANTS, device="cuda").view(THREADS, VARIANTS)
    if not found and not (torch.equal(out[..., 0], numbers.float()) and torch.equal(out[..., 1], numbers * 15.0)):
        found.append("kernels computed something else")
    return found
