"""BLAS with one thread per caller, however callers overlap."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import threadpoolctl

from retrieval_attn.index.threads import _controller, say_if_threads_spin, single_blas
from tests.cpu.reference import in_threads
from tests.waiting import WAIT_SECONDS


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
            leave.wait(WAIT_SECONDS)
        seen.append(blas_threads())

    thread = threading.Thread(target=other)
    with single_blas():
        thread.start()
        inside.wait(WAIT_SECONDS)
        assert max(blas_threads()) == 1
    assert max(blas_threads()) == 1  # the other thread is still inside
    leave.set()
    thread.join()
    assert seen == [before] and blas_threads() == before


def test_libraries_are_looked_for_when_modules_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each block: looking takes longer than a small index."""
    before = blas_threads()
    _controller.cache_clear()
    for _ in range(3):
        with single_blas():
            assert max(blas_threads(), default=1) == 1
        assert blas_threads() == before
    assert _controller.cache_info().misses == 1
    monkeypatch.setitem(sys.modules, "a_module_that_may_have_brought_a_library", sys)
    with single_blas():
        assert _controller.cache_info().misses == 2


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


BUILDERS = """
import threading
import numba
import numpy as np
from retrieval_attn.index import FlatIndex, Format, RoarGraphIndex, SketchIndex
from retrieval_attn.index.threads import builder_threads, kernel_threads
from tests.index.building import built

rng = np.random.default_rng(0)
keys = rng.standard_normal((4, 9000, 32), dtype=np.float32)
queries = rng.standard_normal((4, 2, 64, 32), dtype=np.float32)


def build(head):
    graph = built(RoarGraphIndex, keys[head], Format.FLOAT32, queries[head])
    sketch = built(SketchIndex, keys[head], Format.FLOAT32, queries[head])
    return [index.search(queries[head, 0, :8], 10).ids.tolist() for index in (graph, sketch)]


alone = [build(head) for head in range(4)]
assert numba.threading_layer() == "workqueue", numba.threading_layer()
together, both = [None] * 4, threading.Barrier(4)


def one(head):
    with builder_threads(1, 2):
        both.wait(120)  # builders that wait for each other never meet here
        assert numba.get_num_threads() == 2
        together[head] = build(head)


threads = [threading.Thread(target=one, args=(head,)) for head in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert together == alone
print("done")
"""


def test_builders_work_side_by_side_where_kernels_take_turns() -> None:
    """Numba's workqueue layer ends the process when two threads enter parallel kernels at once: builders of several
    heads share nothing but the turn for each kernel, and build what each builds alone.
    """
    environment = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", BUILDERS], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr[-2000:] + done.stdout


@pytest.mark.parametrize(
    ("policy", "load", "said"), [(None, 64.0 * 64, True), (None, 0.0, False), ("active", 64.0 * 64, False)]
)
def test_threads_that_spin_beside_others_are_told_of(
    policy: str | None, load: float, said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    say_if_threads_spin.cache_clear()
    assert [say_if_threads_spin(), say_if_threads_spin()] == [said, said]
    assert caplog.text.count("OMP_WAIT_POLICY=passive") == said
    say_if_threads_spin.cache_clear()


def test_the_command_line_lets_threads_sleep() -> None:
    """Before torch is loaded; what the user chose stays."""
    code = (
        "import os; from retrieval_attn.cli import main; main(['contexts', 'ls']); print(os.environ['OMP_WAIT_POLICY'])"
    )
    for given, expected in (({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")):
        own = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        environment = {**own, **given, "RETRIEVAL_ATTN_STORE": "/nowhere/at/all"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout.split()[-1] == expected, done.stderr
