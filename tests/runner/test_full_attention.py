"""Answers that attend to all keys of a shorter text (`Config.full_attention`): which do, and what they leave."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache, retrieves
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.paged_prefix import PagedPrefix
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import LayerUploads
from retrieval_attn.gpu.shared.plan import PAGE_TOKENS, pages_for
from retrieval_attn.index.flat import FULL_ROOM, kept_tokens
from retrieval_attn.memory.device import SEARCH_MICROSECONDS, device_kv_bytes
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.runner import full_attention as beside
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import DecodeSteps
from retrieval_attn.runner.full_attention import (
    FullKVPages,
    attach_full_kv,
    kept_pages,
    release_full_kv,
    release_if_needed,
)
from tests.runner.graph_cases import idle_decoders
from tests.tiny_models import QUESTION, build_model, needle_text, random_ids

SMALL: dict[str, Any] = {"sink": 4, "window": 16, "threads": 1, "retrieve": 2}
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


def paged(cache: RetrievalCache) -> PagedPrefix:
    assert cache.batch.paged_prefix is not None
    return cache.batch.paged_prefix


def kept_of(model: Any) -> FullKVPages:
    kept = kept_pages(model)
    assert kept is not None
    return kept


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
    fork = attach_full_kv(model, cache)
    assert fork is not None and not any(held.retrieves for held in held_of(fork))
    assert all(held.retrieves for held in held_of(cache))
    tolerance = TOLERANCE if host_dtype == "auto" else 0.02
    off = (following(model, fork, ids[:, prompt:]) - wanted).abs().max() / wanted.abs().max()
    assert off < tolerance
    some = wanted[:40]
    retrieving = (following(model, cache.fork(), ids[:, prompt : prompt + 40]) - some).abs().max() / some.abs().max()
    assert retrieving > 2 * tolerance, "2 keys of each head are not all"
    assert paged(fork).layers.int8 == (host_dtype == "int8")
    assert [held.window.tail_len for held in held_of(fork)] == [prompt + new - paged(fork).tokens] * len(held_of(fork))


@pytest.mark.usefixtures("roomy")
def test_a_question_of_many_tokens(needle_model_path: str) -> None:
    """A whole prompt through the public API: the tokens of an index that keeps all keys; the context stays as it is."""
    text, question = "The code of the door is 4711. The dog sleeps. " * 60, "What is the code of the door? " * 4
    answers = {}
    ways: dict[str, dict[str, Any]] = {"all": {}, "full": {"index": "full"}, "retrieves": {"full_attention": "never"}}
    for name, options in ways.items():
        context = ra.LLM(needle_model_path, device="cpu", **{**SMALL, **options}).read(text, progress=False)
        before = [(held.tail_start, held.window.tail_len) for held in held_of(context.cache)]
        answers[name] = [context.ask(question, max_new_tokens=12) for _ in range(2)][1]
        assert before == [(held.tail_start, held.window.tail_len) for held in held_of(context.cache)]
    assert answers["all"].tokens == answers["full"].tokens
    assert answers["all"].stats.keys_scanned == 0 < answers["retrieves"].stats.keys_scanned
    assert not answers["all"].stats.indexes and answers["retrieves"].stats.indexes
    assert {name: one.stats.all_keys for name, one in answers.items()} == {
        "all": "float32", "full": "float32", "retrieves": None
    }  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"full_attention": "never"}, {"index": "flat"}, {"retrieve": "all"}, {"tail": False}],
    ids=["off", "another index", "reference", "no tail"],
)
@pytest.mark.usefixtures("roomy")
def test_who_asks_for_retrieval_gets_it(options: dict[str, Any]) -> None:
    model = build_model("llama")
    assert attach_full_kv(model, read(model, random_ids(1, 200, 1), **options)) is None


def test_where_there_is_no_room_or_no_gain(roomy: dict[str, float]) -> None:
    """Pages must fit, and keys be read sooner than they are searched: as they are stored, or else in int8."""
    model = build_model("llama")
    cache = read(model, random_ids(1, 200, 1))
    shape = model_shape(model.config, None)

    def form() -> bool | None:
        release_full_kv(model)
        fork = attach_full_kv(model, cache)
        return None if fork is None else paged(fork).layers.int8

    assert form() is False
    for int8, slower in ((False, True), (True, None)):
        roomy["speed"] = 200.01 * device_kv_bytes(shape, int8=int8) / (SEARCH_MICROSECONDS[int8] * 1e-6)
        assert form() is int8
        roomy["speed"] *= 0.99
        assert form() is slower
    cache.config = cache.config.replace(full_attention="always")
    assert form() is False
    roomy["free"] = 0
    assert form() is None
    tokens = held_of(cache)[0].tail_start
    pages = pages_for(tokens) * PAGE_TOKENS
    sizes = {int8: shape.full_layers * pages * device_kv_bytes(shape, int8=int8) for int8 in (False, True)}
    roomy["free"] = bisect.bisect_left(range(8 * GIB), True, key=lambda free: fits(roomy, free, form))
    assert form() is True, "where one does not fit the other may"
    roomy["free"] += sizes[False] - sizes[True]
    assert form() is False and kept_of(model).layers.pages == pages_for(tokens), "there is no room for more"
    roomy["free"] += sizes[False] * kept_tokens(tokens) // tokens
    assert form() is False and kept_of(model).layers.pages == pages_for(kept_tokens(tokens))


def fits(roomy: dict[str, float], free: int, form: Callable[[], bool | None]) -> bool:
    roomy["free"] = free
    return form() is not None


@pytest.mark.usefixtures("roomy")
def test_rows_and_watchers_retrieve() -> None:
    model = build_model("llama")
    cache = read(model, random_ids(1, 200, 1))
    rows = cache.fork()
    rows.batch_repeat_interleave(2)
    assert attach_full_kv(model, rows) is None
    engine = cache.fork()
    engine.in_batch = True
    assert attach_full_kv(model, engine) is None
    watched: Any = cache.fork()
    watched.layers[0].on_attention = print
    assert attach_full_kv(model, watched) is None
    assert attach_full_kv(model, read(model, random_ids(1, 12, 1))) is None, "nothing lies on the host alone"


@pytest.mark.usefixtures("roomy", "emulated_graphs")
@pytest.mark.parametrize("options", [SMALL, {**SMALL, "host_dtype": "int8"}, {"threads": 1}], ids=str)
def test_one_graph_serves_answers_over_all_keys(options: dict[str, Any], needle_model_path: str) -> None:
    """Captured when the first text is read: for questions, and for other texts as long as its pages have room."""
    llm = ra.LLM(needle_model_path, device="cpu", **options)
    contexts = [llm.read("A dog. " * times, progress=False) for times in (500, 300)]
    [decoder] = [one for one in idle_decoders(llm.model) if one.pages is not None]
    assert decoder.captures == 1 and decoder.pages is not None
    for context in contexts:
        eager = context.fork()
        eager._cache.config = eager._cache.config.replace(graph=False)
        wanted = eager.ask("What?", max_new_tokens=24)
        for _ in range(2):
            answer = context.ask("What?", max_new_tokens=24)
            assert answer.tokens == wanted.tokens and answer.stats.decoded == "graph" != wanted.stats.decoded
            assert answer.stats.all_keys == ("int8" if options.get("host_dtype") == "int8" else "float32")
    assert [one for one in idle_decoders(llm.model) if one.pages is not None] == [decoder]
    assert decoder.captures == 1 and decoder.pages.layers is kept_of(llm.model).layers


@pytest.mark.usefixtures("roomy", "emulated_graphs")
@pytest.mark.parametrize("append", ["exact", "retrieval"])
def test_questions_side_by_side(append: Any, needle_model_path: str) -> None:
    """Of several lengths, over the same pages in one step: the answers that each gets alone."""
    llm = ra.LLM(needle_model_path, device="cpu", **SMALL)
    context = llm.read("The code of the door is 4711. The dog sleeps. " * 40, progress=False)
    questions = ["What is the code of the door?", "Who sleeps, and where does it sleep?", "A dog."]
    alone = [context.ask(one, max_new_tokens=24, question_attention=append) for one in questions]
    together = context.ask_many(questions, max_new_tokens=24, question_attention=append)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert {one.stats.decoded for one in (*alone, *together)} == {"graph"}
    assert not any(one.stats.keys_scanned or one.stats.indexes for one in together)
    decoders = [one for one in idle_decoders(llm.model) if one.pages is not None]
    assert sorted(len(one.memory.token) for one in decoders) == [1, 3]


@pytest.mark.usefixtures("emulated_graphs")
def test_pages_and_their_graphs_go_when_a_text_needs_the_room(roomy: dict[str, float], needle_model_path: str) -> None:
    context = ra.LLM(needle_model_path, device="cpu", **SMALL).read("A dog. " * 100, progress=False)
    assert kept_of(context.model).nbytes > 0
    release_if_needed(context.model)
    roomy["free"] = 2 * kept_of(context.model).nbytes
    release_if_needed(context.model)
    assert any(one.pages is not None for one in idle_decoders(context.model))
    roomy["free"] -= 1
    release_if_needed(context.model)
    assert kept_pages(context.model) is None
    assert not any(one.pages is not None for one in idle_decoders(context.model))


@pytest.mark.usefixtures("roomy")
def test_an_engine_has_the_room(needle_model_path: str) -> None:
    """Its rows retrieve: pages that answers left are let go when it is made. Nobody waits for the collector."""
    llm = ra.LLM(needle_model_path, device="cpu", **SMALL)
    context = llm.read("A dog. " * 100, progress=False)
    gc.disable()
    try:
        context.ask("What?", max_new_tokens=2)
        context.ask_many(["What?", "Who?"], max_new_tokens=2)
        assert not kept_of(llm.model).in_use
    finally:
        gc.enable()
    with ra.Engine(llm):
        assert kept_pages(llm.model) is None


@pytest.mark.usefixtures("roomy")
def test_keys_that_are_there_are_not_brought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next answer on the same text finds them, and brings what the text has grown by; one on another text, or after
    tokens were taken back, brings its own.
    """
    brought: list[tuple[int, int]] = []
    usual = LayerKV.bring_to_pages

    def counted(held: Any, layers: Any, span: Any, first: int) -> None:
        brought.append((first, span.tokens))
        usual(held, layers, span, first)

    monkeypatch.setattr(LayerKV, "bring_to_pages", counted)
    model = build_model("llama")
    ids = random_ids(1, 400, 1)
    texts = [read(model, ids[:, :200]), read(model, ids[:, 200:])]
    for text, times in ((0, 1), (0, 0), (1, 1), (0, 1), (0, 0)):
        brought.clear()
        fork = attach_full_kv(model, texts[text])
        assert fork is not None and len(brought) == times * len(held_of(fork))
    grown, said = texts[0], ids[:, :200]
    earlier = attach_full_kv(model, grown), said
    for taken_back, first in ((0, held_of(grown)[0].tail_start), (30, 0)):
        if taken_back:
            grown.crop(said.shape[1] - taken_back)
            said = said[:, :-taken_back]
        with torch.no_grad(), using_retrieval(model, 64):
            model(input_ids=ids[:, 300:350], past_key_values=grown)
        said = torch.cat([said, ids[:, 300:350]], dim=1)
        brought.clear()
        fork = attach_full_kv(model, grown)
        assert brought == [(first, held_of(grown)[0].tail_start)] * len(held_of(grown))
        for cache, known in ((fork, said), *([] if taken_back else [earlier])):
            assert cache is not None
            with torch.no_grad():
                wanted = model(input_ids=torch.cat([known, ids[:, :1]], dim=1)).logits[0, -1]
            found = following(model, cache, ids[:, :1])[0]
            assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.usefixtures("roomy")
