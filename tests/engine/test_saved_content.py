"""Prompts that begin with a saved context and do not name it: found by token ids, cropped at any token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from retrieval_attn.engine import saved_text
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.errors import UnknownContextError
from retrieval_attn.sampling.sampling_params import SamplingParams
from retrieval_attn.store import ContextStore
from tests.engine.audit import check_engine
from tests.engine.test_saved_contexts import NEVER, damage, ids, llm_of, read
from tests.fuzz.engine_schedules import CONFIG
from tests.tiny_models import tiny_model

ALL = CONFIG.replace(retrieve="all")


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "store")


def asked(engine: Engine, *parts: tuple[int, ...], namespace: str = "", **options: Any) -> Finished:
    return engine.submit(Request(parts, 8, stop_ids=NEVER, namespace=namespace, **options)).result()


def alone(llm: Any, *parts: tuple[int, ...]) -> tuple[int, ...]:
    """Answer of an engine without saved contexts and prefix cache."""
    with Engine(llm, store="/nonexistent", prefix_cache_bytes=0) as engine:
        return asked(engine, *parts).tokens


def logprobs(engine: Engine, *parts: tuple[int, ...], namespace: str = "") -> list[float]:
    """Of the answer's tokens: they tell a prompt apart from one with a token less, which may have the same answer."""
    draw = SamplingParams(temperature=0, logprobs=1)
    ticket = engine.submit(Request(parts, 4, draw, stop_ids=NEVER, namespace=namespace))
    return [event.logprob or 0.0 for event in ticket]


def test_answers_are_those_of_a_fresh_prefill(store: ContextStore) -> None:
    """Of prompts that have all of a context, a part of it, or too little of it, in one piece and in several."""
    llm, book, tail = llm_of(config=ALL), ids(700, 3), ids(90, 4)
    read(llm, 700, 3).save("book", store=store)
    prompts = [
        ((book, tail), 700),
        (((*book, *tail),), 700),
        (((*book[:300], *tail),), 300),
        ((book[:256], ids(30, 5), tail), 256),
        (((*book[:40], *tail),), 0),
        (((*book[:80], *tail),), 0),  # opening 700 tokens for 80 takes longer than reading them
        ((tail, book), 0),
    ]
    with Engine(llm, store="/nonexistent", prefix_cache_bytes=0) as engine:
        expected = [asked(engine, *parts).tokens for parts, _ in prompts]
        scores = [logprobs(engine, *parts) for parts, _ in prompts]
    for number, (parts, cached) in enumerate(prompts):
        with Engine(llm, store=store) as engine:
            found, again = asked(engine, *parts), asked(engine, *parts, namespace="other")
            assert logprobs(engine, *parts, namespace="third") == pytest.approx(scores[number], abs=1e-4), number
            check_engine(engine)
            stats = engine.stats
        assert found.tokens == again.tokens == expected[number], number
        assert found.cached_tokens == again.cached_tokens == cached and found.error is None, number
        assert found.prompt_tokens == sum(map(len, parts))
        assert (stats["content_hits"], stats["content_hit_tokens"]) == (3 * (cached > 0), 3 * cached)
        assert stats["hit_tokens"]["disk"] == cached


