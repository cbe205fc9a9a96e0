"""Saved contexts over HTTP before they are durable: slow and full disks, removal, kill -9, shutdown."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch

from retrieval_attn.engine import background_saves
from retrieval_attn.engine.background_saves import BackgroundSave
from retrieval_attn.engine.prefix_handle import PrefixEntry
from retrieval_attn.engine.radix_cache import Lease
from retrieval_attn.engine.saved_text import UnsavedText
from retrieval_attn.errors import UnknownContextError
from retrieval_attn.offload import threads
from retrieval_attn.saving import layers
from retrieval_attn.saving.save import Saver
from retrieval_attn.store import ContextStore
from retrieval_attn.store.disk import OS_DISK
from tests.fuzz.store_faults import FaultDisk
from tests.server.inside import Inside
from tests.server.process import document, processes, runs, serving
from tests.tiny_models import random_ids
from tests.waiting import WAIT_SECONDS, wait_until

LAYER_BYTES = 4096
"""Smallest write of a layer's file: the store's own files are smaller."""


class Gate:
    """Let writes of layers pass, block them, slow them down, or fail them for want of space."""

    def __init__(self) -> None:
        self.open, self.begun = threading.Event(), threading.Event()
        self.seconds, self.full = 0.0, False
        self.disk = FaultDisk(0, self._act)

    def _act(self, _: int, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if name == "write" and len(arguments[1]) >= LAYER_BYTES:
            self.begun.set()
            self.open.wait()
            time.sleep(self.seconds)
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
        return call()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def inside(tmp_path: Path, gate: Gate) -> Iterator[Inside]:
    found = Inside(tmp_path / "store", disk=gate.disk)
    found.wait_until_it_serves()
    yield found
    gate.open.set()
    gate.seconds = 0
    found.end()


@pytest.fixture
def http(inside: Inside) -> Iterator[httpx.Client]:
    with inside.client() as client:
        yield client


def text(count: int, seed: int) -> str:
    return " ".join(map(str, random_ids(1, count, seed=seed)[0].tolist()))


def made(http: httpx.Client, name: str, given: str) -> dict[str, Any]:
    reply = http.post("/v1/contexts", json={"name": name, "text": given})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def asked(http: httpx.Client, question: str, **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": question, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **options}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def state(http: httpx.Client, name: str) -> dict[str, Any]:
    reply = http.get(f"/v1/contexts/{name}")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def metric(http: httpx.Client, name: str) -> float:
    lines = [one.split() for one in http.get("/metrics").text.splitlines()]
    (value,) = [float(one[1]) for one in lines if one[0] == f"retrieval_attn:{name}"]
    return value


def files_of(store: Path) -> list[Path]:
    """Files of nodes, names and saves under way."""
    return [one for part in ("nodes", "tmp", "contexts") for one in (store / part).rglob("*") if one.is_file()]


def test_a_context_is_asked_before_it_is_durable(inside: Inside, http: httpx.Client, gate: Gate) -> None:
    """The answer to POST does not wait for the disk; the flag flips when the files and the name are on it."""
    record = made(http, "book", text(600, 1))
    assert gate.begun.wait(WAIT_SECONDS) and not gate.open.is_set()
    assert record["durable"] is False and record["tokens"] == 600 and state(http, "book") == record
    assert record in http.get("/v1/contexts").json()["data"]
    assert "tiny@book" in [one["id"] for one in http.get("/v1/models").json()["data"]]
    assert http.get("/v1/models/tiny@book").status_code == 200
    assert metric(http, "context_saves_running") == 1
    before = [asked(http, text(9, 2), model="tiny@book") for _ in range(2)]
    assert [cached(one) for one in before] == [600, 600] and not gate.open.is_set()
    gate.open.set()
    wait_until(lambda: state(http, "book")["durable"])
    done = state(http, "book")
    assert done["bytes"] > 0 and "error" not in done and http.get("/v1/contexts").json()["data"] == [done]
    assert metric(http, "context_saves_running") == 0
    after = asked(http, text(9, 2), model="tiny@book")
    assert after["choices"] == before[0]["choices"] and cached(after) == 600


class Clock:
    """Time that passes only in pauses, and by `work`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(background_saves, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("busy", "share"), [(("questions",), 0.1), (("rows",), 0.5), (("questions", "rows"), 0.1), ((), 1.0)]
)
def test_a_write_has_its_share_of_the_time(
    busy: tuple[str, ...], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where requests never end: else nothing is saved while a server is busy."""
    clock = Clock(monkeypatch)
    for name, what in (("questions", "questions"), ("rows", "foreground")):
        monkeypatch.setattr(background_saves, what, SimpleNamespace(is_recent=name in busy))
    save = BackgroundSave(
        cast(UnsavedText, SimpleNamespace(name="book", tokens=1)), cast(Lease, None), lambda: cast(Saver, None)
    )
    monkeypatch.setattr(save.cancelled, "wait", clock.work)
    began = clock.now
    for _ in range(50):
        clock.work(0.02)
        save._yield_to_requests()
    save.saved.seconds = clock.now - began
    assert save.saved.seconds == pytest.approx(1.0 / share, rel=0.15)
    assert save.written_seconds == pytest.approx(1.0)


def test_a_question_that_ends_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Question:
        @property
        def is_recent(self) -> bool:
            return clock.now < 100.05

    monkeypatch.setattr(background_saves, "questions", Question())
    save = BackgroundSave(
        cast(UnsavedText, SimpleNamespace(name="book", tokens=1)), cast(Lease, None), lambda: cast(Saver, None)
    )
    monkeypatch.setattr(save.cancelled, "wait", clock.work)
    clock.work(0.02)
    save._yield_to_requests()
    assert clock.now == pytest.approx(100.05, abs=0.01)


def test_what_a_later_process_opens_is_the_same(tmp_path: Path, gate: Gate) -> None:
    """Of a context and one that continues it, saved while the first was not durable: only new tokens are written."""
    answers = []
    for _ in range(2):
        inside = Inside(tmp_path / "store", disk=gate.disk)
        inside.wait_until_it_serves()
        with inside.client() as http:
            if not gate.open.is_set():
                made(http, "book", text(600, 1))
                reply = http.post("/v1/contexts/book/save", json={"name": "more", "text": text(200, 3)})
                assert reply.status_code == 200 and reply.json()["tokens"] == 800 and not reply.json()["durable"]
            answers += [asked(http, text(9, 2), model=f"tiny@{name}") for name in ("book", "more")]
            if not gate.open.is_set():
                gate.open.set()
                wait_until(lambda: all(state(http, name)["durable"] for name in ("book", "more")))
                assert http.post("/v1/contexts/book/fork", json={"name": "copy"}).json()["durable"]
        inside.end()
    assert [one["choices"] for one in answers[:2]] == [one["choices"] for one in answers[2:]]
    assert [cached(one) for one in answers] == [600, 800] * 2
    assert len(ContextStore(tmp_path / "store").resolve("more").chain) == 2


def test_removing_it_cancels_the_write(tmp_path: Path, inside: Inside, http: httpx.Client, gate: Gate) -> None:
    """Nothing is left, of one that is written and of one that waits; the names are free."""
    gate.seconds = 0.03
    for number in range(2):
        made(http, f"book{number}", text(600, number))
    gate.open.set()
    assert gate.begun.wait(WAIT_SECONDS)
    for number in (1, 0):
        assert http.delete(f"/v1/contexts/book{number}").json()["deleted"] is True
        assert http.get(f"/v1/contexts/book{number}").status_code == 404
        assert http.delete(f"/v1/contexts/book{number}").status_code == 404
    assert not files_of(tmp_path / "store") and metric(http, "context_saves_running") == 0
    reply = http.post("/v1/completions", json={"model": "tiny@book0", "prompt": "5"})
    assert reply.status_code == 404
    gate.seconds = 0
    made(http, "book0", text(500, 7))
    wait_until(lambda: state(http, "book0")["durable"])
    assert cached(asked(http, "5 6", model="tiny@book0")) == 500


def test_a_name_that_is_saved_again(inside: Inside, http: httpx.Client, gate: Gate) -> None:
    """Questions are about the newest text, whatever is written meanwhile."""
    made(http, "book", text(600, 1))
    made(http, "book", text(500, 2))
    assert cached(asked(http, "5 6", model="tiny@book")) == 500
    gate.open.set()
    wait_until(lambda: state(http, "book")["durable"])
    assert state(http, "book")["tokens"] == 500
    assert cached(asked(http, "5 6", model="tiny@book")) == 500


def test_a_full_disk_is_told(
    tmp_path: Path, inside: Inside, http: httpx.Client, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """In the context's state, the log and a metric; questions are answered as long as the text is in memory."""
    gate.full = True
    gate.open.set()
    made(http, "book", text(600, 1))
    wait_until(lambda: "error" in state(http, "book"))
    found = state(http, "book")
    assert found["durable"] is False and "no room" in found["error"]
    assert metric(http, "context_save_failures_total") == 1 and metric(http, "context_saves_running") == 0
    assert [one for one in caplog.records if "saving the context 'book' failed" in one.getMessage()]
    assert cached(asked(http, "5 6", model="tiny@book")) == 600
    assert not files_of(tmp_path / "store")
    tree = inside.engine._tree
    assert tree is not None
    wait_until(lambda: inside.engine.stats["rows"] == 0)
    tree.evict(tree.sizes)
    reply = http.post("/v1/completions", json={"model": "tiny@book", "prompt": "5 6 7"})
    assert reply.status_code == 404 and "save its text again" in reply.json()["error"]["message"]
    gate.full = False
    made(http, "book", text(600, 1))
    wait_until(lambda: state(http, "book")["durable"])
    assert "error" not in state(http, "book")


def test_a_save_waits_for_gpu_memory(
    tmp_path: Path, http: httpx.Client, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step has the memory for a moment: idle texts yield theirs, the layer is tried again, and none is left out."""
    caplog.set_level(logging.INFO)
    gate.open.set()
    failing = {"view": 2, "brought": 3}
    freed: list[int] = []

    def scarce(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(*given: Any) -> Any:
            if threading.current_thread().name.startswith("save-") and failing[name]:
                failing[name] -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return real(*given)

        return allocate

    monkeypatch.setattr(PrefixEntry, "view", scarce("view", PrefixEntry.view))
    monkeypatch.setattr(layers, "brought", scarce("brought", layers.brought))
    monkeypatch.setattr(threads, "reclaim", lambda *, device: freed.append(device))
    made(http, "book", text(600, 1))
    wait_until(lambda: state(http, "book")["durable"])
    assert failing == {"view": 0, "brought": 0} and freed == [threads.OOM_BYTES] * 5
    assert metric(http, "context_save_failures_total") == 0 and "failed" not in caplog.text
    store = ContextStore(tmp_path / "store")
    node = store.get(store.resolve("book").digest)
    saved = [file for file in node.files if file.startswith("layer-")]
    assert saved and all("tail/key" in node.bundle(file, verify=True).arrays for file in saved)


def test_a_gpu_that_stays_full(inside: Inside, http: httpx.Client, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is told after the last attempt; removing the name ends the wait for memory."""
    gate.open.set()
    asked_for = threading.Event()

    def full(tensor: Any) -> Any:
        asked_for.set()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(layers, "brought", full)
    monkeypatch.setattr(threads, "OOM_WAITS", (0.0, 0.0))
    made(http, "book", text(600, 1))
    wait_until(lambda: "error" in state(http, "book"))
    assert "out of memory" in state(http, "book")["error"] and metric(http, "context_save_failures_total") == 1
    monkeypatch.setattr(threads, "OOM_WAITS", (1000.0,))
    asked_for.clear()
    made(http, "other", text(600, 2))
    assert asked_for.wait(WAIT_SECONDS)
    began = time.monotonic()
    assert http.delete("/v1/contexts/other").status_code == 200
    assert time.monotonic() - began < background_saves.CANCEL_SECONDS / 2
    assert http.get("/v1/contexts/other").status_code == 404


def test_a_shutdown_waits_for_the_disk(tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    """At most as long as it may: a context that is not durable then is told of, and absent."""
    caplog.set_level(logging.INFO)
    for seconds in (30.0, 0.3):
        gate.open.clear()
        inside = Inside(tmp_path / "store", disk=gate.disk)
        inside.wait_until_it_serves()
        with inside.client() as http:
            made(http, f"book{seconds:g}", text(600, int(seconds)))
        if seconds > 1:
            threading.Timer(0.5, gate.open.set).start()
        inside.engine.close(drain=False, save_seconds=seconds)
        if seconds < 1:
            assert "is not saved" in caplog.records[-1].getMessage()
        gate.open.set()
        inside.end()
    store = ContextStore(tmp_path / "store")
    assert store.resolve("book30").plain["tokens"] == 600
    assert len([one for one in caplog.records if "waiting until 1 saved contexts" in one.getMessage()]) == 2
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "save-book0.3"])
    with pytest.raises(UnknownContextError):
        store.resolve("book0.3")


def test_answers_go_on_while_the_disk_is_slow(inside: Inside, http: httpx.Client, gate: Gate) -> None:
    """A removal that waits for a blocked write returns, and the write is given up when the disk goes on."""
    made(http, "book", text(600, 1))
    assert gate.begun.wait(WAIT_SECONDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_saves, "CANCEL_SECONDS", 0.2)
        assert http.delete("/v1/contexts/book").status_code == 200
    assert http.get("/v1/contexts/book").status_code == 404 and cached(asked(http, "5 6 7")) == 0
    gate.open.set()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "save-book"])
    assert http.get("/v1/contexts/book").status_code == 404


