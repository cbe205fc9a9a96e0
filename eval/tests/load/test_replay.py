"""`load replay`: when requests are sent, what is measured, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.tests.load.tiny_server import Body, TinyServer
from retrieval_attn.cli import main
from retrieval_attn.errors import ConfigError
from retrieval_attn.remote import Endpoint, RemoteError, Usage, read_delta, refusal
from retrieval_attn_eval.load.line import Block, Line, written
from retrieval_attn_eval.load.replay import Replay
from retrieval_attn_eval.load.reply import Bounds, Reply
from retrieval_attn_eval.load.report import summary, table
from retrieval_attn_eval.load.sender import Asking, Sender
from retrieval_attn_eval.load.words import Words

pytest.importorskip("httpx", reason="replaying needs httpx; pip install httpx")


def line(seconds: float, *names: int, answer: int = 4, **more: Any) -> Line:
    """A request for these whole blocks of 32 tokens."""
    return Line(seconds, tuple(Block(name, 32) for name in names), answer, **more)


def replayed(lines: list[Line], server: TinyServer, *, timeout: float = 20.0, **options: Any) -> list[Reply]:
    """Its replies in the order of the trace's lines' due times."""
    asking = Asking("tiny", body=options.pop("body", {}))
    replay = Replay(lines, **options)

    async def run(url: str) -> None:
        async with Sender(Endpoint.of(url), asking, timeout) as sender:
            await replay.run(sender, Words(0))

    with server.running() as url:
        asyncio.run(run(url))
    return sorted(replay.replies, key=lambda one: one.due)


def test_the_loop_is_open() -> None:
    """Requests are sent when they are due, though none before them is answered."""
    server = TinyServer(lambda body: "slow")
    server.slow_seconds = 2.0
    replies = replayed([line(0.05 * number, number) for number in range(8)], server)
    assert [one.status for one in replies] == ["ok"] * 8
    assert [one.due for one in replies] == pytest.approx([0.05 * number for number in range(8)])
    assert all(one.sent - one.due < 1.5 for one in replies), "none waited the two seconds of another"
    assert max(one.sent for one in replies) < min(one.times[0] for one in replies)
    assert all(2.0 <= (one.first_seconds or 0) < 5.0 for one in replies)
    assert all(len(one.times) == one.tokens == 4 for one in replies)


def test_speed_and_turns_that_wait() -> None:
    """A turn with a delay counts from the end of the answer to its session's turn before; others do not wait."""
    lines = [
        line(0.0, 1, session="a"),
        line(0.1, 1, 2, session="a", delay=0.4),
        line(0.2, 3, session="b"),
        line(0.3, 3, 4, session="b"),
    ]
    first, timed, late, turn = replayed(lines, TinyServer(lambda body: "slow"), speed=2.0)
    assert (first.due, timed.due, late.due) == pytest.approx((0, 0.1, 0.15))
    assert turn.due == pytest.approx(first.end + 0.2, abs=1e-6)
    due = [one.due for one in replayed(lines, TinyServer(), speed=2.0, waits=False)]
    assert due == pytest.approx([0, 0.05, 0.1, 0.15])


