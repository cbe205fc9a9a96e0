"""Compiled kernels: where they are kept, who compiles them, and that nobody waits for a compiler twice."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import int32, int64

import retrieval_attn as ra
from retrieval_attn.cli import main
from retrieval_attn.compile import cache_dir as place
from retrieval_attn.compile import jobs as jobs_module
from retrieval_attn.compile.jobs import Compilation, CompileJob, missing, wait_until_compiled
from retrieval_attn.compile.numba_cache import KernelLocator
from retrieval_attn.cpu.ahead import early_jobs, kernel_jobs, wait_for_builders
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.packed import keep_best
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.model.bundled import BUNDLED
from tests.preloaded import run_preloaded
from tests.test_structure import ROOT
from tests.waiting import WAIT_SECONDS, comes_true

SERVER = CompileJob("retrieval_attn.cpu.ahead:server")
"""A quick one."""
LONG = CompileJob("retrieval_attn.cpu.ahead:build", ("float32", "roargraph", "{}"))
COUNT_COMPILED = """
from numba.core import event
class Count(event.Listener):
    def on_start(self, given): compiled.append(given.data["dispatcher"].py_func.__qualname__)
    def on_end(self, given): pass
compiled = []
event.register("numba:compile", Count())
"""
USE_A_KERNEL = """
import numpy as np
from retrieval_attn.index.kernels.packed import keep_best
pool = np.array([3, 9, 4, 8, 1], np.int64)
keep_best(pool, 5, 2)
print(sorted(pool[:2].tolist()))
"""


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for kernels."""
    monkeypatch.setenv(place.VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    return tmp_path / "kernels"


@pytest.fixture(scope="module")
def int8_kernels() -> None:
    """Those that a short read runs are loaded, from the folder that other tests use."""
    for job in kernel_jobs(Format.INT8, IndexSpec.of("flat"), retrieve_all=True):
        if not job.target.endswith(":build"):
            job.run()


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", place.VARIABLE)}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**given, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


def test_kernels_lie_in_one_folder_keyed_by_versions_and_processor(own_folder: Path) -> None:
    """Nothing lies beside the sources: a package that cannot be written to, or a second processor, is no trouble."""
    import llvmlite
    import numba

    locator = KernelLocator.from_function(keep_best.py_func, "")
    assert locator is not None
    path = Path(locator.get_cache_path())
    assert path.parent == place.numba_folder() and own_folder in path.parents
    for part in (numba.__version__, llvmlite.__version__, llvmlite.binding.get_host_cpu_name()):
        assert part in path.parent.name
    assert place.triton_folder().parent.parent == own_folder
    assert KernelLocator.from_function(test_kernels_lie_in_one_folder_keyed_by_versions_and_processor, "") is None


def test_what_the_user_set_wins(own_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NUMBA_CACHE_DIR and TRITON_CACHE_DIR keep their meaning."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert KernelLocator.from_function(keep_best.py_func, "") is None
    assert (place.numba_folder(), place.triton_folder()) == (tmp_path / "numba", tmp_path / "triton")
    done = python(USE_A_KERNEL, NUMBA_CACHE_DIR=str(tmp_path / "numba"), **{place.VARIABLE: str(own_folder)})
    assert done.stdout == "[8, 9]\n", done.stderr
    assert list((tmp_path / "numba").rglob("*.nbc")) and not own_folder.exists()


@pytest.mark.parametrize("writable", [True, False])
def test_triton_gets_a_folder(
    own_folder: Path, writable: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ours, or where nothing can be written there, one for this process, which is said."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    if not writable:
        own_folder.write_text("")
    place.use_triton_folder()
    used = Path(os.environ["TRITON_CACHE_DIR"])
    assert used.is_dir() and (own_folder in used.parents) == writable
    assert len(caplog.records) == (not writable)


@pytest.mark.cuda
def test_without_a_compiler_plain_pytorch_decodes(tmp_path: Path) -> None:
    """Triton is installed, but can build nothing: said once, with what to do."""
    code = """
import torch
from retrieval_attn.gpu.decode.kernels import kernels_for
for _ in range(2):
    print(kernels_for(torch.zeros(1, device="cuda"), "decode.kernels_triton"))
"""
    done = python(code, CC=str(tmp_path / "no-compiler"), TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert done.stdout == "None\nNone\n" and done.stderr.count("Triton cannot compile here") == 1, done.stderr


def test_the_key_covers_the_sources_of_callees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel holds the code of those it calls: Numba would go on with the old one when only a callee changes."""
    sources = {
        "a": "from retrieval_attn.b import f\n",
        "b": "from retrieval_attn import c\n",
        "c": "x = 1\n",
        "d": "y = 1\n",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(place, "PACKAGE", tmp_path)
    key = place.source_key.__wrapped__
    before = key("retrieval_attn.a")
    (tmp_path / "d.py").write_text("y = 2\n")
    assert key("retrieval_attn.a") == before
    (tmp_path / "c.py").write_text("x = 2\n")
    assert key("retrieval_attn.a") != before


@pytest.mark.parametrize("trouble", ["not a folder", "full"])
def test_a_folder_that_takes_nothing_is_said_once_and_kernels_work(tmp_path: Path, trouble: str) -> None:
    """Numba alone would raise: at import without any folder, in the call that compiles on a full disk."""
    (tmp_path / "file").write_text("")
    folder, limit = tmp_path / "file" / "kernels", ""
    if trouble == "full":
        # the kernel gives EFBIG for every file, as a full disk gives ENOSPC
        folder, limit = tmp_path / "kernels", "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    again = "keep_best(np.arange(9), 9, 3)"
    done = python(limit + USE_A_KERNEL + again, **{place.VARIABLE: str(folder)})
    assert done.returncode == 0 and done.stdout == "[8, 9]\n", done.stderr
    assert done.stderr.count("compiled kernels cannot be kept in") == 1, done.stderr
    assert "Traceback" not in done.stderr and place.VARIABLE in done.stderr


def test_a_damaged_file_is_compiled_again(own_folder: Path) -> None:
    """A cut file must not end in a traceback of pickle's."""
    environment = {place.VARIABLE: str(own_folder)}
    assert python(USE_A_KERNEL, **environment).stdout == "[8, 9]\n"
    for path in own_folder.rglob("*.nb[ci]"):
        path.write_bytes(path.read_bytes()[:50])
    done = python(USE_A_KERNEL, **environment)
    assert done.stdout == "[8, 9]\n" and done.stderr.count("\n") == 1, done.stderr


def test_processes_save_in_turn(own_folder: Path) -> None:
    """Two at once would give specialisations of one function the same file: one would be loaded for the other."""
    from numba import njit

    def double(x: int) -> int:
        return 2 * x

    double.__module__, double.__qualname__ = "retrieval_attn.index.kernels.packed", "double"
    compiled: Any = njit(cache=True)(double)
    folder = Path(compiled._cache.cache_path)
    assert own_folder in folder.parents
    folder.mkdir(parents=True)
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=lambda: compiled.compile((int64,)))
        other.start()
        other.join(1)
        assert other.is_alive() and not list(folder.glob("*.nb?"))
    other.join(WAIT_SECONDS)
    compiled.compile((int32,))
    assert len(list(folder.glob("*.nbc"))) == 2


def test_jobs_are_done_by_other_processes_once(own_folder: Path) -> None:
    """What fails is named, is not marked as done, and stops nothing else."""
    wrong = CompileJob("retrieval_attn.cpu.ahead:search", ("float32", "nonsense", "{}"))
    with Compilation([SERVER, wrong, SERVER], progress=False) as compilation:
        pass
    assert compilation.jobs == [SERVER, wrong]
    assert list(compilation.failed) == [wrong] and "'nonsense'" in compilation.failed[wrong]
    assert missing([SERVER, wrong]) == [wrong]
    done = python(
        COUNT_COMPILED + "from retrieval_attn.cpu.ahead import server; server(); print(compiled)",
        **{place.VARIABLE: str(own_folder)},
    )
    assert done.stdout == "[]\n", done.stderr


def worker_of(compilation: Compilation) -> subprocess.Popen[str]:
    """The first of its processes, once it runs."""
    while not compilation._workers:
        time.sleep(0.01)
    return compilation._workers[0]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[CompileJob]:
    """What is handed to other processes from now on."""
    done: list[CompileJob] = []
    inner = Compilation._do

    def noted(self: Compilation, job: CompileJob, worker: Any) -> None:
        done.append(job)
        inner(self, job, worker)

    monkeypatch.setattr(Compilation, "_do", noted)
    return done


def test_a_job_under_way_is_waited_for_and_not_done_again(own_folder: Path, begun: list[CompileJob]) -> None:
    """Of two compilations: the second waits for what the first does, counts it, and takes over why it failed."""
    wrong = CompileJob("retrieval_attn.cpu.ahead:search", ("float32", "nonsense", "{}"))
    first = Compilation([SERVER, wrong], progress=False, processes=1)
    with Compilation([wrong, SERVER]) as second:
        assert not second._threads
        bar = second._bar
    assert bar.n == bar.total == 2
    assert begun == [SERVER, wrong] and not missing([SERVER])
    assert list(first.failed) == list(second.failed) == [wrong]
    with Compilation([SERVER], progress=False):
        pass
    assert begun == [SERVER, wrong] and nothing_under_way()


def nothing_under_way() -> bool:
    """Whether all compilations end soon: a process that has done its last job takes a moment to end."""
    return comes_true(lambda: not jobs_module._under_way)


def test_loading_a_model_begins_what_its_reads_wait_for(
    int8_kernels: None, own_folder: Path, begun: list[CompileJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for both, and nobody waits in the load. Of the jobs a quick one: others take half a minute."""
    given: list[Any] = []
    held, inner = threading.Event(), Compilation._do

    def later(self: Compilation, job: CompileJob, worker: Any) -> None:
        held.wait(60)
        inner(self, job, worker)

    def quick(*arguments: Any, **options: Any) -> list[CompileJob]:
        given.append((arguments, options))
        return [SERVER]

    monkeypatch.setattr(Compilation, "_do", later)
    monkeypatch.setattr("retrieval_attn.runner.ready.early_jobs", quick)
    monkeypatch.setattr("retrieval_attn.runner.ready.kernel_jobs", quick)
    llm = ra.LLM("bundled", device="cpu", host_dtype="int8")
    assert begun == [] and missing([SERVER]) and len(jobs_module._under_way) == 1
    held.set()
    assert llm.read("The sky is blue. " * 90, progress=False).num_tokens > 0
    assert begun == [SERVER] and not missing([SERVER]) and nothing_under_way()
    assert given[0] == ((Format.INT8, IndexSpec.of("auto")), {"retrieve_all": True, "serves_graphs": False})
    assert len(given) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_load_that_ends_early_ends_the_other_processes(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Ctrl-C while weights load, or a damaged file: no compiler is left behind, and nothing is waited for."""
    workers = []

    def fail(*arguments: Any, **options: Any) -> None:
        (compilation,) = jobs_module._under_way
        workers.append(worker_of(compilation))
        raise error

    monkeypatch.setattr("retrieval_attn.runner.ready.early_jobs", lambda *arguments, **options: [LONG])
    monkeypatch.setattr("retrieval_attn.llm.load_model", fail)
    with pytest.raises(error):
        ra.LLM(BUNDLED, device="cpu")
    assert workers[0].poll() is not None and missing([LONG]) and not jobs_module._under_way


def test_what_nobody_waits_for_ends_with_the_process(tmp_path: Path) -> None:
    """A model that is loaded and never used: no wait, no crash, no compiler that goes on."""
    code = f"""
import os, time
import numba
os.environ.pop("NUMBA_CACHE_DIR", None)
numba.config.CACHE_DIR = ""
import retrieval_attn as ra
from retrieval_attn.compile import jobs
from retrieval_attn.runner import ready
ready.early_jobs = lambda *arguments, **options: [jobs.CompileJob(*{tuple(LONG)!r})]
ra.LLM({str(BUNDLED)!r}, device="cpu")
(compilation,) = jobs._under_way
while not compilation._workers: time.sleep(0.01)
print(compilation._workers[0].pid)
"""
    done = run_preloaded(["-c", code], environment={place.VARIABLE: str(tmp_path)}, finalizes=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_a_forked_process_waits_for_nothing_of_its_parent(tmp_path: Path) -> None:
    """It has none of the threads that would end the waiting."""
    code = f"""
import os, signal
from retrieval_attn.compile.jobs import Compilation, CompileJob, _under_way
job = CompileJob(*{tuple(LONG)!r})
parent = Compilation([job], progress=False)
child = os.fork()
if not child:
    signal.alarm(20)  # it would wait for ever
    os._exit(len(_under_way) + 2 * len(Compilation([job], progress=False)._elsewhere))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(_under_way))
parent.close()
"""
    done = python(code, **{place.VARIABLE: str(tmp_path)})
    assert done.stdout == "0 1\n", done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["auto", "flat", "roargraph", "device"])
@pytest.mark.parametrize("tokens", [1000, 20_000, 1_000_000])
def test_what_a_load_begins_every_read_needs(kind: str, tokens: int) -> None:
    spec = IndexSpec.of(kind)
    for options in ({}, {"retrieve_all": True, "serves_graphs": True}):
        early = early_jobs(Format.BFLOAT16, spec, **options)
        assert len(early) >= 2 and set(early) <= set(kernel_jobs(Format.BFLOAT16, spec, tokens, **options))


def test_an_interrupt_ends_the_other_processes(own_folder: Path) -> None:
    """Ctrl-C in a read must not leave compilers behind, nor wait for them."""
    with pytest.raises(KeyboardInterrupt), Compilation([LONG], progress=False) as compilation:
        worker = worker_of(compilation)
        raise KeyboardInterrupt
    assert worker.poll() is not None and missing([LONG]) == [LONG]
    began = time.perf_counter()
    wait_until_compiled()
    assert time.perf_counter() - began < 5, "it waited for LONG, which takes longer"


@pytest.mark.slow
def test_builders_of_codes_wait_for_their_own_job(own_folder: Path) -> None:
    """The device waits for them, with keys that are to be coded: what answers need may take longer."""
    device = IndexSpec.of("device")
    jobs = kernel_jobs(Format.BFLOAT16, device, 131072)
    assert [job.target.split(":")[1] for job in jobs[:3]] == ["code", "search", "build"]
    with Compilation(jobs, progress=False, processes=1) as compilation:
        wait_for_builders(device)
        done, left = jobs[0], missing(jobs)
        assert done not in left and jobs[2] in left
        waiting = threading.Thread(target=wait_for_builders, args=(device,), kwargs={"extends": True})
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        compilation.close()
        waiting.join(WAIT_SECONDS)
        assert not waiting.is_alive()
    code = f"""{COUNT_COMPILED}
import numpy as np
from retrieval_attn.cpu.ahead import _no_codes
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.index.spec import IndexSpec
random = np.random.default_rng(0)
keys = from_float32(random.standard_normal((9000, 128), np.float32), Format.BFLOAT16)
IndexSpec.of("device").build(keys, Format.BFLOAT16, random.standard_normal((4, 300, 128), np.float32), coder=_no_codes)
print(compiled)
"""
    assert python(code, **{place.VARIABLE: str(own_folder)}).stdout == "[]\n"


def test_jobs_cover_what_reading_and_decoding_run() -> None:
    """A process that comes later compiles nothing: index built, judged, searched and extended, all from the cache."""
    jobs = kernel_jobs(Format.BFLOAT16, IndexSpec.of("auto"), 20_000)
    with Compilation(jobs, progress=False) as compilation:
        pass
    assert not compilation.failed
    code = f"""{COUNT_COMPILED}
import numpy as np
from retrieval_attn.cpu.ahead import load_kernels
from retrieval_attn.cpu.host_attend import attend_path
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.index.spec import IndexSpec
fmt, spec = Format.BFLOAT16, IndexSpec.of("auto")
random = np.random.default_rng(0)
planes = random.standard_normal((6, 64), np.float32)
rows = from_float32((random.standard_normal((1, 16900, 6), np.float32) @ planes).astype(np.float32), fmt)
path = SequenceKV(1, 64, 32, fmt, index=spec).reserve(20000)
path.append(rows[:, :16600], rows[:, :16600, :32])
queries = (random.standard_normal((2, 300, 6), np.float32) @ planes).astype(np.float32)
path.build_index(0, 16500, queries)
load_kernels(fmt, spec, path.index_kinds)
attend_path(path, queries[:, :1], 100, 16600, 100, scale=0.1)
path.append(rows[:, 16600:], rows[:, 16600:, :32])
path.extend_index(16900)
attend_path(path, queries[:, :8], 100, 16900, 100, scale=0.1)
print(path.index_kinds, compiled)
"""
    done = python(code, **{place.VARIABLE: str(place.folder())})
    assert done.stdout == "{'sketch': 1} []\n", done.stdout + done.stderr


def test_warm_says_what_it_did_and_where(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run has nothing to do, and says so at once. Of the jobs a quick one: others take half a minute."""
    asked = []

    def quick(*given: Any) -> list[CompileJob]:
        asked.append(given)
        return [SERVER]

    monkeypatch.setattr("retrieval_attn.cli.warm._jobs", quick)
    arguments = ["warm", "--device", "cpu", "--host-dtype", "auto", "int8"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "compiled cpu.ahead.server()" in said and str(place.numba_folder()) in said
    assert main(arguments) == 0
    assert "nothing to do" in capsys.readouterr().out and asked == [("auto", ["float32", "int8"], False)]
    SERVER.mark.unlink()
    assert main(arguments) == 0
    assert "compiled cpu.ahead.server()" in capsys.readouterr().out


def test_warm_compiles_all_that_auto_may_take() -> None:
    """On a GPU its own kind and the server of its graphs too."""
    from retrieval_attn.cli.warm import _jobs

    jobs = _jobs("auto", ["bfloat16"], True)
    kinds = {job.arguments[1] for job in jobs if job.target.endswith(":build")}
    assert kinds == {"roargraph", "sketch", "flat", "device"} and SERVER in jobs
    assert SERVER not in _jobs("auto", ["bfloat16"], False)


def test_warm_refuses_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit status 2."""
    assert main(["warm", "--device", "cpu", "--index", "nonsense"]) == 2
    said = capsys.readouterr().err
    assert "'nonsense'" in said and said.count("\n") == 1


def test_kernels_that_are_used_here_are_right() -> None:
    """The kernel that these tests compile in other processes, in this one."""
    pool = np.array([3, 9, 4, 8, 1], np.int64)
    keep_best(pool, 5, 2)
    assert sorted(pool[:2].tolist()) == [8, 9]
