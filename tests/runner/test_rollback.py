"""Reading and extending that fail, or are interrupted, have not happened: a Context never answers from half of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.store import indexed_from
from retrieval_attn.runner.prefill import finish_prefill
from tests.tiny_models import NEEDLE, QUESTION, Loaded, build_model, needle_text, random_ids

CONFIG = ra.Config(sink=8, window=64, retrieve=50, prefill_chunk=512)


@pytest.fixture(scope="module")
def text() -> str:
    return needle_text(10_000)  # about 2,500 tokens


@pytest.fixture(scope="module")
def context(loaded: Loaded, text: str) -> ra.Context:
    return ra.Context(*loaded, CONFIG).read(text, progress=False)


@contextlib.contextmanager
def failing(model: Any, where: str, error: BaseException) -> Iterator[None]:
    """Raises `error` inside the model's last layer, after its keys are stored; inside its first; or in neither."""

    def fail(*_: Any) -> None:
        raise error

    layers = {"first layer": 0, "last layer": -1}
    if where not in layers:
        yield
        return
    hook = model.model.layers[layers[where]].self_attn.o_proj.register_forward_pre_hook(fail)  # its attention is over
    try:
        yield
    finally:
        hook.remove()


WHERE = ["first layer", "last layer", "before the last index", "after the last index"]


@pytest.mark.parametrize(
    ("index", "error"),
    [("auto", KeyboardInterrupt()), ("auto", RuntimeError("no")), ("roargraph", KeyboardInterrupt())],
    ids=["auto, Ctrl-C", "auto, error", "roargraph, Ctrl-C"],
)
def test_an_extension_that_failed_has_not_happened(
    loaded: Loaded, text: str, monkeypatch: pytest.MonkeyPatch, index: str, error: BaseException
) -> None:
    """Wherever it ended: same keys, same answers, and the same text can be appended, to the same index."""
    monkeypatch.setattr("retrieval_attn.index.roargraph.index.EXACT_BELOW", 64)
    context = ra.Context(*loaded, CONFIG, index=index).read(text[:4000], progress=False)
    never = ra.Context(*loaded, CONFIG, index=index).read(text[:4000], progress=False)
    added = text[4000:6000] + NEEDLE
    for where in (*WHERE, *WHERE):
        interrupt(context, added, where, error, monkeypatch)
        assert context.num_tokens == never.num_tokens == context.cache.get_seq_length(), where
        mine_ids, other_ids = (one.cache.batch.sequences[0].token_ids for one in (context, never))
        assert mine_ids == other_ids and len(mine_ids) == never.num_tokens
        for mine, other in zip(layers_of(context), layers_of(never), strict=True):
            assert mine.columns == other.columns and len(mine.hosts[0]) == len(other.hosts[0])
            for here, there in zip(*(layer.hosts[0].read(0, mine.columns) for layer in (mine, other)), strict=True):
                assert np.array_equal(here, there)
            assert mine.held is not None and other.held is not None
            assert torch.equal(mine.held.window.tail()[0], other.held.window.tail()[0])
    assert context.extend(added, progress=False).num_tokens == never.extend(added, progress=False).num_tokens
    assert [len(layer.hosts[0].segments) for layer in layers_of(context)] == [1] * len(layers_of(context))
    for mine, other in zip(layers_of(context), layers_of(never), strict=True):
        assert indexed_from(mine.hosts[0], 0) == indexed_from(other.hosts[0], 0)
    asked = [one.ask(QUESTION, max_new_tokens=16) for one in (context, never)]
    assert asked[0].tokens == asked[1].tokens and "7391846" in asked[0].text


