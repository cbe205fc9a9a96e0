"""index="full": all keys stay beside the model, in windows that grow, and nothing is retrieved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.config import GraphMode
from retrieval_attn.errors import ConfigError
from retrieval_attn.index.flat import FULL_ROOM, kept_tokens
from retrieval_attn.memory.plan import Plan
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import DecodeSteps, forward
from retrieval_attn.runner.graph import pool as graph_pool
from retrieval_attn.runner.graph_runner import GraphRunner
from tests.runner.graph_cases import Decoded, enabled, graph_step, idle_decoders
from tests.tiny_models import build_model, random_ids

SMALL: dict[str, Any] = {"sink": 4, "window": 16, "threads": 1}
TOLERANCE = 2e-5


def held_of(cache: RetrievalCache) -> list[Any]:
    return [layer.held for layer in cache.layers if isinstance(layer, RetrievalLayer)]


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 4096, 65_536, 131_072])
def test_room(tokens: int) -> None:
    """There is room for FULL_ROOM tokens at least, and for an eighth more at most."""
    assert tokens + FULL_ROOM <= kept_tokens(tokens) <= max(tokens + 2 * FULL_ROOM, (tokens + FULL_ROOM) * 9 // 8)


def test_every_token_is_the_models_own() -> None:
    """Longer than windows, spills and the room behind a prompt: as without a cache of ours."""
    model = build_model("llama", max_position_embeddings=4096)
    prompt, new = 300, FULL_ROOM + 120
    ids = random_ids(1, prompt + new, 1)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[0, prompt - 1 :]
    cache = RetrievalCache(model, ra.Config(index="full", **SMALL))
    with torch.no_grad(), using_retrieval(model, 64):
        found = [model(input_ids=ids[:, :prompt], past_key_values=cache).logits[0, -1:]]
        for place in range(prompt, prompt + new):
            found.append(model(input_ids=ids[:, place : place + 1], past_key_values=cache).logits[0])
    assert (torch.cat(found) - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    for held in held_of(cache):
        assert held.tail_start == 0 and not held.retrieves and held.window.tail_len == prompt + new
        assert held.window.room <= kept_tokens(prompt + new) - prompt - new


def test_it_is_not_so_with_an_index() -> None:
    """The test above can fail: few keys that are retrieved are not all."""
    model = build_model("llama", max_position_embeddings=4096)
    ids = random_ids(1, 300, 1)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[0, -1]
    cache = RetrievalCache(model, ra.Config(index="flat", retrieve=2, tail=False, **SMALL))
    with torch.no_grad(), using_retrieval(model, 64):
        model(input_ids=ids[:, :-1], past_key_values=cache)
        found = model(input_ids=ids[:, -1:], past_key_values=cache).logits[0, -1]
    assert (found - wanted).abs().max() > TOLERANCE * wanted.abs().max()


def test_forks_crops_and_several_rows() -> None:
    """What a fork generates, and what is generated after a crop, is what a new cache gives."""
    model = build_model("llama", max_position_embeddings=4096)
    ids = random_ids(1, 260, 2)
    config = ra.Config(index="full", **SMALL)

    def read(count: int) -> RetrievalCache:
        cache = RetrievalCache(model, config)
        with torch.no_grad(), using_retrieval(model, 64):
            model(input_ids=ids[:, :count], past_key_values=cache)
        return cache

    def after(cache: RetrievalCache, token: int) -> torch.Tensor:
        with torch.no_grad(), using_retrieval(model, 64):
            return torch.as_tensor(model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1])

    cache = read(250)
    fork = cache.fork()
    first = after(fork, 7)
    assert torch.equal(first, after(cache, 7)) and not any(held.retrieves for held in held_of(fork))
    cache.crop(200)
    again = after(cache, 9)
    wanted = after(read(200), 9)
    assert (again - wanted).abs().max() < TOLERANCE * wanted.abs().max()


def test_nothing_is_forgotten(needle_model_path: str) -> None:
    """Many questions and a longer text keep all keys; to cut tokens out takes another index."""
    context = ra.LLM(needle_model_path, device="cpu", index="full", **SMALL).read("A dog. " * 200, progress=False)
    with pytest.raises(ConfigError, match="cannot forget tokens"):
        context.forget(4, 100)
    context.extend("A cat. " * 80, progress=False)
    context.ask_many(["What?", "Who is it?"], max_new_tokens=4)
    assert [held.window.tail_len for held in held_of(context.cache)] == [context.num_tokens] * len(
        held_of(context.cache)
    )


def test_a_context_is_saved_and_opened(needle_model_path: str, tmp_path: Path) -> None:
    llm = ra.LLM(needle_model_path, device="cpu", index="full", **SMALL)
    context = llm.read("The code of the door is 4711. " * 40, progress=False)
    answer = context.ask("What is the code?", max_new_tokens=8)
    context.save("door", store=tmp_path)
    opened = llm.open("door", store=tmp_path)
    assert opened.ask("What is the code?", max_new_tokens=8).text == answer.text
    assert not any(held.retrieves for held in held_of(opened.cache))


@pytest.mark.parametrize("case", [{}, {"batch": 2, "padded": 5}, {"repeats": 2}])
@pytest.mark.usefixtures("emulated_graphs")
def test_graphs_go_on_in_windows_that_grow(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    """Room for a few tokens: every so many of them another graph, and no step without one."""
    monkeypatch.setattr("retrieval_attn.index.flat.FULL_ROOM", 16)
    config, model = ra.Config(index="full", **SMALL), enabled("llama")
    eager = Decoded(model, False, config=config, new=50, **case)
    graphed = Decoded(model, True, config=config, new=50, **case)
    assert graphed.difference(eager) <= 1e-5
    assert graphed.steps.replays == 50 and graphed.decoder.captures == 1
    assert not any(held.retrieves for held in held_of(graphed.cache))


@pytest.mark.usefixtures("emulated_graphs")
def test_sequences_of_a_batch_that_outgrow_their_slots_run_eagerly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning gives both sizes; shorter sequences keep their graph."""
    monkeypatch.setattr("retrieval_attn.index.flat.FULL_ROOM", 16)
    config, model = ra.Config(index="full", **SMALL), enabled("llama")
    decoded = [Decoded(model, False, config=config, new=new, seed=new) for new in (1, 12)]
    rows, alone = [one.cache for one in decoded], [one.cache.fork() for one in decoded]
    runner = GraphRunner(model, 2)
    for token in range(30):
        logits = graph_step(runner, rows, [5 + token, 7], [cache.get_seq_length() for cache in rows])
        for cache, id_, found in zip(alone, (5 + token, 7), logits, strict=True):
            place = torch.tensor([[cache.get_seq_length()]])
            with torch.no_grad():
                wanted = forward(model, cache, torch.tensor([[id_]]), mask=None, position_ids=place)
            assert (found - wanted).abs().max() <= 1e-5
    assert runner.reason == "" and 0 < runner.replays < 30
    assert "a window of 100 tokens needs a row of as many, got a row of 84 tokens" in caplog.text


