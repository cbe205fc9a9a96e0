"""What the host has no memory for is an error of this package, and what no folder can be called, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import retrieval_attn as ra
from retrieval_attn.errors import ConfigError, MemoryPlanError
from retrieval_attn.memory.host_room import host_shortage
from retrieval_attn.store import ContextStore
from tests.preloaded import run_preloaded
from tests.tiny_models import Loaded

IDS = [(7 * number) % 3000 + 10 for number in range(100)]


def test_a_window_that_no_memory_holds(loaded: Loaded) -> None:
    """A terabyte: the context is empty afterwards, and another one reads."""
    context = ra.Context(*loaded, ra.Config(window=10**9, threads=1))
    with pytest.raises(MemoryPlanError, match=r"no memory to read 100 tokens.*choose a smaller window"):
        context.read(IDS, progress=False)
    assert context.num_tokens == 0
    assert ra.Context(*loaded, ra.Config(window=16, threads=1)).read(IDS, progress=False).num_tokens == 100


@pytest.mark.parametrize("name", ["window", "sink", "prefill_chunk", "threads"])
def test_numbers_that_no_array_has(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at most 2147483647"):
        ra.Config.from_dict({name: 2**31})


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("can't start new thread")]
)
def test_what_lacks_memory_is_named(error: Exception) -> None:
    with pytest.raises(MemoryPlanError, match="no memory to read") as caught, host_shortage("read"):
        raise error
    assert caught.value.__cause__ is error


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"), host_shortage("read"):
        raise RuntimeError("shape")


LIMITED = """
import resource, sys, torch
torch.set_num_threads(1)
import retrieval_attn as ra
llm = ra.LLM("bundled", window=64, sink=16, retrieve=32, threads=1)
llm.read(list(range(10, 300)), progress=False)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), resource.RLIM_INFINITY))
try:
    llm.read([10 + i % 3000 for i in range(60_000)], progress=False)
except ra.RetrievalAttentionError as error:
    print("named", type(error).__name__)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(llm.read(list(range(10, 300)), progress=False).num_tokens)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of address space")
def test_memory_that_torch_lacks_while_reading() -> None:
    done = run_preloaded(["-c", LIMITED])
    assert done.stdout.splitlines() == ["named MemoryPlanError", "290"], done.stderr[-2000:]


@pytest.mark.parametrize("folder", ["\0", "a\0b", "\ud800", 5, b"x\0"])
def test_folders_that_cannot_be(folder: Any) -> None:
    with pytest.raises(ConfigError, match="the folder of a store must be a path"):
        ContextStore(folder)


def test_a_folder_may_be_bytes_no_more_than_a_path_is(tmp_path: Path) -> None:
    assert ContextStore(str(tmp_path)).folder == ContextStore(tmp_path).folder == tmp_path
