"""Conversations that outgrow the text that they began with: one index for all of it, in captured steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from retrieval_attn.attention import exact
from retrieval_attn.attention.cache import Rollback
from retrieval_attn.engine import prefix_handle
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


@pytest.mark.parametrize(
    "options", [{"retrieve": "all", "tail": False}, {"retrieve": 32, "tail": True}], ids=["all", "few"]
)
def test_a_conversation_has_codes_of_one_segment(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """From 200 tokens to 1,190, turn by turn: no step runs eagerly, codes cover two thirds of the text but for a turn,
    and an entry counts what it copied.
    """
    llm, prompt = llm_of(index="device", **options), ids(200, 1)
    with caplog.at_level(logging.WARNING), emulated(), Engine(llm, prefix_cache_bytes=4 * SHARED) as engine:
        for turn in range(TURNS):
            done = answer(engine, (prompt,))
            assert done.cached_tokens == (0 if not turn else len(prompt) - TURN)
            if options["retrieve"] == "all" and turn in (2, TURNS - 1):
                assert done.tokens == alone(llm, prompt)
            check_engine(engine)
            prompt = (*prompt, *ids(TURN, 2 + turn))
        for entry in entries_of(engine):
            for path in paths_of(entry._cache):
                coded = [segment for segment in path.segments if segment.indexes]
                assert len(coded) == 1, "a device searches codes of one segment"
                assert 1.5 * coded[0].indexed[1] >= len(path) - llm.config.window - TURN
        assert engine._tree is not None
        first, *copies = sorted(
            (one for one in engine._tree.latest(None, 100) if not one.start), key=lambda one: one.end
        )
        assert len(copies) > 1, "a copy needs none of its ancestors"
        assert all(one.rebuild_seconds > first.rebuild_seconds for one in copies), "all of it is read again"
        merged = [segment for one in entries_of(engine) for segment in paths_of(one._cache)[0].segments[:1]]
        assert 3 <= len(set(merged)) <= 6, "copies are rare"
    assert options["retrieve"] == "all" or "eager" not in caplog.text


def test_without_memory_for_a_copy_new_tokens_are_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text keeps its codes, and no other segment gets some."""
    monkeypatch.setattr(device_room, "available_host_bytes", lambda: device_room.COPY_SPARE)
    llm, prompt = llm_of(index="device", retrieve="all", tail=False), ids(200, 1)
    with emulated(), Engine(llm, prefix_cache_bytes=SHARED) as engine:
        for turn in range(5):
            found = answer(engine, (prompt,)).tokens
            check_engine(engine)
            prompt = (*prompt, *ids(TURN, 2 + turn))
        assert found == alone(llm, prompt[:-TURN])
        assert answer(engine, (prompt,)).cached_tokens
        longest = max(entries_of(engine), key=lambda one: one._cache.get_seq_length())
        for path in paths_of(longest._cache):
            assert len(path.segments) > 1 and sum(bool(segment.indexes) for segment in path.segments) == 1


def test_a_rollback_has_the_segments_from_before() -> None:
    session = Session(llm_of(index="device", retrieve=32, tail=True))
    session.turn((ids(200, 1),), 1)
    session.turn((ids(60, 2),), 1)
    cache = session._cache
    before, spans = Rollback(cache), [path.spans for path in paths_of(cache)]
    indexes = [path.segments[0].indexes for path in paths_of(cache)]
    session._parted = False
    session.turn((ids(400, 3),), 1)
    assert all(path.is_merged and len(path.segments) == 1 for path in paths_of(cache))
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
