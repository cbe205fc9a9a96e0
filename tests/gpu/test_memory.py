"""The cap on device memory: arithmetic on the CPU, the allocator's refusal on a device, and LLM's before loading."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import retrieval_attn as ra
from retrieval_attn import llm
from retrieval_attn.errors import MemoryPlanError
from retrieval_attn.gpu import memory
from retrieval_attn.gpu.memory import GIB, LATER_CONTEXT, DeviceMemory, allocator_share

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("limit", "context", "left"),
    [(24 * GIB, GIB // 2, 24 * GIB - GIB // 2), (200 * GIB, GIB, 79 * GIB)],
    ids=["the cap minus the context", "more than the device has"],
)
def test_what_the_allocator_gets(limit: int, context: int, left: int) -> None:
    """On an 80 GiB device."""
    share = allocator_share(limit, DeviceMemory(80 * GIB, 79 * GIB, context))
    assert share * 80 * GIB == pytest.approx(left - LATER_CONTEXT)


def test_a_cap_that_the_context_takes_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match="leaves nothing"):
        allocator_share(GIB // 2, DeviceMemory(80 * GIB, 79 * GIB, GIB // 2))


def test_graphs_count_once_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cap of 24 GiB on a card of 80: .3 GiB beyond what was left for them are taken off, and not given back."""
    device, total = torch.device("cuda", 0), 80 * GIB
    outside, shares = [GIB // 2], [1.0]
    monkeypatch.setattr(
        memory, "device_memory", lambda place: DeviceMemory(total, 50 * GIB, min(outside[-1], GIB), outside[-1])
    )
    monkeypatch.setattr(memory, "_caps", {})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, number: shares.append(share))
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda number: shares[-1])

    def tensors_may_have(held: int) -> float:
        outside.append(held)
        memory.lower_cap_for_graphs(device)
        return shares[-1] * total / GIB

    assert tensors_may_have(GIB) == total / GIB  # without a cap
    outside.append(GIB // 2)
    memory.cap(device, 24 * GIB)
    before = tensors_may_have(GIB // 2 + LATER_CONTEXT)
    assert before == pytest.approx(24 - 0.5 - LATER_CONTEXT / GIB)
    assert tensors_may_have(GIB // 2 + LATER_CONTEXT + 3 * GIB // 10) == pytest.approx(before - 0.3)
    assert tensors_may_have(GIB // 2) == pytest.approx(before - 0.3)
    memory.cap(device, None)
    assert tensors_may_have(3 * GIB) == total / GIB
    memory.lower_cap_for_graphs(torch.device("cpu"))


def test_other_processes_are_not_available() -> None:
    """A 24 GiB card with 10 GiB of others' is a 14 GiB card, the own context counted as had."""
    assert DeviceMemory(24 * GIB, 13 * GIB, GIB).available == 14 * GIB
    assert DeviceMemory(24 * GIB, 24 * GIB, GIB).available == 24 * GIB


@pytest.mark.parametrize(
    ("has", "asked", "words"),
    [
        (24, "12GiB", ["prefill needs", "12.00 GiB were given", "weights", "13.98 GiB", "embedding on the host"]),
        (12, "24GiB", ["gpu_memory='24GiB' was given", "12.00 GiB", "prefill needs"]),
        (12, None, ["prefill needs", "12.00 GiB were given"]),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: int, asked: str | None, words: list[str]
) -> None:
    """The folder has a config and no weights: only a refusal before loading can name the arithmetic."""
    LlamaConfig(**LLAMA_8B).save_pretrained(tmp_path)
    card = DeviceMemory(has * GIB, has * GIB, 0)
    monkeypatch.setattr(llm, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(llm, "device_memory", lambda device: card)
    monkeypatch.setattr(llm, "cap", lambda device, limit: pytest.fail("capped before the plan was accepted"))
    with pytest.raises(MemoryPlanError) as caught:
        ra.LLM(tmp_path, gpu_memory=asked, max_context=131072)
    for word in words:
        assert word in str(caught.value)


def alone(check: Callable[..., None], *arguments: object) -> None:
    """Run `check` in a process of its own: other tests leave memory behind in this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(check, *arguments).result()


@pytest.mark.parametrize("variable", [None, *memory.ALLOCATOR_VARIABLES])
def test_segments_expand_unless_the_environment_says_otherwise(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    for name in memory.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    memory.expand_segments(torch.device("cpu"))
    assert not told
    memory.expand_segments(torch.device("cuda"))
    assert told == ([] if variable else ["expandable_segments:True"])


def test_an_allocator_without_such_segments_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(settings: str) -> None:
        raise RuntimeError("unknown option")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refused, raising=False)
    for name in memory.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level("INFO"):
        memory.expand_segments(torch.device("cuda"))
    assert "stay as they are: unknown option" in caplog.text


def pieces_left(*, expand: bool) -> None:
    """A tensor in the middle of a larger one's memory leaves pieces, which go back where segments expand."""
    device = torch.device("cuda")
    torch.empty(1, device=device)
    if expand:
        memory.expand_segments(device)
    whole = torch.empty(GIB, dtype=torch.uint8, device=device)
    del whole
    held = torch.empty(GIB // 8, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()
    left = memory.split_bytes(device), torch.cuda.memory_reserved(device) - held.nbytes
    assert max(left) < GIB // 8 if expand else min(left) > GIB // 2


@dataclass(frozen=True)
class Peak:
    """Peak bytes on a GPU since `start_peak`: of tensors, and of the whole process."""

    peak: int
    process: int


def start_peak(device: torch.device) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> Peak:
    torch.cuda.synchronize(device)
    outside = memory.device_memory(device).context
    return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device) + outside)


def refuses_beyond_a_cap() -> None:
    """2.5 GiB are given, 4.5 are not, and the process stays below the cap."""
    device = torch.device("cuda")
    memory.cap(device, 4 * GIB)
    start_peak(device)
    held = torch.empty(5 * GIB // 2, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * GIB, dtype=torch.uint8, device=device)
    found = peak(device)
    assert 2.5 * GIB <= found.peak <= found.process <= 4 * GIB
    del held


def reads_within_its_cap(path: Path) -> None:
    """The bundled model in 1.5 GiB reads 16K tokens, and the process holds no more."""
    device = torch.device("cuda")
    start_peak(device)
    model = ra.LLM(path, device="cuda", gpu_memory="1.5GiB", max_context=20000, prefill_chunk=2048)
    model.read([5] * 16384, progress=False)
    found = peak(device)
    assert found.process <= 1.5 * GIB


@pytest.mark.cuda
def test_the_allocator_refuses_what_goes_beyond() -> None:
    alone(refuses_beyond_a_cap)


@pytest.mark.cuda
@pytest.mark.parametrize("expand", [False, True])
def test_segments_that_expand_leave_no_pieces(expand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in memory.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    alone(functools.partial(pieces_left, expand=expand))


@pytest.mark.cuda
def test_llm_keeps_its_cap(needle_model_path: Path) -> None:
    alone(reads_within_its_cap, needle_model_path)


@pytest.mark.parametrize(
    ("speed", "width", "bandwidth"),
    [("32.0 GT/s PCIe", "16", 64e9), ("16.0 GT/s PCIe", "4", 8e9), ("Unknown", "16", None), ("16.0 GT/s", "0", None)],
)
def test_the_bus_as_the_system_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: str, width: str, bandwidth: float | None
) -> None:
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.setattr(memory, "PCI_DEVICES", tmp_path)
    assert memory.bus_bandwidth(torch.device("cuda")) is None
    folder = tmp_path / "0000:1a:03.0"
    folder.mkdir()
    (folder / "max_link_speed").write_text(speed + "\n")
    (folder / "current_link_width").write_text(width + "\n")
    assert memory.bus_bandwidth(torch.device("cuda")) == bandwidth
    del place.pci_bus_id
    assert memory.bus_bandwidth(torch.device("cuda")) is None
