"""Conversations that outgrow the text that they began with: one index for all of it, in captured steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from retrieval_attn.attention import exact
from retrieval_attn.attention.cache import Rollback
from retrieval_attn.engine import prefix_handle
from retrieval_attn.engine.batched_prefill import PrefillRequest
from retrieval_attn.engine.chunked_prefill import ChunkedPrefill
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.prefix_handle import PrefixEntry, paths_of
from retrieval_attn.memory import device_room
from tests.emulation.emulated import emulated
from tests.engine.audit import check_engine
from tests.engine.test_reuse import SHARED, Session, ids, llm_of, request
from tests.engine.test_token_prefix import alone, answer

TURNS = 12
TURN = 90


@pytest.fixture(autouse=True)
def short_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 64 tokens become entries, and may be copied with what they continue."""
    monkeypatch.setattr(prefix_handle, "LAST_TOKENS", 64)
    monkeypatch.setattr(exact, "MERGED_TOKENS", 64)


def entries_of(engine: Engine) -> list[PrefixEntry]:
    assert engine._tree is not None
    return [one.held for one in engine._tree.latest(None, 100) if isinstance(one.held, PrefixEntry)]


FEW_AND_ALL = pytest.mark.parametrize(
    "options", [{"retrieve": "all", "tail": False}, {"retrieve": 32, "tail": True}], ids=["all", "few"]
)


def converse(engine: Engine, llm: Any, prompt: tuple[int, ...], *, is_exact: bool, turns: int = TURNS) -> None:
    """A conversation that begins with a prompt, turn by turn; all of it is reused. is_exact: answers are as alone."""
    known = 0
    for turn in range(turns):
        done = answer(engine, (prompt,))
        assert done.cached_tokens == known
        if is_exact and turn in (2, turns - 1):
            assert done.tokens == alone(llm, prompt)
        check_engine(engine)
        known, prompt = len(prompt), (*prompt, *ids(TURN, 2 + turn))


