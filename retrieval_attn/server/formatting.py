"""Answers in OpenAI's form: chat chunks, text completions, echoed prompts with log-probabilities."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from retrieval_attn.engine.request import Event, Finished
from retrieval_attn.server.answer_parts import AnswerPart, AnswerReader, message_of
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.token_texts import AnswerToken, AnswerTokens, TokenTexts

Value = dict[str, Any]

DONE = b"data: [DONE]\n\n"
encoded = json.JSONEncoder(separators=(",", ":")).encode
"""Encodes ASCII without spaces; made once, because it is called for every token."""
LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


def usage_of(ends: Sequence[Finished], answers_per_prompt: int) -> Value:
    """Sum the tokens of all choices; a prompt with several answers counts once, with its lowest cached tokens."""
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
    """Return a number that JSON can express."""
    return LEAST_LOGPROB if logprob is None else max(float(logprob), LEAST_LOGPROB)


class Form(Protocol):
    """Format of the answers of one request."""

    id: str

    def opening(self, index: int) -> bytes:
        """Return the first chunk of a choice."""

    def chunk(self, index: int, text: str, events: Sequence[Event]) -> bytes:
        """Return the next chunk of a choice, b"" if there is nothing to send.

        events: of the tokens, if the request has log-probabilities; they are sent with their text.
        """

    def closing(self, index: int, end: Finished) -> bytes:
        """Return the last chunk of a choice."""

    def ending(self, usage: Value, *, wanted: bool) -> bytes:
        """Return the end of the stream. usage: token counts, which the client asked for if `wanted`."""

    def failure(self, failure: ApiError) -> bytes:
        """Return the end of a stream that failed."""

    def whole(self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: Value) -> Value:
        """Return the whole answer. events: of each choice, as in `chunk`."""


class BlockForm(Form):
    """The parts of a `Form` that answers in blocks have in common: texts, reasoning and calls, one after another."""

    def __init__(self, reader: AnswerReader) -> None:
        """reader: of the one answer."""
        self._reader, self._blocks = reader, list[Value]()
        self._open: tuple[str, int] | None = None  # kind and number of the call, of the last block while it is open
        self._pieces: list[str] = []  # text of the open block
        self._end: Finished | None = None

    def chunk(self, index: int, text: str, events: Sequence[Event]) -> bytes:
        return b"".join(map(self._part, self._reader.feed(text)))

    def closing(self, index: int, end: Finished) -> bytes:
        self._end = end
        return b"".join(map(self._part, self._rest())) + self._close(whole=end.reason != "length")

    def whole(self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: Value) -> Value:
        (end,) = ends.values()
        self.chunk(0, end.text, ())
        self.closing(0, end)
        return self._finished(usage)

    def _rest(self) -> Sequence[AnswerPart]:
        """Return the remaining parts."""
        return self._reader.end()

    def _part(self, part: AnswerPart) -> bytes:
        """Return the events of a part."""
        events = b""
        if self._open != (part.kind, part.call):
            events = self._close(whole=True)
            self._open, self._pieces = (part.kind, part.call), []
            events += self._begin(part)
        if part.text:
            self._pieces.append(part.text)
            events += self._delta(part)
        return events

    def _begin(self, part: AnswerPart) -> bytes:
        """Add the block that begins with a part, without its text. Return its first events."""
        raise NotImplementedError

    def _delta(self, part: AnswerPart) -> bytes:
        """Return the event of a part's text."""
        raise NotImplementedError

    def _close(self, *, whole: bool) -> bytes:
        """End the open block, if there is one, and return its last events. whole: False if the answer was cut off."""
        raise NotImplementedError

    def _finished(self, usage: Value) -> Value:
        """Return the answer after its end."""
        raise NotImplementedError


class Head:
    """Common fields of all chunks and answers of one request."""

    def __init__(self, prefix: str, model: str, *, whole: str, chunk: str) -> None:
        """model: name in the request. whole, chunk: `object` of the whole answer and of a chunk."""
        self.id, self._kind = f"{prefix}-{uuid.uuid4().hex}", whole
        self._rest = {"created": int(time.time()), "model": model}
        begin = encoded({"id": self.id, "object": chunk, **self._rest})
        self._begin = f'data: {begin[:-1]},"choices":'

    def chunk(self, choices: list[Value], usage: Value | None = None) -> bytes:
        """Return one event."""
        more = "" if usage is None else f',"usage":{encoded(usage)}'
        return f"{self._begin}{encoded(choices)}{more}}}\n\n".encode("ascii")

    def whole(self, choices: list[Value], usage: Value) -> Value:
        """Return the whole answer."""
        return {"id": self.id, "object": self._kind, **self._rest, "choices": choices, "usage": usage}


