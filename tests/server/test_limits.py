"""Limits on connections, headers, bodies and time: what exceeds them is refused, soon, small, in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from retrieval_attn.engine.request import Event, Request
from retrieval_attn.server import bodies, connections, contexts
from retrieval_attn.server import streaming as reply
from retrieval_attn.server.admission import Admission
from retrieval_attn.server.answering import MAX_UNREAD, Choices
from retrieval_attn.server.bodies import MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS, MAX_STRINGS, check_json
from retrieval_attn.server.client import Submitted
from retrieval_attn.server.connections import MAX_HEAD_BYTES, MAX_HEADERS
from retrieval_attn.server.failure import ApiError
from tests.server.inside import Inside, body_of, sent
from tests.server.process import Served
from tests.waiting import WAIT_SECONDS

HEAD = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
JSON = {"content-type": "application/json"}
ITEMS = 4096


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    found = Inside(tmp_path)
    found.wait_until_it_serves()
    yield found
    found.end()


@pytest.fixture(scope="module")
def measured() -> Iterator[tuple[Served, list[httpx.Response]]]:
    """A server in a new interpreter: a forked one shares memory. What its /health answered until it was ready, too."""
    from tests.server.process import starting

    with starting("--warm-up", "0", port=(port := free_port())) as found:
        answers = []
        while not found.url:
            try:
                answers.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=5))
            except httpx.TransportError:  # it still imports what it needs
                time.sleep(0.05)
            assert found.process.poll() is None
        found.wait()
        yield found, answers


def answer(sock: socket.socket, seconds: float = WAIT_SECONDS) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer on a connection that the server closes. Raises TimeoutError if it does not."""
    sock.settimeout(seconds)
    data = b""
    while piece := sock.recv(1 << 16):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def refused(address: tuple[str, int], data: bytes, seconds: float = WAIT_SECONDS) -> int:
    """Status of a refusal in OpenAI's form, behind which the connection is closed."""
    with socket.create_connection(address) as sock:
        sock.sendall(data)
        status, body = answer(sock, seconds)
    assert body["error"]["message"] and set(body["error"]) == {"message", "type", "param", "code"}
    return status


class TestHeads:
    """Of requests: URL and headers."""

    def test_too_many_bytes(self, inside: Inside) -> None:
        line = b"x: " + b"a" * (MAX_HEAD_BYTES // 4) + b"\r\n"
        assert refused(inside.address, HEAD + line * 5 + b"\r\n") == 431
        assert refused(inside.address, HEAD + b"x: " + b"a" * MAX_HEAD_BYTES * 6) == 431  # no header's end
        assert refused(inside.address, b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n") == 431

    def test_too_many(self, inside: Inside) -> None:
        lines = b"".join(b"x-%d: 1\r\n" % number for number in range(MAX_HEADERS))
        assert refused(inside.address, HEAD + lines + b"\r\n") == 431

    def test_as_many_as_may_be(self, inside: Inside) -> None:
        lines = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 400) for number in range(MAX_HEADERS - 2))
        with socket.create_connection(inside.address) as sock:
            sock.sendall(HEAD + lines + b"connection: close\r\n\r\n")
            assert answer(sock)[0] == 200

    def test_a_trailer_without_an_end(self, inside: Inside) -> None:
        """Trailers come behind a chunked body, when headers have passed; the parser keeps them all."""
        chunked = POST + b"transfer-encoding: chunked\r\n\r\n"
        assert refused(inside.address, chunked + b"0\r\nx: " + b"a" * MAX_HEAD_BYTES * 6) == 431

    @pytest.mark.parametrize(
        "data",
        [
            b"nonsense\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            HEAD + b"x : y\r\n\r\n",
            HEAD + b"x: \x00\r\n\r\n",
            POST + b"transfer-encoding: chunked\r\n\r\n-1\r\n",
            POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        ],
    )
    def test_what_is_not_http(self, data: bytes, inside: Inside) -> None:
        assert refused(inside.address, data) == 400

    @pytest.mark.parametrize("hosts", [b"", b"host: localhost\r\nhost: localhost\r\n"])
    def test_one_host(self, hosts: bytes, inside: Inside) -> None:
        data = b"GET /health HTTP/1.1\r\n" + hosts + b"connection: close\r\n\r\n"
        assert refused(inside.address, data) == 400

    def test_refusals_are_counted(self, inside: Inside) -> None:
        refused(inside.address, b"nonsense\r\n\r\n")
        with inside.client() as http:
            assert 'http_requests_total{method="any",path="none",status="400"} 1.0' in http.get("/metrics").text


