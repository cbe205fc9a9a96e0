"""Saved contexts over HTTP: made of texts, messages and files, asked by name, continued, renamed, gone; a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import retrieval_attn as ra
from tests.server.process import ANSWER, QUESTION, Served, document, saved, serving


@pytest.fixture
def http(served: Served) -> Any:
    with served.client() as client:
        yield client


def asked(http: httpx.Client, question: str = QUESTION, **options: Any) -> dict[str, Any]:
    body = {"model": "bundled", "temperature": 0, "max_tokens": 16, **options}
    body.setdefault("messages", [{"role": "user", "content": question}])
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_text_is_saved_listed_asked_and_removed(http: httpx.Client) -> None:
    record = saved(http, name="book", text=document())
    assert record["tokens"] > 800 and record["bytes"] > 0 and record["model"] == "bundled@book"
    assert http.get("/v1/contexts/book").json() == record
    assert record in http.get("/v1/contexts").json()["data"]
    assert "bundled@book" in [one["id"] for one in http.get("/v1/models").json()["data"]]
    assert http.get("/v1/models/bundled@book").json()["id"] == "bundled@book"
    for options in ({"model": "bundled@book"}, {"context": "book"}, {"model": "bundled@book", "context": "book"}):
        answer = asked(http, **options)
        assert ANSWER in text_of(answer) and cached(answer) == record["tokens"]
    assert http.delete("/v1/contexts/book").json()["deleted"] is True
    assert http.get("/v1/contexts/book").status_code == 404
    reply = http.post(
        "/v1/chat/completions", json={"model": "bundled@book", "messages": [{"role": "user", "content": "x"}]}
    )
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "context_not_found"
    assert http.delete("/v1/contexts/book").status_code == 404


def test_an_answer_is_that_of_the_text_itself(http: httpx.Client) -> None:
    """A saved context asked is the document with the question behind it."""
    saved(http, name="same", text=document(30))
    named = asked(http, model="bundled@same", logprobs=True)
    messages = [{"role": "system", "content": document(30)}, {"role": "user", "content": QUESTION}]
    plain = asked(http, messages=messages, logprobs=True)
    assert named["choices"] == plain["choices"]


def test_files_and_conversations(http: httpx.Client) -> None:
    reply = http.post("/v1/contexts/files", data={"name": "file"}, files={"file": ("book.txt", document().encode())})
    assert reply.status_code == 200, reply.text
    assert ANSWER in text_of(asked(http, model="bundled@file"))
    turns = [{"role": "user", "content": document()}]
    talk = saved(http, name="talk", messages=turns)
    assert ANSWER in text_of(asked(http, model="bundled@talk"))
    assert talk["tokens"] == reply.json()["tokens"]
    marked = http.post(
        "/v1/contexts/files", data={"name": "marked"}, files={"file": ("book.txt", document().encode("utf-8-sig"))}
    )
    assert marked.json()["tokens"] == reply.json()["tokens"], "a byte order mark is no text"
    reply = http.post("/v1/contexts/files", data={"name": "file"}, files={"file": ("book.txt", b"caf\xe9")})
    assert reply.status_code == 400 and "0xe9" in reply.json()["error"]["message"]


def test_more_is_read_behind_a_context_and_saved_with_it(http: httpx.Client) -> None:
    """Only what is new is written: both records share the first one's bytes."""
    first = saved(http, name="first", text=document(60))
    reply = http.post(
        "/v1/contexts/first/save", json={"name": "second", "text": "\nThe special magic Oslo number is: 5550123."}
    )
    assert reply.status_code == 200, reply.text
    second = reply.json()
    assert first["tokens"] < second["tokens"] < first["tokens"] + 40
    assert http.post("/v1/contexts/second/fork", json={"name": "whole"}).json()["bytes"] < 1.6 * first["bytes"]
    assert "5550123" in text_of(asked(http, "What is the special magic Oslo number?", model="bundled@second"))
    assert ANSWER in text_of(asked(http, model="bundled@second"))
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    reply = http.post("/v1/contexts/first/save", json={"name": "talked", "messages": turns})
    assert reply.status_code == 200 and reply.json()["tokens"] > first["tokens"] + 15
    answer = asked(http, model="bundled@talked")
    whole = asked(http, model="bundled@first", messages=[*turns, {"role": "user", "content": QUESTION}])
    assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert ANSWER in text_of(answer) and cached(answer) == reply.json()["tokens"]


def test_a_fork_lives_on(http: httpx.Client) -> None:
    record = saved(http, name="origin", text=document())
    fork = http.post("/v1/contexts/origin/fork", json={"name": "copy"}).json()
    assert {**fork, "id": "", "model": "", "created": 0} == {**record, "id": "", "model": "", "created": 0}
    assert http.post("/v1/contexts/origin/fork", json={"name": "copy"}).status_code == 409
    http.delete("/v1/contexts/origin")
    assert ANSWER in text_of(asked(http, model="bundled@copy"))


@pytest.mark.parametrize(
    "name", ["..", ".", "a/b", "%2e%2e", "../../etc/passwd", "..%2f..%2fetc", "x" * 65, "a b", "ä"]
)
def test_names_are_no_paths(name: str, http: httpx.Client) -> None:
    for reply in (
        http.get(f"/v1/contexts/{name}"),
        http.delete(f"/v1/contexts/{name}"),
        http.post("/v1/contexts", json={"name": name, "text": "x"}),
        http.post(
            "/v1/chat/completions", json={"model": f"bundled@{name}", "messages": [{"role": "user", "content": "x"}]}
        ),
    ):
        assert reply.status_code in (307, 400, 404, 405) or reply.json().get("object") == "list", reply.text


def test_a_follow_up_turn_reads_what_is_new(http: httpx.Client) -> None:
    turns = [
        {"role": "system", "content": document(50)},
        {"role": "user", "content": "Tell me of the " + "sky and the sun " * 40},
    ]
    first = asked(http, messages=turns)
    turns += [{"role": "assistant", "content": text_of(first) or "Yes."}, {"role": "user", "content": QUESTION}]
    second = asked(http, messages=turns)
    assert ANSWER in text_of(second)
    assert cached(second) > first["usage"]["prompt_tokens"] - 10


def test_saved_contexts_are_there_after_a_restart(needle_model_path: Path, tmp_path: Path) -> None:
    """Nothing of them is read again; one that was begun for another model is refused by name."""
    other = ra.LLM(needle_model_path, device="cpu", dtype="bfloat16", max_context=2048)
    other.read(document(4), progress=False).save("other", store=tmp_path / "store")
    arguments = ("--store", str(tmp_path / "store"), "--warm-up", "0")
    with serving(*arguments, preloaded=True) as first, first.client() as http:
        record = saved(http, name="book", text=document())
        before = asked(http, model="bundled@book")
        assert first.end() == 0
    with serving(*arguments, preloaded=True) as second, second.client() as http:
        after = asked(http, model="bundled@book")
        assert cached(after) == record["tokens"]
        assert after["choices"] == before["choices"] and ANSWER in text_of(after)
        reply = http.post(
            "/v1/chat/completions", json={"model": "bundled@other", "messages": [{"role": "user", "content": "x"}]}
        )
        assert reply.status_code == 409 and reply.json()["error"]["code"] == "context_of_another_model"
