"""Stored responses: a bound that holds whatever is stored, continued and deleted, callers apart, and restarts."""

from __future__ import annotations

import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from retrieval_attn.errors import StoreError
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.stored_responses import OVERHEAD_BYTES, StoredResponse, StoredResponses
from tests.server.inside import Inside

MOST = 20_000
CALLERS = ("key:a", "key:b")
BODIES = "SELECT coalesce(sum(length(body)), 0) FROM responses"
TURNS = f"SELECT coalesce(sum(length(said) + {OVERHEAD_BYTES}), 0) FROM turns"
UNREACHED = """SELECT count(*) FROM turns AS one WHERE turn NOT IN (SELECT turn FROM responses)
    AND NOT EXISTS (SELECT 1 FROM turns WHERE earlier = one.turn)"""


def kept(store: StoredResponses, caller: str, name: str, size: int = 10, earlier: Any = None) -> Any:
    store.keep(caller, {"id": name, "output": []}, [{"role": "user", "content": name + "x" * size}], earlier)
    return store.get(caller, name)


def said(response: StoredResponse) -> list[str]:
    return [turn["content"].rstrip("x") for turns in response.conversation for turn in json.loads(turns)]


def test_the_caller_with_the_most_bytes_loses_its_oldest() -> None:
    store = StoredResponses(MOST)
    kept(store, "key:b", "b0")
    for number in range(50):
        kept(store, "key:a", f"a{number}", 500)
    assert store.nbytes <= MOST and store.get("key:b", "b0") is not None
    assert store.get("key:a", "a0") is None and store.get("key:a", "a49") is not None
    oldest = next(number for number in range(50) if store.get("key:a", f"a{number}") is not None)  # used: now the last
    kept(store, "key:a", "more", 500)
    assert store.get("key:a", f"a{oldest}") is not None and store.get("key:a", f"a{oldest + 1}") is None
    assert kept(store, "key:a", "large", MOST) is None and store.nbytes <= MOST
    with pytest.raises(ApiError, match="20,000 bytes") as found:
        store.previous("key:a", "large")
    assert (found.value.status, found.value.code) == (404, "previous_response_not_found")


def test_a_conversation_outlives_its_first_responses() -> None:
    """Its messages stay until the last response that continues them goes."""
    store = StoredResponses(MOST)
    first = kept(store, "key:a", "one")
    second = kept(store, "key:a", "two", earlier=first)
    third = kept(store, "key:a", "three", earlier=second)
    total = store.nbytes
    assert store.remove("key:a", "one") and store.remove("key:a", "two") and not store.remove("key:a", "one")
    assert store.nbytes == total - len(first.body) - len(second.body) and said(third) == ["one", "two", "three"]
    assert store.remove("key:a", "three") and store.nbytes == 0


def test_a_response_that_goes_before_it_is_read() -> None:
    """A request that waited finds its conversation gone, and never another's: rows are not used twice."""
    store = StoredResponses(MOST)
    waiting = kept(store, "key:a", "one")
    assert store.remove("key:a", "one")
    kept(store, "key:b", "two")
    with pytest.raises(ApiError) as found:
        waiting.conversation  # noqa: B018
    assert found.value.status == 404


def test_a_new_process_finds_them(tmp_path: Path) -> None:
    """With a folder, and other servers on it as well; none but the file's owner can read it."""
    first = StoredResponses(MOST, tmp_path / "responses")
    kept(first, "key:a", "one")
    beside = StoredResponses(MOST, tmp_path / "responses")
    two = kept(beside, "key:a", "two", earlier=beside.get("key:a", "one"))
    assert said(two) == ["one", "two"] and first.nbytes == beside.nbytes
    first.close()
    beside.close()
    later = StoredResponses(MOST, tmp_path / "responses")
    again = later.get("key:a", "two")
    assert again is not None and again.body == two.body and said(again) == ["one", "two"]
    assert later.get("key:b", "two") is None
    later.close()
    assert (tmp_path / "responses" / "responses.sqlite3").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content, words", [(b"x" * 5000, "not a database"), (None, "has version 7")])
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "responses.sqlite3"
    if content is None:
        other = sqlite3.connect(path)
        other.execute("PRAGMA user_version=7")
        other.close()
    else:
        path.write_bytes(content)
    with pytest.raises(StoreError, match=words) as found:
        StoredResponses(MOST, tmp_path)
    assert str(path) in str(found.value)


