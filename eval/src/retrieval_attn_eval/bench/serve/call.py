"""Call: one request of a workload, and when it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import retrieval_attn as ra

__all__ = ["Call", "chains"]


class Call(NamedTuple):
    """One request of a workload.

    Attributes:
        request: prompt, and how it is answered.
        arrival: seconds from the workload's beginning.
        session: name of the session whose last answer the request waits for. None: it waits for none.
        delay: seconds from that answer to this request.
    """

    request: ra.Request
    arrival: float
    session: str | None = None
    delay: float = 0.0


def chains(calls: Sequence[Call]) -> list[list[int]]:
    """Return the numbers of calls that wait for each other, in order; a call without a session is alone."""
    found: dict[str | int, list[int]] = {}
    for number, call in enumerate(calls):
        found.setdefault(number if call.session is None else call.session, []).append(number)
    return list(found.values())
