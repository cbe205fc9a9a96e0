"""Responses in memory: a bound that holds whatever is stored, continued and deleted, and callers apart."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.stored_responses import StoredResponse, StoredResponses
from tests.server.inside import Inside

MOST = 20_000
CALLERS = ("key:a", "key:b")


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
    gone, bodies = weakref.ref(first), len(first.body) + len(second.body)
    total = store.nbytes
    assert store.remove("key:a", "one") and store.remove("key:a", "two") and not store.remove("key:a", "one")
    assert store.nbytes == total - bodies and said(third) == ["one", "two", "three"]
    del first, second, third
    assert store.remove("key:a", "three") and store.nbytes == 0
    assert gone() is None


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
        total = 0
        for caller in CALLERS:
            reached: dict[int, int] = {}
            for name in map(str, range(self.count)):
                one = self.store.get(caller, name)
                if one is not None:
                    assert name in self.held[caller] and said(one) == self.words[name]
                while one is not None:
                    reached[id(one)] = one.nbytes
                    one = one.earlier
            total += sum(reached.values())
        assert total == self.store.nbytes <= MOST


TestStoring = Storing.TestCase
TestStoring.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


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