class _ChunkedForm(Form):
    """The parts of a `Form` that answers in chunks of a `Head` have in common."""

    def __init__(self, head: Head, texts: TokenTexts, top: int, visible: frozenset[int]) -> None:
        """See `ChatForm`."""
        self._head, self.id, self._texts, self._top = head, head.id, texts, top
        self._tokens = AnswerTokens(texts, visible)

    def closing(self, index: int, end: Finished) -> bytes:
        rest = self._rest(index)
        return self._chunk(index, rest, self._reason(index, end), self._logprobs(self._tokens.end(index) or None))

    def ending(self, usage: Value, *, wanted: bool) -> bytes:
        return (self._head.chunk([], usage) if wanted else b"") + DONE

    def failure(self, failure: ApiError) -> bytes:
        return b"data: " + failure.encoded + b"\n\n" + DONE

    def whole(self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: Value) -> Value:
        choices = [
            {
                "index": index,
                **self._content(index, end.text),
                "logprobs": self._logprobs(self._all_tokens(index, end, events)),
                "finish_reason": self._reason(index, end),
            }
            for index, end in sorted(ends.items())
        ]
        return self._head.whole(choices, usage)

    def _chunk(self, index: int, content: Value, reason: str | None = None, logprobs: Value | None = None) -> bytes:
        return self._head.chunk([{"index": index, **content, "logprobs": logprobs, "finish_reason": reason}])

    def _all_tokens(self, index: int, end: Finished, events: Mapping[int, Sequence[Event]]) -> list[AnswerToken] | None:
        """Return the tokens of a whole choice, None without log-probabilities."""
        if index not in events:
            return None
        return [*self._tokens.take(index, end.text, events[index]), *self._tokens.end(index)]

    def _content(self, index: int, text: str) -> Value:
        """Return the field of a whole choice with its text."""
        raise NotImplementedError

    def _rest(self, index: int) -> Value:
        """Return the field of the last chunk of a choice with text."""
        raise NotImplementedError

    def _reason(self, index: int, end: Finished) -> str:
        return end.reason

    def _logprobs(self, tokens: Sequence[AnswerToken] | None) -> Value | None:
        raise NotImplementedError


class ChatForm(_ChunkedForm):
    """A `Form` of POST /v1/chat/completions."""

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        top: int,
        make_reader: Callable[[], AnswerReader] = AnswerReader,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """top: number of most likely tokens whose log-probabilities are returned besides the sampled one's.

        make_reader: return a parser of one choice. visible: special tokens that the text keeps.
        """
        head = Head("chatcmpl", model, whole="chat.completion", chunk="chat.completion.chunk")
        super().__init__(head, texts, top, visible)
        self._readers: defaultdict[int, AnswerReader] = defaultdict(make_reader)
        self._called: set[int] = set()  # choices with a tool call

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def chunk(self, index: int, text: str, events: Sequence[Event]) -> bytes:
        tokens = self._tokens.take(index, text, events)
        delta = self._delta(index, self._readers[index].feed(text))
        if not delta and not tokens:
            return b""
        return self._chunk(index, {"delta": delta or {"content": ""}}, logprobs=self._logprobs(tokens or None))

    def _rest(self, index: int) -> Value:
        return {"delta": self._delta(index, self._readers.pop(index).end() if index in self._readers else ())}

    def _content(self, index: int, text: str) -> Value:
        reader = self._readers[index]
        delta = self._delta(index, [*reader.feed(text), *reader.end()])
        calls = delta.get("tool_calls", ())
        message = {"role": "assistant", "content": delta.get("content", None if calls else ""), "refusal": None}
        if "reasoning_content" in delta:
            message["reasoning_content"] = delta["reasoning_content"]
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return {"message": message}

    def _delta(self, index: int, parts: Sequence[AnswerPart]) -> Value:
        delta = message_of(parts)
        if "tool_calls" in delta:
            self._called.add(index)
        return delta

    def _reason(self, index: int, end: Finished) -> str:
        return "tool_calls" if index in self._called and end.reason == "stop" else end.reason

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


class TextForm(_ChunkedForm):
    """A `Form` of POST /v1/completions."""

    def __init__(self, model: str, texts: TokenTexts, top: int) -> None:
        """top: as in `ChatForm`."""
        head = Head("cmpl", model, whole="text_completion", chunk="text_completion")
        super().__init__(head, texts, top, frozenset())

    def opening(self, index: int) -> bytes:
        return b""

    def chunk(self, index: int, text: str, events: Sequence[Event]) -> bytes:
        tokens = self._tokens.take(index, text, events)
        return self._chunk(index, {"text": text}, logprobs=self._logprobs(tokens or None)) if text or tokens else b""

    def _rest(self, index: int) -> Value:
        return {"text": ""}

    def _content(self, index: int, text: str) -> Value:
        return {"text": text}

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


class EchoedPrompt(NamedTuple):
    """A prompt that is returned with its answer: its text and token ids."""

    text: str
    ids: Sequence[int]


class EchoForm(TextForm):
    """A `Form` of POST /v1/completions with `echo`. With `logprobs`, prompt tokens have theirs; the first is null.

    Evaluations score texts this way: the prompt is text and continuation, and at most one token is generated.
    """

    def __init__(
        self, model: str, texts: TokenTexts, top: int, prompts: Sequence[EchoedPrompt], *, answers: bool
    ) -> None:
        """prompts: of each choice. answers: False for choices without an answer (max_tokens=0)."""
        super().__init__(model, texts, top)
        self._prompts, self._answers = prompts, answers

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"text": self._prompts[index].text})

    def whole(
        self, ends: Mapping[int, Finished], events: Mapping[int, Sequence[Event]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        if not self._answers:
            ends = {index: end._replace(text="", tokens=()) for index, end in ends.items()}
            events = {index: () for index in events}
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        whole = super().whole(
            {index: end._replace(text=self._prompts[index].text + end.text) for index, end in ends.items()},
            {index: [*self._scored(index, ends[index]), *events[index]] for index in events},
            usage,
        )
        for logprobs in (choice["logprobs"] for choice in whole["choices"] if choice["logprobs"]):
            logprobs["token_logprobs"][0] = None  # it has no predecessor
            if logprobs["top_logprobs"]:
                logprobs["top_logprobs"][0] = None
        return whole

    def _scored(self, index: int, end: Finished) -> list[Event]:
        """Return the tokens of a choice's prompt as events."""
        first, *others = self._prompts[index].ids
        scored = zip(others, end.prompt, strict=True)
        return [Event(first, ""), *(Event(token, "", score.logprob, score.top) for token, score in scored)]
