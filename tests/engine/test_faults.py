"""What goes wrong beside others: clients that leave in any state, no memory left, crowds. The others are answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.gate import prefill_threads
from retrieval_attn.engine.request import Finished, Request, RequestHandle
from retrieval_attn.engine.request_needs import State
from retrieval_attn.errors import EngineFullError, MemoryPlanError
from retrieval_attn.runner import graph_runner as bucket
from retrieval_attn.runner.rows import step
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.engine.audit import check_engine
from tests.fuzz.engine_schedules import CONFIG
from tests.preloaded import run_preloaded
from tests.tiny_models import random_ids, tiny_model
from tests.waiting import wait_until
from tools.engine_load import Look, grown

NEVER: frozenset[int] = frozenset()


def llm_of(config: ra.Config = CONFIG) -> Any:
    model = tiny_model("llama")
    return SimpleNamespace(
        model=model, tokenizer=number_tokenizer(model.get_input_embeddings().weight.shape[0]), config=config
    )


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random_ids(1, count, seed=seed)[0].tolist())


def asked(prompt: int, seed: int, answer: int, **options: Any) -> Request:
    """A document of 100 tokens, that others may have, too, and a prompt after it."""
    return Request((ids(100, 1), ids(prompt, seed)), answer, stop_ids=NEVER, **options)


def alone(llm: Any, request: Request) -> Finished:
    with Engine(llm, prefix_cache_bytes=0) as engine:
        return engine.submit(request).result()


@contextmanager
def engine_of(llm: Any, **changes: Any) -> Iterator[Engine]:
    """Afterwards nothing is held, and a request is answered as ever."""
    limits = replace(default_limits(llm.model, llm.config), **changes)
    with Engine(llm, limits=limits, prefix_cache_bytes=1 << 26) as engine:
        yield engine
        last = asked(20, 99, 6)
        assert engine.submit(last).result().tokens == alone(llm, last).tokens
        wait_until(lambda: engine._scheduler.idle)
        check_engine(engine)
        assert engine._tree is not None and engine._tree.root.refs == 0
        assert prefill_threads.running == 0


def until_state(engine: Engine, ticket: RequestHandle, state: State) -> None:
    wait_until(lambda: engine._scheduler.state(ticket.id) is state, pause=0.001)


OTHER = asked(30, 6, 150)


@pytest.fixture(scope="module")
def answer_to_other() -> tuple[int, ...]:
    """Tokens of the answer to OTHER by an engine with no other request."""
    return alone(llm_of(), OTHER).tokens


@pytest.mark.parametrize("state", [one for one in State if one is not State.GONE])
def test_a_client_that_leaves(state: State, answer_to_other: tuple[int, ...]) -> None:
    """In each state: its answer ends as cancelled, what it has is a beginning, and the other one never notices."""
    llm = llm_of()
    leaving = asked(3_500 if state is State.READING else 40, 5, 150, priority="batch")
    ahead = 0 if state is State.WAITING else 2
    with engine_of(llm, rows=1, ahead=ahead, inter_token_seconds=0.001) as engine:
        if state in (State.WAITING, State.READY):  # the slot is taken
            first = engine.submit(OTHER)
            until_state(engine, first, State.DECODING)
            left = engine.submit(leaving)
            until_state(engine, left, state)
            left.cancel()
        else:
            left = engine.submit(leaving)
            until_state(engine, left, State.READING if state is State.READING else State.DECODING)
            first = engine.submit(OTHER)
            until_state(engine, left, state)  # parked: the other one takes the slot
            left.cancel()
        found = left.result()
        assert found.reason == "cancelled"
        if found.tokens:
            assert found.tokens == alone(llm, replace(leaving, max_tokens=len(found.tokens))).tokens
        assert (len(found.tokens) > 0) == (state in (State.DECODING, State.PREEMPTED))
        assert first.result().tokens == answer_to_other


@pytest.mark.parametrize("error", [MemoryError("no more"), torch.OutOfMemoryError("no more")], ids=["host", "device"])
def test_no_memory_in_a_chunk(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request whose chunk it was fails; one that waited for its document reads that itself."""
    llm, document = llm_of(), ids(500, 7)
    attend, chunks = RetrievalLayer.attend, 0

    def failing(layer: Any, module: Any, query: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        nonlocal chunks
        if query.shape[2] == CONFIG.prefill_chunk:
            chunks += 1
            if chunks == 5:
                raise error
        return attend(layer, module, query, *given, **options)

    requests = [Request((document, ids(9, number)), 5, stop_ids=NEVER) for number in range(4)]
    with engine_of(llm) as engine:
        beside = engine.submit(asked(20, 8, 150))
        until_state(engine, beside, State.DECODING)
        monkeypatch.setattr(RetrievalLayer, "attend", failing)
        found = [ticket.result() for ticket in [engine.submit(one) for one in requests]]
        assert isinstance(found[0].error, type(error) | MemoryPlanError) and found[0].reason == "error"
        assert [one.tokens for one in found[1:]] == [alone(llm, one).tokens for one in requests[1:]]
        assert [one.cached_tokens for one in found] == [0, 0, 500, 500]
        assert beside.result().reason == "length"


@pytest.mark.parametrize("tokens", [CONFIG.spill, 64], ids=["decoding", "reading"])
def test_no_memory_for_what_leaves_the_window(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row whose keys the host cannot take fails alone, while it decodes or is read."""
    llm = llm_of()
    append, appended = Segment.append, 0

    def failing(segment: Any, keys: Any, *given: Any) -> None:
        nonlocal appended
        if keys.shape[1] == tokens:
            appended += 1
            if appended == 2:
                raise MemoryError("no more")
        append(segment, keys, *given)

    requests = [asked(64 if number == 2 else 30, number, 60) for number in range(4)]
    with engine_of(llm) as engine, monkeypatch.context() as patched:
        patched.setattr(Segment, "append", failing)
        found = [ticket.result() for ticket in [engine.submit(one) for one in requests]]
    (failed,) = [one for one in found if one.error is not None]
    assert isinstance(failed.error, MemoryPlanError) and (len(failed.tokens) > 0) == (tokens == CONFIG.spill)
    for request, one in zip(requests, found, strict=True):
        assert one.tokens == alone(llm, request).tokens[: len(one.tokens)] and (one.error or one.reason == "length")


def test_no_memory_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of that step fail, who comes later is answered; any other error of a whole step ends the engine."""
    llm = llm_of()
    steps = 0

    def failing(*given: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise torch.OutOfMemoryError("no more")
        return step(*given)

    monkeypatch.setattr(bucket, "eager_step", failing)
    with engine_of(llm) as engine:
        found = [ticket.result() for ticket in [engine.submit(asked(5, number, 30)) for number in range(3)]]
        failed = [one for one in found if one.error is not None]
        assert failed and all(isinstance(one.error, torch.OutOfMemoryError) for one in failed)


def test_a_crowd_with_one_question() -> None:
    """Hundreds of equal requests: one of them reads, no more wait than may, and memory is that of the rows."""
    llm, document, question = llm_of(), ids(1_500, 11), ids(4, 12)
    request = Request((document, question), 2, stop_ids=NEVER)
    with engine_of(llm, waiting=250) as engine:
        forwards: list[int] = []
        hook = llm.model.register_forward_pre_hook(
            lambda module, args, kwargs: forwards.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        tickets, refused = [], 0
        try:
            for _ in range(400):
                try:
                    tickets.append(engine.submit(request))
                except EngineFullError:
                    refused += 1
            found = [ticket.result() for ticket in tickets]
        finally:
            hook.remove()
        assert refused and len(found) >= 250
        assert sum(count for count in forwards if count > 512) == 1_500
        assert {one.tokens for one in found} == {alone(llm, request).tokens}
        assert sorted({one.cached_tokens for one in found}) == [0, 1_500]
        assert engine.stats["shared"].prefix_entries_resident == 1


@pytest.mark.slow
def test_mixed_load_leaves_nothing() -> None:
    """A share of what `tools/engine_load.py` does for hours: memory, threads, files and the tree do not grow."""
    done = run_preloaded(["-m", "tools.engine_load", "--minutes", "0.1"], timeout=280)
    assert done.returncode == 0 and "ended: length" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", Look._fields)
def test_what_grows_is_told(name: str) -> None:
    look = Look(10**9, 5, 6, 500_000, 10**6)
    steady = [look] * 20
    assert grown(steady) == []
    room = {"rss": 33 << 20, "threads": 4, "objects": 3_001, "shared": 10**7}.get(name, 1)
    (told,) = grown([*steady[:12], *[look._replace(**{name: getattr(look, name) + room})] * 8])
    assert told.startswith(f"{name}:")
