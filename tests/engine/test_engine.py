"""Many requests at once: every answer is the one that its request gets alone."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn import answer_loop
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.cpu import segment
from retrieval_attn.engine import prefill_worker as readings
from retrieval_attn.engine.engine import READ_TOKENS, Engine, default_limits
from retrieval_attn.engine.gate import prefill_threads
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.request import Finished, Request, RequestHandle
from retrieval_attn.engine.scheduler import Scheduler, SchedulerOutput, StepResult
from retrieval_attn.errors import AdmissionError, ConfigError, ContextLengthError, EngineFullError, InputDataError
from retrieval_attn.offload import page_lock
from retrieval_attn.offload.threads import wait_for
from retrieval_attn.offload.traffic import Traffic
from retrieval_attn.runner import graph_runner as bucket
from retrieval_attn.runner.rows import RowsFailedError, step
from retrieval_attn.sampling.sampler import Sampler
from retrieval_attn.sampling.sampling_params import SamplingParams
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from tests.engine.audit import check_engine
from tests.fuzz.engine_actions import watched
from tests.fuzz.engine_schedules import CONFIG, Library, run, schedule_of, wrong
from tests.preloaded import run_preloaded
from tests.tiny_models import QUESTION, Loaded, needle_text, random_ids, tiny_model
from tests.waiting import wait_until


def llm_of(config: ra.Config = CONFIG) -> Any:
    model = tiny_model("llama")
    tokenizer = number_tokenizer(model.get_input_embeddings().weight.shape[0])
    return SimpleNamespace(model=model, tokenizer=tokenizer, config=config)


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random_ids(1, count, seed=seed)[0].tolist())


def alone(llm: Any, request: Request) -> Finished:
    """By a fresh engine, nothing beside it and nothing shared."""
    with Engine(llm, prefix_cache_bytes=0) as engine:
        return engine.submit(request).result()


def requests_of(seed: int, count: int) -> list[Request]:
    """Some share documents; some draw; lengths from one token to twenty windows."""
    chance = random.Random(seed)
    documents = [ids(chance.randrange(70, 500), 100 + seed * 10 + number) for number in range(3)]
    found = []
    for number in range(count):
        tail = ids(chance.randrange(1, 40), 7_000 + 100 * seed + number)
        parts = (chance.choice(documents), tail) if chance.random() < 0.6 else (tail,)
        draw = SamplingParams(0.8, top_k=9, seed=number) if chance.random() < 0.3 else SamplingParams()
        if number % 4 == 1:
            draw = replace(draw, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={number: 3.0})
        found.append(Request(parts, chance.randrange(1, 14), draw, stop_ids=frozenset({3})))
    return found


def same(one: Finished, other: Finished) -> bool:
    return (one.tokens, one.text, one.reason) == (other.tokens, other.text, other.reason)


@pytest.mark.parametrize("index", ["auto", "flat", "device"])
@pytest.mark.parametrize("prefix_cache_bytes", [0, 1 << 26])
def test_every_answer_is_the_one_it_gets_alone(index: str, prefix_cache_bytes: int) -> None:
    llm = llm_of(CONFIG.replace(index=index))
    requests = requests_of(1, 14)
    with Engine(llm, prefix_cache_bytes=prefix_cache_bytes) as engine:
        found = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
        check_engine(engine)
        assert engine.stats["rows"] == engine.stats["waiting"] == 0
    for request, one in zip(requests, found, strict=True):
        assert one.error is None and same(one, alone(llm, request)), request
    assert any(one.cached_tokens for one in found) == bool(prefix_cache_bytes)
    assert {one.reason for one in found} >= {"length"}


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules(seed: int, tmp_path: Path) -> None:
    """Requests that come and go at any time, from several threads; `tests/fuzz/engine_schedules.py` runs more."""
    model = llm_of().model
    vocabulary = model.get_input_embeddings().weight.shape[0]
    schedule = schedule_of(seed, 8, vocabulary, contexts=True)
    all_keys: dict[str, Any] = {"retrieve": "all", "tail": False} if schedule.crops else {}
    llm = llm_of(CONFIG.replace(index=schedule.index, **all_keys))
    with watched() as actions:
        found = run(llm, schedule, Library(tmp_path, vocabulary), actions)
    assert wrong(llm, found) == []
    assert actions["open"], actions


def test_a_document_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By requests that come together, and by one that comes later; not by one of another namespace."""
    llm, document = llm_of(), ids(900, 1)
    forwards: list[int] = []
    hook = llm.model.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
            asked = [Request((document, ids(9, 50 + number)), 5) for number in range(6)]
            found = [ticket.result() for ticket in [engine.submit(request) for request in asked]]
            assert sum(count for count in forwards if count > 60) == 900
            assert sorted(one.cached_tokens for one in found) == [0, 900, 900, 900, 900, 900]
            assert engine.submit(asked[0]).result().cached_tokens == 900
            other = Request((document, ids(9, 50)), 5, namespace="somebody")
            assert engine.submit(other).result().cached_tokens == 0
            shared = engine.stats["shared"]
            assert (shared.prefix_entries_resident, shared.reading, shared.waiting) == (2, 0, 0)
    finally:
        hook.remove()
    for request, one in zip(asked, found, strict=True):
        assert same(one, alone(llm, request))


