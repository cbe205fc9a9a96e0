"""Layers on several devices (`device_map`): weights that accelerate keeps elsewhere, and two GPUs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

import retrieval_attn as ra
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.errors import ConfigError
from retrieval_attn.model import placement
from retrieval_attn.model.loading import load_model
from retrieval_attn.model.rotation import Rotation
from retrieval_attn.offload.queries import _drawn_on
from tests.model.test_tensor_parallel import BUNDLED, TINY, check_logits, make_cases, run_both
from tests.tiny_models import QUESTION, build_model, needle_text, random_ids, tiny_model

ALL = ra.Config(sink=4, window=16, retrieve="all")
CPU = torch.device("cpu")
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two CUDA devices, torch sees {torch.cuda.device_count()}"
)
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed; device_map needs it"
)


def by_layer(first: str | int, second: str | int) -> dict[str, Any]:
    """A device map of a tiny model: embedding and one layer, then the other layer and the head."""
    before: dict[str, Any] = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), first)
    return before | dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), second)


def logits_of(model: Any, cache: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Prompt, then one token at a time; (1, tokens, vocabulary) on the CPU."""
    pieces = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    with torch.no_grad():
        return torch.cat([model(input_ids=piece, past_key_values=cache).logits for piece in pieces], dim=1).cpu()


def expected_logits(name: str, ids: torch.Tensor) -> torch.Tensor:
    model = tiny_model(name)
    return logits_of(model, DynamicCache(config=model.config), ids, 150)


def mapped(name: str, folder: Path, device_map: dict[str, Any]) -> Any:
    """The tiny model of `name`, saved and loaded again with a device map."""
    tiny_model(name).save_pretrained(folder / "model")
    # grouped matrix products of experts may not take float32 on a GPU
    options = {"experts_implementation": "eager"} if name == "gpt_oss" else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=device_map, offload_folder=folder / "disk", dtype=torch.float32, **options
    )
    return model.eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return random_ids(1, 154)


MAPS: dict[str, dict[str, Any]] = {
    "second layer on disk": by_layer("cpu", "disk"),
    "first on disk": by_layer("disk", "cpu"),
    "all": {"": "disk"},
}


@needs_accelerate
@pytest.mark.parametrize("where", list(MAPS))
def test_offloaded_weights_change_nothing(where: str, tmp_path: Path, ids: torch.Tensor) -> None:
    """Hooks that load weights and move inputs go on working inside and after layer-major prefill, enabled twice."""
    model = mapped("llama", tmp_path, MAPS[where])
    expected = expected_logits("llama", ids)
    for chunk in (4096, 37):
        ra.enable(model, ALL, prefill_chunk=chunk)
        got = logits_of(model, ra.RetrievalCache(model, ALL), ids, 150)
        assert (got - expected).abs().max() <= 1e-5
    ra.disable(model)
    assert (logits_of(model, DynamicCache(config=model.config), ids, 150) - expected).abs().max() <= 1e-5


@needs_accelerate
def test_sliding_layers_too(tmp_path: Path, ids: torch.Tensor) -> None:
    """Gemma-3's first layer slides; its weights are on disk."""
    model = mapped("gemma3", tmp_path, {"": "disk"})
    ra.enable(model, ALL, prefill_chunk=37)
    got = logits_of(model, ra.RetrievalCache(model, ALL), ids, 150)
    assert (got - expected_logits("gemma3", ids)).abs().max() <= 1e-5


@needs_accelerate
def test_a_context_of_a_model_on_disk(tmp_path: Path, needle_model_path: Path) -> None:
    """Token ids go where the embedding runs, not to the meta device where its weights seem to be."""
    tokenizer = AutoTokenizer.from_pretrained(needle_model_path)
    text = needle_text(700)
    answers = []
    for options in ({}, {"device_map": {"": "disk"}, "offload_folder": tmp_path}):
        model = AutoModelForCausalLM.from_pretrained(needle_model_path, dtype=torch.float32, **options)
        if options:
            assert model.device.type == "meta"
            assert placement.input_device(model) == CPU
        context = ra.Context(model.eval(), tokenizer, ra.Config(**{**BUNDLED, "prefill_chunk": 100})).read(text)
        answers.append(context.ask(QUESTION, max_new_tokens=12, question_attention="exact").text)
    assert answers[0] == answers[1]
    assert "7391846" in answers[0]


def test_placement_of_an_ordinary_model() -> None:
    model = tiny_model("llama")
    assert placement.input_device(model) == CPU
    assert placement.devices(model) == (CPU,)
    assert not placement.is_hooked(model)
    assert placement.tensor_ranks(model) == 1
    chosen = torch.tensor([3])
    assert placement.agreed(chosen, model) is chosen


