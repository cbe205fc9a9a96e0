"""Form: how answers are written for clients, as chat completions or as text completions, whole or in chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from retrieval_attn.batch.request import Event, Finished

__all__ = ["DONE", "ChatForm", "Form", "TextForm", "TokenTexts", "usage_of"]

Value = dict[str, Any]

DONE = b"data: [DONE]\n\n"
encoded = json.JSONEncoder(separators=(",", ":")).encode
"""ASCII, without spaces; made once, for it is called for every token."""
LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON has not."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def usage_of(ends: Sequence[Finished], answers_per_prompt: int) -> Value:
    """Of all choices; a prompt that several answer is counted once, and was read as the first of them found it."""
    prompts = [ends[start : start + answers_per_prompt] for start in range(0, len(ends), answers_per_prompt)]
    read = sum(group[0].prompt_tokens for group in prompts)
    made = sum(len(end.tokens) for end in ends)
    cached = sum(min(end.cached_tokens for end in group) for group in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": made,
        "total_tokens": read + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class TokenTexts:
    """Tokens as texts, for log-probabilities."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """tokenizer: the model's."""

        @lru_cache(maxsize=65536)
        def decoded(token: int) -> str:
            return str(tokenizer.decode([token]))

        self.text = decoded

    def value(self, token: int, logprob: float | None) -> Value:
        """As a chat's log-probabilities have it. bytes: None for a part of a character."""
        text = self.text(token)
        known = None if REPLACEMENT in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": finite(logprob), "bytes": known}


def finite(logprob: float | None) -> float:
    """A number that JSON has."""
    return LEAST_LOGPROB if logprob is None else max(float(logprob), LEAST_LOGPROB)


class Form(Protocol):
    """Of one request's answers."""

    id: str

    def opening(self, index: int) -> bytes:
        """What a stream begins a choice with."""

    def chunk(self, index: int, text: str, events: Sequence[Event]) -> bytes:
        """More of a choice. events: that have the log-probabilities of its tokens; empty: nobody asked."""

    def closing(self, index: int, reason: str) -> bytes:
        """The end of a choice."""

    def usage(self, usage: Value) -> bytes:
        """The last chunk, where it was asked for."""

    def whole(self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: Value) -> Value:
        """All of it. events: as in `chunk`, of each choice."""


class Head:
    """What all chunks and answers of one request begin with."""

    def __init__(self, prefix: str, kinds: tuple[str, str], model: str) -> None:
        """kinds: `object` of the whole answer and of a chunk. model: as the request names it."""
        self.id, self._kind = f"{prefix}-{uuid.uuid4().hex}", kinds[0]
        self._rest = {"created": int(time.time()), "model": model}
        begin = encoded({"id": self.id, "object": kinds[1], **self._rest})
        self._begin = f'data: {begin[:-1]},"choices":'

    def chunk(self, choices: list[Value], usage: Value | None = None) -> bytes:
        """One event."""
        more = "" if usage is None else f',"usage":{encoded(usage)}'
        return f"{self._begin}{encoded(choices)}{more}}}\n\n".encode("ascii")

    def whole(self, choices: list[Value], usage: Value) -> Value:
        """The answer."""
        return {"id": self.id, "object": self._kind, **self._rest, "choices": choices, "usage": usage}


class ChatForm:
    """A `Form` of POST /v1/chat/completions."""

    def __init__(self, model: str, texts: TokenTexts, top: int) -> None:
        """top: log-probabilities of so many of the likeliest tokens are told beside the chosen one's."""
        self._head = Head("chatcmpl", ("chat.completion", "chat.completion.chunk"), model)
        self.id, self._texts, self._top = self._head.id, texts, top

    def opening(self, index: int) -> bytes:
        """See `Form`."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def chunk(self, index: int, text: str, events: Sequence[Event]) -> bytes:
        """See `Form`."""
        return self._chunk(index, {"content": text}, logprobs=self._logprobs(events) if events else None)

    def closing(self, index: int, reason: str) -> bytes:
        """See `Form`."""
        return self._chunk(index, {}, reason)

    def usage(self, usage: Value) -> bytes:
        """See `Form`."""
        return self._head.chunk([], usage)

    def whole(self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: Value) -> Value:
        """See `Form`."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": end.text, "refusal": None},
                "logprobs": self._logprobs(events[index]) if index in events else None,
                "finish_reason": end.reason,
            }
            for index, end in sorted(ends.items())
        ]
        return self._head.whole(choices, usage)

    def _chunk(self, index: int, delta: Value, reason: str | None = None, logprobs: Value | None = None) -> bytes:
        return self._head.chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _logprobs(self, events: Sequence[Event]) -> Value:
        value = self._texts.value
        content = [
            {
                **value(event.token, event.logprob),
                "top_logprobs": [value(token, logprob) for token, logprob in event.top[: self._top]],
            }
            for event in events
        ]
        return {"content": content, "refusal": None}


class TextForm:
    """A `Form` of POST /v1/completions."""

    def __init__(self, model: str, texts: TokenTexts, top: int) -> None:
        """top: as in `ChatForm`."""
        self._head = Head("cmpl", ("text_completion", "text_completion"), model)
        self.id, self._texts, self._top = self._head.id, texts, top
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> bytes:
        """See `Form`."""
        return b""

    def chunk(self, index: int, text: str, events: Sequence[Event]) -> bytes:
        """See `Form`."""
        return self._chunk(index, text, logprobs=self._logprobs(index, events) if events else None)

    def closing(self, index: int, reason: str) -> bytes:
        """See `Form`."""
        return self._chunk(index, "", reason)

    def usage(self, usage: Value) -> bytes:
        """See `Form`."""
        return self._head.chunk([], usage)

    def whole(self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: Value) -> Value:
        """See `Form`."""
        choices = [
            {
                "index": index,
                "text": end.text,
                "logprobs": self._logprobs(index, events[index]) if index in events else None,
                "finish_reason": end.reason,
            }
            for index, end in sorted(ends.items())
        ]
        return self._head.whole(choices, usage)

    def _chunk(self, index: int, text: str, reason: str | None = None, logprobs: Value | None = None) -> bytes:
        return self._head.chunk([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}])

    def _logprobs(self, index: int, events: Sequence[Event]) -> Value:
        tokens = [self._texts.text(event.token) for event in events]
        offsets = []
        for text in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        top = [
            {self._texts.text(token): finite(logprob) for token, logprob in event.top[: self._top]} for event in events
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(event.logprob) for event in events],
            "top_logprobs": top if self._top else None,
            "text_offset": offsets,
        }
