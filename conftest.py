"""What every test shares: no network, few threads, a header with versions, CUDA skips, the bundled model.

Several processes may run the tests side by side (`pytest -n 3 --dist loadfile`, as `make test` does): what they share
is Numba's cache of compiled kernels, and the cores.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before anything imports the hub client: a test must never wait for, or depend on, a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
# Before OpenMP starts: a thread that waits must not hold a core that another process can use.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Before NumPy starts OpenBLAS: its threads spin while they wait. Decomposing the small matrices of the tests by several
# threads takes up to ten times as long on busy cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest

# What modules make while they are imported lives to the end: looked at again and again, it costs a tenth of all tests.
gc.disable()

ROOT = Path(__file__).resolve().parent
PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# Time limits per example say more about what else runs on the machine than about the code.
hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.load_profile("shared-machine")
SLOW_TESTS = 40
"""Tests of median length that take as long as one that is marked `slow`."""
LIBRARIES = ("torch", "transformers", "numpy", "numba", "faiss-cpu", "hypothesis", "pytest")


def torch_threads(processes: int) -> int:
    """Of each process: on a shared machine the default pool makes tests slower, not faster."""
    return max(1, min(2, (os.cpu_count() or 1) // processes))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    """The processor's marketing name where Linux tells it, else what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """A failure report without versions and machine cannot be repeated."""
    versions = ", ".join(f"{name} {_version(name)}" for name in LIBRARIES)
    processes = getattr(config.option, "numprocesses", None) or 1  # here is the one that hands out the tests
    threads = f"{processes} at once, torch threads {torch_threads(processes)} each"
    return [f"libraries: {versions}", f"cpu: {_cpu_name()}, {os.cpu_count()} cores, {threads}"]


def pytest_configure(config: pytest.Config) -> None:
    """Pins torch's threads; small windows evict early from here on: modules of tests compute with it."""
    import torch

    from tests.small_windows import spill_early

    torch.set_num_threads(torch_threads(PROCESSES))
    spill_early()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files that take long first, so that no process ends with one alone; skip `cuda` tests without a device."""
    import torch

    runs = [item for item in items if torch.cuda.is_available() or not item.get_closest_marker("cuda")]
    tests = Counter(item.path for item in runs)
    slow = Counter(item.path for item in runs if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -(SLOW_TESTS * slow[item.path] + tests[item.path]))
    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA device; torch {torch.__version__} sees none"
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage is collected from here on, among what tests make."""
    gc.enable()
    gc.collect()
    gc.freeze()


def _unchanged_models() -> Iterator[None]:
    """Fail if a cached tiny model has another attention implementation afterwards; restore it for later tests."""
    models = sys.modules.get("tests.tiny_models")
    before = {} if models is None else models.changed_models()
    yield
    models = sys.modules.get("tests.tiny_models")
    after = {} if models is None else models.changed_models()
    left = [name for name in after if name not in before]
    for name in left:
        models.restore_model(after[name])  # type: ignore[union-attr]
    assert not left, f"{left} are not as they were: call retrieval_attn.disable(model), or change a copy"


# Automatic fixtures are set up first and torn down last: one checks tests, one checks fixtures of modules.
tests_leave_shared_models = pytest.fixture(autouse=True)(_unchanged_models)
modules_leave_shared_models = pytest.fixture(autouse=True, scope="module")(_unchanged_models)


@pytest.fixture(autouse=True, scope="session")
def reference_step_kernels() -> Iterator[None]:
    """Kernels of captured steps are plain PyTorch if Triton does not run."""
    from retrieval_attn.gpu.decode.kernels import replaced_kernels
    from tests.reference.kernels import reference_kernels

    with replaced_kernels(reference_kernels):
        yield


@pytest.fixture
def nan_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uninitialised float memory holds NaN during the test, so an output that nobody wrote cannot pass.

    Covers numpy.empty, numpy.empty_like, torch.empty and torch.empty_like as called from Python;
    allocations inside compiled code are not covered. Integer arrays get their largest value. Opt-in,
    because libraries that allocate and then fill pay for it twice.
    """
    import torch

    np_empty, np_empty_like = np.empty, np.empty_like
    torch_empty, torch_empty_like = torch.empty, torch.empty_like

    def poison_array(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind in "fc":
            array.fill(np.nan)
        elif array.dtype.kind in "iu":
            array.fill(np.iinfo(array.dtype).max)
        return array

    def poison_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta or tensor.dtype == torch.bool:
            return tensor
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                return tensor.fill_(float("nan"))
            return tensor.fill_(torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(np, "empty", lambda *a, **k: poison_array(np_empty(*a, **k)))
    monkeypatch.setattr(np, "empty_like", lambda *a, **k: poison_array(np_empty_like(*a, **k)))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison_tensor(torch_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison_tensor(torch_empty_like(*a, **k)))
    yield


@pytest.fixture(scope="session")
def compiled() -> None:
    """float32 and bfloat16 kernels are ready. Must come before `nan_empty`: Numba cannot compile while it is there."""
    from retrieval_attn.cpu.ahead import kernel_jobs
    from retrieval_attn.index.formats import Format
    from retrieval_attn.index.spec import IndexSpec

    for fmt in (Format.FLOAT32, Format.BFLOAT16):
        for job in kernel_jobs(fmt, IndexSpec.of("flat"), retrieve_all=True):
            job.run()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For files whose matrices are so small that a second thread only waits for a core that others have."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(needle_model_path: Path) -> tuple[Any, Any]:
    """The bundled model in float32, with transformers' own attention, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(needle_model_path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(needle_model_path)


@pytest.fixture(scope="session")
def needle_model_path() -> Path:
    """Folder of the bundled model. RETRIEVAL_ATTN_TEST_MODEL names another one to try."""
    bundled = ROOT / "retrieval_attn" / "model" / "bundled"
    path = Path(os.environ.get("RETRIEVAL_ATTN_TEST_MODEL", bundled))
    if not (path / "model.safetensors").is_file():
        pytest.fail(f"no model.safetensors in {path}; set RETRIEVAL_ATTN_TEST_MODEL to a folder that has one")
    return path


@pytest.fixture
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys get a graph, too, and lists of their queries."""
    from retrieval_attn.index.roargraph.index import RoarGraphIndex

    monkeypatch.setattr("retrieval_attn.index.roargraph.index.EXACT_BELOW", 0)
    monkeypatch.setattr(RoarGraphIndex, "training", replace(RoarGraphIndex.training, lists_from=1))


@pytest.fixture
def fresh_decoders() -> None:
    """No test continues another's graphs."""
    from retrieval_attn.runner.graph import pool as graph_pool

    graph_pool._idle.clear()
    graph_pool._failed.clear()


@pytest.fixture
def emulated_graphs(fresh_decoders: None) -> Iterator[None]:
    """Graphs are captured and replayed on the CPU."""
    from tests.emulation.emulated import emulated

    with emulated():
        yield