class TestTime:
    """That a client may take."""

    def test_for_headers(self, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
        assert refused(inside.address, HEAD) == 408
        for silent in (b"", b"\r\n"):
            with socket.create_connection(inside.address) as sock:
                sock.sendall(silent)
                sock.settimeout(20)
                assert sock.recv(1000) in (b"", b"HTTP/1.1 408 ")[:1] or silent

    def test_for_headers_of_a_second_request(self, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_connection(inside.address) as sock:
            sock.sendall(HEAD + b"\r\n")
            sock.settimeout(20)
            assert b" 200 " in sock.recv(10000)
            monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
            sock.sendall(HEAD)
            assert answer(sock)[0] == 408

    def test_for_a_body(self, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bodies, "BODY_SECONDS", 0.3)
        assert refused(inside.address, POST + b"content-length: 9\r\n\r\n{") == 408

    def test_for_a_body_that_nobody_wants(self, inside: Inside) -> None:
        """The answer was sent before the body was whole: the connection must not be held for it."""
        assert refused(inside.address, POST.replace(b"completions", b"nothing") + b"content-length: 9\r\n\r\n{") == 404
        assert refused(inside.address, POST + b"content-length: 999999999999\r\n\r\n{") == 413


def test_connections_of_an_address(tmp_path: Path) -> None:
    """Half requests give way to new ones, requests under way do not."""
    inside = Inside(tmp_path, connections=4)
    inside.wait_until_it_serves()
    held: list[socket.socket] = []
    try:
        for _ in range(50):
            held.append(socket.create_connection(inside.address))
            held[-1].sendall(HEAD)
        with inside.client() as http:
            assert http.get("/health").status_code == 200
        for sock in held:
            sock.close()
        held = [sent(inside.address, body_of(3000, number, stream=True)) for number in range(4)]
        for sock in held:
            assert b" 200 " in sock.recv(20)
        assert refused(inside.address, HEAD + b"\r\n") == 503
    finally:
        for sock in held:
            sock.close()
        inside.end()


def test_half_requests_do_not_use_up_files() -> None:
    """A server that may open few files keeps some for requests, whatever one address holds."""
    from tests.server.process import serving

    with serving("--warm-up", "0", most_files=64, preloaded=True) as served:
        host, port = httpx.URL(served.url).host, httpx.URL(served.url).port
        held = []
        for _ in range(80):
            held.append(socket.create_connection((host, port)))
            held[-1].sendall(HEAD)
        with served.client() as http:
            for _ in range(5):
                assert http.get("/health").status_code == 200
        for sock in held:
            sock.close()


class TestBodies:
    """Of JSON, refused on their bytes."""

    def test_held_bytes_of_all(self, tmp_path: Path) -> None:
        """Bodies of which the last byte does not come take no more than four of the largest may."""
        inside = Inside(tmp_path, body_bytes=1 << 20)
        inside.wait_until_it_serves()
        held = []
        try:
            for _ in range(6):
                held.append(socket.create_connection(inside.address))
                held[-1].sendall(POST + b"content-length: 1000000\r\n\r\n" + b" " * 999_999)
            statuses = []
            for sock in held:
                sock.settimeout(1)
                try:
                    statuses.append(int(sock.recv(1000).split()[1]))
                except TimeoutError:
                    statuses.append(0)
            assert sorted(statuses) == [0, 0, 0, 0, 503, 503]
            for sock in held:
                sock.close()
            with inside.client() as http:
                assert http.post("/v1/completions", content=body_of(2), headers=JSON).status_code == 200
        finally:
            inside.end()

    @pytest.mark.parametrize("megabytes", [2, 30])
    def test_wrong_bodies_cost_little(self, megabytes: int, measured: tuple[Served, list[httpx.Response]]) -> None:
        """Of lists, objects and unknown keys: 400 within a second, in 10 times their size, while /health answers."""
        served, _ = measured
        size = megabytes * 1_000_000
        made = {
            "ids": b'{"model":"bundled","prompt":[' + b"-1," * (size // 3) + b"1]}",
            "lists of ids": b'{"model":"bundled","prompt":[[' + b"-1," * (size // 3) + b"1]]}",
            "as many ids as may be": b'{"model":"bundled","prompt":[' + b"-1," * 131_000 + b"1]}" + b" " * size,
            "lists": b'{"model":"bundled","prompt":[' + b"[1]," * (size // 4) + b"[1]]}",
            "strings": b'{"model":"bundled","prompt":[' + b'"a",' * (size // 4) + b'""]}',
            "numbers": b'{"model":"bundled","prompt":[' + b"1.5," * (size // 4) + b"1]}",
            "keys": b'{"model":"bundled",' + b",".join(b'"%d":1' % n for n in range(size // 11)) + b"}",
            "objects": b'{"model":"bundled","messages":[' + b"{}," * (size // 3) + b"{}]}",
            "depth": b'{"model":"bundled","prompt":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
            "quotes": b'{"model":"bundled","prompt":"' + rb"\"" * (size // 2),
            "backslashes": b'{"model":"bundled","prompt":"' + b"\\" * size,
        }
        process = Path(f"/proc/{served.process.pid}")
        worst: list[float] = []
        ended = threading.Event()

        def ask_health() -> None:
            with served.client() as http:
                while not ended.is_set():
                    watch = Stopwatch(process)
                    assert http.get("/health").status_code == 200
                    worst.append(watch.seconds())
                    time.sleep(0.01)

        watcher = threading.Thread(target=ask_health)
        watcher.start()
        try:
            with served.client() as http:
                for name, body in made.items():
                    grown = []
                    for _ in range(3):  # the least: free memory that the allocator happens to return adds to one
                        (process / "clear_refs").write_text("5")  # its peak is that of now
                        before, began = memory(process, "VmRSS"), Stopwatch(process)
                        reply = http.post("/v1/completions", content=body, headers=JSON)
                        seconds = began.seconds()
                        grown.append(memory(process, "VmHWM") - before)
                        assert reply.status_code == 400 and len(reply.content) < 3000, (name, reply.text)
                        assert seconds < (1 if megabytes == 2 else 5), (name, seconds)
                        if grown[-1] < 10 * len(body):
                            break
                    assert min(grown) < 10 * len(body), (name, grown)
        finally:
            ended.set()
            watcher.join()
        assert max(worst) < 1

    def test_right_ones_pass(self, served: Served) -> None:
        """What real clients send: long texts with all that JSON escapes, many messages, many ids."""
        text = 'He said: "a, [b], {c}\\"\n' * 30
        long = {"model": "bundled", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        many = {"model": "bundled", "messages": [{"role": "user", "content": "a"}] * 21, "max_tokens": 1}
        ids = {"model": "bundled", "prompt": [5] * 1000, "max_tokens": 1}
        with served.client() as http:
            assert http.post("/v1/chat/completions", json=long).status_code == 200
            assert http.post("/v1/chat/completions", json=many).status_code == 200
            assert http.post("/v1/completions", json=ids).json()["usage"]["prompt_tokens"] == 1000

    def test_types_of_content(self, served: Served) -> None:
        """JSON as a form's text needs no preflight in a browser, so it is refused."""
        body = b'{"model":"bundled","prompt":"a","max_tokens":1}'
        with served.client() as http:
            for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
                reply = http.post("/v1/completions", content=body, headers={"content-type": kind})
                assert reply.status_code == 400 and "content-type: application/json" in reply.text, kind
            for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
                assert http.post("/v1/completions", content=body, headers={"content-type": kind}).is_success
            packed = {**JSON, "content-encoding": "gzip"}
            assert "uncompressed" in http.post("/v1/completions", content=body, headers=packed).text


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=60)


def counted(value: Any, depth: int = 1) -> Iterator[tuple[str, int]]:
    """What is limited in a value, and how much of it there is."""
    if isinstance(value, str):
        yield "strings", 1
    if isinstance(value, list | dict):
        yield "containers", 1
        yield "depth", depth
        yield ("keys" if isinstance(value, dict) else "items"), len(value)
        for one in value.values() if isinstance(value, dict) else value:
            yield from counted(one, depth + 1)
        for _ in value if isinstance(value, dict) else ():
            yield "strings", 1


@settings(max_examples=300, deadline=None)
@given(VALUES, st.integers(1, 6), st.booleans(), st.sampled_from((None, 1)))
@example("\\", 1, True, None)
@example('"', 1, False, None)
def test_counts_on_bytes_are_those_of_objects(value: Any, items: int, ascii_only: bool, indent: int | None) -> None:
    """Whatever strings have in them: quotes, brackets, commas, backslashes."""
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    sums = {name: 0 for name in ("strings", "containers", "depth", "keys", "items")}
    for name, count in counted(value):
        sums[name] = sums[name] + count if name in ("strings", "containers") else max(sums[name], count)
    if sums["items"] <= items:
        check_json(body, items)
    else:
        with pytest.raises(ApiError, match="items in a list"):
            check_json(body, items)


@pytest.mark.parametrize(
    ("most", "made"),
    [
        (MAX_DEPTH, lambda count: b"[" * count + b"]" * count),
        (MAX_KEYS, lambda count: b"{" + b",".join(b'"%d":1' % n for n in range(count)) + b"}"),
        (MAX_CONTAINERS, lambda count: b",".join([b"{}"] * count)),
        (MAX_STRINGS, lambda count: b",".join([b'""'] * count)),
        (ITEMS, lambda count: b"[" + b",".join([b"1"] * count) + b"]"),
    ],
)
def test_each_limit_is_at_its_number(most: int, made: Any) -> None:
    check_json(made(most), ITEMS)
    with pytest.raises(ApiError) as found:
        check_json(made(most + 1), ITEMS)
    assert found.value.status == 400


def memory(process: Path, name: str) -> int:
    """Bytes, by Linux."""
    line = next(line for line in (process / "status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def processor_wait(process: Path) -> float:
    """Seconds in which threads of a process could run and had no processor: other programs' work, not its own."""
    total = 0
    for task in (process / "task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return total / 1e9


class Stopwatch:
    """Time of a server and this process, without the time in which both waited for a processor."""

    def __init__(self, server: Path) -> None:
        self._processes = server, Path("/proc/self")
        self._began, self._waited = time.perf_counter(), self._waits()

    def seconds(self) -> float:
        return time.perf_counter() - self._began - max(0.0, self._waits() - self._waited)

    def _waits(self) -> float:
        return sum(map(processor_wait, self._processes))


class TestDeadlines:
    """A request ends when its deadline or its client does."""

    @pytest.mark.slow
    def test_of_a_client_that_stops_reading(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reply, "SLACK_SECONDS", 0.2)
        inside = Inside(tmp_path, deadline_seconds=10, send_bytes=4096)
        inside.wait_until_it_serves()
        try:
            with inside.client() as http:
                assert http.post("/v1/completions", content=body_of(2), headers=JSON).is_success
            with sent(inside.address, body_of(3800, 1, stream=True, logprobs=20, n=4), receive_bytes=4096) as sock:
                assert inside.wait_for(lambda found: bool(found) and all(one.flow.write_paused for one in found))
                assert inside.wait_for(lambda found: not found)
                sock.settimeout(WAIT_SECONDS)
                received = b""
                while piece := sock.recv(1 << 16):  # what the kernel had already, then the end
                    received += piece
                assert b"[DONE]" not in received
            inside.wait_for_nobody()
        finally:
            inside.end()

    def test_of_unread_events(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Events that nobody takes are bounded in number; the engine is told to stop."""
        cancelled: list[int] = []

        class Fast:
            async def submit(self, request: Request, put: Any) -> Submitted:
                loop = asyncio.get_running_loop()
                for _ in range(2 * MAX_UNREAD):
                    loop.call_soon(put, Event(5, "a", None, ()))
                return Submitted("1", lambda: cancelled.append(1))

        async def run() -> tuple[int, ApiError | None]:
            found = Choices(Fast(), Admission(10, 1000), 60, "prompt")  # type: ignore[arg-type]
            await found.submit([Request(((1, 2),))])
            await asyncio.sleep(0.1)
            count = 0
            try:
                async for items in found:
                    count += len(items)
            except ApiError as error:
                return count, error
            return count, None

        count, error = asyncio.run(run())
        assert error is not None and error.code == "client_too_slow" and cancelled
        assert count <= MAX_UNREAD


class TestStore:
    """Work that waits for a disk or for the store's lock holds up nothing else."""

    def test_a_lock_that_is_held(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        inside = Inside(tmp_path)
        inside.wait_until_it_serves()
        released = threading.Event()
        try:
            assert inside.service is not None
            store = inside.service.contexts._store
            monkeypatch.setattr(store, "resolve", lambda name: released.wait(WAIT_SECONDS))
            with inside.client() as http:

                def ask() -> None:
                    with inside.client() as other:
                        other.get("/v1/contexts/x")

                threads = [threading.Thread(target=ask) for _ in range(3 * contexts.STORE_THREADS)]
                for thread in threads:
                    thread.start()
                time.sleep(0.5)
                began = time.perf_counter()
                assert http.post("/v1/completions", content=body_of(2), headers=JSON).status_code == 200
                assert http.post("/tokenize", json={"prompt": "5 6"}).status_code == 200
                assert time.perf_counter() - began < WAIT_SECONDS / 2
                released.set()
                for thread in threads:
                    thread.join()
        finally:
            released.set()
            inside.end()

    def test_a_context_that_another_client_removes_was_saved(self, tmp_path: Path) -> None:
        inside = Inside(tmp_path)
        inside.wait_until_it_serves()
        try:
            assert inside.service is not None
            client, contexts = inside.service.client, inside.service.contexts
            keep = client.keep

            async def keep_and_lose(*given: Any) -> Any:
                kept = await keep(*given)
                await contexts.remove(given[0])
                return kept

            client.keep = keep_and_lose  # type: ignore[method-assign,assignment]
            with inside.client() as http:
                reply = http.post("/v1/contexts", json={"name": "mine", "text": "5 6 7 8 9"})
                assert reply.status_code == 200, reply.text
                assert reply.json()["id"] == "mine" and reply.json()["tokens"] == 5
                assert http.get("/v1/contexts/mine").status_code == 404
        finally:
            inside.end()


def test_health_while_the_model_loads(measured: tuple[Served, list[httpx.Response]]) -> None:
    """The port answers at once, with 503 until the model is there."""
    served, answers = measured
    loading = [one for one in answers if one.status_code == 503]
    assert loading and loading[0].json()["error"]["code"] == "model_loading" and loading[0].headers["retry-after"]
    assert httpx.get(f"{served.url}/health").status_code == 200


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
