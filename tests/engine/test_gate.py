"""Gates of prefill threads; the threads stay, because PyTorch keeps cuDNN's plans per thread."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future

import pytest

from retrieval_attn.engine.gate import Gate, PrefillThreads
from retrieval_attn.offload.threads import telling, wait_for
from tests.waiting import WAIT_SECONDS


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
