"""Idle texts that host memory has no room for: saved to the store, evicted, and opened for later prompts."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrieval_attn.engine import background_saves
from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.errors import StoreError, UnknownContextError
from retrieval_attn.memory.reclaim import reclaim
from retrieval_attn.store import ContextStore
from tests.engine.audit import check_engine
from tests.engine.test_saved_contexts import NEVER, ids, llm_of, read
from tests.fuzz.engine_schedules import CONFIG
from tests.waiting import comes_true

ALL = CONFIG.replace(retrieve="all", prefill_chunk=512)
ROOM = 2_000_000
"""Bytes of three texts of 1,000 tokens."""


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "store")


@pytest.fixture(autouse=True)
def all_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model reads 1,000 tokens in less time than a file is opened."""
    monkeypatch.setattr(background_saves, "OPEN_SECONDS", -1e9)


def asked(engine: Engine, *parts: tuple[int, ...], namespace: str | None = "", **options: Any) -> Finished:
    found = engine.submit(Request(parts, 8, stop_ids=NEVER, namespace=namespace, **options)).result()
    assert found.error is None
    return found


def alone(llm: Any, *parts: tuple[int, ...]) -> tuple[int, ...]:
    with Engine(llm, prefix_cache_bytes=0) as engine:
        return asked(engine, *parts).tokens


def automatic(store: ContextStore) -> list[str]:
    return [one.name for one in store.list() if one.is_automatic]


def is_quiet(engine: Engine) -> bool:
    return engine._disk is None or not engine._disk.is_saving


@pytest.mark.parametrize("texts", [0, 3])
def test_files_keep_to_their_bytes(store: ContextStore, texts: int) -> None:
    """0: no prompt is written, and texts beyond memory are read again; else the least recently used files go."""
    llm, tail = llm_of(config=ALL), ids(20, 99)
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        for number in range(5):
            asked(engine, ids(1000, number), tail)
            assert comes_true(lambda: is_quiet(engine))
        (one, *_) = [entry.nbytes for entry in store.list() if entry.is_automatic]
    for entry in store.list():
        store.remove(entry.name)
    with Engine(llm, store=store, prefix_cache_bytes=ROOM, prefix_cache_disk_bytes=texts * one) as engine:
        for number in range(8):
            asked(engine, ids(1000, number), tail)
            assert comes_true(lambda: is_quiet(engine))
        assert engine.stats["shared"].evicted >= 4
    left = [entry.nbytes for entry in store.list() if entry.is_automatic]
    assert sum(left) <= texts * one and (len(left) > 0) == (texts > 0)


def test_texts_beyond_memory_come_back_from_the_disk(store: ContextStore) -> None:
    """Eight texts, memory for three: asked again, each is reused and its answer is the one that it gets alone."""
    llm, texts, tail = llm_of(config=ALL), [ids(1000, number) for number in range(8)], ids(20, 99)
    expected = [alone(llm, one, tail) for one in texts]
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        for one in texts:
            asked(engine, one, tail)
            assert comes_true(lambda: is_quiet(engine))
        stats = engine.stats
        assert stats["shared"].evicted >= 4
        assert stats["disk_saves"] >= stats["disk_evictions"] == stats["shared"].evicted
        again = [asked(engine, one, tail) for one in texts]
        check_engine(engine)
        stats = engine.stats
    assert [one.tokens for one in again] == expected
    assert [one.cached_tokens for one in again] == [1000] * 8
    assert stats["disk_loads"] >= 5 and stats["disk_loaded_bytes"] > 4 * 1000 * 100
    assert stats["hit_tokens"]["disk"] == 1000 * stats["disk_loads"]
    assert stats["saves_running"] == stats["saves_failed"] == 0


def filled(engine: Engine, texts: list[tuple[int, ...]], namespace: str | None = "") -> None:
    """Ask about texts, and wait until those that are next to be evicted are on the disk."""
    for one in texts:
        asked(engine, one, ids(20, 99), namespace=namespace)
        assert comes_true(lambda: is_quiet(engine))


