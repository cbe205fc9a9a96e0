"""The engine in a process of its own: answers as in the server's, its crash, and what is there afterwards."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from retrieval_attn import errors
from retrieval_attn.cli import serve
from retrieval_attn.config import Config
from retrieval_attn.engine.request import Event, Finished, Request
from retrieval_attn.engine.warm_up import WarmUpProgress
from retrieval_attn.model.bundled import model_path
from retrieval_attn.sampling.grammar import GrammarSpec
from retrieval_attn.sampling.sampling_params import SamplingParams
from retrieval_attn.server import engine_process, remote
from retrieval_attn.server import ipc as frames
from retrieval_attn.server.client import LocalEngine
from retrieval_attn.server.settings import EngineSpec
from retrieval_attn.server.worker import Worker
from tests.preloaded import forked_processes, run_preloaded
from tests.server.process import ANSWER, END_SECONDS, QUESTION, Served, document, runs, saved, serving
from tests.waiting import WAIT_SECONDS, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Served]:
    store = str(tmp_path / "store")
    with serving("--store", store, "--engine", "process", "--warm-up", "0", preloaded=True) as found:
        yield found


def talk(**options: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": document()}, {"role": "user", "content": QUESTION}]
    return {"model": "bundled", "messages": messages, "max_tokens": 16, "temperature": 0, **options}


def pid_of(served: Served, number: int) -> int:
    """Of the process that was started as the so manyth."""

    def pids() -> list[int]:
        return [int(line["engine_pid"]) for line in served.log if "engine_pid" in line]

    wait_until(lambda: len(pids()) > number, pause=0.05)
    return pids()[number]


@pytest.mark.slow
def test_it_answers_and_is_started_again_when_it_crashes(apart: Served, served: Served) -> None:
    """A stream under way gets an error event, /health says 503, and what was saved is there afterwards."""
    with served.client() as here:
        expected = here.post(CHAT, json=talk(logprobs=True, top_logprobs=2)).json()["choices"]
    with apart.client() as http:
        assert http.post(CHAT, json=talk(logprobs=True, top_logprobs=2)).json()["choices"] == expected
        assert http.post(CHAT, json=talk(max_tokens=10**6)).status_code == 400
        assert http.post(CHAT, json=talk(model="bundled@nobody")).json()["error"]["code"] == "context_not_found"
        record = saved(http, name="book", text=document())
        first = pid_of(apart, 0)
        body = talk(max_tokens=60_000, temperature=2, stream=True)
        with http.stream("POST", CHAT, json=body) as stream:
            events = (line for line in stream.iter_lines() if line)
            next(events), next(events)
            os.kill(first, signal.SIGKILL)
            rest = list(events)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_lost"
        reply = http.get("/health")
        assert reply.status_code == 503 and "status -9" in reply.json()["error"]["message"]
        refused = http.post(CHAT, json=talk())
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert "retrieval_attn:engine_up 0.0" in http.get("/metrics").text
        assert pid_of(apart, 1) != first
        wait_until(lambda: http.get("/health").status_code == 200, pause=0.05)
        found = http.post(CHAT, json={**talk(model="bundled@book"), "messages": talk()["messages"][1:]}).json()
        assert ANSWER in found["choices"][0]["message"]["content"]
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == record["tokens"]
        second = pid_of(apart, 1)
        apart.end(signal.SIGKILL)  # however the server ends, nothing is left that holds a GPU's memory
        wait_until(lambda: not runs(second), pause=0.05)


@pytest.mark.slow
def test_it_ends_when_answers_under_way_have(apart: Served) -> None:
    with (
        apart.client() as http,
        http.stream("POST", CHAT, json=talk(max_tokens=200, temperature=2, stream=True)) as stream,
    ):
        events = (line for line in stream.iter_lines() if line)
        next(events), next(events)
        apart.process.send_signal(signal.SIGTERM)
        rest = list(events)
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
    assert apart.process.wait(END_SECONDS) == 0


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    options = (str(tmp_path), "--engine", "process")
    with pytest.raises(AssertionError, match="is a folder without a config.json"), serving(*options, preloaded=True):
        pass


def test_frames_bring_what_was_sent() -> None:
    ids = tuple(np.random.default_rng(0).integers(0, 2**31 - 1, 1000).tolist())
    request = Request(
        (ids, (5,)),
        7,
        SamplingParams(0.5, 3, 0.9, 0.1, 1.1, -0.5, 1.5, {5: -100.0, 2**31 - 1: 0.25}, 2**64 - 1, 4),
        ("a", "\u2028"),
        frozenset({1}),
        None,
        "x",
        "batch",
        "c",
        min_tokens=6,
        visible=frozenset({4, 7}),
    )
    assert frames.request_from(json.loads(json.dumps(frames.request_of(request)))) == request
    constrained = Request(((5, 6),), grammar=GrammarSpec("regex", "a+", "</think>"))
    assert frames.request_from(json.loads(json.dumps(frames.request_of(constrained)))) == constrained
    ends = Finished(
        "error", "t\ud83d", (1, 2), 5, 3, (0.5, 1.5), errors.ContextLengthError("too long", limit=9, tokens=12)
    )
    for item in (
        Event(5, "x", -float("inf"), ((5, -0.5), (6, -float("inf")))),
        Event(-1, "y"),
        ends._replace(error=None),
    ):
        assert frames.item_from(json.loads(json.dumps(frames.item_of(item)))) == item
    found = frames.item_from(frames.item_of(ends))
    assert isinstance(found, Finished) and type(found.error) is errors.ContextLengthError
    assert (str(found.error), vars(found.error)) == ("too long", {"limit": 9, "tokens": 12, "reason": ""})
    for kind in ("RowsFailedError", "Any", "SystemExit", "RetrievalAttentionErro"):
        assert type(frames.error_from([kind, "x", {}])) is frames.EngineFailure


@pytest.mark.slow
def test_requests_to_an_engine_that_hangs_end_at_their_deadline(tmp_path: Path) -> None:
    """None of them is in the engine when it continues, and the server ends although its engine does not."""
    options = (
        "--store",
        str(tmp_path),
        "--engine",
        "process",
        "--warm-up",
        "0",
        "--deadline",
        "10",
        "--shutdown-timeout",
        "1",
    )
    # of an engine that saves nothing
    constants = {"retrieval_attn.server.remote.END_SECONDS": 3, "retrieval_attn.server.remote.SAVE_SECONDS": 1}
    with serving(*options, preloaded=True, constants=constants) as apart, apart.client() as http:
        engine = pid_of(apart, 0)
        short = {**talk(max_tokens=1), "messages": talk()["messages"][1:]}
        assert http.post(CHAT, json=short).status_code == 200
        os.kill(engine, signal.SIGSTOP)

        def late(stream: bool) -> tuple[int, str]:
            reply = http.post(CHAT, json=talk(max_tokens=60_000, ignore_eos=True, stream=stream), timeout=END_SECONDS)
            return reply.status_code, reply.json()["error"]["code"]

        with ThreadPoolExecutor() as threads:
            assert list(threads.map(late, (False, True))) == [(504, "deadline")] * 2
        os.kill(engine, signal.SIGCONT)
        assert http.post(CHAT, json=short).status_code == 200
        text = http.get("/metrics").text
        assert "num_requests_running 0.0" in text and "num_requests_waiting 0.0" in text
        os.kill(engine, signal.SIGSTOP)
        apart.process.send_signal(signal.SIGTERM)
        assert apart.process.wait(END_SECONDS + 25) == 0
        assert not runs(engine)


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_hang(EngineSpec(model_path("bundled"), {}, Config().to_dict(), store=str(tmp_path)), monkeypatch))


async def _hang(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "subprocess", forked_processes())
    engine = remote.RemoteEngine(spec)
    await engine.start()
    monkeypatch.setattr(remote, "PING_SECONDS", 0.05)
    await asyncio.sleep(4)  # longer than MAX_SILENT_PINGS pings take: it answers them
    process = engine._process
    assert process is not None and engine.lost is None
    os.kill(process.child.pid, signal.SIGSTOP)
    with pytest.raises(errors.RetrievalAttentionError, match="lost.*status -9"):
        await asyncio.wait_for(engine.keep("a", (5, 6, 7), None, ""), WAIT_SECONDS)
    assert engine.lost is not None
    async with asyncio.timeout(WAIT_SECONDS):
        while engine.lost is not None:
            await asyncio.sleep(0.05)
    assert (await engine.stats())["rows"] == 0
    await engine.close(drain=False)


class SlowEngine:
    """An engine whose `submit` waits; it counts cancelled requests."""

    died = None
    warming = WarmUpProgress(4, 15)

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.cancelled = threading.Event()
        self.is_listening = False

    def submit(self, _: Request) -> Any:
        self.goes_on.wait(WAIT_SECONDS)
        return SimpleNamespace(id="1", listen=self._listen, cancel=self._cancel)

    def _listen(self, _: Any) -> None:
        self.is_listening = True

    def _cancel(self) -> None:
        assert self.is_listening
        self.cancelled.set()

    def close(self, *, drain: bool, save_seconds: float) -> None:
        pass


def test_a_request_that_is_cancelled_before_it_is_submitted() -> None:
    """Frames come faster than threads submit: without a note of it, nobody would end the answer."""
    engine: Any = SlowEngine()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        work = threading.Thread(target=Worker(theirs, engine).run)
        work.start()
        request = frames.request_of(Request(((5, 6),), 7))
        ours.sendall(frames.frame_of({"do": "submit", "id": 4, "request": request}))
        ours.sendall(frames.frame_of({"do": "cancel", "id": 4}))
        ours.sendall(frames.frame_of({"do": "ping", "id": 0}))
        assert frames.receive_frame(ours) == {"id": 0, "ok": [4, 15]}  # behind the other two
        engine.goes_on.set()
        assert engine.cancelled.wait(WAIT_SECONDS)
        assert frames.receive_frame(ours) == {"id": 4, "ok": "1"}
        ours.sendall(frames.frame_of({"do": "close", "drain": False}))
        work.join(WAIT_SECONDS)
        assert not work.is_alive()


def test_a_worker_is_told_once_that_all_graphs_are_captured() -> None:
    """It has the garbage collector leave out what lives to the end."""
    engine: Any = SlowEngine()
    ours, theirs = socket.socketpair()
    told: list[str] = []
    with ours, theirs:
        work = threading.Thread(target=Worker(theirs, engine, lambda: told.append("warm")).run)
        work.start()
        for warming in ([4, 15], None, None):
            engine.warming = warming
            ours.sendall(frames.frame_of({"do": "ping", "id": 0}))
            assert frames.receive_frame(ours) == {"id": 0, "ok": warming}
        ours.sendall(frames.frame_of({"do": "close", "drain": False}))
        work.join(WAIT_SECONDS)
    assert told == ["warm"]


def test_a_process_starts_before_torch_is_imported_if_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def choose(name: str) -> torch.device:
        asked.append(name)
        return torch.device("cpu")

    monkeypatch.setattr("retrieval_attn.model.loading.choose_device", choose)
    monkeypatch.setattr(serve, "NVIDIA", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert serve._apart(argparse.Namespace(engine="auto", device="auto")) and not asked
    assert not serve._apart(argparse.Namespace(engine="here", device="auto")) and not asked
    assert not serve._apart(argparse.Namespace(engine="auto", device="cpu")) and asked == ["cpu"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not serve._apart(argparse.Namespace(engine="auto", device="auto")) and asked == ["cpu", "auto"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(serve, "NVIDIA", tmp_path / "none")
    assert not serve._apart(argparse.Namespace(engine="auto", device="auto")) and asked[2:] == ["auto"]


def test_a_server_does_not_import_what_it_does_not_use() -> None:
    """`tests/preload.py` skips as a server does."""
    pytest.importorskip("sklearn")
    looked = "{'sklearn', 'scipy.optimize', 'pandas', 'torch'} & set(sys.modules)"
    code = f"import sys, retrieval_attn.server.worker; print({looked}); import sklearn.metrics, scipy.optimize"
    found = run_preloaded(["-c", code])
    assert (found.returncode, found.stdout) == (0, "{'torch'}\n"), found.stderr


def test_a_process_whose_server_is_gone_is_seen() -> None:
    """Before it loads a model for a server that does not exist."""
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            assert not engine_process._is_closed(theirs)
            ours.sendall(b"1")
            assert not engine_process._is_closed(theirs) and theirs.recv(1) == b"1"
        assert engine_process._is_closed(theirs)


def test_a_ping_says_what_is_still_captured() -> None:
    asyncio.run(_ping())


async def _ping() -> None:
    reader = asyncio.StreamReader()
    child: Any = remote._EngineChild(None, reader, None)  # type: ignore[arg-type]
    for number, found in ((remote.PING, [4, 15]), (7, None)):
        reader.feed_data(frames.frame_of({"id": number, "ok": found}))
    reader.feed_eof()
    await child._hand_out()
    engine = remote.RemoteEngine(EngineSpec("bundled", {}, {}))
    assert engine.warming is None
    engine._process = child
    assert engine.warming == WarmUpProgress(4, 15)
    child.note_warming(None)
    assert engine.warming is None


def test_who_stops_waiting_for_a_submission_cancels_the_request() -> None:
    """In the server's process: the thread that submits goes on."""
    asyncio.run(_stop_waiting(SlowEngine()))


async def _stop_waiting(engine: Any) -> None:
    local = LocalEngine(engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await local.submit(Request(((5, 6),), 7), lambda _: None)
    engine.goes_on.set()
    assert await asyncio.to_thread(engine.cancelled.wait, 20)