@FEW_AND_ALL
def test_a_conversation_lies_in_one_segment(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """From 200 tokens to 1,190, turn by turn: no step runs eagerly, all tokens have codes, which a copy has learned
    again, and one entry is left, which counts what a fresh one does.
    """
    llm = llm_of(index="device", **options)
    with caplog.at_level(logging.WARNING), emulated(), Engine(llm, prefix_cache_bytes=4 * SHARED) as engine:
        converse(engine, llm, ids(200, 1), is_exact=options["retrieve"] == "all")
        [entry] = entries_of(engine)
        for path in paths_of(entry._cache):
            [segment] = path.segments
            assert segment.indexed[1] == segment.length == len(path) == 200 + (TURNS - 1) * TURN
            assert segment._index is not None and 2 * 200 < segment._index.learned < len(path)
        if options["retrieve"] == "all":  # others have clusters of other sizes
            with Engine(llm, prefix_cache_bytes=4 * SHARED) as fresh:
                answer(fresh, (tuple(entry._cache.batch.sequences[0].token_ids),))
                # room for codes that come is not the same
                assert entry.sizes.total == pytest.approx(entries_of(fresh)[0].sizes.total, rel=0.05)
    assert options["retrieve"] == "all" or "eager" not in caplog.text


def test_a_turn_of_an_agent_is_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the part in which its answer lies is read with the result behind it."""
    read: list[int] = []
    for kind in (ChunkedPrefill, PrefillRequest):

        def begin(
            self: Any, loop: Any, cache: Any, ids: Any, *given: Any, old: Any = kind.__init__, **more: Any
        ) -> None:
            read.append(len(ids))
            old(self, loop, cache, ids, *given, **more)

        monkeypatch.setattr(kind, "__init__", begin)
    llm, parts = llm_of(index="device", retrieve="all", tail=False), [ids(200, 1), ids(70, 2)]
    with Engine(llm, prefix_cache_bytes=4 * SHARED) as engine:
        answer(engine, tuple(parts))
        for turn in range(3):
            del read[:]
            parts += [ids(20, 100 + turn), ids(TURN, 200 + turn)]
            assert answer(engine, tuple(parts)).cached_tokens == sum(map(len, parts[:-2]))
            assert read == [20 + TURN]
            check_engine(engine)


@FEW_AND_ALL
def test_of_two_conversations_one_copies(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The first goes on behind the text that both begin with. Once the other has much more than that, its turn copies
    all into a segment of its own, and goes on there.
    """
    llm, prompt = llm_of(index="device", **options), ids(200, 1)
    with caplog.at_level(logging.WARNING), emulated(), Engine(llm, prefix_cache_bytes=4 * SHARED) as engine:
        is_exact = options["retrieve"] == "all"
        answer(engine, (prompt,))
        answer(engine, ((*prompt, *ids(TURN, 99)),))
        known = len(prompt)
        for turn in range(TURNS):
            prompt = (*prompt, *ids(TURN, 2 + turn))
            done = answer(engine, (prompt,))
            assert done.cached_tokens == known
            if is_exact and turn in (2, TURNS - 1):
                assert done.tokens == alone(llm, prompt)
            check_engine(engine)
            known = len(prompt)
        assert engine._tree is not None
        [first, *_, last] = sorted(engine._tree.latest(None, 100), key=lambda one: one.end)
        assert not last.start and last.rebuild_seconds > first.rebuild_seconds, "a copy needs none of its ancestors"
        for entry in (first.held, last.held):
            assert isinstance(entry, PrefixEntry)
            assert all(len(path.segments) == 1 for path in paths_of(entry._cache))
        assert sum(one.end > 200 + 3 * TURN for one in engine._tree.latest(None, 100)) <= 3, "of a conversation, one"
    assert is_exact or "eager" not in caplog.text


def test_without_memory_for_a_copy_new_tokens_are_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text keeps its codes, and no other segment gets some."""
    monkeypatch.setattr(device_room, "available_host_bytes", lambda: device_room.COPY_SPARE)
    llm, prompt = llm_of(index="device", retrieve="all", tail=False), ids(200, 1)
    with emulated(), Engine(llm, prefix_cache_bytes=SHARED) as engine:
        answer(engine, (prompt,))
        answer(engine, ((*prompt, *ids(TURN, 99)),))  # it goes on behind the text
        for turn in range(4):
            prompt = (*prompt, *ids(TURN, 2 + turn))
            found = answer(engine, (prompt,)).tokens
            check_engine(engine)
        assert found == alone(llm, prompt)
        longest = max(entries_of(engine), key=lambda one: one._cache.get_seq_length())
        for path in paths_of(longest._cache):
            assert len(path.segments) > 1 and sum(bool(segment.indexes) for segment in path.segments) == 1


@pytest.mark.parametrize("copies", [False, True])
def test_a_rollback_has_the_segments_from_before(copies: bool) -> None:
    session = Session(llm_of(index="device", retrieve=32, tail=True))
    session.turn((ids(200, 1),), 1)
    session.turn((ids(60, 2),), 1)
    cache = session._cache
    before, spans = Rollback(cache), [path.spans for path in paths_of(cache)]
    indexes = [path.segments[0].indexes for path in paths_of(cache)]
    session._parted = False
    others = [path.fork() for path in paths_of(cache)] if copies else []
    assert all(one.continue_first(1) for one in others)
    session.turn((ids(400, 3),), 1)
    for path in paths_of(cache):
        assert (path.is_merged, path.continues) == (copies, not copies) and len(path.segments) == 1
    assert before.undo()
    assert [path.spans for path in paths_of(cache)] == spans and not any(path.is_merged for path in paths_of(cache))
    assert [path.segments[0].indexes for path in paths_of(cache)] == indexes


@pytest.mark.parametrize("index", ["flat", "sketch"])
def test_other_kinds_keep_their_segments(index: str) -> None:
    """Indexes on the host are searched segment by segment: nothing is copied."""
    llm, prompt = llm_of(index=index, retrieve=32), ids(200, 1)
    with Engine(llm, prefix_cache_bytes=SHARED) as engine:
        for turn in range(5):
            assert engine.submit(request((prompt,), 3)).result().error is None
            prompt = (*prompt, *ids(TURN, 2 + turn))
        assert not any(path.is_merged for one in entries_of(engine) for path in paths_of(one._cache))