def test_texts_survive_a_restart(store: ContextStore) -> None:
    llm, texts = llm_of(config=ALL), [ids(1000, number) for number in range(5)]
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        filled(engine, texts)
    names = automatic(store)
    assert len(names) >= 2 and store.verify() == []
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        found = asked(engine, texts[0], ids(20, 98))
        assert (found.cached_tokens, engine.stats["disk_loads"]) == (1000, 1)
    assert found.tokens == alone(llm, texts[0], ids(20, 98))
    with Engine(llm, prefix_cache_bytes=ROOM) as engine:
        filled(engine, texts)
        assert engine.stats["shared"].evicted and not engine.stats["disk_saves"], "no store was given"


@pytest.mark.parametrize(("owner", "users"), [("key:a", {"key:a"}), ("", {""}), (None, {"key:a", "key:b", "", None})])
def test_a_text_of_a_namespace_serves_it_alone(owner: str | None, users: set[str | None], store: ContextStore) -> None:
    """Not another key, and not requests without a key, nor the other way round; those of None serve all."""
    llm, texts = llm_of(config=ALL), [ids(1000, number) for number in range(5)]
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        filled(engine, texts, owner)
        assert engine.stats["disk_evictions"]
        for space in ("key:a", "key:b", "", None):
            cached = asked(engine, texts[0], ids(20, 97), namespace=space).cached_tokens
            assert cached == (1000 if space in users else 0), space
            assert comes_true(lambda: is_quiet(engine))
    for space in ("key:b", "", None, "key:a"):
        with Engine(llm, store=store) as engine:  # after a restart
            cached = asked(engine, texts[1], ids(20, 97), namespace=space).cached_tokens
            assert cached == (1000 if space in users else 0), space


def test_the_same_text_of_two_namespaces(store: ContextStore) -> None:
    """Each has a name of its own, and neither finds what the other one opened."""
    llm, texts = llm_of(config=ALL), [ids(1000, number) for number in range(5)]
    for space in ("key:a", "key:b"):
        with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
            filled(engine, texts, space)
    named = [one for one in store.list() if one.is_automatic]
    of_a, of_b = ({one.digest for one in named if one.plain["owner"] == space} for space in ("key:a", "key:b"))
    assert len(of_a) + len(of_b) == len(named) and len(of_a & of_b) >= 2, "files of equal texts are shared"
    with Engine(llm, store=store) as engine:
        for space in ("key:a", "key:b"):
            assert asked(engine, texts[0], ids(20, 97), namespace=space).cached_tokens == 1000
        assert engine.stats["disk_loads"] == 2


def test_no_request_names_an_automatic_text(store: ContextStore) -> None:
    llm, texts = llm_of(config=ALL), [ids(1000, number) for number in range(5)]
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        filled(engine, texts, "key:a")
        name = automatic(store)[0]
        for space in ("key:a", "key:b"):
            with pytest.raises(UnknownContextError, match="automatic"):
                engine.submit(Request((ids(5, 1),), 2, context=name, namespace=space))
        assert engine.unsaved == [] and all(one["context"] is None for one in engine.status()["texts"])


def test_texts_that_prompts_must_not_continue_are_not_saved(store: ContextStore) -> None:
    """Those after a context of other options."""
    llm = llm_of(config=ALL)
    read(llm_of(config=ALL.replace(window=ALL.window + 16)), 500, 3).save("book", store=store)
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        for number in range(6):
            asked(engine, ids(1000, number), ids(20, 99), context="book")
            assert comes_true(lambda: is_quiet(engine))
        assert engine.stats["shared"].evicted and not engine.stats["disk_saves"]
    assert [one.name for one in store.list()] == ["book"]


