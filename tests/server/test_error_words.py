"""Errors in words that clients know, and without files, commands and Python of the machine that serves."""

from __future__ import annotations

import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from retrieval_attn import errors
from retrieval_attn.server.bodies import parse_json
from retrieval_attn.server.failure import ApiError, failure_of
from retrieval_attn.server.ipc import error_from, plain_error
from retrieval_attn.server.protocol import ChatBody
from retrieval_attn.server.streaming import noted
from tests.server.inside import Inside
from tests.server.process import Served, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POSITIONS = 131_072
SERVER_SIDE = re.compile(r"/(tmp|home|root|work|var)\b|retrieval-attn |LLM[.(]|Config\(|--\w|yarn|cached and")
"""What only who runs the server can use."""


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    made = Inside(tmp_path)
    made.wait_until_it_serves()
    try:
        yield made
    finally:
        made.end()


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()["error"]
    assert not SERVER_SIDE.search(found["message"]), found["message"]
    return found


def talk(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "bundled", "messages": [{"role": "user", "content": text}], **options}


def test_too_long_a_prompt_is_told_as_openai_tells_it(http: httpx.Client) -> None:
    """Clients look for the code, or for the words, and then shorten the conversation."""
    long = "the sky " * 70_000
    begin = f"This model's maximum context length is {POSITIONS} tokens. However, you requested "
    for path, field, body in (
        (CHAT, "messages", talk(long, max_tokens=9)),
        (TEXT, "prompt", {"model": "bundled", "prompt": long, "max_tokens": 9}),
        (TEXT, "prompt", {"model": "bundled", "prompt": [5] * POSITIONS, "max_tokens": 9}),
    ):
        for stream in (False, True):
            error = error_of(http.post(path, json={**body, "stream": stream}))
            assert (error["code"], error["param"]) == ("context_length_exceeded", field)
            assert error["type"] == "invalid_request_error" and error["message"].startswith(begin)
            found = re.fullmatch(
                rf"(\d+) tokens \((\d+) in the {field}, 9 in the completion\)\. Please reduce the length of the "
                rf"{field} or completion\.",
                error["message"].removeprefix(begin),
            )
            assert found is not None and int(found[1]) == int(found[2]) + 9 > POSITIONS, error


def test_a_prompt_of_too_many_characters_is_told_the_same(http: httpx.Client) -> None:
    """It is refused before it is tokenized."""
    for path, field, body in (
        (CHAT, "messages", talk("x" * 20_000_000)),
        (TEXT, "prompt", {"model": "bundled", "prompt": "x" * 20_000_000}),
    ):
        error = error_of(http.post(path, json=body))
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert re.search(rf"maximum context length is {POSITIONS} tokens. .* at least \d+ tokens", error["message"])


def test_each_route_names_the_field_of_a_too_long_text(http: httpx.Client) -> None:
    """Before and after it is tokenized: by its characters, and by its tokens."""
    assert http.post("/v1/contexts", json={"name": "short", "text": "The sky is blue. " * 9}).status_code == 200
    for text in ("x" * 20_000_000, "the sky " * 70_000):
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]
        requests: list[tuple[str, str, dict[str, Any]]] = [
            ("/v1/contexts", "text", {"name": "long", "text": text}),
            ("/v1/contexts", "messages", {"name": "long", "messages": turns}),
            ("/v1/contexts/short/save", "text", {"name": "long", "text": text}),
            ("/v1/contexts/short/save", "messages", {"name": "long", "messages": turns}),
        ]
        if text.startswith("x"):  # more tokens than the model has positions are no error of /tokenize: it counts them
            requests += [("/tokenize", "prompt", {"prompt": text}), ("/tokenize", "messages", {"messages": turns})]
        for path, field, body in requests:
            error = error_of(http.post(path, json=body))
            assert (error["code"], error["param"]) == ("context_length_exceeded", field), (path, error)
            assert f"in the {field}" in error["message"]
        reply = http.post("/v1/contexts/files", data={"name": "long"}, files={"file": ("a.txt", text.encode())})
        error = error_of(reply)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "file"), error
        found = re.fullmatch(
            r"There are at least (\d+) tokens in the file, but a context of this server holds (\d+): shorten the file, "
            r"or split it into several contexts\.",
            error["message"],
        )
        assert found is not None and int(found[1]) > int(found[2]) > POSITIONS - 100, error