def interrupt(context: ra.Context, added: Any, where: str, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    """An extend() that ends with `error` at some place."""

    def end(*arguments: Any) -> None:
        if where == "after the last index":
            finish_prefill(*arguments)
        raise error

    with patch.context() as patched, failing(context.model, where, error), pytest.raises(type(error)):
        if where.endswith("index"):
            patched.setattr("retrieval_attn.answer_loop.finish_prefill", end)
        context.extend(added, progress=False)


def layers_of(context: ra.Context) -> list[RetrievalLayer]:
    return [layer for layer in context.cache.layers if isinstance(layer, RetrievalLayer)]


def test_an_extension_of_a_forked_context_that_failed(context: ra.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are shared then, and the new text goes to one of its own."""
    expected = context.ask(QUESTION, max_new_tokens=16).tokens
    fork = context.fork()
    interrupt(
        fork, " The special magic Turin number is: 1112223. " * 40, "last layer", KeyboardInterrupt(), monkeypatch
    )
    assert fork.ask(QUESTION, max_new_tokens=16).tokens == expected
    fork.extend(" The special magic Turin number is: 1112223. ")
    assert "1112223" in fork.ask("What is the special magic Turin number?", max_new_tokens=16).text
    assert context.ask(QUESTION, max_new_tokens=16).tokens == expected


@pytest.mark.parametrize(("name", "options"), [("gemma2", {}), ("llama", {"host_dtype": "int8"})])
@pytest.mark.parametrize("where", WHERE)
def test_windows_are_put_back_as_they_were(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], where: str
) -> None:
    """A sliding layer has forgotten what was in its window, and an int8 host has rounded it."""
    config = ra.Config(sink=4, window=32, retrieve=10, **options)
    ids = random_ids(1, 700)[0].tolist()
    context, never = (
        ra.Context(build_model(name), loaded[1], config).read(ids[:150], progress=False) for _ in range(2)
    )
    interrupt(context, ids[150:], where, KeyboardInterrupt(), monkeypatch)
    for mine, other in zip(context.cache.layers, never.cache.layers, strict=True):
        assert mine.window.span == other.window.span  # type: ignore[union-attr]
        assert torch.equal(mine.window.tail()[0], other.window.tail()[0])  # type: ignore[union-attr]
    asked = [one.continue_with(ids[:3], max_new_tokens=8).tokens for one in (context, never)]
    assert asked[0] == asked[1]
    again = [one.extend(ids[150:], progress=False).continue_with(ids[:3], max_new_tokens=8) for one in (context, never)]
    assert again[0].tokens == again[1].tokens


def test_a_reading_that_failed_can_be_done_again(loaded: Loaded, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ra.Context(*loaded, CONFIG)
    for where in WHERE:
        interrupt(context, text, where, KeyboardInterrupt(), monkeypatch)
        assert context.num_tokens == context.cache.get_seq_length() == 0, where
    assert "7391846" in context.read(text, progress=False).ask(QUESTION, max_new_tokens=16).text


def test_a_context_that_could_not_be_put_back_says_so(context: ra.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C, while the first is cleaned up after: never an answer from half a context."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    fork, empty = context.fork(), ra.Context(context.model, context.tokenizer, CONFIG)
    monkeypatch.setattr("retrieval_attn.attention.cache.Rollback.undo", fail)
    monkeypatch.setattr("retrieval_attn.context.abandon", fail)
    for one in (fork, empty):
        interrupt(one, "And so on.", "last layer", KeyboardInterrupt(), monkeypatch)
        uses: list[Any] = [one.ask, one.extend, one.read, one.stream, lambda text, it=one: it.fork()]
        for use in uses:
            with pytest.raises(ra.CacheMismatchError, match="in a new Context"):
                use(QUESTION)


def test_many_short_extensions_stay_in_one_index(loaded: Loaded, text: str) -> None:
    """A context that grows turn by turn is one segment per layer, however many turns it takes."""
    context = ra.Context(*loaded, CONFIG).read(text[:4000], progress=False)
    for start in range(4000, 8000, 200):
        context.extend(text[start : start + 200], progress=False)
    assert [len(layer.hosts[0].segments) for layer in layers_of(context)] == [1] * len(layers_of(context))