def test_what_everybody_may_name_is_not_found_by_everybody(store: ContextStore) -> None:
    """Text of no namespace after a context that a key saved: its tokens would be found by prompts of all keys."""
    llm = llm_of(config=ALL)
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        asked(engine, ids(900, 1), ids(20, 99), namespace="key:a")
        engine.save("book", ids(900, 1), namespace="key:a")
        for number in range(6):
            asked(engine, ids(1000, 10 + number), ids(20, 99), context="book", namespace=None)
            assert comes_true(lambda: is_quiet(engine))
        assert engine.stats["shared"].evicted
        asked(engine, ids(1000, 10), ids(20, 99), context="book", namespace="key:a")
        filled(engine, [ids(1000, 20 + number) for number in range(12)], "key:a")
    behind = [one for one in store.list() if one.is_automatic and one.plain["tokens"] == 1900]
    assert [one.plain["owner"] for one in behind] == ["key:a"]


def test_what_continues_a_text_is_written_once(store: ContextStore) -> None:
    """Turns of a conversation: each has a node of the store with its own tokens, after those of the turns before."""
    llm, first = llm_of(config=ALL), ids(900, 1)
    turns = [first, (*first, *ids(700, 2)), (*first, *ids(700, 2), *ids(800, 3))]
    parts = [turns[0], turns[1][900:], turns[2][1600:]]
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        for count in (1, 2, 3):
            asked(engine, *parts[:count], ids(20, 99))
        for number in range(9):
            filled(engine, [ids(1000, 10 + number)])
    named = {one.plain["tokens"]: one for one in store.list() if one.is_automatic and one.plain["tokens"] != 1000}
    assert set(named) == {900, 1600, 2400}
    assert named[2400].chain[:2] == named[1600].chain and named[1600].chain[:1] == named[900].chain
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        found = asked(engine, *parts, ids(20, 98))
        assert found.cached_tokens == 2400
        more = asked(engine, *parts, ids(700, 4), ids(20, 98))
        filled(engine, [ids(1000, 30 + number) for number in range(20)])
        check_engine(engine)
        assert more.cached_tokens == 2400
    (longest,) = [one for one in store.list() if one.plain["tokens"] == 3100]
    assert longest.chain[:3] == named[2400].chain, "it continues an opened text"
    assert found.tokens == alone(llm, *parts, ids(20, 98))
    with Engine(llm, store=store) as engine:
        assert asked(engine, *parts, ids(700, 4), ids(20, 98)).tokens == more.tokens


