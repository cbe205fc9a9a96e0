"""Ctrl-C at random moments: a context answers as before, or says that it does not; shared indexes are never half."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from retrieval_attn.cpu.segment import Segment
from retrieval_attn.index.flat import FlatIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.keys import StoredKeys
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.index.threads import uninterrupted
from tests.fuzz import interrupts


@pytest.fixture(autouse=True)
def default_handler() -> None:
    """A shell may have started this with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _graphs_of_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `Subject` sets for its whole process is taken back after a test. Ends may take longer: tests share cores."""
    monkeypatch.setattr(interrupts.roargraph, "EXACT_BELOW", interrupts.roargraph.EXACT_BELOW)
    monkeypatch.setattr(interrupts, "SECONDS", 20.0)


@pytest.mark.slow
def test_moments_of_everything(needle_model_path: Path) -> None:
    """A few of those that `python -m tests.fuzz.interrupts` takes hundreds of."""
    tallies = interrupts.run(8, 0, ["auto"], needle_model_path)
    assert [sum(tally.outcomes.values()) for tally in tallies.values()] == [2] * 4
    assert not [fault for tally in tallies.values() for fault in tally.faults]


def test_the_tool_finds_a_context_that_is_half(needle_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rollback of an extension, interrupted ones are lost."""
    monkeypatch.setattr("retrieval_attn.attention.cache.Rollback.undo", lambda self: True)
    tally = interrupts.run(6, 0, ["auto"], needle_model_path, ["extend"])["extend"]
    assert tally.outcomes["refused"] + tally.outcomes["wrong"] > 0


def test_a_signal_waits_for_the_end_of_a_block() -> None:
    """It is raised there, once, and the handler is as before; in other threads nothing changes."""
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def elsewhere() -> None:
        with uninterrupted():
            done.append("thread")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    with pytest.raises(ZeroDivisionError), uninterrupted():
        raise ZeroDivisionError
    assert done[-1] == "thread"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_in_the_middle_of_an_insertion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes were there and keys were not: a fork's insertion, interrupted, left its parent an index of two lengths."""
    keys = np.random.default_rng(0).standard_normal((1, 12, 4)).astype(np.float32)
    segment = Segment(1, 16, 4, 4, Format.FLOAT32)
    segment.append(keys[:, :8], keys[:, :8])
    segment.build_index(IndexSpec.of("flat", {"codes": "int8"}), 0, 8, None)
    segment.append(keys[:, 8:], keys[:, 8:])
    add, changes = StoredKeys.add, segment.changes

    def interrupted(runs: StoredKeys, new: np.ndarray) -> None:
        signal.raise_signal(signal.SIGINT)
        add(runs, new)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(StoredKeys, "add", interrupted)
        segment.extend_index(12)
    index = segment.indexes[0]
    assert isinstance(index, FlatIndex) and len(index) == 12 and segment.changes > changes
    assert index.search(keys[0, 8:], 12).ids.max() == 11