def test_a_cell_of_reading_is_as_long_as_the_limits_say() -> None:
    """However long the chunks of a context alone are: who decodes waits for a chunk."""
    llm = llm_of(CONFIG.replace(prefill_chunk=8192))
    limits = replace(default_limits(llm.model, llm.config), chunk_tokens=64)
    assert default_limits(llm.model, llm.config).chunk_tokens == READ_TOKENS < 8192
    seen: list[int] = []
    layer = llm.model.model.layers[0].self_attn
    hook = layer.register_forward_pre_hook(
        lambda _module, _given, named: seen.append(named["hidden_states"].shape[1]), with_kwargs=True
    )
    with Engine(llm, limits=limits) as engine:
        found = engine.submit(Request((ids(300, 1),), 3)).result()
    hook.remove()
    assert max(seen) == 64 and found.tokens == alone(llm, Request((ids(300, 1),), 3)).tokens


def test_what_ends_a_layer_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long prompt in two parts, beside a row that decodes: no tick has a chunk and such an end."""
    llm = llm_of(CONFIG.replace(prefill_chunk=64))
    told: list[StepResult] = []
    tick = Scheduler.schedule

    def noted(scheduler: Scheduler, results: StepResult, now: float) -> SchedulerOutput:
        told.append(results)
        return tick(scheduler, results, now)

    monkeypatch.setattr(Scheduler, "schedule", noted)
    layers = len(RetrievalCache(llm.model, llm.config).layers)
    with Engine(llm) as engine:
        row = engine.submit(Request((ids(20, 1),), 400, stop_ids=frozenset()))
        found = engine.submit(Request((ids(300, 2), ids(200, 3)), 2, stop_ids=frozenset())).result()
        row.cancel()
    assert found.error is None
    ticks = [one for one in told if one.read]
    read = [
        (chunks, "end" in before.next_kinds.values())
        for before, one in itertools.pairwise(ticks)
        for chunks in one.read.values()
    ]
    ended = [chunks for chunks, end in read if end and chunks]  # of 5 chunks and of 4; in parts while the row decodes
    assert set(ended) == {1} and 2 * layers <= len(ended) <= 4 * 2 * layers
    assert sum(chunks for chunks, end in read if not end) >= (5 + 4) * layers
    for before, one in itertools.pairwise(ticks):
        ends = [name for name, kind in before.next_kinds.items() if kind == "end"]
        assert not ends or ends == list(one.read)


@pytest.mark.parametrize("scored", [False, True])
def test_known_tokens_count_as_free_for_requests_that_lease_them(monkeypatch: pytest.MonkeyPatch, scored: bool) -> None:
    """A request whose prompt is scored reads all of it, and needs memory for that."""
    llm, known = llm_of(CONFIG), list[tuple[str, int]]()
    limits = replace(default_limits(llm.model, llm.config), rows=1, ahead=0, chunk_tokens=64)
    note = Scheduler.set_known

    def noted(scheduler: Scheduler, job: str, tokens: int) -> None:
        known.append((job, tokens))
        note(scheduler, job, tokens)

    monkeypatch.setattr(Scheduler, "set_known", noted)
    text = ids(300, 1)
    options: dict[str, Any] = {"prompt_logprobs": 0} if scored else {}
    with Engine(llm, limits=limits) as engine:
        first = engine.submit(Request((text, ids(5, 2)), 4))
        others = [engine.submit(Request((text, ids(5, 3 + number)), 2, **options)) for number in range(2)]
        assert all(one.result().error is None for one in (first, *others))
    assert bool(known) is not scored


def test_tokens_that_were_evicted_are_not_known_any_more() -> None:
    """A waiting request counted them as free memory: who is admitted with them would have none."""
    llm = llm_of(CONFIG)
    limits = replace(default_limits(llm.model, llm.config), rows=1, ahead=0)
    text = ids(300, 1)
    with Engine(llm, limits=limits) as engine:
        engine.submit(Request((text, ids(5, 2)), 2)).result()
        row = engine.submit(Request((ids(40, 5),), 400, stop_ids=frozenset()))
        waiting = engine.submit(Request((text, ids(5, 3)), 2))

        def known() -> int:
            with engine._changed:
                return max((entry.job.known_tokens for entry in engine._scheduler._places.entries.values()), default=0)

        assert known() >= 300 and engine._tree is not None
        assert engine._tree.evict(Sizes(1 << 40)).host
        wait_until(lambda: not known())
        assert engine._scheduler.waiting == 1, "before it was admitted"
        row.cancel()
        assert waiting.result().cached_tokens == 0


def test_rows_get_tokens_while_a_read_waits_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that end once the row has more tokens: if the row waited for them, both would wait for ever."""
    llm = llm_of(CONFIG.replace(prefill_chunk=64))
    told, copies, make_room = list[int](), Future[None](), Traffic.make_room

    def waits(traffic: Traffic, alone: bool = False, earlier: int = 1) -> float:
        if told:
            wait_for([copies])
        return make_room(traffic, alone, earlier)

    def listen(row: RequestHandle) -> None:
        for _ in row:
            told.append(1)
            if len(told) == 30:
                copies.set_result(None)

    with Engine(llm) as engine:
        row = engine.submit(Request((ids(20, 1),), 60, stop_ids=frozenset()))
        listening = threading.Thread(target=listen, args=(row,))
        listening.start()
        while not told:
            time.sleep(0.001)
        monkeypatch.setattr(Traffic, "make_room", waits)
        found = engine.submit(Request((ids(300, 2), ids(200, 3)), 2, stop_ids=frozenset())).result()
        listening.join(60)
    assert len(told) == 60
    assert found.tokens == alone(llm, Request((ids(300, 2), ids(200, 3)), 2, stop_ids=frozenset())).tokens