def test_what_requests_say() -> None:
    """Equal blocks are equal texts; what a line or a flag adds is in the body."""
    server = TinyServer()
    lines = [line(0, 1, 2), line(0.3, 1, 2, 3, 5, 6, extra={"temperature": 0.5}), line(0.02, 4)]
    first, _, longer = replayed(lines, server, body={"ignore_eos": True, "temperature": 1.0})
    short, other, long = sorted(server.bodies, key=lambda body: (len(body["messages"]), -len(str(body))))
    one, two = short["messages"][0]["content"].split("\n\n")
    assert [len(message["content"].split()) for message in long["messages"]] == [32] * 5
    assert [message["role"] for message in long["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert [message["content"] for message in long["messages"][:2]] == [one, two], "of two blocks, one message"
    assert other["messages"][0]["content"] not in str(long) + str(short)
    assert long["temperature"] == 0.5 and short["temperature"] == 1.0 and short["ignore_eos"] is True
    assert {body["max_tokens"] for body in server.bodies} == {4}
    assert longer.usage == Usage(185, 4, 64) and first.usage == Usage(69, 4, 0)


@pytest.mark.parametrize(
    ("trouble", "status", "problem"),
    [
        ("503", "503", "too many requests wait"),
        ("401", "401", "too many requests wait"),
        ("cut", "broken", "without a finish_reason"),
        ("error", "broken", "the engine ended"),
        ("slow", "timeout", "no end within 1 s"),
    ],
)
def test_failures_are_told_by_their_status(trouble: str, status: str, problem: str) -> None:
    """One request fails, the other is answered; neither counts for the other."""
    server = TinyServer(lambda body: trouble if body["max_tokens"] == 6 else "")
    server.slow_seconds = 3.0
    bad, good = replayed([line(0, 1, answer=6), line(0.05, 2)], server, timeout=1.0 if trouble == "slow" else 30.0)
    assert (bad.status, good.status) == (status, "ok") and problem in bad.problem
    found = summary([bad, good], Bounds(5.0, 5.0))
    assert found["errors"] == {status: 1} and found["answered"] == 1 and found["good"] == 0.5
    assert found["first"]["p50"] == good.first_seconds
    assert f"{status}: 1" in table(found) and problem in table(found)


def test_nobody_answers() -> None:
    async def run() -> Reply:
        async with Sender(Endpoint.of("http://127.0.0.1:9"), Asking("tiny"), 5.0) as sender:
            with pytest.raises(RemoteError, match="check that a server is running"):
                await sender.rate()
            return await sender.send(line(0, 1), ["text"], 0.0, time.perf_counter())

    reply = asyncio.run(run())
    assert reply.status == "connection" and summary([reply], Bounds(1, 1))["first"] is None


def reply(due: float, *times: float, usage: Usage | None = None, status: str = "ok") -> Reply:
    return Reply(due, due, times[-1], times, 5, usage, status)


def test_what_is_counted() -> None:
    """By hand: percentiles over requests, gaps over pieces, goodput by both bounds, cached of all prompts."""
    replies = [
        reply(0.0, 1.0, 1.1, 1.2, usage=Usage(100, 3, 60)),
        reply(1.0, 2.5, 2.6, 2.7, usage=Usage(100, 3, 0)),  # the first token is late
        reply(2.0, 2.5, 3.5, 4.5, usage=Usage(100, 3, 30)),  # the others are
        reply(3.0, 3.5, status="503"),
    ]
    found = summary(replies, Bounds(1.0, 0.2))
    assert found["first"]["p50"] == pytest.approx(1.0) and found["first"]["mean"] == pytest.approx(1.0)
    assert found["gap"]["p50"] == pytest.approx(0.1) and found["gap"]["p99"] == pytest.approx(1.0)
    assert found["good"] == 0.25 and found["cached"] == pytest.approx(0.3)
    assert found["seconds"] == 4.5 and found["tokens_per_second"] == pytest.approx(2.0)
    assert found["offered_per_second"] == pytest.approx(1.0) and found["short_answers"] == 3
    several = reply(0.0, 1.0, 2.0, usage=Usage(1, 11, 0))
    assert several.is_good(Bounds(1.0, 0.1)) and not several.is_good(Bounds(1.0, 0.09)), "a piece may be many tokens"
    empty = summary([], Bounds(1, 1))
    assert empty["good"] is None and table(empty)


def test_lines_of_a_stream() -> None:
    def data(found: object) -> Any:
        return read_delta(f"data: {json.dumps(found)}")

    assert read_delta("") is None and read_delta(": waiting") is None and read_delta("event: x") is None
    assert data({"choices": [{"index": 0, "delta": {"content": "a"}}]}).text == "a"
    assert data({"choices": [{"index": 1, "delta": {"content": "a"}}]}).text == "", "another answer to the same"
    assert data({"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]})[:2] == ("b", "stop")
    assert data({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}).usage == Usage(3, 2, 0)
    assert data({"error": {"message": "gone"}}).error == "gone"
    assert read_delta("data: [DONE]").done and "no JSON object" in read_delta("data: {").error  # type: ignore[union-attr]


def test_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    endpoint = Endpoint.of("http://127.0.0.1:8000/")
    assert endpoint.at("models") == "http://127.0.0.1:8000/v1/models"
    assert endpoint.headers == {"Authorization": "Bearer secret"} and "secret" not in repr(endpoint)
    monkeypatch.delenv("OPENAI_API_KEY")
    assert (
        Endpoint.of("https://host/api/v1/").at("x") == "https://host/api/v1/x" and not Endpoint.of("http://h").headers
    )
    for url in ("host", "ftp://host", "http://", "http://h?x=1"):
        with pytest.raises(ConfigError, match="must be the address"):
            Endpoint.of(url)
    assert refusal(b'{"detail": "no"}') == "no" and refusal("a\n b") == "a b" and len(refusal("x" * 999)) == 300


def trace_file(folder: Path, lines: list[Line]) -> str:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(written(lines)))
    return str(path)


def whole(seconds: float, *names: int) -> Line:
    """A request for whole blocks, as a file has them."""
    return Line(seconds, tuple(Block(name, 512) for name in names), 8)


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.usefixtures("no_key")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's first model is asked; prompts have the tokens of the trace, as the server counts them."""
    server = TinyServer(words_per_token=2)
    file, out = trace_file(tmp_path, [whole(0, 1), whole(0.2, 1, 2, 3)]), tmp_path / "new" / "replay.json"
    flags = ["--output-dir", str(out.parent), "--block", "64", "--scale", "0.5"]
    with server.running() as url:
        assert main(["load", "replay", file, "--url", url, *flags]) == 0
    report = json.loads(out.read_text())
    assert (report["model"], report["words_per_token"], report["of"]) == ("tiny", 2.0, 2)
    assert [one["usage"]["prompt_tokens"] for one in report["replies"]] == [64, 192], "with what a template adds"
    assert report["cached"] == pytest.approx(56 / (64 + 192)) and report["answer_tokens"] == 8
    assert report["errors"] == {} and report["first"]["p99"] > 0 and report["gap"]["p50"] > 0
    assert "cached share of prompts" in capsys.readouterr().out


@pytest.mark.usefixtures("no_key")
def test_command_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = trace_file(tmp_path, [whole(0, 1), whole(0.01, 2)])
    asked = ["load", "replay", file, "--output-dir", str(tmp_path / "one"), "--url"]
    again = [*asked[:4], str(tmp_path / "other"), "--url"]
    behave: Callable[[Body], str] = lambda body: "503" if body.get("stream") else ""  # noqa: E731
    with TinyServer(behave).running() as url:
        assert main([*asked, url]) == 1
    assert "503: 2" in capsys.readouterr().out
    with TinyServer(lambda body: "401").running() as url:
        assert main([*again, url]) == 2
    assert "answered 401: too many requests wait" in capsys.readouterr().err
    assert main([*again, "http://127.0.0.1:9"]) == 2
    assert "check that a server is running" in capsys.readouterr().err


@pytest.mark.usefixtures("no_key")
def test_interrupted_it_reports_what_came(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a replay: status 130, and a result of the requests that were answered."""
    file, out = trace_file(tmp_path, [whole(0, 1), whole(600, 2)]), tmp_path / "out" / "replay.json"
    server = TinyServer()
    with server.running() as url:
        command = [sys.executable, "-m", "retrieval_attn.cli", "load", "replay", file, "--url", url]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

        def as_in_a_terminal() -> None:
            """A shell starts what runs in its background with the signal ignored, and children inherit that."""
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        with subprocess.Popen(
            [*command, "--output-dir", str(out.parent)], preexec_fn=as_in_a_terminal, **pipes
        ) as asked:
            deadline = time.monotonic() + 60
            while len(server.bodies) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.5)
            asked.send_signal(signal.SIGINT)
            printed, said = asked.communicate(timeout=60)
    assert asked.returncode == 130, said
    report = json.loads(out.read_text())
    assert report["interrupted"] and (report["requests"], report["of"], report["answered"]) == (1, 2, 1)
    assert "requests" in printed
