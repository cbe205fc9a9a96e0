"""Answers in OpenAI's form: chat chunks, text completions, echoed prompts with log-probabilities."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from retrieval_attn.engine.request import Event, Finished
from retrieval_attn.server.token_texts import AnswerToken, AnswerTokens, TokenTexts

__all__ = ["ChatForm", "DONE", "EchoForm", "Form", "TextForm", "usage_of"]

Value = dict[str, Any]

DONE = b"data: [DONE]\n\n"
encoded = json.JSONEncoder(separators=(",", ":")).encode
"""ASCII, without spaces; made once, for it is called for every token."""
LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON has not."""


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


def finite(logprob: float | None) -> float:
    """A number that JSON has."""
    return LEAST_LOGPROB if logprob is None else max(float(logprob), LEAST_LOGPROB)


class Form(Protocol):
    """Of one request's answers."""

    id: str

    def opening(self, index: int) -> bytes:
        """What a stream begins a choice with."""

    def chunk(self, index: int, text: str, events: Sequence[Event]) -> bytes:
        """More of a choice. events: of its tokens, if their log-probabilities were asked for, which are sent with the
        text; b"" while there is nothing to send.
        """

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
        self._tokens = AnswerTokens(texts)

    def opening(self, index: int) -> bytes:
        """See `Form`."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def chunk(self, index: int, text: str, events: Sequence[Event]) -> bytes:
        """See `Form`."""
        tokens = self._tokens.take(index, text, events)
        return self._chunk(index, {"content": text}, logprobs=self._logprobs(tokens or None)) if text or tokens else b""

    def closing(self, index: int, reason: str) -> bytes:
        """See `Form`."""
        return self._chunk(index, {}, reason, self._logprobs(self._tokens.end(index) or None))

    def usage(self, usage: Value) -> bytes:
        """See `Form`."""
        return self._head.chunk([], usage)

    def whole(self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: Value) -> Value:
        """See `Form`."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": end.text, "refusal": None},
                "logprobs": self._logprobs(_all_tokens(self._tokens, index, end, events)),
                "finish_reason": end.reason,
            }
            for index, end in sorted(ends.items())
        ]
        return self._head.whole(choices, usage)

    def _chunk(self, index: int, delta: Value, reason: str | None = None, logprobs: Value | None = None) -> bytes:
        return self._head.chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _logprobs(self, tokens: Sequence[AnswerToken] | None) -> Value | None:
        if tokens is None:
            return None
        content = [
            {
                **_token_value(token.text, token.event.logprob, token.data),
                "top_logprobs": [
                    _token_value(one.label, one.logprob, one.data) for one in self._texts.candidates(token, self._top)
                ],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class TextForm:
    """A `Form` of POST /v1/completions."""

    def __init__(self, model: str, texts: TokenTexts, top: int) -> None:
        """top: as in `ChatForm`."""
        self._head = Head("cmpl", ("text_completion", "text_completion"), model)
        self.id, self._texts, self._top = self._head.id, texts, top
        self._tokens = AnswerTokens(texts)

    def opening(self, index: int) -> bytes:
        """See `Form`."""
        return b""

    def chunk(self, index: int, text: str, events: Sequence[Event]) -> bytes:
        """See `Form`."""
        tokens = self._tokens.take(index, text, events)
        return self._chunk(index, text, logprobs=self._logprobs(tokens or None)) if text or tokens else b""

    def closing(self, index: int, reason: str) -> bytes:
        """See `Form`."""
        return self._chunk(index, "", reason, self._logprobs(self._tokens.end(index) or None))

    def usage(self, usage: Value) -> bytes:
        """See `Form`."""
        return self._head.chunk([], usage)

    def whole(self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: Value) -> Value:
        """See `Form`."""
        choices = [
            {
                "index": index,
                "text": end.text,
                "logprobs": self._logprobs(_all_tokens(self._tokens, index, end, events)),
                "finish_reason": end.reason,
            }
            for index, end in sorted(ends.items())
        ]
        return self._head.whole(choices, usage)

    def _chunk(self, index: int, text: str, reason: str | None = None, logprobs: Value | None = None) -> bytes:
        return self._head.chunk([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}])

    def _logprobs(self, tokens: Sequence[AnswerToken] | None) -> Value | None:
        if tokens is None:
            return None
        top = [{one.key: finite(one.logprob) for one in self._texts.candidates(token, self._top)} for token in tokens]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [finite(token.event.logprob) for token in tokens],
            "top_logprobs": top if self._top else None,
            "text_offset": [token.offset for token in tokens],
        }


def _token_value(text: str, logprob: float | None, data: bytes | None) -> Value:
    return {"token": text, "logprob": finite(logprob), "bytes": None if data is None else list(data)}


def _all_tokens(
    tokens: AnswerTokens, index: int, end: Finished, events: Mapping[int, Sequence[Event]]
) -> list[AnswerToken] | None:
    """Tokens of a whole choice; None if log-probabilities were not asked for."""
    if index not in events:
        return None
    return [*tokens.take(index, end.text, events[index]), *tokens.end(index)]


class EchoForm(TextForm):
    """A `Form` of POST /v1/completions with `echo`. With `logprobs`, tokens of the prompt have theirs, the first null.

    Evaluations score texts so: they send text and continuation as the prompt, and ask for at most one token.
    """

    def __init__(
        self, model: str, texts: TokenTexts, top: int, prompts: Sequence[tuple[str, Sequence[int]]], *, answers: bool
    ) -> None:
        """model, texts, top: as in `TextForm`. prompts: text and token ids of each choice's. answers: False: the
        choices are their prompts alone (max_tokens=0).
        """
        super().__init__(model, texts, top)
        self._prompts, self._answers = prompts, answers

    def opening(self, index: int) -> bytes:
        """See `Form`."""
        return self._chunk(index, self._prompts[index][0])

    def whole(
        self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """See `Form`."""
        if not self._answers:
            ends = {index: end._replace(text="", tokens=()) for index, end in ends.items()}
            events = {index: () for index in events}
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        whole = super().whole(
            {index: end._replace(text=self._prompts[index][0] + end.text) for index, end in ends.items()},
            {index: [*self._scored(index, ends[index]), *events[index]] for index in events},
            usage,
        )
        for logprobs in (choice["logprobs"] for choice in whole["choices"] if choice["logprobs"]):
            logprobs["token_logprobs"][0] = None  # nothing is before it
            if logprobs["top_logprobs"]:
                logprobs["top_logprobs"][0] = None
        return whole

    def _scored(self, index: int, end: Finished) -> list[Event]:
        """The tokens of a choice's prompt as events."""
        first, *others = self._prompts[index][1]
        scored = zip(others, end.prompt, strict=True)
        return [Event(first, ""), *(Event(token, "", score.logprob, score.top) for token, score in scored)]