@pytest.mark.parametrize("read_before", [True, False])
def test_questions_on_a_long_text_are_short(read_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the text is: once it was read, the questions about it are read side by side."""
    llm = llm_of()
    limits = replace(default_limits(llm.model, llm.config), chunk_tokens=64)
    text, asked = ids(300, 1), [ids(9, 5 + number) for number in range(6)]
    seen: list[int] = []
    real = readings.BatchedPrefill

    def watched_reads(*given: Any) -> Any:
        pack = real(*given)
        seen.append(len(pack.reads))
        return pack

    monkeypatch.setattr(readings, "BatchedPrefill", watched_reads)
    with Engine(llm, limits=limits, prefix_cache_bytes=1 << 26) as engine:
        if read_before:
            engine.submit(Request((text, ids(1, 2)), 1)).result()
            del seen[:]
        with engine._changed:  # no step before all are there
            tickets = [engine.submit(Request((text, question), 9)) for question in asked]
        found = [ticket.result() for ticket in tickets]
        check_engine(engine)
    assert max(seen) >= 5
    for question, one in zip(asked, found, strict=True):
        assert one.tokens == alone(llm, Request((text, question), 9)).tokens


@pytest.mark.parametrize("cancelled", [False, True])
def test_rows_get_tokens_between_the_layers_of_questions(cancelled: bool) -> None:
    """Of questions that are read together: who decodes does not wait for all layers of all of them. One of them may be
    cancelled there.
    """
    llm = llm_of()
    limits = replace(default_limits(llm.model, llm.config), inter_token_seconds=1e-6)
    text, asked = ids(300, 1), [ids(9, 5 + number) for number in range(4)]
    seen: list[tuple[int, int]] = []
    tickets: list[Any] = []

    def note(layer: int, tokens: int) -> None:
        seen.append((layer, tokens))
        if cancelled and tickets and tokens > 9 and layer == 0:
            tickets[1].cancel()

    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _module, given, number=number: note(number, given[0].shape[1]))
        for number, layer in enumerate(llm.model.model.layers)
    ]
    with Engine(llm, limits=limits, prefix_cache_bytes=1 << 26) as engine:
        row = engine.submit(Request((text, ids(5, 2)), 3_000, stop_ids=frozenset()))
        next(iter(row))
        del seen[:]
        with engine._changed:  # no step before all are there
            tickets += [engine.submit(Request((text, question), 5)) for question in asked]
        found = [ticket.result() for ticket in tickets]
        row.cancel()
        check_engine(engine)
    for hook in hooks:
        hook.remove()
    packs = [place for place, (layer, tokens) in enumerate(seen) if tokens > 9]
    assert len(packs) >= 2
    for one, other in itertools.pairwise(packs):
        assert (0, 1) in seen[one:other]
    for number, (question, one) in enumerate(zip(asked, found, strict=True)):
        if cancelled and number == 1:
            assert one.reason == "cancelled"
        else:
            assert one.tokens == alone(llm, Request((text, question), 5)).tokens


def test_the_end_of_a_reading_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU indexes are still built when a prompt is read: rows get tokens meanwhile."""
    llm, over = llm_of(), threading.Event()
    real = answer_loop.finish_prefill

    def slow(cache: Any, on_layer: Any = None) -> None:
        if len(cache.layers[0].hosts[0]) == 400:
            assert over.wait(20)
        real(cache, on_layer)

    monkeypatch.setattr(answer_loop, "finish_prefill", slow)
    with Engine(llm) as engine:
        row = engine.submit(Request((ids(60, 1),), 2_000, stop_ids=frozenset()))
        events = iter(row)
        next(events)
        other = engine.submit(Request((ids(400, 2),), 3, stop_ids=frozenset()))
        for _ in range(300):
            next(events)
        assert not over.is_set() and other._queue.empty()
        over.set()
        found = other.result()
        row.cancel()
    assert found.tokens == alone(llm, Request((ids(400, 2),), 3, stop_ids=frozenset())).tokens


def test_a_text_that_another_goes_on_with() -> None:
    """Each token is read once, in either order, though one's ids are the other's first; what is held is counted."""
    llm, long = llm_of(CONFIG.replace(retrieve="all", tail=False)), ids(600, 1)
    short = long[:200]
    for (first, second), nodes in (((long, short), 1), ((short, long), 2)):
        with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
            sizes = []
            for document, known in ((first, 0), (second, 200), (first, len(first)), (second, len(second))):
                request = Request((document, (*long[200:204], *ids(5, 2))), 6, stop_ids=frozenset())
                found = engine.submit(request).result()
                assert same(found, alone(llm, request)) and found.cached_tokens == known
                check_engine(engine)
                sizes.append(engine.stats["shared"].nbytes)
            assert engine.stats["shared"].prefix_entries_resident == nodes and sizes[1:] == sizes[1:2] * 3
            assert (sizes[1] > sizes[0]) == (nodes == 2)


def test_who_waits_for_a_read_gives_it_its_own_time() -> None:
    """An interactive request needs what one of less priority reads: without that, it would wait until that one ages."""
    llm, document = llm_of(), ids(3_000, 2)
    limits = replace(default_limits(llm.model, llm.config), inter_token_seconds=0.001, promote_seconds=1000.0)
    with Engine(llm, limits=limits, prefix_cache_bytes=1 << 26) as engine:
        slow = engine.submit(Request((document, ids(5, 3)), 2, priority="batch"))
        while not engine.stats["shared"].reading:
            threading.Event().wait(0.001)
        fast = engine.submit(Request((document, ids(5, 4)), 2))
        for number in range(20):  # somebody else always has something to read, and comes first
            engine.submit(Request((ids(200, 10 + number),), 1))
        assert fast.result().cached_tokens == 3_000
        assert slow.result().reason == "length"


@pytest.mark.parametrize("index", ["flat", "sketch", "roargraph", "device"])
@pytest.mark.parametrize("before", [((60,), 40), ((700, 5), 20)], ids=["a question", "a turn longer than the document"])
def test_what_others_asked_changes_nothing(index: str, before: tuple[tuple[int, ...], int]) -> None:
    """To the bit: others do not insert into the indexes of a shared text, nor build them anew."""
    llm, document = llm_of(CONFIG.replace(index=index)), ids(400, 1)
    parts, tokens = before
    first = Request((document, *(ids(count, count) for count in parts)), tokens, stop_ids=frozenset())
    request = Request((document, ids(8, 3)), 30, SamplingParams(logprobs=4), stop_ids=frozenset())
    with Engine(llm, prefix_cache_bytes=0) as engine:
        expected = list(engine.submit(request))
    with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
        engine.submit(first).result()
        ticket = engine.submit(request)
        assert list(ticket) == expected and ticket.result().cached_tokens == 400


def test_prefixes_are_given_up_for_what_needs_the_memory() -> None:
    llm = llm_of()
    with Engine(llm, prefix_cache_bytes=300_000) as engine:
        for number in range(8):
            engine.submit(Request((ids(400, number), ids(5, 90)), 3)).result()
            check_engine(engine)
        shared = engine.stats["shared"]
    assert shared.evicted and shared.nbytes <= 300_000 and shared.prefix_entries_resident < 8


def test_one_row_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of()
    requests = [Request((ids(30 + number, number),), 8) for number in range(4)]
    calls = 0

    def failing(model: Any, caches: Any, *given: Any) -> torch.Tensor:
        nonlocal calls
        calls += calls > 0 or len(caches) > 1  # from the first step with two rows on
        logits = step(model, caches, *given)
        if calls == 1:
            raise RowsFailedError({1: RuntimeError("the search failed")}, logits)
        if calls == 3:
            logits[0] = torch.nan
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(bucket, "eager_step", failing)
        with Engine(llm) as engine:
            found = [ticket.result() for ticket in [engine.submit(request) for request in requests]]
            check_engine(engine)
    failed = [one for one in found if one.error is not None]
    assert len(failed) == 2 and {one.reason for one in failed} == {"error"}
    assert "the search failed" in str(failed[0].error) + str(failed[1].error)
    for request, one in zip(requests, found, strict=True):
        expected = alone(llm, request)
        assert one.tokens == expected.tokens[: len(one.tokens)]
        assert one.error is not None or same(one, expected)


def test_an_engine_that_dies_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of()
    monkeypatch.setattr(Sampler, "__call__", lambda *given, **named: 1 // 0)
    engine = Engine(llm)
    tickets = [engine.submit(Request((ids(20, number),), 4)) for number in range(3)]
    assert {type(ticket.result().error) for ticket in tickets} == {ZeroDivisionError}
    with pytest.raises(ZeroDivisionError):
        list(tickets[0])
    with pytest.raises(EngineFullError, match="closed"):
        engine.submit(Request((1, 2), 4))  # type: ignore[arg-type]
    engine.close()


def test_what_is_refused() -> None:
    llm = llm_of()
    with pytest.raises(InputDataError, match="at least one token"):
        Request(())
    with pytest.raises(InputDataError, match="at least one token"):
        Request(((1, 2), ()))
    with pytest.raises(ConfigError, match="max_tokens"):
        Request(((1,),), 0)
    with pytest.raises(ConfigError, match="stop"):
        Request(((1,),), stop="no")  # type: ignore[arg-type]
    limits = default_limits(llm.model, llm.config)
    with Engine(llm, limits=type(limits)(**{**vars(limits), "host_bytes": 50_000, "waiting": 2})) as engine:
        with pytest.raises(AdmissionError, match="host memory"):
            engine.submit(Request((ids(2_000, 1),), 4))
        with pytest.raises(ContextLengthError, match="4096 positions"):
            engine.submit(Request((ids(4_000, 1),), 97))
        assert engine.submit(Request(((5,),), 2)).result().reason == "length"
    with pytest.raises(EngineFullError):
        engine.submit(Request(((1,),)))


def test_what_is_answered_leaves_nothing_behind() -> None:
    """Caches that are left are those of the tree, whatever ended, was cancelled or failed; no read's thread is left."""

    def caches() -> int:
        gc.collect()
        return sum(type(one) is ra.RetrievalCache for one in gc.get_objects())

    before = caches()
    schedule = schedule_of(31, 16, 97)
    with Engine(llm_of(), prefix_cache_bytes=1 << 26) as engine:
        tickets = [engine.submit(request) for request in schedule.requests]
        for ticket in tickets[::3]:
            ticket.cancel()
        for ticket in tickets:
            ticket.result()
        engine.submit(Request(((5,),), 1)).result()  # the ticks after the last end have passed
        assert caches() - before <= engine.stats["shared"].prefix_entries_resident + 1
        assert prefill_threads.running == 0
    del engine, tickets, ticket
    assert caches() == before


def test_an_interrupt_ends_it_soon() -> None:
    """Ctrl-C at random times: `tests/fuzz/engine_interrupts.py`, in a process of its own."""
    done = run_preloaded(["-m", "tests.fuzz.engine_interrupts", "--tries", "8"])
    assert done.returncode == 0 and "8 interrupts" in done.stdout, done.stdout + done.stderr


def test_one_that_is_left_open_ends_with_python() -> None:
    """In the middle of an answer, nothing said on the error output."""
    code = (
        "from tests.engine.test_engine import ids, llm_of\n"
        "from retrieval_attn import Engine, Request\n"
        "engine = Engine(llm_of())\n"
        "ticket = engine.submit(Request((ids(900, 1),), 3000, stop_ids=frozenset()))\n"
        "print(next(iter(ticket)).token)\n"
    )
    done = run_preloaded(["-c", code], finalizes=True)
    assert done.returncode == 0 and done.stdout.strip().isdigit() and "Error" not in done.stderr, done.stderr


def test_closed_at_once() -> None:
    """What is there ends as cancelled, and no thread stays."""
    engine = Engine(llm_of())
    tickets = [engine.submit(Request((ids(600, number),), 500)) for number in range(5)]
    next(iter(tickets[0]))
    engine.close(drain=False)
    assert {ticket.result().reason for ticket in tickets} == {"cancelled"}
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("retrieval_attn-engine")]


def test_questions_about_one_text(loaded: Loaded) -> None:
    """The answers of a context that was read and asked alone."""
    llm = SimpleNamespace(model=loaded[0], tokenizer=loaded[1], config=ra.Config())
    text, questions = needle_text(12_000), [QUESTION, "What is the sky?", QUESTION]
    with Engine(llm) as engine:
        found = [ticket.result() for ticket in [engine.ask(text, one, max_tokens=16) for one in questions]]
    context = ra.Context(*loaded, ra.Config()).read(text, progress=False)
    expected = [context.ask(one, max_new_tokens=16) for one in questions]
    assert [one.text for one in found] == [one.text for one in expected] and "7391846" in found[0].text
    assert sorted(one.cached_tokens > 0 for one in found) == [False, True, True]


def test_texts_and_logprobs_come_as_they_are_chosen() -> None:
    llm = llm_of()
    request = Request((ids(50, 1),), 6, SamplingParams(logprobs=3), stop=(" 9",))
    with Engine(llm) as engine:
        ticket = engine.submit(request)
        events = list(ticket)
        end = ticket.result()
    chosen = [event for event in events if event.token >= 0]
    assert "".join(event.text for event in events) == end.text and tuple(event.token for event in chosen) == end.tokens
    for event in chosen:
        assert len(event.top) == 3 and event.top[0] == (event.token, pytest.approx(event.logprob))
        assert event.logprob is not None and event.logprob < 0


def test_a_listener_has_all_items_in_order() -> None:
    """Those that were there first as well; then nothing comes to who iterates."""
    llm = llm_of()
    request = Request((ids(50, 1),), 6)
    with Engine(llm) as engine:
        early, late = engine.submit(request), engine.submit(request)
        items: list[list[Any]] = [[], []]
        early.listen(items[0].append)
        assert next(iter(late)).token >= 0
        late.listen(items[1].append)
        wait_until(lambda: all(one and isinstance(one[-1], Finished) for one in items))
        over = engine.submit(request)
        engine.submit(request).result()  # it came later, and is told later
        whole: list[Any] = []
        over.listen(whole.append)
        wait_until(lambda: bool(whole) and isinstance(whole[-1], Finished))
    assert [event.token for event in whole[:-1]] == list(items[0][-1].tokens)
    assert [event.token for event in items[0][:-1]] == list(items[0][-1].tokens)
    assert [event.token for event in items[1][:-1]] == list(items[0][-1].tokens)[1:]


def test_a_question_about_a_long_text_page_locks_nothing_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking is a device's: a second turn of 16K tokens failed on a CPU, where its short part was read packed."""
    monkeypatch.setattr(page_lock, "LEAST_BYTES", 1)
    monkeypatch.setattr(segment, "HUGE_PAGE", 1)  # what such a text has large segments by
    llm = llm_of()
    text = ids(1500, 1)
    with Engine(llm) as engine:
        found = [engine.submit(Request((text, ids(9, seed)), 3)).result() for seed in (2, 3)]
    assert [one.error for one in found] == [None, None] and found[1].cached_tokens == 1500
