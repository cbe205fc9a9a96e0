"""Responses in memory: answered turns of conversations, which later requests continue by id."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.response_bodies import turns_of_output

__all__ = ["StoredResponse", "StoredResponses"]

OVERHEAD_BYTES = 2048
"""Bytes of a response besides its JSON."""


class StoredResponse:
    """One answered turn. Earlier turns are shared with other responses that continue them."""

    def __init__(self, body: bytes, turns: bytes, earlier: StoredResponse | None) -> None:
        """body: the response, dropped with its id. turns: JSON list of the chat messages of its request and answer."""
        self.body, self.turns, self.earlier = body, turns, earlier
        self.users = 1
        """References: one of `StoredResponses`, one for each response that continues this one."""

    @property
    def nbytes(self) -> int:
        """Bytes of this turn alone."""
        return len(self.body) + len(self.turns) + OVERHEAD_BYTES

    @property
    def conversation(self) -> list[bytes]:
        """The messages of all turns, the first one first, as JSON lists."""
        found: list[bytes] = []
        one: StoredResponse | None = self
        while one is not None:
            found.append(one.turns)
            one = one.earlier
        return found[::-1]

    @property
    def conversation_bytes(self) -> int:
        """Bytes of `conversation`."""
        return sum(map(len, self.conversation))


class StoredResponses:
    """Responses by caller and id, the least recently used one evicted first.

    If memory runs out, the caller with the most bytes loses a response: no caller evicts those of callers with less.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: limit of all callers together."""
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._of: defaultdict[str, OrderedDict[str, StoredResponse]] = defaultdict(OrderedDict)
        self._bytes: defaultdict[str, int] = defaultdict(int)

    def get(self, namespace: str, response_id: str) -> StoredResponse | None:
        """Return a response of a caller and mark it as used. None: unknown, evicted, or of another caller."""
        mine = self._of.get(namespace)
        found = None if mine is None else mine.get(response_id)
        if mine is not None and found is not None:
            mine.move_to_end(response_id)
        return found

    def previous(self, namespace: str, response_id: str) -> StoredResponse:
        """Return the response that a request continues. Raises ApiError 404."""
        found = self.get(namespace, response_id)
        if found is None:
            raise ApiError(
                404, f"Previous response with id {response_id[:80]!r} not found. This server keeps the last responses "
                f"in memory, at most {self.most_bytes:,} bytes of them, and none with store: false. Send the "
                "conversation in input.", param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        return found

    def keep(
        self, namespace: str, response: dict[str, Any], turns: Sequence[dict[str, Any]], earlier: StoredResponse | None
    ) -> None:
        """Store a finished response, evicting others. turns: chat messages of its request. earlier: continued by it."""
        said = [*turns, *turns_of_output(response["output"])]
        body, told = (json.dumps(one, separators=(",", ":")).encode("ascii") for one in (response, said))
        kept = StoredResponse(body, told, earlier)
        one = earlier
        while one is not None and one.users == 0:  # evicted while the request ran: counted again
            self._count(namespace, one.nbytes)
            one.users = 1
            one = one.earlier
        if one is not None:
            one.users += 1
        self._count(namespace, kept.nbytes)
        self._of[namespace][response["id"]] = kept
        while self.nbytes > self.most_bytes:
            largest = max(self._of, key=lambda name: self._bytes[name])
            _, evicted = self._of[largest].popitem(last=False)
            self._drop(largest, evicted)

    def remove(self, namespace: str, response_id: str) -> bool:
        """Delete a response; others that continue it keep its messages. Return False if there is none."""
        found = self._of[namespace].pop(response_id, None) if namespace in self._of else None
        if found is not None:
            self._drop(namespace, found)
        return found is not None

    def _drop(self, namespace: str, response: StoredResponse) -> None:
        """Free a response whose id was removed, and the earlier turns that no other response continues."""
        self._count(namespace, -len(response.body))
        response.body = b""
        one: StoredResponse | None = response
        while one is not None:
            one.users -= 1
            if one.users:
                break
            self._count(namespace, -one.nbytes)
            one = one.earlier
        if not self._of[namespace]:
            del self._of[namespace]

    def _count(self, namespace: str, nbytes: int) -> None:
        self.nbytes += nbytes
        self._bytes[namespace] += nbytes
        if not self._bytes[namespace]:
            del self._bytes[namespace]
