"""Saved contexts of requests that wait come from the disk before their turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.request import Request
from retrieval_attn.engine.saved_text import ContextPrefetcher
from retrieval_attn.store import ContextStore, Shelf
from retrieval_attn.store.mapped import give_up, resident_bytes
from tests.engine.test_saved_contexts import NEVER, ids, llm_of, read
from tests.waiting import comes_true

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What shelves are told to expect."""
    found: list[list[str]] = []
    expect = Shelf.expect

    def noted(self: Shelf, names: Sequence[str]) -> None:
        found.append(list(names))
        expect(self, names)

    monkeypatch.setattr(Shelf, "expect", noted)
    return found


def test_names_in_the_order_of_their_requests(told: list[list[str]], tmp_path: Path) -> None:
    store = ContextStore(tmp_path)
    expected = ContextPrefetcher(lambda: store, 1 << 30)
    for number, name in enumerate(["b", "a", "b", "c"]):
        expected.add(str(number), name)
    expected.remove("0")
    expected.remove("unknown")
    expected.add("4", "d")
    assert told == [["b"], ["b", "a"], ["b", "a", "c"], ["a", "b", "c", "d"]]
    expected.close()
    expected.add("5", "e")
    assert len(told) == 4 and not [one for one in threading.enumerate() if one.name == "context-shelf"]


@pytest.mark.parametrize("named", [True, False])
def test_a_waiting_request_finds_its_files_in_memory(named: bool, told: list[list[str]], tmp_path: Path) -> None:
    """One row decodes; the context of the next one, taken out of memory, is there again before it begins. The request
    names it, or begins with its tokens.
    """
    store, llm = ContextStore(tmp_path), llm_of()
    read(llm, 900, 1).save("other", store=store)
    files = store.files(read(llm, 900, 2).save("wanted", store=store).digest)
    limits = replace(default_limits(llm.model, llm.config), rows=1, ahead=0)
    with Engine(llm, limits=limits, store=store) as engine:
        long = engine.submit(Request((ids(50, 3),), max_tokens=4000, stop_ids=NEVER))
        assert comes_true(lambda: engine.stats["steps"] > 0)
        for file in files:
            give_up(file)
        stay = any(resident_bytes(file) for file in files)  # some disks keep their files in memory
        context, text = ("wanted", ()) if named else (None, (ids(900, 2),))
        waiting = [engine.submit(Request((*text, ids(20, seed)), 2, context=context)) for seed in (5, 6)]
        assert comes_true(lambda: bool(told)) and told == [["wanted"]]
        assert stay or comes_true(lambda: all(resident_bytes(file) for file in files))
        assert engine.stats["waiting"] == 2
        long.cancel()
        for one in waiting:
            assert one.result().cached_tokens >= 900