@pytest.mark.slow
def test_kill_9_before_it_is_durable(tmp_path: Path) -> None:
    """The context is absent after a restart, and the remains of its write are removed."""
    store = tmp_path / "store"
    arguments = ("--store", str(store), "--warm-up", "0", "--shutdown-timeout", "1")
    with serving(*arguments, preloaded=True) as served, served.client() as http:
        made_of = http.post("/v1/contexts", json={"name": "kept", "text": "The sky is blue."})
        assert made_of.status_code == 200
        wait_until(lambda: http.get("/v1/contexts/kept").json()["durable"])
        before = sorted(files_of(store))
        with contextlib.ExitStack() as stack:
            handle = OS_DISK.lock(store / "LOCK", wait_seconds=10)  # neither pins nor names can be written
            assert handle is not None
            stack.callback(OS_DISK.close, handle)
            reply = http.post("/v1/contexts", json={"name": "book", "text": document(150)})
            assert reply.status_code == 200 and reply.json()["durable"] is False
            OS_DISK.close(handle)
            while not list((store / "tmp").glob("*/layer-*")):
                time.sleep(0.001)
            handle = OS_DISK.lock(store / "LOCK", wait_seconds=10)
            assert handle is not None
            assert http.get("/v1/contexts/book").json()["durable"] is False
            running = processes(served.process.pid)
            for pid in reversed(running):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not any(map(runs, running[1:])))
            stack.pop_all()
            OS_DISK.close(handle)
    assert set(files_of(store)) > set(before), "the write had begun"
    with serving(*arguments, preloaded=True) as served, served.client() as http:
        assert http.get("/v1/contexts/book").status_code == 404
        assert [one["id"] for one in http.get("/v1/contexts").json()["data"]] == ["kept"]
        wait_until(lambda: sorted(files_of(store)) == before)
        assert any("removed" in one.get("message", "") for one in served.log)
