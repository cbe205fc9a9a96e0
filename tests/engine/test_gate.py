"""Gates of prefill threads; the threads stay, because PyTorch keeps cuDNN's plans per thread."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future

import pytest

from retrieval_attn.engine.gate import Gate, PrefillThreads, ReadCancelled
from retrieval_attn.offload.threads import telling, wait_for
from tests.waiting import WAIT_SECONDS, wait_until


def test_the_next_prefill_runs_in_the_same_thread() -> None:
    """A thread of its own for each prefill makes plans again: a second of every prompt of 24K on an H100."""
    threads, found = PrefillThreads(), list[int]()
    for _ in range(3):
        assert threads.start(lambda: found.append(threading.get_ident())).wait(WAIT_SECONDS)
        assert threads.running == 0
    assert len(set(found)) == 1


def test_prefills_that_overlap_have_threads_of_their_own() -> None:
    threads, goes = PrefillThreads(), threading.Event()
    found: list[int] = []

    def work() -> None:
        found.append(threading.get_ident())
        goes.wait(WAIT_SECONDS)

    overs = [threads.start(work) for _ in range(2)]
    assert threads.running == 2
    goes.set()
    assert all(over.wait(WAIT_SECONDS) for over in overs) and len(set(found)) == 2
    assert threads.running == 0


def test_a_thread_forgets_what_it_ran() -> None:
    """A prefill holds a cache of gigabytes."""

    class Work:
        def __call__(self) -> None:
            pass

    threads, work = PrefillThreads(), Work()
    gone = weakref.ref(work)
    over = threads.start(work)
    del work
    assert over.wait(WAIT_SECONDS) and gone() is None


def test_a_prefill_that_raises_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    threads = PrefillThreads()

    def fails() -> None:
        raise RuntimeError("no memory")

    assert threads.start(fails).wait(WAIT_SECONDS) and "no memory" in caplog.text
    assert threads.start(lambda: None).wait(WAIT_SECONDS) and threads.running == 0


def test_the_engine_goes_on_while_a_chunk_waits_for_copies() -> None:
    """On an H200 rows waited .1 s, five times in 15 s, until keys of an earlier layer had left the device."""
    gate, copies = Gate(2), Future[None]()

    def read() -> None:
        gate.enter()
        with telling(gate.stalled):
            wait_for([copies])
        gate.enter()
        gate.end()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    gate.grant(1)
    assert gate.wait(10, or_stalled=True) and gate.is_stalled and gate.chunks_done == 0
    assert gate.granted == 0 and not gate.wait(0.05), "the chunk is not complete"
    copies.set_result(None)
    assert gate.wait(WAIT_SECONDS) and not gate.is_stalled and gate.chunks_done == 1
    gate.grant(1)
    thread.join(WAIT_SECONDS)
    assert gate.ended


def test_waiting_for_what_is_done_stalls_nothing() -> None:
    gate, done = Gate(1), Future[None]()
    done.set_exception(OSError("told to who asks for the result"))
    with telling(gate.stalled):
        wait_for([done])
    wait_for([done])
    assert not gate.is_stalled


class Launched:
    """Launches of a thread that take a while; counts how often it waited for them. pending: not waited for."""

    def __init__(self) -> None:
        self.settled = self.paced = 0
        self.pending = False

    def settle(self) -> None:
        self.settled, self.pending = self.settled + 1, False

    def pace(self) -> None:
        self.paced += 1
        time.sleep(0.005)


def test_an_open_gate_stops_nobody_until_it_is_closed() -> None:
    launches, entered, stop = Launched(), list[int](), threading.Event()
    gate = Gate(1000, launches, layer_chunks=3, chunk_tokens=8)

    def read() -> None:
        while not stop.is_set():
            entered.append(gate.enter(20))
            launches.pending = True
        gate.end()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    gate.grant(1)
    assert gate.wait(WAIT_SECONDS) and entered == [8], "of a closed one, as many tokens as are granted"
    assert gate.take_done() == 1 and gate.take_done() == 0 and gate.chunk_seconds == 0
    for round_ in range(5):
        begun, paced = len(entered), launches.paced
        gate.grant(1, is_open=True)
        wait_until(lambda begun=begun: len(entered) > begun + 10)
        assert entered[begun] == 24, "it takes what a forward takes"
        assert not gate.wait(0.02) and gate.chunk_seconds >= 0.005 / 3 and launches.paced >= paced + 10
        gate.close()
        assert gate.wait(WAIT_SECONDS) and not launches.pending, f"it stops and has settled, {round_}"
        assert not gate.alone and gate.granted == 0 and gate.take_done() == 3 * (len(entered) - begun)
        count = len(entered)
        time.sleep(0.02)
        assert len(entered) == count
        gate.grant(1, alone=False)
        assert gate.wait(WAIT_SECONDS) and entered[count:] == [8] and gate.take_done() == 1
    stop.set()
    gate.grant(1)
    thread.join(WAIT_SECONDS)
    assert gate.ended


def test_an_open_read_can_be_cancelled() -> None:
    gate, raised = Gate(1000, Launched()), threading.Event()

    def read() -> None:
        with pytest.raises(ReadCancelled):
            while True:
                gate.enter()
        raised.set()

    threading.Thread(target=read, daemon=True).start()
    gate.grant(1, is_open=True)
    wait_until(lambda: gate.chunks_done > 10)
    gate.cancel()
    assert raised.wait(WAIT_SECONDS)
