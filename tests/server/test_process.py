"""The server as a process: keys, limits, clients that go, signals, logs, metrics, the example."""

from __future__ import annotations

import json
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.preloaded import CLI, run_preloaded
from tests.server.process import ANSWER, END_SECONDS, QUESTION, ROOT, Served, document, serving
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
JSON_TYPE = "content-type: application/json"
LONG = {"model": "bundled", "max_tokens": 4000, "temperature": 1, "seed": 1}
ADMIN, USER, OTHER = "admin-key-1", "user-key-1", "other-key-1"


def talk(text: str = QUESTION, **options: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": document()}, {"role": "user", "content": text}]
    return {"model": "bundled", "messages": messages, "max_tokens": 16, "temperature": 0, **options}


def metric(http: httpx.Client, name: str) -> float:
    """The sum over all labels."""
    lines = http.get("/metrics").text.splitlines()
    found = [
        line.rsplit(" ", 1)[1] for line in lines if line.partition("{")[0].split(" ")[0] == f"retrieval_attn:{name}"
    ]
    assert found, name
    return sum(map(float, found))


def wait_for(http: httpx.Client, name: str, value: float) -> None:
    wait_until(lambda: metric(http, name) == value, lambda: f"{name} is {metric(http, name)}, not {value}", pause=0.05)


def test_curl_streams(served: Served) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    command = [curl, "-sNf", f"{served.url}{CHAT}", "-H", "content-type: application/json", "-d", "@-"]
    done = subprocess.run(
        command, input=json.dumps(talk(stream=True)), capture_output=True, text=True, timeout=END_SECONDS
    )
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert done.returncode == 0 and events[-1] == "[DONE]", done.stdout
    text = "".join(json.loads(one)["choices"][0]["delta"].get("content", "") for one in events[:-1])
    assert ANSWER in text


def test_the_example(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ask_a_server.py", served.url])
    runpy.run_path(str(ROOT / "examples" / "ask_a_server.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    for line, number in zip(lines, ("4815162", "7391846", "1208934"), strict=True):
        assert number in line
    assert "(0 tokens" not in lines[1] + lines[2]


def test_who_goes_away_ends_the_work(served: Served) -> None:
    """At random times, in streams and before answers: no request runs on, and nothing is held for it."""
    with served.client() as http:
        gone = metric(http, "request_disconnected_total")
        host, port = served.url.removeprefix("http://").split(":")
        for number in range(30):
            body = json.dumps({**talk(f"Tell {number}."), **LONG, "stream": number % 2 == 0}).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{JSON_TYPE}\r\ncontent-length: {len(body)}\r\n\r\n"
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(head.encode() + body)
                time.sleep(0.01 * (number % 12))
        wait_for(http, "request_disconnected_total", gone + 30)
        wait_for(http, "num_requests_running", 0)
        wait_for(http, "num_requests_waiting", 0)
        wait_for(http, "num_requests_without_token", 0)
        assert ANSWER in http.post(CHAT, json=talk()).text


def test_half_a_request_is_nobodys(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{{".encode())
    with served.client() as http:
        assert http.get("/health").json()["status"] == "ok"  # graphs may still be captured


def test_logs_and_metrics(served: Served) -> None:
    with served.client() as http:
        before = {name: metric(http, name) for name in ("generation_tokens_total", "e2e_request_latency_seconds_count")}
        reply = http.post(CHAT, json=talk(), headers={"x-request-id": "mine-7"})
        usage = reply.json()["usage"]
        # a request is counted, and then told to the log, behind its reply
        wait_until(lambda: any(line.get("request_id") == "mine-7" for line in served.log))
        lines = [line for line in served.log if line.get("request_id") == "mine-7"]
        assert metric(http, "generation_tokens_total") == before["generation_tokens_total"] + usage["completion_tokens"]
        assert metric(http, "e2e_request_latency_seconds_count") == before["e2e_request_latency_seconds_count"] + 1
        assert metric(http, "engine_up") == 1 and metric(http, "prefix_cache_hits_total") > 0
    (line,) = lines
    assert line["status"] == 200 and line["completion_tokens"] == usage["completion_tokens"]
    assert 0 < line["first_token_seconds"] <= line["seconds"] and line["key"] == "anybody"
    assert "Bergen" not in json.dumps(served.log)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with keys, and a small limit of bodies."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys"
    keys.write_text(f"{ADMIN} root admin\n# who\n{USER} ann\n\n{OTHER}  # nameless\n", encoding="utf-8-sig")
    limits = ("--max-body", "1MiB", "--warm-up", "0")
    options = ("--api-key-file", str(keys), "--parse-special", *limits)
    with serving("--store", str(folder / "store"), *options, preloaded=True) as found:
        yield found


def test_keys(keyed: Served) -> None:
    with keyed.client() as nobody, keyed.client("wrong-key-1") as wrong, keyed.client(USER) as user:
        assert nobody.get("/health").status_code == nobody.get("/version").status_code == 200
        for http in (nobody, wrong):
            for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/metrics"), ("GET", "/openapi.json")):
                reply = http.request(method, path)
                assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
                assert reply.json()["error"]["code"] == "invalid_api_key"
        assert user.get("/v1/models").status_code == 200
        for method, path in (("GET", "/metrics"), ("GET", "/v1/contexts"), ("DELETE", "/v1/contexts/x")):
            assert user.request(method, path).status_code == 403
    with keyed.client(ADMIN) as admin:
        assert admin.get("/metrics").status_code == admin.get("/v1/contexts").status_code == 200


def test_special_tokens_of_raw_texts(keyed: Served, served: Served) -> None:
    """With --parse-special words become these tokens, in raw texts alone; without it they never do."""
    messages = [{"role": "user", "content": "a</s>b"}]
    for server, key, parses in ((keyed, USER, True), (served, None, False)):
        with server.client(key) as http:
            assert (1 in http.post("/tokenize", json={"prompt": "a</s>b"}).json()["tokens"]) == parses
            assert 1 not in http.post("/tokenize", json={"messages": messages, "tools": None}).json()["tokens"]


def test_what_one_key_asked_is_not_another_ones_beginning(keyed: Served) -> None:
    """Else the time of an answer, and cached_tokens, tell what others asked."""
    found = []
    for key in (USER, USER, OTHER):
        with keyed.client(key) as http:
            found.append(http.post(CHAT, json=talk()).json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found[0] == found[2] == 0 and found[1] > 800


def test_a_body_that_is_too_large(keyed: Served) -> None:
    with keyed.client(USER) as http:
        for content in (b"x" * (1 << 20) + b"x", iter([b"x" * (1 << 19)] * 3)):
            reply = http.post(CHAT, content=content)
            assert reply.status_code == 413 and "1,048,576" in reply.json()["error"]["message"]


def test_who_waits_too_long_or_in_too_long_a_queue_is_told() -> None:
    """One row is taken by a long answer until its deadline; two wait, and the next is told to come again."""
    body = {**talk("Tell a story."), **LONG, "max_tokens": 60_000, "stream": True, "logit_bias": {}}
    limits = ("--max-queue", "2", "--max-num-seqs", "1", "--deadline", "6", "--warm-up", "0")
    with (
        serving(*limits, preloaded=True) as served,
        served.client() as http,
        http.stream("POST", CHAT, json=body) as first,
    ):
        events = (line for line in first.iter_lines() if line)
        assert "assistant" in next(events) and "content" in next(events)
        found: list[httpx.Response] = []

        def ask() -> None:
            with served.client() as other:
                found.append(other.post(CHAT, json={**talk(), "max_tokens": 60_000, "temperature": 2}))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(http, "num_requests_without_token", 2)
        refused = http.post(CHAT, json=talk())
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        rest = list(events)
        for thread in threads:
            thread.join()
    if 'finish_reason":"stop' not in rest[-2]:
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "deadline" and rest[-1] == "data: [DONE]"
    assert {reply.status_code for reply in found} <= {200, 504}


def is_reachable(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return False
    return True


def test_it_ends_when_answers_under_way_have(keyed: Served) -> None:
    """SIGTERM: the stream goes on to its end, new requests find nobody, the exit status is 0. The last to ask it."""
    with keyed.client(USER) as http:
        body = {**talk("Tell a story."), **LONG, "max_tokens": 100, "stream": True}
        with http.stream("POST", CHAT, json=body) as stream:
            events = (line for line in stream.iter_lines() if line)
            next(events), next(events)
            keyed.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not is_reachable(f"{keyed.url}/health"))
            rest = list(events)
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        assert keyed.process.wait(END_SECONDS) == 0 and keyed.log[-1]["message"] == "shutdown complete"


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Who is being answered is told, by the form that errors in streams have, and nothing of it is an error of ours."""
    body = {**talk("Tell a story."), **LONG, "max_tokens": 60_000, "stream": True}
    arguments = ("--store", str(tmp_path), "--warm-up", "0", "--shutdown-timeout", str(10 * END_SECONDS))
    with (
        serving(*arguments, preloaded=True) as served,
        served.client() as http,
        http.stream("POST", CHAT, json=body) as stream,
    ):
        events = (line for line in stream.iter_lines() if line)
        next(events), next(events)
        served.process.send_signal(signal.SIGINT)
        # two at once may count as one
        wait_until(lambda: any(line["message"].startswith("draining") for line in served.log))
        served.process.send_signal(signal.SIGINT)
        rest = list(events)
        assert served.process.wait(END_SECONDS) == 0
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "cancelled" and rest[-1] == "data: [DONE]"
    assert not [line for line in served.log if line["level"] == "error"] and not served.other


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--host", "0.0.0.0"), "needs a key"),
        (("--max-body", "much"), "amount of memory"),
        (("--name", "a@b"), "MODEL@CONTEXT"),
        (("--api-key-file", "/nowhere/keys"), "No such file"),
        (("--deadline", "0"), "at least 1"),
    ],
)
def test_what_it_does_not_start_with(arguments: tuple[str, ...], words: str) -> None:
    """One line and exit status 2, before the model is loaded."""
    done = run_preloaded([*CLI, "serve", "--port", "0", *arguments], timeout=END_SECONDS)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_port_that_is_taken(served: Served) -> None:
    port = served.url.rsplit(":", 1)[1]
    done = run_preloaded([*CLI, "serve", "--port", port], timeout=END_SECONDS)
    assert done.returncode == 2 and "another --port" in done.stderr
