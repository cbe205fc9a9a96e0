"""Int8 rows of opened contexts: made ahead of the first answer, used by running batches, beside foreground work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Request
from retrieval_attn.index.formats import Format
from retrieval_attn.offload import int8_rows, threads
from retrieval_attn.offload.int8_rows import AwaitedRows, Int8RowMirror, RowsUnderWay, ask_for_rows, rows_of
from retrieval_attn.runner.graph.decode_graph import DecodeGraph
from retrieval_attn.runner.graph.decoder import GraphDecoder
from retrieval_attn.runner.graph.host_row_gather import Reads
from retrieval_attn.runner.graph.pool import exhaust
from retrieval_attn.saving import save
from retrieval_attn.store import ContextStore
from tests.engine.audit import check_engine
from tests.engine.test_saved_contexts import NEVER, ids, llm_of
from tests.index.test_host_codes import answer, context_of, ids_of
from tests.offload.test_int8_rows import HEADS, appended, made_rows, numbers, rows_in
from tests.runner.graph_cases import CONFIG
from tests.runner.test_host_row_gather import REACHED
from tests.waiting import WAIT_SECONDS

TOKENS = 1200


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "store")


class Makers:
    """Threads that make rows, each of which begins once it may. failing: number of segments without memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turns, self.asked, self.failing = threading.Semaphore(0), 0, 0
        real = int8_rows._made_rows

        def made(segment: Segment, device: torch.device) -> Int8RowMirror:
            self.asked += 1
            assert self._turns.acquire(timeout=WAIT_SECONDS)
            if self.failing:
                self.failing -= 1
                raise OSError("the disk went away")
            return real(segment, device)

        monkeypatch.setattr(int8_rows, "_made_rows", made)

    def make(self, segments: int) -> None:
        """Let the next segments be made, and wait for them."""
        wanted, end = int8_rows._finished.count + segments, time.monotonic() + WAIT_SECONDS
        self._turns.release(segments)
        while int8_rows._finished.count < wanted:
            assert time.monotonic() < end, "nobody asked for rows"
            time.sleep(0.002)

    def release(self) -> None:
        """Let all be made."""
        self._turns.release(1 << 10)


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Makers]:
    found = Makers(monkeypatch)
    yield found
    found.release()
    made_rows()


def saved(store: ContextStore, **options: Any) -> ra.Context:
    context = context_of(CONFIG.replace(**REACHED, **options))
    context.read(ids_of(context, TOKENS), progress=False)
    context.save("rows", store=store)
    return context


