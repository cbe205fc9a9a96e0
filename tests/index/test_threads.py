"""BLAS with one thread per caller, however callers overlap."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import threadpoolctl

from retrieval_attn.index.threads import single_blas
from tests.cpu.reference import in_threads


def blas_threads() -> list[int]:
    """Of every BLAS library with a pool that all callers share, NumPy's. faiss's has threads for each caller."""
    np.linalg.eigh(np.eye(4))
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    return [pool["num_threads"] for pool in pools if pool["threading_layer"] != "openmp"]


def test_overlapping_blocks_put_the_number_back() -> None:
    """The first to come sets it, and the last to go restores it, not the first."""
    before = blas_threads()
    if not before or max(before) == 1:
        pytest.skip(f"BLAS has {before} threads here: nothing to limit")
    inside, leave = threading.Event(), threading.Event()
    seen: list[list[int]] = []

    def other() -> None:
        with single_blas():
            inside.set()
            leave.wait(10)
        seen.append(blas_threads())

    thread = threading.Thread(target=other)
    with single_blas():
        thread.start()
        inside.wait(10)
        assert max(blas_threads()) == 1
    assert max(blas_threads()) == 1  # the other thread is still inside
    leave.set()
    thread.join()
    assert seen == [before] and blas_threads() == before


def test_an_error_inside_puts_the_number_back() -> None:
    """As leaving does."""
    before = blas_threads()
    with pytest.raises(ValueError, match="inside"), single_blas():
        raise ValueError("inside")
    assert blas_threads() == before


def test_many_callers_at_once() -> None:
    """One limit for all, however they come and go."""
    before = blas_threads()
    wrong: list[list[int]] = []

    def work() -> None:
        for _ in range(20):
            with single_blas():
                if max(blas_threads(), default=1) > 1:
                    wrong.append(blas_threads())

    in_threads(*[work] * 6)
    assert not wrong and blas_threads() == before
