"""What a method answers with, and the protocol all methods share.  Loads neither torch nor a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from retrieval_attn_eval.prompts import Prompt

__all__ = ["POSITIONS", "Method", "Reply", "make_reply", "stop_ids"]

POSITIONS = ("inside", "after")


@dataclass(frozen=True)
class Reply:
    """One answer.  ids: output ids, without the prompt and the end-of-sequence token.

    seconds: prefill (the question included), index and decode; wall clock; 0 where an earlier answer paid for it.
    stats: `tokens_attended_per_step` is the number of tokens that one query attended to, sinks and window included,
    as measured: the mean over steps, layers and key-value heads (None if no token went through the method).
    """

    text: str
    ids: list[int]
    finish_reason: str
    seconds: dict[str, float]
    stats: dict[str, Any] = field(default_factory=dict)


class Method(Protocol):
    """A way to answer.  `answers` gives one Reply for each asked question position, greedy decoding.

    options: what decides the answers, resolved, ready for JSON.  `release` frees what is kept of the last context.
    """

    name: str
    options: dict[str, Any]

    def answers(self, prompt: Prompt, positions: Sequence[str], max_new_tokens: int) -> dict[str, Reply]: ...

    def release(self) -> None: ...


def stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """Ids that end an answer: the generation config's, else the tokenizer's."""
    found = model.generation_config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return []
    return [int(i) for i in found] if isinstance(found, Sequence) else [int(found)]


def make_reply(
    tokenizer: Any, ids: list[int], stops: Sequence[int], seconds: dict[str, float], stats: dict[str, Any]
) -> Reply:
    """Reply of output ids, a closing stop id removed."""
    stopped = bool(ids) and ids[-1] in stops
    ids = ids[:-1] if stopped else ids
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Reply(text, ids, "stop" if stopped else "length", seconds, stats)
