"""Launchers of Triton's kernels: one thread at a time loads them, so that none gets another's."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from retrieval_attn.gpu.decode import kernels
from retrieval_attn.gpu.decode.kernels import in_turn, load_launchers_in_turn

THREADS, VARIANTS = 6, 24


@pytest.fixture
def own_triton_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


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


def test_slow_compilations_are_logged(caplog: pytest.LogCaptureFixture, own_triton_folder: None) -> None:
    """By the kernel's name and its compile-time numbers; a listener that was there before is called, too."""
    options = pytest.importorskip("triton", reason="needs Triton: pip install triton==3.6.0").knobs.compilation
    from tools.compile_kernels import CARDS, compiled

    caplog.set_level(logging.INFO, "retrieval_attn.gpu.decode.kernels")
    hits: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "listener", lambda cache_hit, **_: hits.append(cache_hit))
        kernels.log_slow_compiles()
        kernels.log_slow_compiles()
        for card, seconds in zip(CARDS, (0.0, 3600.0), strict=False):
            patch.setattr(kernels, "SLOW_SECONDS", seconds)
            assert not compiled(card, "delta").failed
    said = [record.getMessage() for record in caplog.records]
    assert said and len(hits) == 2 * len(said)
    assert all(re.fullmatch(r"Triton compiled _\w+\(.*\w+=\w+\) in [\d.]+ s", line) for line in said)


def test_a_slow_launcher_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "retrieval_attn.gpu.decode.kernels")
    monkeypatch.setattr(kernels, "SLOW_SECONDS", 0.05)
    driver = SimpleNamespace(launcher_cls=lambda source, seconds: time.sleep(seconds))
    in_turn(driver)
    for seconds in (0.0, 0.1):
        driver.launcher_cls(SimpleNamespace(name=f"kernel of {seconds}"), seconds)
    assert [record.getMessage() for record in caplog.records] == [
        "Triton made the launcher of kernel of 0.1() in 0.1 s"
    ]


@pytest.mark.cuda
def test_threads_that_load_kernels_get_their_own_launchers() -> None:
    load_launchers_in_turn()
    assert mixed_up() == []


def mixed_up() -> list[str]:
    """What goes wrong where threads launch variants of two kernels with other numbers of arguments."""
    launched = pytest.importorskip("tests.gpu.launched_triton")
    out = torch.zeros(THREADS, VARIANTS, 2, device="cuda")
    begin, found = threading.Barrier(THREADS), list[str]()

    def launch(thread: int) -> None:
        begin.wait()
        for variant in range(VARIANTS):
            try:
                launched.launch(out[thread, variant], VARIANTS * thread + variant)
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
