"""Follow-up turns that do not read the answer before them: what they get is what one cache that never ended gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.batch.engine import Engine
from retrieval_attn.batch.request import Finished, Request
from retrieval_attn.batch.rows import step
from retrieval_attn.batch.sharing import HeldAnswer
from retrieval_attn.cache.cache import RetrievalCache, seal
from retrieval_attn.engine.graph.emulation import emulated
from retrieval_attn.eval.bench.session.subject import number_tokenizer
from tests.tiny_models import random_ids, tiny_model

CONFIG = ra.Config(sink=4, window=24, spill=8, retrieve=6, prefill_chunk=64)
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
    return [node for node in engine._tree._residents if isinstance(node.held, HeldAnswer)]


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
    with steps, Engine(llm, shared_bytes=SHARED, reuse_generated=True) as engine, read_counts(llm) as read:
        other = engine.submit(request((ids(200, 9),), 3_000))
        next(iter(other))
        del read[:]
        parts: list[tuple[int, ...]] = [document, opening]
        found: list[Finished] = []
        for number, new in enumerate([*news, ()]):
            found.append(engine.submit(request(parts, tokens[number])).result())
            parts = [*parts, (*found[-1].tokens, *new)]
            engine.check()
        other.cancel()
    assert [one.tokens for one in found] == expected
    assert [one.cached_tokens for one in found] == [0, 309 + 49, 309 + 50 + 7 + 19]
    assert sum(read) == 309 + 8 + 71


def test_off_by_default() -> None:
    llm, document = llm_of(), ids(300, 1)
    with Engine(llm, shared_bytes=SHARED) as engine:
        first = engine.submit(request((document, ids(9, 2)), 20)).result()
        again = engine.submit(request((document, (*ids(9, 2), *first.tokens, 5)), 4)).result()
        assert again.cached_tokens == 300 and answers_of(engine) == []