@pytest.mark.slow
def test_the_engines_process_tells_the_numbers(tmp_path: Path) -> None:
    options = ("--store", str(tmp_path), "--engine", "process", "--warm-up", "0")
    with serving(*options, preloaded=True) as apart, apart.client() as http:
        error = error_of(http.post(CHAT, json=talk("hello", max_tokens=POSITIONS)))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert f"{POSITIONS} in the completion" in error["message"]
        error = error_of(http.post(CHAT, json=talk("hello", context="nobody")), 404)
        assert error["message"] == "There is no saved context 'nobody'."


def test_a_context_that_continues_counts(http: httpx.Client) -> None:
    assert http.post("/v1/contexts", json={"name": "counted", "text": "The sky is blue. " * 300}).status_code == 200
    error = error_of(http.post(CHAT, json=talk("Why?", context="counted", max_tokens=POSITIONS - 100)))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_an_unknown_context_is_named_and_the_store_is_not(http: httpx.Client) -> None:
    body = {"name": "x", "text": "y"}
    for reply in (
        http.post(CHAT, json=talk("a", context="nobody")),
        http.post(CHAT, json=talk("a", model="bundled@nobody")),
        http.get("/v1/models/bundled@nobody"),
        http.get("/v1/contexts/nobody"),
        http.delete("/v1/contexts/nobody"),
        http.post("/v1/contexts/nobody/save", json=body),
        http.post("/v1/contexts/nobody/fork", json={"name": "x"}),
    ):
        error = error_of(reply, 404)
        assert (error["code"], error["message"]) == ("context_not_found", "There is no saved context 'nobody'.")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("stop", {"stop": ""}),
        ("stop", {"stop": ["a"] * 17}),
        ("stop", {"stop": ["a", 5]}),
        ("messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
        ("messages.0.content", {"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]}),
        ("logit_bias.a", {"logit_bias": {"a": 1}}),
        ("top_logprobs", {"top_logprobs": 21}),
        (None, {"top_logprobs": 3}),
    ],
)
def test_a_wrong_value_is_told_by_its_field(field: str | None, options: dict[str, Any]) -> None:
    """Clients know fields, and no types of this server."""
    with pytest.raises(ApiError) as failed:
        parse_json(json.dumps({**talk("hello"), **options}).encode(), ChatBody, 4096)
    error = failed.value.body["error"]
    assert error["param"] == field
    assert not re.search(r"constrained|list\[|\bstr:|: :|Value error", error["message"]), error["message"]


def test_a_name_that_no_context_can_have(http: httpx.Client) -> None:
    for name in ("..", "a/b", "../../etc/passwd", "x" * 65):
        error = error_of(http.post(CHAT, json=talk("a", model=f"bundled@{name}")))
        assert error["code"] == "invalid_context" and "1 to 64" in error["message"]


OURS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.RetrievalAttentionError)
]


@pytest.mark.parametrize(
    ("reason", "status", "code"), [("name", 400, "invalid_context"), ("full", 507, "store_full"),
    ("busy", 503, "store_busy"), ("failed", 500, "store_failed")],
)  # fmt: skip
def test_the_reason_of_a_store_error_decides_its_status(reason: errors.StoreReason, status: int, code: str) -> None:
    """Also after the error crossed from the engine's process."""
    error = error_from(plain_error(errors.StoreError("/var/store: no room", reason=reason)))
    failure = noted(error)
    assert (failure.status, failure.code) == (status, code) and "/var" not in failure.message