def test_one_opening_serves_crops_of_many_lengths(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once and one after the other; follow-up turns go on from what was read behind it."""
    opened: list[str] = []
    open_chain = saved_text.open_chain

    def counting(chain: Any, *given: Any, **options: Any) -> Any:
        opened.append(chain.name)
        return open_chain(chain, *given, **options)

    monkeypatch.setattr(saved_text, "open_chain", counting)
    llm, book = llm_of(config=ALL), ids(900, 3)
    read(llm, 900, 3).save("book", store=store)
    prompts = [(*book[: 200 + 97 * number], *ids(40, number)) for number in range(6)]
    expected = [alone(llm, one) for one in prompts]
    with Engine(llm, store=store) as engine:
        tickets = [engine.submit(Request((one,), 8, stop_ids=NEVER)) for one in prompts]
        assert [ticket.result().tokens for ticket in tickets] == expected
        turn = (*book, *ids(600, 7))
        first, second = asked(engine, turn, ids(30, 8)), asked(engine, turn, ids(30, 9))
        check_engine(engine)
    assert opened == ["book"]
    assert (first.cached_tokens, second.cached_tokens) == (900, 1500)


def test_the_longest_is_used_and_the_prefix_cache_wins(store: ContextStore) -> None:
    """Of contexts that begin alike; a text that the prefix cache has whole is not opened."""
    llm, book = llm_of(config=ALL), ids(600, 3)
    read(llm, 600, 3).save("long", store=store)
    read(llm, 600, 3).extend(ids(100, 5), progress=False).save("longest", store=store)
    with Engine(llm, store=store) as engine:
        assert asked(engine, (*book, *ids(100, 5), *ids(50, 6))).cached_tokens == 700
        store.remove("longest")
        time.sleep(0.01)
        assert asked(engine, (*book, *ids(100, 5), *ids(51, 7)), namespace="b").cached_tokens == 600
        hits = engine.stats["content_hits"]
        assert asked(engine, (*book, *ids(100, 5), *ids(51, 7)), namespace="b").cached_tokens >= 600
        assert engine.stats["content_hits"] == hits + 1
        own = ids(600, 8)
        asked(engine, own, ids(20, 1))
        engine.save("own", own)
        assert asked(engine, own, ids(20, 2)).cached_tokens == 600
        assert engine.stats["content_hits"] == hits + 1, "the prefix cache has it"


def test_of_equal_matches_the_one_that_ends_there_is_used(store: ContextStore) -> None:
    """With retrieval, a longer one that is cropped may lead to another answer than a fresh prefill."""
    llm, book, tail = llm_of(), ids(300, 3), ids(20, 4)
    for name, more in (("a", ids(90, 5)), ("b", ()), ("c", ids(40, 6))):
        context = read(llm, 300, 3)
        (context.extend(more, progress=False) if more else context).save(name, store=store)
    with Engine(llm, store=store) as engine:
        found = asked(engine, book, tail)
        (text,) = engine.status()["texts"]
    assert (found.cached_tokens, text["context"], text["tokens"]) == (300, "b", 300)
    assert found.tokens == alone(llm, book, tail)


def test_contexts_of_another_tenant_are_not_used(store: ContextStore) -> None:
    """One that a key saved serves that key; one that was saved without a key serves all."""
    llm, book = llm_of(config=ALL), ids(600, 3)
    with Engine(llm, store=store) as engine:
        asked(engine, book, ids(20, 1), namespace="key:a")
        engine.save("book", book, namespace="key:a")
    with Engine(llm, store=store) as engine:
        other = asked(engine, book, ids(20, 2), namespace="key:b")
        own = asked(engine, book, ids(20, 2), namespace="key:a")
        named = asked(engine, ids(20, 2), namespace="key:c", context="book")
    assert (other.cached_tokens, own.cached_tokens, named.cached_tokens) == (0, 600, 600)
    assert other.tokens == own.tokens == named.tokens


def test_removed_while_it_is_used(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running request goes on; one that had not opened it reads its prompt; later ones do not find it."""
    llm, book = llm_of(config=ALL), ids(600, 3)
    read(llm, 600, 3).save("book", store=store)
    expected = alone(llm, book, ids(20, 1))
    with Engine(llm, store=store) as engine:
        ticket = engine.submit(Request((book, ids(20, 1)), 300, stop_ids=NEVER))
        next(iter(ticket))
        store.remove("book")
        store.gc()
        assert ticket.result().tokens[:8] == expected
        time.sleep(0.01)
        assert asked(engine, book, ids(20, 1), namespace="b").cached_tokens == 0
    read(llm, 600, 3).save("book", store=store)
    open_chain = saved_text.open_chain

    def removing(*given: Any, **options: Any) -> Any:
        store.remove("book")
        store.gc()
        raise UnknownContextError("the node is gone")

    monkeypatch.setattr(saved_text, "open_chain", removing)
    with Engine(llm, store=store) as engine:
        found = asked(engine, book, ids(20, 1))
        assert found.error is None and found.tokens == expected and found.cached_tokens == 0
        check_engine(engine)
    monkeypatch.setattr(saved_text, "open_chain", open_chain)


def test_damage_is_read_again(store: ContextStore) -> None:
    """The request is answered from its own prompt, whatever the files hold."""
    llm, book = llm_of(config=ALL), ids(900, 3)
    read(llm, 900, 3).save("book", store=store)
    expected = alone(llm, (*book[:800], *ids(50, 1)))
    damage(store, "book", "tail/key")
    with Engine(llm, store=store) as engine:
        for _ in range(2):
            found = asked(engine, (*book[:800], *ids(50, 1)))
            assert found.error is None and found.tokens == expected
        check_engine(engine)
        assert engine.stats["damaged_blocks"] == 1


def test_what_continues_a_context_is_saved_as_its_child(store: ContextStore) -> None:
    """Only new tokens are written of a text that begins with a saved one, though nobody named it."""
    llm, book, more = llm_of(config=ALL), ids(700, 3), ids(200, 4)
    read(llm, 700, 3).save("book", store=store)
    with Engine(llm, store=store) as engine:
        asked(engine, (*book, *more), ids(20, 1))
        saved = engine.save("more", (*book, *more))
        named = asked(engine, ids(20, 1), context="more")
        check_engine(engine)
    assert saved.new_tokens == 200 and len(store.resolve("more").chain) == 2
    assert named.tokens == alone(llm, (*book, *more), ids(20, 1)) and named.cached_tokens == 900


def test_models_that_cannot_crop_need_the_whole_context(store: ContextStore) -> None:
    """A sliding window cannot go back to an earlier token."""
    llm, book = llm_of(tiny_model("gemma3"), config=ALL), ids(600, 3)
    read(llm, 600, 3).save("book", store=store)
    for parts, cached in (((book, ids(20, 1)), 600), (((*book[:400], *ids(90, 2)),), 0)):
        expected = alone(llm, *parts)
        with Engine(llm, store=store) as engine:
            found = asked(engine, *parts)
            check_engine(engine)
        assert (found.tokens, found.cached_tokens) == (expected, cached)