def test_a_question_asks_nothing_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What precedes it lies in pages and window: nothing comes from the host again for an exact question."""
    model = build_model("llama")
    ids = random_ids(1, 240, 1)
    cache = read(model, ids[:, :200])
    fork = attach_full_kv(model, cache)
    assert fork is not None

    def walk(*_: Any, **__: Any) -> None:
        raise AssertionError("a block of the host's keys was asked for")

    monkeypatch.setattr(LayerUploads, "walk", walk)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits[0, 200:]
        with using_retrieval(model, 64):
            found = model(input_ids=ids[:, 200:], past_key_values=fork).logits[0]
            with pytest.raises(AssertionError, match="was asked for"):
                model(input_ids=ids[:, 200:], past_key_values=cache)
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.usefixtures("roomy")
def test_answers_on_two_texts_at_once(roomy: dict[str, float]) -> None:
    """Pages that an answer uses stay as they are: the other one gets pages of its own, or retrieves."""
    model = build_model("llama")
    ids = random_ids(1, 400, 1)
    texts, forks = [read(model, ids[:, :200]), read(model, ids[:, 200:])], []
    for text in texts:
        fork = attach_full_kv(model, text)
        assert fork is not None
        forks.append(fork)
    assert paged(forks[0]).layers is not paged(forks[1]).layers
    assert paged(forks[0]).layers.retired and not paged(forks[1]).layers.retired
    for fork, own in zip(forks, (ids[:, :200], ids[:, 200:]), strict=True):
        with torch.no_grad():
            wanted = model(input_ids=torch.cat([own, ids[:, :1]], dim=1)).logits[0, -1]
        assert (following(model, fork, ids[:, :1])[0] - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    roomy["free"] = 0
    assert attach_full_kv(model, texts[0]) is None


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("after", [0, 1, None], ids=["before any text", "after a piece", "not at all"])
def test_an_answer_that_has_no_room_after_all_retrieves(
    after: int | None, monkeypatch: pytest.MonkeyPatch, needle_model_path: str
) -> None:
    """Another answer took the memory. Text that is out is not said again: that answer ends with the error."""
    context = ra.LLM(needle_model_path, device="cpu", **SMALL).read("A dog. " * 100, progress=False)
    wanted = context.fork()
    wanted._cache.config = wanted._cache.config.replace(full_attention="never")
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
        fork = attach_full_kv(model, cache)
        assert fork is not None and not any(held.retrieves for held in held_of(fork))
        steps, logits = DecodeSteps(model, fork, graph), []
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
    """Through the public API: an answer over all keys leaves what the next one needs as well, once."""
    llm = ra.LLM(needle_model_path, device="cuda")
    context = llm.read(torch.randint(3, llm.model.config.vocab_size, (32_768,)).tolist(), progress=False)
    held = []
    for _ in range(3):
        context.continue_with([5, 6, 7], max_new_tokens=8)
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert max(held) == min(held)
    kept = kept_of(llm.model)
    assert kept.layers.pages * PAGE_TOKENS >= 32_000 and not kept.in_use
    release_if_needed(llm.model)
    assert kept_pages(llm.model) is kept
    release_full_kv(llm.model)
    del kept
    gc.collect()
    assert torch.cuda.memory_allocated() < held[0]


@pytest.mark.cuda
@pytest.mark.parametrize("host_dtype", ["auto", "int8"])
def test_a_gpu_answers_questions_side_by_side(host_dtype: str, needle_model_path: str) -> None:
    """Rows over one text, whose keys lie in pages once: a short and a long question find what they ask for."""
    llm = ra.LLM(needle_model_path, device="cuda", host_dtype=host_dtype)
    context = llm.read(needle_text(60_000), progress=False)
    ways: list[Any] = ["exact", "retrieval"]
    for append in ways:
        questions = [QUESTION, "The grass is green. " * 3 + QUESTION]
        found = context.ask_many(questions, max_new_tokens=16, question_attention=append)
        assert all("7391846" in one.text and one.stats.decoded == "graph" for one in found)
        assert not any(one.stats.keys_scanned or one.stats.indexes for one in found)
    assert kept_of(llm.model).layers.int8 == (host_dtype == "int8")
