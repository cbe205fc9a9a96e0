"""Moves between RAM and disk, on real files: what is fetched is in memory, what is given up is not."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from retrieval_attn.errors import ConfigError, StoreError
from retrieval_attn.store import ContextStore
from retrieval_attn.store.disk import file_system
from retrieval_attn.store.mapped import give_up, resident_bytes
from retrieval_attn.store.shelf import Done, Shelf
from tests.store.cases import IDS, save
from tests.waiting import WAIT_SECONDS

ROOMY = 1 << 40


@pytest.fixture
def store(tmp_path: Path) -> ContextStore:
    return ContextStore(tmp_path / "store")


@pytest.fixture
def on_disk(tmp_path: Path) -> None:
    """Only where files are on a disk can memory forget them."""
    probe = tmp_path / "probe"
    probe.write_bytes(b"x" * (1 << 20))
    with probe.open("rb+") as file:
        os.fsync(file.fileno())
    give_up(probe)
    if resident_bytes(probe):
        pytest.skip(f"the file system ({file_system(tmp_path, tmp_path.stat().st_dev) or 'unknown'}) keeps its pages")


def settled(shelf: Shelf) -> bool:
    """Wait until the queue is prefetched. Return False after 20 seconds."""
    with shelf._wake:
        return shelf._wake.wait_for(lambda: shelf._queue is None and not shelf._working, 20)


def applied(shelf: Shelf, names: list[str]) -> Done:
    """Prefetch these contexts in this thread."""
    return shelf._apply(tuple(names), lambda: False)


def three(store: ContextStore) -> list[str]:
    return [save(store, name, IDS + place, seed=10 * place) for place, name in enumerate(["a", "b", "c"])]


def resident(store: ContextStore, name: str) -> float:
    """Share of a context's bytes that are in memory."""
    files = [path for node in store.resolve(name).chain for path in store.files(node)]
    return sum(resident_bytes(path) or 0 for path in files) / sum(path.stat().st_size for path in files)


def forget(store: ContextStore) -> None:
    for context in store.list():
        for node in context.chain:
            for path in store.files(node):
                give_up(path)


@pytest.mark.usefixtures("on_disk")
def test_what_is_expected_comes_to_memory(store: ContextStore) -> None:
    three(store)
    forget(store)
    assert max(resident(store, name) for name in "abc") < 0.1
    with Shelf(store, ram_bytes=ROOMY) as shelf:
        shelf.expect(["b", "not there", "a"])
        assert settled(shelf)
        assert min(resident(store, name) for name in "ab") > 0.99
        assert resident(store, "c") < 0.1
        assert sorted(digest for digest, entry in shelf.entries.items() if entry.in_ram) == sorted(
            store.resolve(name).digest for name in "ab"
        )


@pytest.mark.usefixtures("on_disk")
def test_memory_is_given_up_for_what_is_expected(store: ContextStore) -> None:
    """Two contexts fit: what nobody waits for leaves, then what is needed last."""
    digests = dict(zip("abc", three(store), strict=True))
    nbytes = store.resolve("a").nbytes
    forget(store)
    with Shelf(store, ram_bytes=2 * nbytes + nbytes // 2) as shelf:
        assert applied(shelf, ["a", "b"]).fetched == [digests["a"], digests["b"]]
        done = applied(shelf, ["c", "b"])
        assert (done.fetched, done.evicted) == ([digests["c"]], [digests["a"]])
        assert done.nbytes >= nbytes - 4096
        assert resident(store, "a") < 0.1 and min(resident(store, name) for name in "bc") > 0.99
        assert applied(shelf, ["c", "a"]).evicted == [digests["b"]]
    assert store.verify() == []


def test_a_fork_moves_without_what_it_shares(store: ContextStore) -> None:
    """A chain of three nodes, a fork of the second: nodes with the same names are one group."""
    root = save(store, None)
    turn = save(store, "long", IDS[:50], parent=root, seed=3)
    last = save(store, "long", IDS[50:90], parent=turn, seed=4)
    fork = save(store, "fork", IDS[90:], parent=turn, seed=5)
    with Shelf(store, ram_bytes=ROOMY) as shelf:
        shelf.refresh()
        assert set(shelf.entries) == {turn, last, fork}, "root and turn are one group"
        assert shelf.entries[turn].nbytes > store.get(root).nbytes


def test_a_newer_queue_replaces_an_older_one(store: ContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second queue is looked at before the rest of the first."""
    digests = dict(zip("abc", three(store), strict=True))
    started, go_on = threading.Event(), threading.Event()
    fetched: list[str] = []
    with Shelf(store, ram_bytes=ROOMY) as shelf:

        def fetch(group: object, stop: object) -> int:
            fetched.append(group.digest)  # type: ignore[attr-defined]
            started.set()
            assert go_on.wait(WAIT_SECONDS)
            return 1

        monkeypatch.setattr(shelf, "_fetch", fetch)
        monkeypatch.setattr("retrieval_attn.store.shelf.Group.resident_bytes", lambda group: 0)
        shelf.expect(["a", "b"])
        assert started.wait(WAIT_SECONDS)
        shelf.expect(["c"])
        go_on.set()
        assert settled(shelf)
    assert fetched == [digests["a"], digests["c"]]


def test_a_damaged_context_does_not_stop_the_others(store: ContextStore, caplog: pytest.LogCaptureFixture) -> None:
    digests = three(store)
    path = store.files(digests[0])[0]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    forget(store)
    with caplog.at_level(logging.WARNING), Shelf(store, ram_bytes=ROOMY) as shelf:
        done = applied(shelf, ["a", "b", "c"])
    assert digests[0] not in done.fetched
    if set(done.fetched) != {digests[1], digests[2]}:  # where memory cannot forget files, they are there already
        assert done.fetched == []
    else:
        assert "damaged" in caplog.text


def test_what_cannot_be(store: ContextStore) -> None:
    with pytest.raises(ConfigError, match="must be 0 bytes or more"):
        Shelf(store, ram_bytes=-1)
    shelf = Shelf(store, ram_bytes=1)
    assert applied(shelf, ["a"]) == ([], [], 0)  # a store that does not exist yet
    shelf.close()
    shelf.close()
    with pytest.raises(StoreError, match="closed"):
        shelf.expect([])


def test_saves_and_removals_beside_the_shelf(store: ContextStore) -> None:
    """A thread of fetches while names come and go: nothing is lost, nothing raised."""
    with Shelf(store, ram_bytes=1 << 20) as shelf:
        for turn in range(12):
            save(store, f"n{turn % 4}", IDS + turn, seed=turn)
            shelf.expect([f"n{place}" for place in range(4)])
            if turn % 3 == 2:
                store.remove(f"n{turn % 4}")
                store.gc()
        assert settled(shelf)
    assert store.verify() == []


def test_an_opened_node_lets_its_maps_go_at_once(store: ContextStore) -> None:
    """They were in a circle of references: memory that they mapped could not be given up until a collection."""
    save(store, "a")
    node = store.get(store.resolve("a").digest)
    kept = weakref.ref(node)
    gc.disable()
    try:
        del node
        assert kept() is None
    finally:
        gc.enable()


def test_pages_of_small_files(tmp_path: Path) -> None:
    empty, small = tmp_path / "empty", tmp_path / "small"
    empty.write_bytes(b"")
    small.write_bytes(np.arange(100, dtype=np.uint8).tobytes())
    assert resident_bytes(empty) == 0
    assert resident_bytes(small) in (0, 100, None)
    give_up(empty)
