"""Follow-up turns that do not read the answer before them: what they get is what one cache that never ended gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache, seal
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.prefix_handle import AnswerEntry, text_mark
from retrieval_attn.engine.request import Finished, Request
from retrieval_attn.model.weights import weight_state
from retrieval_attn.runner.rows import step
from retrieval_attn.sampling.sampling_params import SamplingParams
from retrieval_attn.store import ContextStore
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.emulation.emulated import emulated
from tests.engine.audit import check_engine
from tests.tiny_models import random_ids, tiny_model

CONFIG = ra.Config(sink=4, window=24, retrieve=6, prefill_chunk=64)
NO_STOP: frozenset[int] = frozenset()
SHARED = 1 << 26


def llm_of(kind: str = "llama", **options: Any) -> Any:
    model = tiny_model(kind)
    tokenizer = number_tokenizer(model.get_input_embeddings().weight.shape[0])
    return SimpleNamespace(model=model, tokenizer=tokenizer, config=CONFIG.replace(**options))


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random_ids(1, count, seed=seed)[0].tolist())


class Session:
    """One cache that goes on from turn to turn, by itself: parts are read behind each other, and answers fed."""

    def __init__(self, llm: Any, *, parted: bool = True) -> None:
        """parted: a read continues a fork, as between parts of a prompt; otherwise the very cache."""
        self._loop, self._parted = AnswerLoop(llm.model, llm.tokenizer), parted
        self._cache = RetrievalCache(llm.model, llm.config)
        self._held: tuple[int, ...] = ()
        self._logits = torch.empty(0)

    def turn(self, parts: Sequence[Sequence[int]], tokens: int) -> tuple[int, ...]:
        """So many tokens behind parts that are new, the greedy ones; the last is not fed."""
        for part in parts:
            self._read(part)
        found = [int(self._logits.argmax())]
        while len(found) < tokens:
            self._logits = step(self._loop.model, [self._cache], found[-1:], [len(self._held)])
            self._held = (*self._held, found[-1])
            found.append(int(self._logits.argmax()))
        return tuple(found)

    def _read(self, part: Sequence[int]) -> None:
        if self._held and self._parted:
            seal(self._cache)
            self._cache = self._cache.fork()
        batch = self._loop.batch([list(part)], before=self._held)
        self._logits = self._loop.read_whole(self._cache, batch).logits
        self._held = (*self._held, *part)


def request(parts: Sequence[Sequence[int]], tokens: int, **options: Any) -> Request:
    return Request(tuple(map(tuple, parts)), tokens, stop_ids=NO_STOP, **options)


def read_counts(llm: Any) -> Any:
    """Lengths of forwards of the model, but for steps."""
    counts: list[int] = []

    def note(_module: Any, _args: Any, given: Any) -> None:
        if given["input_ids"].shape[1] > 1:
            counts.append(given["input_ids"].shape[1])

    @contextmanager
    def counting() -> Iterator[list[int]]:
        hook = llm.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield counts
        finally:
            hook.remove()

    return counting()


def answers_of(engine: Engine) -> list[Any]:
    """Nodes that hold answers."""
    assert engine._tree is not None
    return [node for node in engine._tree._residents if isinstance(node.held, AnswerEntry)]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("index", ["auto", "flat", "device"])
def test_three_turns_are_those_of_one_session(index: str, graphs: bool) -> None:
    """Beside other rows, in steps that are eager and in graphs; each turn reads the last token that was not fed, and
    what is new.
    """
    llm = llm_of(index=index)
    document, opening = ids(300, 1), ids(9, 2)
    news = [ids(7, 3), ids(70, 4)]
    tokens = (50, 20, 12)
    session = Session(llm)
    expected = [session.turn((document, opening), tokens[0])]
    expected += [session.turn(((expected[0][-1], *news[0]),), tokens[1])]
    expected += [session.turn(((expected[1][-1], *news[1]),), tokens[2])]
    steps = emulated() if graphs else nullcontext()
    with steps, Engine(llm, prefix_cache_bytes=SHARED, cache_generated=True) as engine, read_counts(llm) as read:
        other = engine.submit(request((ids(200, 9),), 3_000))
        next(iter(other))
        del read[:]
        parts: list[tuple[int, ...]] = [document, opening]
        found: list[Finished] = []
        for number, new in enumerate([*news, ()]):
            found.append(engine.submit(request(parts, tokens[number])).result())
            parts = [*parts, (*found[-1].tokens, *new)]
            check_engine(engine)
        other.cancel()
    assert [one.tokens for one in found] == expected
    assert [one.cached_tokens for one in found] == [0, 309 + 49, 309 + 50 + 7 + 19]
    assert sum(read) == 309 + 8 + 71


def test_off_by_default() -> None:
    llm, document = llm_of(), ids(300, 1)
    with Engine(llm, prefix_cache_bytes=SHARED) as engine:
        first = engine.submit(request((document, ids(9, 2)), 20)).result()
        again = engine.submit(request((document, (*ids(9, 2), *first.tokens, 5)), 4)).result()
        assert again.cached_tokens == 300 and answers_of(engine) == []


def follow_up(engine: Engine, parts: Sequence[Sequence[int]], first: Finished, **options: Any) -> Finished:
    """The next turn: all that was said, and one part more."""
    *before, last = parts
    return engine.submit(request((*before, (*last, *first.tokens, *ids(6, 77))), 9, **options)).result()


PARTS = ids(300, 1), ids(9, 2)


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma3"])
def test_layers_that_slide(kind: str) -> None:
    llm = llm_of(kind)
    session = Session(llm)
    expected = session.turn(PARTS, 40)
    with Engine(llm, prefix_cache_bytes=SHARED, cache_generated=True) as engine:
        first = engine.submit(request(PARTS, 40)).result()
        second = follow_up(engine, PARTS, first)
        check_engine(engine)
    assert first.tokens == expected and second.cached_tokens == 309 + 39
    assert second.tokens == session.turn(((expected[-1], *ids(6, 77)),), 9)


def test_a_cancelled_answer_is_continued_as_far_as_it_was_told() -> None:
    llm = llm_of()
    session = Session(llm)
    with Engine(llm, prefix_cache_bytes=SHARED, cache_generated=True) as engine:
        ticket = engine.submit(request(PARTS, 3_000))
        events = iter(ticket)
        for _ in range(30):
            next(events)
        ticket.cancel()
        first = ticket.result()
        second = follow_up(engine, PARTS, first)
    assert first.reason == "cancelled" and session.turn(PARTS, len(first.tokens)) == first.tokens
    assert second.cached_tokens == 309 + len(first.tokens) - 1
    assert second.tokens == session.turn(((first.tokens[-1], *ids(6, 77)),), 9)


def test_other_ids_have_what_was_read() -> None:
    """An answer that the client cut, as at a stop string, or that tokenizes otherwise: the turn is as without the
    option. So is one of another namespace.
    """
    llm = llm_of()
    with Engine(llm, prefix_cache_bytes=SHARED) as engine:
        first = engine.submit(request(PARTS, 40)).result()
        cut = first._replace(tokens=first.tokens[:20])
        expected = follow_up(engine, PARTS, cut)
        whole = follow_up(engine, PARTS, first)
    with Engine(llm, prefix_cache_bytes=SHARED, cache_generated=True) as engine:
        assert engine.submit(request(PARTS, 40)).result().tokens == first.tokens
        found = follow_up(engine, PARTS, cut)
        assert (found.tokens, found.cached_tokens) == (expected.tokens, 300)
        found = follow_up(engine, PARTS, first, namespace="somebody")
        assert (found.tokens, found.cached_tokens) == (whole.tokens, 0)
        check_engine(engine)


@pytest.mark.parametrize("where", ["in the step", "in its logits"])
def test_rows_that_failed_leave_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of()
    with Engine(llm, prefix_cache_bytes=SHARED, cache_generated=True) as engine:
        bad, good = (engine.submit(request((PARTS[0], ids(9, seed)), 30)) for seed in (2, 3))
        next(iter(bad))
        with engine._changed:
            row = engine._rows[bad.id]
            assert row.cache is not None
            if where == "in the step":
                monkeypatch.setattr(row.cache, "require_room", _refuse)
            else:
                real = engine._stepper._choose
                monkeypatch.setattr(
                    engine._stepper, "_choose", lambda *given: {**real(*given), **dict.fromkeys({bad.id} & {*given[0]})}
                )
        assert bad.result().reason == "error" and good.result().reason == "length"
        engine.submit(request((ids(70, 5),), 1)).result()  # both have left
        # other tests may have changed the weights of this process's model, and put them back: then texts have a mark
        mark = len(text_mark(llm.model, weight_state(llm.model), 338))
        spans = [node.end - mark for node in answers_of(engine)]
        check_engine(engine)
    assert sorted(spans) in ([309 + 29], [70, 309 + 29])


def _refuse(*_: object) -> None:
    raise MemoryError("of this row")


def test_answers_of_one_prompt_stand_side_by_side() -> None:
    """As of n=2: each follow-up continues its own."""
    llm, parts = llm_of(), (*PARTS[:1], PARTS[1][:-1], PARTS[1][-1:])
    draws = [SamplingParams(1.0, seed=seed) for seed in (1, 2)]
    with Engine(llm, prefix_cache_bytes=SHARED, cache_generated=True) as engine:
        tickets = [engine.submit(request(parts, 30, draw=draw)) for draw in draws]
        firsts = [ticket.result() for ticket in tickets]
        seconds = [follow_up(engine, parts, first) for first in firsts]
        check_engine(engine)
    assert firsts[0].tokens != firsts[1].tokens
    assert [one.cached_tokens for one in seconds] == [309 + 29] * 2


def test_answers_are_given_up_as_prompts_are() -> None:
    llm = llm_of()
    with Engine(llm, prefix_cache_bytes=400_000, cache_generated=True) as engine:
        for seed in range(12):
            engine.submit(request((ids(200, seed), ids(9, 50 + seed)), 20)).result()
            check_engine(engine)
        engine.submit(request((ids(9, 5),), 1)).result()
        stats = engine.stats["shared"]
    assert stats.evicted and stats.nbytes <= 500_000


def test_a_saved_context_and_pages(tmp_path: Path) -> None:
    """Answers behind a saved context, and behind a prefix whose keys lie in pages."""
    llm = llm_of()
    store = ContextStore(tmp_path)
    ra.Context(llm.model, llm.tokenizer, llm.config).read(PARTS[0], progress=False, save="one", store=store)
    session = Session(llm)
    expected = session.turn(PARTS, 30)
    again = session.turn(((expected[-1], *ids(6, 77)),), 9)
    with Engine(llm, prefix_cache_bytes=SHARED, cache_generated=True, store=store) as engine:
        first = engine.submit(request(PARTS[1:], 30, context="one")).result()
        second = follow_up(engine, PARTS[1:], first, context="one")
        check_engine(engine)
    assert first.tokens == expected and second.tokens == again and second.cached_tokens == 309 + 29
    with Engine(llm, prefix_cache_bytes=SHARED, cache_generated=True, paged_prefix_tokens=700) as engine:
        first = engine.submit(request(PARTS, 30)).result()
        parts = (*PARTS[:1], (*PARTS[1], *first.tokens, *ids(60, 7)), ids(5, 8))
        found = [engine.submit(request(parts, 9)).result() for _ in range(2)]
        check_engine(engine)
    assert found[0].cached_tokens == 309 + 29 and found[1].cached_tokens == 309 + 30 + 60
    assert found[0].tokens == found[1].tokens and found[0].error is None