@pytest.mark.usefixtures("emulated_graphs")
def test_of_graphs_with_large_windows_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several lengths: their graphs' windows do not add up."""
    model, config = enabled("llama"), ra.Config(index="full", **SMALL)
    decoders = [Decoded(model, True, config=config, prompt=tokens, new=2).decoder for tokens in (60, 1200)]
    assert idle_decoders(model) == decoders, "two small ones are kept"
    monkeypatch.setattr(graph_pool, "LARGE_BYTES", 1)
    decoders.append(Decoded(model, True, config=config, prompt=2400, new=2).decoder)
    assert idle_decoders(model) == decoders[2:]


@pytest.mark.cuda
def test_a_gpu_attends_to_all_keys(fresh_decoders: None) -> None:
    """head_dim 128, groups of 4, bfloat16, in real graphs, across growing windows: as an eager cache, and as a model
    without a cache of ours, within bfloat16.
    """
    options = {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    model = build_model("llama", **options).to("cuda", torch.bfloat16)
    ids = random_ids(1, 3000, 5).cuda()
    with torch.no_grad():
        plain = model(input_ids=ids).logits[0, -1].float()
    config = ra.Config(index="full", sink=64, window=128)
    found: dict[GraphMode, torch.Tensor] = {}
    for graph in (False, True):
        cache = RetrievalCache(model, config)
        start = 3000 - FULL_ROOM - 200
        with torch.no_grad(), using_retrieval(model, 1024):
            model(input_ids=ids[:, :start], past_key_values=cache)
        steps = DecodeSteps(model, cache, graph)
        with torch.no_grad(), using_retrieval(model, 1024):
            for place in range(start, 3000):
                logits = steps.step(ids[:, place], torch.tensor([place], device="cuda"), None)
                found[graph] = logits.float().clone()
                logits.tolist()
                steps.confirm()
        assert steps.replays == (3000 - start if graph else 0) and not any(one.retrieves for one in held_of(cache))
        steps.close()
    scale = plain.abs().max()
    assert (found[True] - found[False]).abs().max() < 0.02 * scale
    assert (found[True][0] - plain).abs().max() < 0.05 * scale


def test_plan_counts_all_keys() -> None:
    model = build_model("llama", max_position_embeddings=1 << 17)
    small, large = (
        next(
            item.bytes
            for item in ra.plan(model, context=tokens, config=ra.Config(index="full")).device
            if item.name == "sinks and window"
        )
        for tokens in (8192, 65_536)
    )
    assert 6 * small < large < 9 * small


@pytest.mark.parametrize("index", ["full", "flat"])
def test_the_largest_context_is_one_that_fits(index: str) -> None:
    """A window that holds all keys grows with the context; where nothing is kept, the same as before."""
    model = build_model("llama", max_position_embeddings=1 << 24)

    def planned(tokens: int) -> Plan:
        config = ra.Config(index=index)
        return ra.plan(model, context=tokens, gpu_memory="1500MiB", host_memory="1TiB", config=config)

    most = planned(8192).largest_context
    assert most > 8192 and planned(most).fits and not planned(most + 2 * FULL_ROOM + most // 4).fits


def test_an_engine_has_windows_of_one_size(needle_model_path: str) -> None:
    with pytest.raises(ConfigError, match="window="):
        ra.Engine(ra.LLM(needle_model_path, device="cpu", index="full", **SMALL))
