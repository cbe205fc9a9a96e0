"""Delta: what one line of a streamed answer says."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from retrieval_attn.remote.endpoint import refusal

__all__ = ["Delta", "Usage", "read_delta"]


class Usage(NamedTuple):
    """Tokens of a prompt, of which cached_tokens were not read for it, and of its answer."""

    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int


class Delta(NamedTuple):
    """text: of the answer's first choice. finish: why it ended, "" before. error: what went wrong, ""; done: no more
    comes.
    """

    text: str = ""
    finish: str = ""
    usage: Usage | None = None
    error: str = ""
    done: bool = False


def read_delta(line: str) -> Delta | None:
    """A line of server-sent events, of a chat or of a completion; None for one that says nothing.

    A line that cannot be read is an error, for what follows it would miss something.
    """
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return Delta(done=True)
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return Delta(error=f"a line that is no JSON object: {data[:80]!r}")
    if found.get("error"):
        return Delta(error=refusal(data))
    text = finish = ""
    for choice in found.get("choices") or []:
        if isinstance(choice, dict) and not choice.get("index"):
            text, finish = _text(choice), choice.get("finish_reason") or ""
    return Delta(text, finish, read_usage(found.get("usage")))


def read_usage(found: Any) -> Usage | None:
    """The member "usage" of an answer; None if it has none."""
    if not isinstance(found, dict):
        return None
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(_count(found.get("prompt_tokens")), _count(found.get("completion_tokens")), _count(cached))


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    return str(delta.get("reasoning_content") or "") + str(delta.get("content") or "")


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0