@pytest.mark.usefixtures("emulated_graphs")
def test_rows_are_made_before_the_first_answer(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening asks for them, before a step is planned."""
    read = saved(store, graph=True)
    monkeypatch.setattr(save, "make_ready", lambda *given: None)
    opened = context_of(read.config).open("rows", store=store, progress=False)
    made_rows()
    rows = rows_in(opened.cache)
    assert rows and all(isinstance(one, Int8RowMirror) for one in rows)
    question = ids_of(opened, 8)
    assert answer(opened, question) == answer(read, question)
    opened.kept.wait()


@pytest.mark.usefixtures("emulated_graphs")
def test_contexts_without_rows_ask_for_none(store: ContextStore, makers: Makers) -> None:
    context = context_of(CONFIG.replace(**{**REACHED, "index_options": {"key_bytes": 64}}))
    context.read(ids_of(context, TOKENS), progress=False)
    context.save("plain", store=store)
    context_of(context.config).open("plain", store=store, progress=False).kept.wait()
    assert not makers.asked


class Reading:
    """Readers of the host's memory in each step of a decoder; `at` calls something in a step."""

    def __init__(self, at: dict[int, Callable[[], object]]) -> None:
        self.steps: list[tuple[int, ...]] = []
        self._at = at

    def note(self, reads: tuple[int, ...]) -> None:
        self.steps.append(reads)
        self._at.get(len(self.steps), int)()

    @property
    def changes(self) -> list[tuple[int, ...]]:
        """Readers of the steps, without repetitions."""
        return [one for number, one in enumerate(self.steps) if not number or one != self.steps[number - 1]]


@pytest.mark.usefixtures("emulated_graphs")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_running_batch_uses_them(
    failing: int, store: ContextStore, makers: Makers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the step on after the last layer's are complete; never some layers by the host and others by the device, for
    which a graph would have to be captured. Not if a layer has none: the host goes on for all.
    """
    context = saved(store)
    layers = len(rows_in(context.cache))
    llm = llm_of(context.model, context.config)
    llm.tokenizer = context.tokenizer
    request = Request((ids(40, 5),), 24, context="rows", stop_ids=NEVER)
    makers.failing = failing

    def replan() -> None:
        rows = [row for row in graph.rows if row is not None]
        exhaust(graph.take(rows, graph.kind._replace(host_access=()), range(1)))

    reading = Reading({6: replan, 9: lambda: makers.make(layers - 1)})
    step, take = DecodeGraph.step, DecodeGraph.take
    graph: Any = None

    def taken(self: DecodeGraph, *given: Any) -> Iterator[None]:
        if not reading.steps:
            makers.make(1)
        return take(self, *given)

    def stepped(self: DecodeGraph, *given: Any, **options: Any) -> Any:
        nonlocal graph
        graph = self
        reading.note(self.kind.host_access)
        return step(self, *given, **options)

    monkeypatch.setattr(DecodeGraph, "take", taken)
    monkeypatch.setattr(DecodeGraph, "step", stepped)
    with Engine(llm, store=store) as engine:
        found = engine.submit(request).result()
        check_engine(engine)
    assert makers.asked == layers and len(reading.steps) == 23
    assert reading.steps[:9] == [()] * 9
    expected: list[tuple[int, ...]] = [()] if failing else [(), (Reads.BOTH,) * layers]
    assert reading.changes == expected
    assert len(reading.steps) > 12 and (failing or reading.steps[9] == (Reads.BOTH,) * layers)
    monkeypatch.undo()
    with Engine(llm, store=store) as engine:
        assert engine.submit(request).result().tokens == found.tokens


@pytest.mark.usefixtures("emulated_graphs")
def test_an_answer_alone_uses_them(store: ContextStore, makers: Makers, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `LLM.open` decodes, whose steps go ahead of the last token."""
    read = saved(store, graph=True)
    opened = context_of(read.config).open("rows", store=store, progress=False)
    question, layers = ids_of(opened, 8), len(rows_in(read.cache))
    reading = Reading({3: lambda: makers.make(1), 5: lambda: makers.make(layers - 1)})
    raise_error = GraphDecoder.raise_host_error

    def noted(self: GraphDecoder) -> None:
        reading.note(self.reads)
        raise_error(self)

    monkeypatch.setattr(GraphDecoder, "raise_host_error", noted)
    assert answer(opened, question) == answer(read, question)
    assert reading.steps[:5] == [()] * 5 and len(reading.steps) > 7
    assert all(reads and Reads.HOST not in reads for reads in reading.steps[5:])
    opened.kept.wait()


def test_rows_that_are_awaited() -> None:
    """Complete once, when the last thread is done, also one that finished while a plan was made."""
    segment, where = Segment(HEADS, 900, 32, 48, Format.FLOAT32), torch.device("cpu")
    appended(segment, numbers(60, 1), write=False)
    segment.freeze()

    class Path:
        segments = (segment,)

    path: Any = Path()
    awaited = AwaitedRows()
    assert not awaited.are_pending and not awaited.are_complete
    segment.replicas[int8_rows.KIND] = under_way = RowsUnderWay(done=False)
    awaited.watch([path])
    awaited.watch_asked([path])
    assert awaited.are_pending and not awaited.are_complete
    under_way.done = True
    assert not awaited.are_pending and awaited.are_complete
    awaited.watch([path])
    awaited.watch_asked([path])
    assert not awaited.are_complete
    segment.replicas[int8_rows.KIND] = None
    awaited.watch([path])
    ask_for_rows(segment, where)
    made_rows()
    awaited.watch_asked([path])
    assert awaited.are_complete and isinstance(rows_of(segment), Int8RowMirror)


def frozen(count: int) -> list[Segment]:
    """Segments of several pieces each."""
    found = []
    for seed in range(count):
        segment = Segment(HEADS, 900, 32, 48, Format.FLOAT32)
        appended(segment, numbers(400, seed), write=False)
        segment.freeze()
        found.append(segment)
    return found


@pytest.mark.parametrize("busy", [False, True])
def test_threads_yield_to_steps(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While rows decode one thread makes rows and rests as long as it worked; otherwise all of them do."""
    monkeypatch.setattr(int8_rows, "MAKERS", 3)
    monkeypatch.setattr(int8_rows, "AT_ONCE", 100)
    monkeypatch.setattr(threads, "BUSY_SECONDS", 1000.0 if busy else 0.0)
    threads.foreground.note()
    together, present, lock = [0], set(), threading.Lock()
    meeting = threading.Barrier(3)
    rested: list[float] = []
    write = int8_rows._write_piece

    def written(*given: Any) -> float:
        with lock:
            present.add(threading.get_ident())
            together[0] = max(together[0], len(present))
        if not busy:
            meeting.wait(WAIT_SECONDS)
        write(*given)
        with lock:
            present.discard(threading.get_ident())
        return 0.01

    monkeypatch.setattr(int8_rows, "_write_piece", written)
    monkeypatch.setattr(int8_rows, "_sleep", rested.append)
    int8_rows._makers.cache_clear()
    segments = frozen(3)
    for segment in segments:
        ask_for_rows(segment, torch.device("cpu"))
    made_rows()
    int8_rows._makers.cache_clear()
    assert all(isinstance(rows_of(segment), Int8RowMirror) for segment in segments)
    assert together == [1 if busy else 3] and rested == [0.01] * 12 * busy


def test_a_gpu_that_is_full_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made once there is memory: without them all later answers would be slower."""
    (segment,) = frozen(1)
    write, failing = int8_rows._write_piece, [2]

    def scarce(*given: Any) -> float:
        if failing[0]:
            failing[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return write(*given)

    monkeypatch.setattr(int8_rows, "_write_piece", scarce)
    monkeypatch.setattr(threads, "OOM_WAITS", (0.0, 0.0))
    ask_for_rows(segment, torch.device("cpu"))
    made_rows()
    rows = rows_of(segment)
    assert isinstance(rows, Int8RowMirror) and rows.length == 400
