"""Answers that attend to all keys of a shorter text (`Config.all_keys`): which do, what they say, what they leave."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.cache.cache import RetrievalCache, retrieves
from retrieval_attn.cache.retrieval import RetrievalLayer
from retrieval_attn.engine import beside
from retrieval_attn.engine.attention import using_retrieval
from retrieval_attn.engine.beside import make_way, with_all_keys
from retrieval_attn.engine.decode import Steps
from retrieval_attn.engine.graph import registry
from retrieval_attn.index.full import FULL_ROOM
from retrieval_attn.memory.all_keys import SEARCH_MICROSECONDS
from tests.tiny_models import build_model, random_ids

SMALL: dict[str, Any] = {"sink": 4, "window": 16, "spill": 8, "threads": 1, "retrieve": 2}
TOLERANCE = 2e-5
GIB = 1 << 30


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """A GPU's numbers for a CPU: bytes that are free, bytes per second of its memory. To be changed."""
    numbers: dict[str, float] = {"free": 8 * GIB, "speed": 3.35e12}
    monkeypatch.setattr(beside, "whole_device_bytes", lambda model: int(numbers["free"]))
    monkeypatch.setattr(beside, "memory_speed", lambda model: numbers["speed"])
    yield numbers


def held_of(cache: RetrievalCache) -> list[Any]:
    return [layer.held for layer in cache.layers if isinstance(layer, RetrievalLayer)]


def read(model: Any, ids: torch.Tensor, **options: Any) -> RetrievalCache:
    cache = RetrievalCache(model, ra.Config(**{**SMALL, **options}))
    with torch.no_grad(), using_retrieval(model, 64):
        model(input_ids=ids, past_key_values=cache)
    return cache


