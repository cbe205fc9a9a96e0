"""What is wrong with a request is told with 400 and its kin, never with 500, and the server stays healthy."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.process import Served

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "What is the sky?"}


@pytest.fixture
def http(served: Served) -> Any:
    with served.client() as client:
        yield client


def body_with(**changed: Any) -> str:
    """A chat's body; NaN and infinity are written as Python does."""
    return json.dumps({"model": "bundled", "messages": [USER], "max_tokens": 2, **changed})


REFUSED: dict[str, str] = {
    "no messages": body_with(messages=[]),
    "messages are none": body_with(messages=None),
    "unknown role": body_with(messages=[{"role": "robot", "content": "x"}]),
    "message without content": body_with(messages=[{"role": "user"}]),
    "null content of the user": body_with(messages=[{"role": "user", "content": None}]),
    "arguments that are no JSON": body_with(
        messages=[USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    ),
    "arguments that are no object": body_with(
        messages=[USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]
    ),
    "tools without a chat template": body_with(tools=[{"type": "function", "function": {"name": "f"}}]),
    "a tool's result without a chat template": body_with(messages=[USER, {"role": "tool", "content": "x"}]),
    "variables without a chat template": body_with(chat_template_kwargs={"enable_thinking": False}),
    "another chat template": body_with(chat_template_kwargs={"chat_template": "{{ messages }}"}),
    "a picture": body_with(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    "NaN": body_with(temperature=float("nan")),
    "infinity": body_with(top_p=float("inf")),
    "a million stops": body_with(stop=["x"] * 1_000_000),
    "an empty stop": body_with(stop=[""]),
    "a long stop": body_with(stop="x" * 1000),
    "a thousand answers": body_with(n=1000),
    "no answers": body_with(n=0),
    "no tokens": body_with(max_tokens=0),
    "many tokens": body_with(max_tokens=10**9),
    "too many digits": '{"model": "bundled", "seed": ' + "9" * 10_000 + "}",
    "a text as a number": body_with(temperature="1"),
    "a number as a truth": body_with(stream=1),
    "too many logprobs": body_with(logprobs=True, top_logprobs=21),
    "top without logprobs": body_with(top_logprobs=3),
    "unknown field": body_with(tempratur=0),
    "a lone surrogate": '{"model": "bundled", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "structured output": body_with(response_format={"type": "json_schema"}),
    "a name that is a path": body_with(context="../../etc/passwd"),
    "no context behind the @": body_with(model="bundled@"),
    "two contexts": body_with(model="bundled@one", context="two"),
    "not JSON": "{",
    "an array": "[]",
    "null": "null",
    "nothing": "",
    "deep": "[" * 100_000,
    "too long": body_with(messages=[{"role": "user", "content": "the sky " * 200_000}]),
    "longer than any token allows": body_with(messages=[{"role": "user", "content": "x" * 20_000_000}]),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_wrong_is_told(name: str, http: httpx.Client) -> None:
    reply = http.post(CHAT, content=REFUSED[name], headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (
        error["type"] == "invalid_request_error"
        and error["message"]
        and set(error) == {"message", "type", "param", "code"}
    )
    assert len(reply.content) < 3000


@pytest.mark.parametrize("content", [b'{"model": "caf\xe9"}', b"\xff\xfe", b"\x00" * 100, b'{"model": "\xed\xa0\x80"}'])
def test_bytes_that_are_no_text(content: bytes, http: httpx.Client) -> None:
    for path in (CHAT, "/v1/completions", "/v1/contexts", "/tokenize", "/v1/contexts/files", "/v1/contexts/x/save"):
        for kind in (
            "application/json",
            "text/plain",
            "multipart/form-data",
            "multipart/form-data; boundary=x",
            "\xe9",
        ):
            reply = http.post(path, content=content, headers={b"content-type": kind.encode("latin-1")})
            assert reply.status_code == 400 and reply.json()["error"]["message"], (path, kind, reply.text)


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], [1, "x"], [-1], [10**6], [2**40], [[1], []], None, 5, {}, [1.5], [True]]
)
def test_prompts_that_are_none(prompt: Any, http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json={"model": "bundled", "prompt": prompt, "max_tokens": 1})
    assert reply.status_code == 400 and reply.json()["error"]["message"], reply.text


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", CHAT, 405),
        ("PUT", "/v1/models", 405),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/contexts/nobody", 404),
        ("POST", "/v1/contexts/nobody/fork", 404),
        ("POST", "/v1/contexts/nobody/save", 404),
    ):
        reply = http.request(method, path, json={"name": "x", "text": "y"} if path.endswith("save") else {"name": "x"})
        assert reply.status_code == status and reply.json()["error"]["message"], (path, reply.text)


def test_headers(http: httpx.Client) -> None:
    """A request's id is the client's where it may be one."""
    assert http.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 200, "\xe9", ""):
        found = http.get("/version", headers={b"x-request-id": bad.encode("latin-1")}).headers["x-request-id"]
        assert found != bad and len(found) == 32


def test_nothing_is_left_of_it(http: httpx.Client, served: Served) -> None:
    """After all of the above; and what failed by the server's own fault is in its log."""
    assert http.get("/health").status_code == 200
    reply = http.post(CHAT, content=body_with(), headers={"content-type": "application/json"})
    assert reply.status_code == 200
    assert not [line for line in served.log if line["level"] == "error"], served.log
    assert not served.other
