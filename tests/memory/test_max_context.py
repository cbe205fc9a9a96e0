"""A model with more positions than memory has room for serves what fits, and says so; longer texts are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import retrieval_attn as ra
from retrieval_attn import llm
from retrieval_attn.cli import main
from retrieval_attn.engine.request import Request
from retrieval_attn.errors import ContextLengthError
from retrieval_attn.gpu.memory import DeviceMemory
from retrieval_attn.memory.plan import CONTEXT_STEP, plan, plan_fitting
from retrieval_attn.memory.units import GIB, parse_tokens, show_tokens
from retrieval_attn.model.bundled import model_path
from retrieval_attn.server.failure import failure_of
from retrieval_attn.server.prompts import Prompts
from retrieval_attn.server.settings import EngineSpec

MILLION = 1 << 20
LONG = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=MILLION, dtype="bfloat16",
)  # fmt: skip
"""Llama-3-8B's shape with a million positions: 128 GiB of keys and values."""


@pytest.fixture
def many_positions(needle_model_path: Path, tmp_path: Path) -> Path:
    """The bundled model, whose config says a million positions."""
    for file in needle_model_path.iterdir():
        if file.name != "config.json" and file.is_file():
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((needle_model_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MILLION}))
    return tmp_path


@pytest.fixture
def small_host(many_positions: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Memory for the weights and 3,000 tokens."""
    needed = plan(many_positions, 3000, gpu_memory=1 << 60, dtype=torch.float32, decide=False)
    free = needed.shape.weight_bytes + sum(one.bytes for one in needed.host[:-1])
    monkeypatch.setenv("RETRIEVAL_ATTN_HOST_MEMORY", f"{free}B")
    return free


@pytest.mark.parametrize(("gpu", "host"), [(24, 64), (18, 256), (24, 8)])
def test_the_most_that_fits_is_planned(gpu: int, host: int) -> None:
    """One step more does not fit; short of memory for the weights, the reasons are those of one step."""
    sizes: dict[str, Any] = {"gpu_memory": gpu * GIB, "host_memory": host * GIB}
    found = plan_fitting(LONG, **sizes)
    assert found.fits and CONTEXT_STEP < found.context < MILLION and found.context % CONTEXT_STEP == 0
    assert not plan(LONG, found.context + CONTEXT_STEP, **sizes).fits
    assert plan_fitting(LONG, 4096, **sizes).context == 4096
    refused = plan_fitting(LONG, gpu_memory=8 * GIB, host_memory=host * GIB)
    assert not refused.fits and refused.context == CONTEXT_STEP


def test_a_gpu_serves_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder has no weights: the plan comes before them. A given `max_context` that does not fit is refused."""
    LONG.save_pretrained(tmp_path)
    card = DeviceMemory(80 * GIB, 80 * GIB, 0)
    monkeypatch.setattr(llm, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(llm, "device_memory", lambda device: card)
    monkeypatch.setattr(llm, "cap", lambda device, limit: None)
    monkeypatch.setattr("retrieval_attn.memory.plan.host_memory_bytes", lambda: 64 * GIB)
    monkeypatch.setenv("RETRIEVAL_ATTN_HOST_MEMORY", "64GiB")
    with pytest.raises(ra.InputDataError):
        ra.LLM(tmp_path, gpu_memory="24GiB")
    fitting = plan_fitting(LONG, gpu_memory="24GiB", host_memory="64GiB").context
    assert 300_000 < fitting < MILLION
    line = f"max_context {show_tokens(fitting)}: of the model's 1M positions, that is what fits in 24.00 GiB GPU and 64"
    assert [record.message for record in caplog.records if record.message.startswith(line)]
    with pytest.raises(ra.MemoryPlanError, match="the host needs"):
        ra.LLM(tmp_path, gpu_memory="24GiB", max_context=MILLION)
    with pytest.raises(ra.MemoryPlanError, match="weights"):
        ra.LLM(tmp_path, gpu_memory="8GiB")


def test_a_cpu_serves_what_fits(many_positions: Path, small_host: int, caplog: pytest.LogCaptureFixture) -> None:
    """A longer text is refused before it is read: its tokens, the most that fit, and what to do."""
    model = ra.LLM(many_positions, device="cpu", threads=1)
    assert model.max_context == 2048
    (line,) = [record.message for record in caplog.records if record.name == "retrieval_attn.llm"]
    assert line.startswith("max_context 2K: of the model's 1M positions, that is what fits in ")
    ids = [7] * 2040
    context = model.read(ids, progress=False)
    assert len(context.continue_with([5], max_new_tokens=2).tokens) == 2
    words = '2048 that the model serves here: of the model\'s 1M positions.*quantization="int4"'
    with pytest.raises(ContextLengthError, match=words) as caught:
        context.extend([7] * 9, progress=False)
    assert (caught.value.limit, caught.value.tokens) == (2048, 2049) and "1M positions" in caught.value.reason
    with pytest.raises(ContextLengthError, match=words):
        model.read([7] * 2049, progress=False)
    assert ra.LLM(many_positions, device="cpu", threads=1, max_context=4096).max_context == 4096


def test_weights_that_take_all_memory_leave_the_positions(
    many_positions: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some machines tell too little memory: nothing is refused before a text is read."""
    monkeypatch.setenv("RETRIEVAL_ATTN_HOST_MEMORY", "64KiB")
    assert ra.LLM(many_positions, device="cpu", threads=1).max_context == MILLION
    assert "the weights need" in caplog.text and "max_context stays at the model's 1M tokens" in caplog.text


@pytest.mark.parametrize("given", [None, 1000])
def test_a_server_refuses_more(many_positions: Path, small_host: int, given: int | None) -> None:
    """In OpenAI's words, with the reason: a long text before it is tokenized, another when its tokens are counted."""
    options = ra.Config(threads=1).to_dict()
    loading = {"device": "cpu", "max_context": given}
    most, reason = (2048, "of the model's 1M positions, that is what fits in") if given is None else (1000, "--max-con")
    loaded, engine = EngineSpec(str(many_positions), loading, options, rows=1, prefix_cache_bytes=0).load()
    with engine:
        facts = EngineSpec(str(many_positions), loading, options).facts(loaded)
        assert facts.positions == most and facts.positions_reason.startswith(reason)
        with pytest.raises(ContextLengthError) as counted:
            engine.submit(Request(((7,) * (most - 3),), 4))
        said = failure_of(counted.value, answer_tokens=4).message
        assert f"maximum context length is {most} tokens ({reason}" in said and f"requested {most + 1} tokens" in said
        prompts = Prompts(loaded.tokenizer, facts.vocabulary, facts.positions, reason=facts.positions_reason)
        with pytest.raises(ContextLengthError) as caught:
            prompts.of_text("word " * 100_000)
        assert f"is {most} tokens ({reason}" in failure_of(caught.value).message
        assert len(engine.submit(Request(((7,) * (most - 4),), 2)).result().tokens) == 2


def test_plan_chooses_and_says_so(capsys: pytest.CaptureFixture[str], many_positions: Path) -> None:
    """As `LLM` would choose; nothing is said of a context that has all positions, or was given."""
    LONG.save_pretrained(folder := many_positions / "long")
    sizes = ["--gpu-memory", "24GiB", "--host-memory", "64GiB"]
    assert main(["plan", str(folder), *sizes]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith("of the model's 1M positions, that is what fits in 24.00 GiB GPU and 64.00 GiB host memory.")
    tokens = parse_tokens(said.removeprefix("max_context ").partition(":")[0])
    assert tokens == plan_fitting(LONG, gpu_memory="24GiB", host_memory="64GiB").context
    assert main(["plan", str(folder), *sizes, "--max-context", "128k"]) == 0
    assert "max_context" not in capsys.readouterr().out
    assert main(["plan", str(folder), *sizes, "--max-context", "1m"]) == 1
    assert main(["plan", str(model_path("bundled")), *sizes]) == 0
    assert "max_context" not in capsys.readouterr().out
    assert main(["plan", str(folder), *sizes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == tokens