@needs_accelerate
def test_placement_follows_the_hooks(tmp_path: Path) -> None:
    """Weights on disk are on the meta device; what counts is where they are brought to."""
    model = mapped("llama", tmp_path, {"": "disk"})
    assert placement.is_hooked(model)
    assert placement.devices(model) == (CPU,)
    assert placement.execution_device(model.model.layers[1]) == CPU


@pytest.mark.parametrize(
    ("device_map", "devices", "away"),
    [
        ({"a": 1, "b": "cuda:0", "c": 1}, [0, 1], False),
        ({"a": "cuda", "b": "disk"}, [0], True),
        ({"": "cpu"}, [], True),
        ("auto", list(range(torch.cuda.device_count())), False),
    ],
)
def test_devices_that_a_map_names(device_map: Any, devices: list[int], away: bool) -> None:
    assert placement.cuda_devices(device_map) == [torch.device("cuda", number) for number in devices]
    assert placement.offloads(device_map) is away


@needs_accelerate
def test_llm_with_weights_on_disk(tmp_path: Path) -> None:
    """The same loader for LLM; inputs go where the embedding runs."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "disk")
    assert placement.is_hooked(loaded)
    assert placement.input_device(loaded) == CPU


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_map": "auto", "tensor_parallel": True}, "both given"),
        ({"device_map": "auto", "device": "cpu"}, "leave device out"),
        ({"tensor_parallel": True}, "torchrun --nproc-per-node"),
    ],
)
def test_spreading_that_cannot_be(options: dict[str, Any], words: str, needle_model_path: Path) -> None:
    """Said before anything is loaded."""
    with pytest.raises(ConfigError, match=words):
        ra.LLM(needle_model_path, **options)


# -- two devices that do not exist ----------------------------------------------------------------------


def spread_over_fakes(name: str) -> Any:
    """A tiny model of fake tensors, its layers on two fake devices, with accelerate's hooks between them."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    class Hook(AlignDevicesHook):
        def init_hook(self, module: Any) -> Any:  # accelerate would move the weights, which fakes do not let it
            return module

    model = build_model(name)
    where = by_layer("cpu:0", "cpu:1")
    for path, module in model.named_modules():
        place = next((where[part] for part in where if path == part or path.startswith(f"{part}.")), "cpu:0")
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
                    own[key] = nn.Parameter(fake, requires_grad=False) if own is module._parameters else fake
        if path in where:
            add_hook_to_module(module, Hook(execution_device=place, skip_keys={"past_key_values"}))
    add_hook_to_module(model, Hook(execution_device="cpu:0", io_same_device=True, skip_keys={"past_key_values"}))
    return model


@needs_accelerate
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gemma4", "qwen3"])
def test_no_operation_mixes_two_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors know shapes and devices, and refuse operations over two. The host's work on numbers is left out.

    Prefill in one and in chunks, decoding over the index, an exact follow-up, a fork; windows where their layers are.
    """

    def all_to_host(tensors: list[torch.Tensor], fmt: object) -> Any:
        return [np.zeros(tuple(tensor.shape), np.float32) for tensor in tensors]

    def to_device(array: Any, fmt: object, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(array.shape, dtype=like.dtype, device=like.device)

    monkeypatch.setattr(
        "retrieval_attn.runner.prefill.require_host_room", lambda *sizes, **place: None
    )  # builds the model again
    monkeypatch.setattr("retrieval_attn.offload.work.all_to_host", all_to_host)
    monkeypatch.setattr("retrieval_attn.attention.layer_kv.to_device", to_device)
    monkeypatch.setattr("retrieval_attn.offload.clusters.ClusterBuild.fetch", lambda build, ready: None)
    monkeypatch.setattr("retrieval_attn.offload.clusters.ClusterBuild.place", lambda build: None)
    monkeypatch.setattr("retrieval_attn.attention.exact.ExactPass._moved", lambda reading, *given: None)

    def host_queries(part: Any, one: Any) -> Any:
        _, heads, new, dim = part.query.shape
        return np.ones((heads, len(one.rows) * new, dim), np.float32)

    monkeypatch.setattr("retrieval_attn.attention.host_attention.HostSource._host_queries", host_queries)
    monkeypatch.setattr(
        "retrieval_attn.attention.host_attention.to_queries", lambda query: np.ones(query.shape, np.float32)
    )
    config = ra.Config(**{**TINY, "index": "flat"})
    _drawn_on.cache_clear()  # its tensors are real, or another test's fakes
    with FakeTensorMode(), torch.no_grad():
        model = spread_over_fakes(name)
        assert placement.devices(model) == (torch.device("cpu", 0), torch.device("cpu", 1))
        for chunk in (4096, 37):
            ra.enable(model, config, prefill_chunk=chunk)
            cache = ra.RetrievalCache(model, config)
            for step in (150, 1, 1, 40, 1):
                ids = torch.zeros(1, step, dtype=torch.long, device="cpu:0")
                logits = model(input_ids=ids, past_key_values=cache).logits
                assert logits.device == torch.device("cpu", 0)
            layers: list[Any] = list(cache.fork().layers)
            assert [layer.window.tail()[0].device.index for layer in layers] == [0, 1]
        rotation = Rotation.of(model, model.model.layers[1].self_attn)
        cosines, _ = rotation._tables(torch.arange(3, device="cpu:1"))
        assert cosines.device == torch.device("cpu", 1)
    _drawn_on.cache_clear()


# -- two GPUs -----------------------------------------------------------------------------------------


@pytest.mark.cuda
@two_gpus
@needs_accelerate
@pytest.mark.parametrize("chunk", [4096, 37], ids=["one-shot", "layer-major"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "gpt_oss"])
def test_layers_on_two_gpus(name: str, chunk: int, tmp_path: Path, ids: torch.Tensor) -> None:
    """Logits equal the CPU's, each cache layer on its layer's device, logits where the inputs were."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tied = name in ("gemma2", "gemma3")  # the head's weights are the embedding's, and lie in one place
    model = mapped(name, tmp_path, {**by_layer(0, 1), "lm_head": 0} if tied else by_layer(0, 1))
    assert placement.devices(model) == (torch.device("cuda", 0), torch.device("cuda", 1))
    ra.enable(model, ALL, prefill_chunk=chunk)
    cache = ra.RetrievalCache(model, ALL)
    got = logits_of(model, cache, ids.cuda(0), 150)
    assert (got - expected_logits(name, ids)).abs().max() <= 2e-5
    layers: list[Any] = list(cache.layers)
    for number, layer in enumerate(layers):
        assert layer.window.tail()[0].device == torch.device("cuda", number)