def test_the_disk_is_bounded(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts used least recently are removed; contexts of users stay."""
    llm, texts = llm_of(config=ALL), [ids(1000, number) for number in range(9)]
    read(llm, 400, 77).save("book", store=store)
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        filled(engine, texts[:4])
        one = engine.stats["disk_saved_bytes"] // engine.stats["disk_saves"]
        monkeypatch.setattr(ContextStore, "free_bytes", lambda _: int(10 * one) - engine.stats["disk_nbytes"])
        filled(engine, texts[4:])
        asked(engine, texts[0], ids(20, 98))
        filled(engine, [ids(1000, 20 + number) for number in range(6)])
    stats = engine.stats
    named = [one for one in store.list() if one.is_automatic]
    assert stats["disk_removals"] > 0 and one < stats["disk_nbytes"] <= 5 * one
    assert sum(one.nbytes for one in named) == stats["disk_nbytes"] and store.resolve("book")
    assert store.nbytes() < stats["disk_nbytes"] + store.resolve("book").nbytes + 100_000, "files went, too"


def test_a_small_disk_is_written_once_a_use(store: ContextStore) -> None:
    """A disk with room for one text: texts that are to be evicted do not replace each other for ever."""
    llm, texts = llm_of(config=ALL), [ids(1000, number) for number in range(6)]
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        filled(engine, texts)
        one = engine.stats["disk_saved_bytes"] // engine.stats["disk_saves"]
    for name in automatic(store):
        store.remove(name)
    with Engine(llm, store=store, prefix_cache_bytes=ROOM * 2 // 3, prefix_cache_disk_bytes=one * 3 // 2) as engine:
        for text in texts:
            asked(engine, text, ids(20, 99))
        time.sleep(2)
        stats = engine.stats
        assert comes_true(lambda: is_quiet(engine)) and stats["shared"].evicted
        assert 0 < stats["disk_saves"] <= len(texts) and len(automatic(store)) <= 1
        check_engine(engine)


def test_a_text_larger_than_the_disk_removes_no_other(store: ContextStore, caplog: Any) -> None:
    """It is evicted without a copy, as is a text that continues it; smaller texts are saved as before."""
    llm = llm_of(config=ALL)
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        filled(engine, [ids(1000, number) for number in range(6)])
        one = engine.stats["disk_saved_bytes"] // engine.stats["disk_saves"]
    for name in automatic(store)[2:]:
        store.remove(name)
    first = automatic(store)
    with Engine(llm, store=store, prefix_cache_bytes=ROOM, prefix_cache_disk_bytes=2 * one) as engine:
        large = ids(2500, 50)
        filled(engine, [large, large + ids(1000, 51), ids(2500, 52)])
        assert comes_true(lambda: bool(engine.stats["shared"].evicted))
        assert len(first) == 2 and (automatic(store), engine.stats["disk_saves"]) == (first, 0)
        assert "is not saved: a text of" in caplog.text and "idle texts are not saved" not in caplog.text
        filled(engine, [ids(1000, 60 + number) for number in range(4)])
        assert engine.stats["disk_saves"] > 0


def test_a_disk_that_fails(store: ContextStore, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Texts are evicted as without it, and requests are answered."""
    llm, texts = llm_of(config=ALL), [ids(1000, number) for number in range(6)]

    def full(self: ContextStore) -> int:
        raise StoreError("the disk is full")

    monkeypatch.setattr(ContextStore, "free_bytes", full)
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        filled(engine, texts)
        assert asked(engine, texts[0], ids(20, 98)).cached_tokens == 0
        check_engine(engine)
        assert engine.stats["shared"].evicted and not engine.stats["disk_saves"]
    assert caplog.text.count("idle texts are not saved") == 1 and automatic(store) == []


def test_memory_that_is_needed_now_waits_for_no_disk(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that lacks memory waits for the write; `reclaim` cancels it and drops texts that are not saved."""
    monkeypatch.setattr(background_saves, "WRITE_SECONDS", float("inf"))
    llm, texts = llm_of(config=ALL), [ids(1000, number) for number in range(6)]
    held = threading.Event()
    write = background_saves.BackgroundSave.write

    def slow(self: background_saves.BackgroundSave) -> None:
        held.wait()
        write(self)

    monkeypatch.setattr(background_saves.BackgroundSave, "write", slow)
    limits = default_limits(llm.model, llm.config)
    limits = replace(limits, host_bytes=limits.token_bytes * 3000)
    with Engine(llm, store=store, limits=limits) as engine:
        tree = engine._tree
        assert tree is not None
        for one in texts[:2]:
            asked(engine, one, ids(20, 99))
        waiting = engine.submit(Request((texts[2], ids(20, 99)), 8, stop_ids=NEVER))
        assert comes_true(lambda: engine._disk is not None and engine._disk.is_saving)
        time.sleep(0.1)
        assert engine.stats["waiting"] == 1 and engine.stats["shared"].evicted == 0
        held.set()
        assert waiting.result().error is None and engine.stats["disk_evictions"] >= 1
        assert comes_true(lambda: is_quiet(engine))
        held.clear()
        asked(engine, texts[3], ids(20, 99))
        assert comes_true(lambda: not is_quiet(engine)) and tree.sizes.host > tree.idle.host
        threading.Timer(0.2, held.set).start()
        assert reclaim(host=1 << 40)[0] > 0 and tree.sizes.host == 0
        check_engine(engine)
        assert is_quiet(engine) and engine.stats["saves_failed"] == 0


@pytest.mark.parametrize("texts", [1, 2])
def test_a_request_waits_for_no_slow_write(texts: int, store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk writes a context for long: a request that lacks memory evicts another text, which is not written.

    1 text: the only one that can be evicted is the one whose write has begun, which is cancelled.
    """
    llm = llm_of(config=ALL)
    held = threading.Event()
    write = background_saves.BackgroundSave.write

    def slow(self: background_saves.BackgroundSave) -> None:
        while not (held.is_set() or self.cancelled.is_set()):
            time.sleep(0.001)
        write(self)

    monkeypatch.setattr(background_saves.BackgroundSave, "write", slow)
    limits = default_limits(llm.model, llm.config)
    limits = replace(limits, host_bytes=limits.token_bytes * (1500 if texts == 1 else 3000))
    with Engine(llm, store=store, limits=limits) as engine:
        for number in range(texts):
            asked(engine, ids(1000, number), ids(20, 99))
        if texts == 2:
            engine.save("named", ids(1000, 1), wait=False)
        else:
            monkeypatch.setattr(background_saves, "WRITE_SECONDS", 0.0)
        waiting = engine.submit(Request((ids(1000, 9), ids(20, 99)), 8, stop_ids=NEVER))
        assert waiting.result().error is None
        assert engine.stats["shared"].evicted == 1 and engine.stats["disk_evictions"] == 0
        held.set()
        assert comes_true(lambda: is_quiet(engine))
        check_engine(engine)


def test_memory_has_what_a_prompt_needs_but_for_a_few_tokens(store: ContextStore) -> None:
    """A longer text is not opened for an eighth of its tokens or less, and for more it is."""
    llm, text = llm_of(config=ALL), ids(2000, 1)
    with Engine(llm, store=store, prefix_cache_bytes=ROOM) as engine:
        for end in (1200, 1360, 2000):
            asked(engine, text[:end], ids(20, 99))
        filled(engine, [ids(1000, 10 + number) for number in range(9)])
    assert {one.plain["tokens"] for one in store.list()} > {1200, 1360, 2000}
    with Engine(llm, store=store) as engine:
        asked(engine, text[:1100], ids(20, 97), namespace=None)
        few = asked(engine, text[:1200], ids(20, 98))
        more = asked(engine, text, ids(20, 98))
    assert (few.cached_tokens, more.cached_tokens) == (1100, 2000)


def test_what_a_request_waits_for_is_no_victim(store: ContextStore) -> None:
    """One row decodes; the next request's text stays in memory, whatever else goes."""
    llm, texts = llm_of(config=ALL), [ids(1000, number) for number in range(3)]
    limits = replace(default_limits(llm.model, llm.config), rows=1, ahead=0)
    with Engine(llm, store=store, limits=limits) as engine:
        tree = engine._tree
        assert tree is not None
        for one in texts:
            asked(engine, one, ids(20, 99))
        first = tree.victims(Sizes(1))
        long = engine.submit(Request((ids(50, 3),), max_tokens=4000, stop_ids=NEVER))
        assert comes_true(lambda: engine.stats["steps"] > 24)
        waiting = engine.submit(Request((texts[0], ids(20, 98)), 8, stop_ids=NEVER))
        (node,) = engine._prefills.waited_for()
        assert first == [node] and tree.victims(tree.idle, engine._prefills.waited_for())[-1] is node
        long.cancel()
        assert waiting.result().cached_tokens == 1000


def test_a_session_with_its_answers_is_opened_again(store: ContextStore) -> None:
    """Also after a restart; an engine that keeps no answers does not continue their KV."""
    llm, prompt = llm_of(config=ALL), (ids(1000, 1), ids(20, 99))
    with Engine(llm, store=store, prefix_cache_bytes=ROOM, cache_generated=True) as engine:
        first = asked(engine, *prompt)
        following = (*prompt[0], *prompt[1], *first.tokens, *ids(900, 2))
        second = asked(engine, following, ids(9, 3))
        assert second.cached_tokens == 1020 + len(first.tokens) - 1
        for number in range(12):
            filled(engine, [ids(1000, 10 + number)])
        found = asked(engine, following, ids(9, 4))
        assert engine.stats["disk_loads"] and found.cached_tokens == len(following)
        check_engine(engine)
    kept = [one for one in store.list() if one.plain["tokens"] == len(following)]
    assert [one.plain["generated"] for one in kept] == [True]
    with Engine(llm, store=store, cache_generated=True) as engine:
        assert asked(engine, following, ids(9, 4)).cached_tokens == len(following)
    with Engine(llm, store=store) as engine:
        assert asked(engine, following, ids(9, 4)).cached_tokens in (0, 1000, 1020)