@pytest.mark.parametrize("kind", OURS)
def test_no_error_tells_files_or_commands(kind: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it says; the log has the words. Errors in requests' values are written for clients."""
    words = "cannot read /var/store/contexts/a.json: run `retrieval-attn contexts verify`"
    with caplog.at_level(logging.INFO):
        failure = noted(kind(words))
    if kind in (errors.ConfigError, errors.InputDataError):
        assert (failure.status, failure.message) == (400, words)
        return
    assert "/var" not in failure.message and "retrieval-attn" not in failure.message and len(failure.message) > 20
    assert any(words in record.getMessage() or words in str(record.exc_info) for record in caplog.records)


def test_keys_that_do_not_fit_the_model_are_a_conflict(inside: Inside) -> None:
    """Weights that changed between a request and its answer, over HTTP: the client is told, and may ask again."""
    submit = inside.engine.submit

    def changed(request: Any) -> Any:
        ticket = submit(request)
        with torch.no_grad():
            inside.model.get_output_embeddings().weight.mul_(1.5)
        return ticket

    body = {"model": "tiny", "prompt": [5] * 200, "max_tokens": 200}
    with inside.client() as http:
        inside.engine.submit = changed  # type: ignore[method-assign]
        error = error_of(http.post(TEXT, json=body), 409)
        assert (error["type"], error["code"]) == ("conflict_error", "context_of_another_model")
        inside.engine.submit = submit  # type: ignore[method-assign]
        assert http.post(TEXT, json=body).status_code == 200


def test_what_memory_does_not_take_is_told_as_too_long() -> None:
    words = "Job '3' needs (8,000 prompt - 0 cached + 9 generated) = ... give the engine more host memory"
    failure = failure_of(errors.AdmissionError(words, limit=5000, tokens=8009), field="messages", answer_tokens=9)
    assert failure.code == "context_length_exceeded" and "Job" not in failure.message
    assert re.search(r"maximum context length is 5000 tokens .*\(8000 in the messages, 9 in the", failure.message)


def test_an_engine_without_memory_for_a_request(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's own refusal, over HTTP."""
    limits = inside.engine._scheduler.limits
    object.__setattr__(limits, "host_bytes", 100 * limits.token_bytes)
    with inside.client() as http:
        reply = http.post(TEXT, json={"model": "tiny", "prompt": [5] * 200, "max_tokens": 7})
    error = error_of(reply)
    assert error["code"] == "context_length_exceeded" and "is 100 tokens" in error["message"]


def test_an_engine_that_ended_tells_its_words_to_the_log(inside: Inside) -> None:
    inside.engine.died = OSError("/var/lib/model is gone")
    try:
        with inside.client() as http:
            for reply in (http.get("/health"), http.post(TEXT, json={"model": "tiny", "prompt": [5], "max_tokens": 1})):
                assert error_of(reply, 503)["code"] == "engine_lost" and "OSError" in reply.text
    finally:
        inside.engine.died = None


def test_bodies_of_another_kind(http: httpx.Client) -> None:
    body = b'{"model":"bundled","max_tokens":1,"messages":[{"role":"user","content":"caf\xe9"}]}'
    good = body.replace(b"\xe9", b"\xc3\xa9")
    json_type = {"content-type": "application/json"}
    form = {"content-type": "application/x-www-form-urlencoded"}  # curl -d
    assert http.post(CHAT, content=good, headers=json_type).status_code == 200
    for content, headers, words in (
        (good, form, "send content-type: application/json"),
        (good, {}, "send content-type: application/json"),
        (body, json_type, "UTF-8"),
        (gzip.compress(good), {**json_type, "content-encoding": "gzip"}, "'gzip'"),
        (gzip.compress(good), json_type, "do not compress"),
    ):
        assert words in error_of(http.post(CHAT, content=content, headers=headers))["message"]


def test_paths_that_are_not_served_tell_which_are(http: httpx.Client) -> None:
    """Of OpenAI's and of other APIs."""
    for path in (
        "/v1/images/generations",
        "/v1/complete",
        "/v1/embeddings",
        "/v1/chat/completions/",
        "/chat/completions",
        "/v2",
    ):
        error = error_of(http.post(path, json={"model": "bundled", "input": "x"}), 404)
        assert (error["type"], error["code"], error["param"]) == ("not_found_error", "unknown_url", None)
        assert f"no POST {path} here" in error["message"] and f"POST {CHAT}, POST {TEXT}" in error["message"]
    reply = http.get(CHAT)
    assert "POST" in error_of(reply, 405)["message"] and reply.headers["allow"] == "POST"