def following(model: Any, cache: RetrievalCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits (tokens, vocabulary) of one token after the other."""
    with torch.no_grad(), using_retrieval(model, 64):
        found = [model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits[0] for at in range(ids.shape[1])]
    return torch.cat(found)


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("host_dtype", ["auto", "int8"])
def test_every_token_is_the_models_own(host_dtype: str) -> None:
    """Beyond the room behind the text: as without a cache of ours. The cache itself goes on retrieving, as before."""
    model = build_model("llama", max_position_embeddings=4096)
    prompt, new = 300, FULL_ROOM + 120
    ids = random_ids(1, prompt + new, 1)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[0, prompt:]
    cache = read(model, ids[:, :prompt], host_dtype=host_dtype)
    fork = with_all_keys(model, cache, 0)
    assert fork is not None and not any(held.retrieves or held.tail_start for held in held_of(fork))
    assert all(held.retrieves for held in held_of(cache))
    tolerance = TOLERANCE if host_dtype == "auto" else 0.02
    off = (following(model, fork, ids[:, prompt:]) - wanted).abs().max() / wanted.abs().max()
    assert off < tolerance
    retrieving = (following(model, cache.fork(), ids[:, prompt:]) - wanted).abs().max() / wanted.abs().max()
    assert retrieving > 2 * tolerance, "2 keys of each head are not all"
    assert [held.window.tail_len for held in held_of(fork)] == [prompt + new] * len(held_of(fork))


@pytest.mark.usefixtures("roomy")
def test_a_question_of_many_tokens(needle_model_path: str) -> None:
    """A whole prompt through the public API: the tokens of an index that keeps all keys; the context stays as it is."""
    text, question = "The code of the door is 4711. The dog sleeps. " * 60, "What is the code of the door? " * 4
    answers = {}
    ways: dict[str, dict[str, Any]] = {"all": {}, "full": {"index": "full"}, "retrieves": {"all_keys": False}}
    for name, options in ways.items():
        context = ra.LLM(needle_model_path, device="cpu", **{**SMALL, **options}).read(text, progress=False)
        before = [(held.tail_start, held.window.tail_len) for held in held_of(context.cache)]
        answers[name] = [context.ask(question, max_new_tokens=12) for _ in range(2)][1]
        assert before == [(held.tail_start, held.window.tail_len) for held in held_of(context.cache)]
    assert answers["all"].tokens == answers["full"].tokens
    assert answers["all"].stats.keys_scanned == 0 < answers["retrieves"].stats.keys_scanned
    assert not answers["all"].stats.indexes and answers["retrieves"].stats.indexes


@pytest.mark.parametrize(
    "options",
    [{"all_keys": False}, {"index": "flat"}, {"retrieve": "all"}, {"tail": False}],
    ids=["off", "another index", "reference", "no tail"],
)
@pytest.mark.usefixtures("roomy")
def test_who_asks_for_retrieval_gets_it(options: dict[str, Any]) -> None:
    model = build_model("llama")
    assert with_all_keys(model, read(model, random_ids(1, 200, 1), **options), 0) is None


def test_where_there_is_no_room_or_no_gain(roomy: dict[str, float]) -> None:
    """Two windows, of an answer and of a captured step, must fit, and keys be read sooner than they are searched."""
    model = build_model("llama")
    cache = read(model, random_ids(1, 200, 1))
    assert with_all_keys(model, cache, 0) is not None
    layers, token_bytes = len(held_of(cache)), 2 * held_of(cache)[0].window.buffers[0][0, :, 0].nbytes
    roomy["speed"] = 200 * token_bytes / (SEARCH_MICROSECONDS * 1e-6)
    assert with_all_keys(model, cache, 0) is not None
    roomy["speed"] *= 0.99
    assert with_all_keys(model, cache, 0) is None
    roomy["speed"] = 3.35e12
    roomy["free"] = 2 * layers * token_bytes * 200
    assert with_all_keys(model, cache, 0) is None


@pytest.mark.usefixtures("roomy")
def test_rows_and_watchers_retrieve() -> None:
    model = build_model("llama")
    cache = read(model, random_ids(1, 200, 1))
    rows = cache.fork()
    rows.batch_repeat_interleave(2)
    assert with_all_keys(model, rows, 0) is None
    engine = cache.fork()
    engine.in_batch = True
    assert with_all_keys(model, engine, 0) is None
    watched: Any = cache.fork()
    watched.layers[0].mass_heads = 1
    assert with_all_keys(model, watched, 0) is None
    assert with_all_keys(model, read(model, random_ids(1, 12, 1)), 0) is None, "nothing lies on the host alone"


@pytest.mark.usefixtures("roomy", "emulated_graphs")
def test_one_graph_serves_answers_over_all_keys(monkeypatch: pytest.MonkeyPatch, needle_model_path: str) -> None:
    """Captured when the text is read; what is large of it goes when the next text needs the room."""
    monkeypatch.setattr(registry, "LARGE_BYTES", 1)
    context = ra.LLM(needle_model_path, device="cpu", **SMALL).read("A dog. " * 100, progress=False)
    [decoder] = registry._decoders[context.model]
    assert decoder.captures == 1 and decoder.slots[0].key.shape[2] > context.num_tokens
    eager = context.fork()
    eager._cache.config = eager._cache.config.replace(graph=False)
    wanted = eager.ask("What?", max_new_tokens=24)
    for _ in range(2):
        answer = context.ask("What?", max_new_tokens=24)
        assert answer.tokens == wanted.tokens and answer.stats.decoded == "graph" != wanted.stats.decoded
    assert registry._decoders[context.model] == [decoder] and decoder.captures == 1
    make_way(context.model)
    assert registry.large_bytes(context.model) > 0
    monkeypatch.setattr(beside, "whole_device_bytes", registry.large_bytes)
    make_way(context.model)
    assert registry.large_bytes(context.model) == 0


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("after", [0, 1, None], ids=["before any text", "after a piece", "not at all"])
def test_an_answer_that_has_no_room_after_all_retrieves(
    after: int | None, monkeypatch: pytest.MonkeyPatch, needle_model_path: str
) -> None:
    """Another answer took the memory. Text that is out is not said again: that answer ends with the error."""
    context = ra.LLM(needle_model_path, device="cpu", **SMALL).read("A dog. " * 100, progress=False)
    wanted = context.fork()
    wanted._cache.config = wanted._cache.config.replace(all_keys=False)
    usual = AnswerLoop.answer

    def answer(loop: AnswerLoop, cache: RetrievalCache, batch: Any, sampling: Any, on_text: Any, cancelled: Any) -> Any:
        if not retrieves(cache) and after is not None:
            for _ in range(after):
                on_text("A")
            raise torch.OutOfMemoryError("no room")
        return usual(loop, cache, batch, sampling, on_text, cancelled)

    monkeypatch.setattr(AnswerLoop, "answer", answer)
    said: list[str] = []
    if after:
        with pytest.raises(torch.OutOfMemoryError):
            context.ask("What?", max_new_tokens=8, on_text=said.append)
        assert said == ["A"]
        return
    found = context.ask("What?", max_new_tokens=8, on_text=said.append)
    assert "".join(said) == found.text
    assert (found.stats.keys_scanned > 0) == (after == 0)
    if after == 0:
        assert found.tokens == wanted.ask("What?", max_new_tokens=8).tokens


@pytest.mark.cuda
@pytest.mark.parametrize("host_dtype", ["auto", "int8"])
def test_a_gpu_attends_to_all_keys(fresh_decoders: None, host_dtype: str) -> None:
    """head_dim 128, groups of 4, bfloat16, codes on the GPU: eager and captured steps, across growing windows, as a
    model without a cache of ours, within bfloat16. What the GPU says of itself allows it.
    """
    options = {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 32768}
    model = build_model("llama", **options).to("cuda", torch.bfloat16)
    prompt, new = 20_000, FULL_ROOM + 100
    ids = random_ids(1, prompt + new, 5).cuda()
    with torch.no_grad():
        plain = model(input_ids=ids).logits[0, prompt:].float()
    cache = RetrievalCache(model, ra.Config(host_dtype=host_dtype))
    with torch.no_grad(), using_retrieval(model, 8192):
        model(input_ids=ids[:, :prompt], past_key_values=cache)
    assert cache.index_kinds() == {"device": 2 * len(held_of(cache))}
    scale, found = plain.abs().max(), {}
    for graph in (False, True):
        fork = with_all_keys(model, cache, 0)
        assert fork is not None and not any(held.retrieves for held in held_of(fork))
        steps, logits = Steps(model, fork, graph), []
        with torch.no_grad(), using_retrieval(model, 8192):
            for place in range(prompt, prompt + new):
                step = steps.step(ids[:, place], torch.tensor([place], device="cuda"), None)
                logits.append(step[0].float().clone())
                step.tolist()
                steps.confirm()
        assert steps.replays == (new if graph else 0)
        steps.close()
        found[graph] = torch.stack(logits)
    assert (found[True] - found[False]).abs().max() < 0.02 * scale
    assert (found[True] - plain).abs().max() < 0.05 * scale


@pytest.mark.cuda
def test_memory_of_an_answer_is_given_back(needle_model_path: str) -> None:
    """Through the public API: what an answer over all keys takes goes with it, but for the step's own windows."""
    llm = ra.LLM(needle_model_path, device="cuda")
    context = llm.read(torch.randint(3, llm.model.config.vocab_size, (32_768,)).tolist(), progress=False)
    held = []
    for _ in range(3):
        context.continue_with([5, 6, 7], max_new_tokens=8)
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert max(held) == min(held)
    assert registry._decoders[context.model][-1].slots[0].key.shape[2] > 32_768