@pytest.mark.cuda
@two_gpus
@needs_accelerate
@pytest.mark.parametrize("index", ["flat", "roargraph"])
def test_a_context_on_two_gpus_answers_as_on_one(index: str, needle_model_path: Path) -> None:
    """The bundled model in bfloat16, layers 0-2 and 3-4, an index that trains on queries of both devices."""
    tokenizer = AutoTokenizer.from_pretrained(needle_model_path)
    text = needle_text(40_000)
    config = ra.Config(**{**BUNDLED, "index": index, "prefill_chunk": 4096})
    answers = []
    for split in ({"": 0}, None):
        model_map = split or {
            "model.embed_tokens": 0,
            "model.rotary_emb": 0,
            **{f"model.layers.{number}": int(number > 2) for number in range(5)},
            "model.norm": 1,
            "lm_head": 0,  # tied to the embedding
        }
        model = AutoModelForCausalLM.from_pretrained(needle_model_path, dtype=torch.bfloat16, device_map=model_map)
        context = ra.Context(model.eval(), tokenizer, config).read(text, progress=False)
        devices = [layer.window._key.device.index for layer in retrieving(context)]
        assert devices == ([0, 0, 0, 1, 1] if split is None else [0] * 5)
        several = context.ask_many([QUESTION, "What is it?"], max_new_tokens=12)
        answers.append((context.ask(QUESTION, max_new_tokens=12, question_attention="retrieval").text, several[0].text))
    assert "7391846" in answers[0][0]
    assert answers[0] == answers[1]


def retrieving(context: ra.Context) -> list[Any]:
    return [layer for layer in context.cache.layers if isinstance(layer, RetrievalLayer)]


@pytest.mark.cuda
@two_gpus
@needs_accelerate
def test_llm_takes_a_device_map(needle_model_path: Path) -> None:
    llm = ra.LLM(needle_model_path, device_map="balanced", config=ra.Config(prefill_chunk=4096))
    assert len(placement.devices(llm.model)) == 2
    context = llm.read(needle_text(40_000), progress=False)
    assert "7391846" in context.ask(QUESTION, max_new_tokens=12).text


@pytest.mark.cuda
@two_gpus
def test_two_ranks_on_two_gpus_equal_one(tmp_path: Path, needle_model_path: Path) -> None:
    """Tensor parallel under torchrun and NCCL: logits, tokens, heads and answers as on one GPU."""
    cases = make_cases(tmp_path, needle_model_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = run_both(tmp_path, cases, launcher, "cuda:0")
    print(json.dumps({name: [rank.get("layer_devices") for rank in found.ranks] for name, found in both.items()}))
    for name, found in both.items():
        for number, rank in enumerate(found.ranks):
            assert rank["device"] == f"cuda:{number}"
            assert rank["ranks"] == 2
            assert 2 * rank["host_bytes"] == found.one["host_bytes"]
            if name == "bundled":
                assert rank["text"] == found.one["text"]
                assert "7391846" in rank["text"]
            else:
                assert rank["tokens"] == found.one["tokens"]
                assert set(rank["layer_devices"]) == {f"cuda:{number}"}
        if name == "bundled":
            assert found.ranks[0]["sampled"] == found.ranks[1]["sampled"]
        else:
            check_logits(found, 2e-5)