def test_an_answer_that_cannot_be_stored_is_still_an_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = StoredResponses(MOST, tmp_path)
    kept(store, "key:a", "one")
    other = sqlite3.connect(tmp_path / "responses.sqlite3")
    other.execute("DROP TABLE callers")
    other.close()
    with caplog.at_level(logging.WARNING):
        store.keep("key:a", {"id": "two", "output": []}, [], None)
    assert "response two was answered but not stored" in caplog.text and store.get("key:a", "two") is None
    store.close()


class Storing(RuleBasedStateMachine):
    """All that requests can do, in any order; an earlier response may be evicted or deleted while one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.store = StoredResponses(MOST)
        self.held: dict[str, dict[str, StoredResponse]] = {caller: {} for caller in CALLERS}
        self.words: dict[str, list[str]] = {}
        self.count = 0

    @rule(caller=st.sampled_from(CALLERS), size=st.integers(0, 6000), data=st.data())
    def keep(self, caller: str, size: int, data: st.DataObject) -> None:
        """Answer a request that continues any response that it once found, also one that is gone by now."""
        held = self.held[caller]
        before = data.draw(st.sampled_from([None, *held]))
        name = f"{self.count}"
        self.count += 1
        self.words[name] = [*(self.words[before] if before else ()), name]
        found = kept(self.store, caller, name, size, held[before] if before else None)
        if found is not None:
            assert said(found) == self.words[name]
            held[name] = found

    @precondition(lambda self: self.count)
    @rule(caller=st.sampled_from(CALLERS), data=st.data())
    def remove(self, caller: str, data: st.DataObject) -> None:
        """Delete any response, of this caller or not."""
        name = str(data.draw(st.integers(0, self.count - 1)))
        assert self.store.remove(caller, name) is False or self.store.get(caller, name) is None

    @invariant()
    def holds(self) -> None:
        """The bytes counted are those of all that can be reached, and no caller finds another's."""
        for caller in CALLERS:
            for name in map(str, range(self.count)):
                one = self.store.get(caller, name)
                if one is not None:
                    assert name in self.held[caller] and said(one) == self.words[name]
        bodies, turns = (self.store._one(one)[0] for one in (BODIES, TURNS))
        assert bodies + turns == self.store.nbytes <= MOST
        assert self.store._one(UNREACHED) == (0,)


TestStoring = Storing.TestCase
TestStoring.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_the_server_evicts_and_limits_a_conversation(tmp_path_factory: pytest.TempPathFactory) -> None:
    inside = Inside(tmp_path_factory.mktemp("store"), response_bytes=60_000, body_bytes=3_000)
    inside.wait_until_it_serves()
    try:
        with inside.client() as web:
            body: dict[str, Any] = {"model": "tiny", "max_output_tokens": 2, "input": "1 2 3 " * 20}
            first = web.post("/v1/responses", json=body).json()["id"]
            previous = first
            for _ in range(12):
                reply = web.post("/v1/responses", json=body | {"previous_response_id": previous})
                assert reply.status_code == 200, reply.text
                previous = reply.json()["id"]
            for _ in range(12):
                web.post("/v1/responses", json=body | {"store": True})
            reply = web.post("/v1/responses", json=body | {"previous_response_id": first})
            assert reply.status_code == 404 and reply.json()["error"]["code"] == "previous_response_not_found"
            assert "60,000 bytes" in reply.json()["error"]["message"]
            assert inside.service is not None and 0 < inside.service.responses.nbytes <= 60_000
            long = body | {"input": "1 2 3 " * 400, "max_output_tokens": 1}
            first = web.post("/v1/responses", json=long).json()["id"]
            second = web.post("/v1/responses", json=long | {"previous_response_id": first})
            assert second.status_code == 200, second.text
            third = web.post("/v1/responses", json=long | {"previous_response_id": second.json()["id"]})
            assert third.status_code == 413 and "3,000 bytes" in third.json()["error"]["message"]
    finally:
        inside.end()


def test_a_restarted_server_continues_a_conversation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By the id of a response that it answered before, with the folder of `--store`."""
    folder, body = tmp_path_factory.mktemp("store"), {"model": "tiny", "max_output_tokens": 2, "input": "1 2 3"}
    previous = tokens = None
    for _ in range(2):
        inside = Inside(folder)
        inside.wait_until_it_serves()
        try:
            with inside.client() as web:
                sent = body if previous is None else body | {"previous_response_id": previous["id"]}
                reply = web.post("/v1/responses", json=sent)
                assert reply.status_code == 200, reply.text
                if previous is not None:
                    assert web.get(f"/v1/responses/{previous['id']}").json() == previous
                    assert reply.json()["usage"]["input_tokens"] > tokens
                previous, tokens = reply.json(), reply.json()["usage"]["input_tokens"]
        finally:
            inside.end()
