"""Parts of a chat answer: content, reasoning and tool calls, split as the text comes."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from retrieval_attn.errors import InputDataError
from retrieval_attn.prompt.text_stream import decoding
from retrieval_attn.sampling.grammar import GrammarSpec
from retrieval_attn.server.tool_formats import (
    FORMATS,
    CallPiece,
    CallReader,
    HarmonyFormat,
    ToolFormat,
    Tools,
    format_of,
    is_strict,
    json_object,
)

PROMPT_END_TOKENS = 24
"""Last tokens of a prompt in which a template may open the model's thinking."""


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the source of a tokenizer's chat template, of all of them if there are several; "" for none."""
    given: Any = tokenizer.chat_template or ""
    return "\n".join(given.values()) if isinstance(given, dict) else str(given)


class AnswerPart(NamedTuple):
    """A piece of an answer.

    call: number of the tool call. name, id: of a call that begins; None: the piece continues it.
    """

    kind: Literal["content", "reasoning", "call"]
    text: str
    call: int = 0
    name: str | None = None
    id: str | None = None  # noqa: A003


class Thinking(NamedTuple):
    """Markers of a model's thinking. open: also written by chat templates at the end of a prompt."""

    open: str
    close: str


THINKING = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<|channel>thought", "<channel|>"),
    Thinking("<seed:think>", "</seed:think>"),
)
"""Markers by which chat templates are recognized; the first pair that a template has both of is taken."""

_CHANNEL = r"(?:<\|start\|>assistant)?<\|channel\|>"
_TO_A_FUNCTION = r"(?!\s+to=functions\.)"
_MESSAGE = r"[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
HARMONY: Mapping[str, Mapping[str, str | list[str]]] = {
    "thinking": {"open_pattern": rf"{_CHANNEL}analysis{_TO_A_FUNCTION}{_MESSAGE}", "close": ["<|end|>", "<|call|>"]},
    "commentary": {
        "open_pattern": rf"{_CHANNEL}commentary{_TO_A_FUNCTION}{_MESSAGE}",
        "close": ["<|end|>", "<|call|>"],
    },
    "final": {"open_pattern": rf"{_CHANNEL}final{_MESSAGE}", "close": ["<|end|>", "<|return|>"]},
}
"""Regions of GPT-OSS's channels besides tool calls."""
_TEXT: Mapping[str, Any] = {"content": "text", "content_args": {"strip": False}, "repeats": True}


@dataclass(frozen=True)
class AnswerFormat:
    """Format of a model's chat answers.

    Attributes:
        calls: format of tool calls; None: unknown.
        thinking: markers of its thinking; None: it has none, or the format of its calls has them.
        template: the tokenizer's own response template, for a model whose format of calls is unknown.
        visible: ids of special tokens that the text of answers keeps.
    """

    calls: ToolFormat | None = None
    thinking: Thinking | None = None
    template: ResponseTemplate | None = None
    visible: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> AnswerFormat:
        """Recognize the format of a tokenizer's chat template. Raises ValueError for a wrong response template."""
        text = template_text(tokenizer)
        calls = format_of(text)
        thinking = next((one for one in THINKING if one.open in text and one.close in text), None)
        own = getattr(tokenizer, "response_template", None) if calls is None else None
        words = " ".join([*(calls.words if calls else ()), *(thinking or ()), *([json.dumps(own)] if own else ())])
        words = re.sub(r"\\(.)", r"\1", words)  # of patterns
        visible = {
            token for token in decoding(tokenizer)[2] if str(tokenizer.convert_ids_to_tokens(token)) in words
        } - {tokenizer.eos_token_id, tokenizer.bos_token_id}
        template = load_response_template(own) if own else None
        return cls(calls, thinking, template, frozenset(visible))

    @property
    def description(self) -> str:
        """A line for the log."""
        if self.template is not None:
            return "tool calls and reasoning: by the tokenizer's response template"
        if self.calls is None:
            known = ", ".join(sorted(one.name for one in FORMATS))
            calls = f"the chat template has no known format, so that calls are returned as text (known: {known})"
        else:
            calls = f"parsed as {self.calls.name}"
        harmony = isinstance(self.calls, HarmonyFormat)
        reasoning = "by channels" if harmony else "none" if self.thinking is None else f"by {self.thinking.open}"
        return f"tool calls: {calls}; reasoning: {reasoning}"

    def opening(self, name: str | None) -> str:
        """Return the text that begins a forced call of `name`, of any function if that is None.

        Raises InputDataError if the format is unknown.
        """
        if self.calls is None:
            raise InputDataError(
                "tool_choice cannot force a call: the format of tool calls of this model's chat template is unknown. "
                'Use "auto".'
            )
        return self.calls.opening(name)

    def grammar_of_calls(self, tools: Tools, opening: str, *, many: bool) -> GrammarSpec | None:
        """Return the grammar of calls of these tools; None if none of them is strict.

        opening, many: see `ToolFormat.grammar`. Raises InputDataError if the format's arguments cannot be constrained.
        """
        if not any(map(is_strict, tools)):
            return None
        found = None
        if self.calls is not None:
            found = self.calls.grammar(tools, opening, many=many, markers=self.thinking or ())
        if found is None:
            name = "unknown" if self.calls is None else self.calls.name
            raise InputDataError(
                f"strict tools cannot be enforced with tool_choice {'forced' if opening else 'auto'}: the format of "
                f"calls of this model is {name}. Leave strict out."
            )
        return found.spec

    def constrained(self, grammar: GrammarSpec, prompt_end: str) -> GrammarSpec:
        """Return the grammar of an answer after the model's thinking.

        prompt_end: see `reader`. Raises InputDataError for a model that writes its answer in channels.
        """
        if isinstance(self.calls, HarmonyFormat):
            raise InputDataError("Structured output is not possible with this model: it writes answers in channels.")
        thinking = self.thinking
        if thinking is None or prompt_end.rstrip().endswith(thinking.close):
            return grammar
        return replace(grammar, after=thinking.close, opens="" if self._thinks(prompt_end) else thinking.open)

    def thinking_end(self, prompt_end: str) -> str:
        """Return the text that ends the thinking which a prompt begins, "" for a prompt that begins none."""
        return f"\n{self.thinking.close}\n\n" if self.thinking is not None and self._thinks(prompt_end) else ""

    def reader(self, tools: Tools, prompt_end: str, opening: str = "", most_calls: int | None = None) -> AnswerReader:
        """Return a parser of one answer.

        tools: of the request; calls are text without any. prompt_end: text of the prompt's last tokens. opening: the
        text that begins a forced call, after `prompt_end`. most_calls: calls that are returned; None: all.
        """
        if self.template is not None:
            return AnswerReader(
                ResponseParser(self.template, prompt_end, tools=[dict(tool) for tool in tools]), None, tools
            )
        calls = self.calls if tools else None
        fields = self._fields(calls)
        if len(fields) == 1:
            return AnswerReader()
        start = opening
        if not opening and self.thinking is not None and self._thinks(prompt_end):
            start = self.thinking.open
        parser = ResponseParser({"start_anchor": "assistant", "fields": fields}, "")
        return AnswerReader(parser, calls, tools, start, most_calls)

    def _thinks(self, prompt_end: str) -> bool:
        return self.thinking is not None and prompt_end.rstrip().endswith(self.thinking.open)

    def _fields(self, calls: ToolFormat | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"content": dict(_TEXT)}
        if isinstance(self.calls, HarmonyFormat):
            fields |= {name: {**anchors, **_TEXT} for name, anchors in HARMONY.items()}
        elif self.thinking is not None:
            opening, closing = map(re.escape, self.thinking)
            anchors = {"open_pattern": rf"{opening}\s*", "close_pattern": rf"\s*{closing}"}
            fields["thinking"] = {**anchors, **_TEXT}
        if calls is not None:
            fields["tool_calls"] = {**calls.region, **_TEXT}
        return fields


class AnswerReader:
    """Splits the text of one answer into its parts."""

    def __init__(
        self, parser: ResponseParser | None = None, calls: ToolFormat | None = None, tools: Tools = (), start: str = "",
        most_calls: int | None = None,
    ) -> None:  # fmt: skip
        """parser: None: all is content. calls: format of call regions; None: the parser returns calls as values. start:
        text of the prompt that belongs to the answer.
        """
        self._parser, self._calls, self._tools, self._most = parser, calls, tools, most_calls
        self._region: CallReader | None = None
        self._body: str | None = None  # text of a call region in which no call was found so far
        self._count = 0
        self._blank_ignored = False  # between regions
        self._first: list[AnswerPart] = []  # of the prompt, returned with the first text
        if parser is not None:
            self._first = self._parts(parser.initial_events) + self.feed(start)

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain with the next characters."""
        if self._parser is None:
            return [AnswerPart("content", text)] if text else []
        found = self._taken()
        try:
            return found + self._parts(self._parser.feed(text))
        except ValueError:  # of a tokenizer's own response template: the text has another form
            return found + self._given_up(text)

    def end(self) -> list[AnswerPart]:
        """Return the remaining parts, after the last character."""
        if self._parser is None:
            return []
        found = self._taken()
        try:
            _, events = self._parser.finalize()
        except ValueError:
            return found + self._given_up("")
        return found + self._parts(events, complete=False)

    def _taken(self) -> list[AnswerPart]:
        found, self._first = self._first, []
        return found

    def _given_up(self, text: str) -> list[AnswerPart]:
        """Return the rest as content."""
        self._parser, body, self._body = None, self._body or "", None
        return [AnswerPart("content", body + text)] if body + text else []

    def _parts(self, events: Sequence[Mapping[str, Any]], *, complete: bool = True) -> list[AnswerPart]:
        found: list[AnswerPart] = []
        for event in events:
            if event["field"] == "tool_calls":
                found += self._of_call(event, complete=complete)
            elif event["field"] == "thinking":
                self._blank_ignored |= event["type"] == "region_close"
                if event["type"] == "region_chunk":
                    found.append(AnswerPart("reasoning", event["text"]))
            elif event["type"] == "region_chunk":
                text = event["text"].lstrip() if self._blank_ignored else event["text"]
                if text:
                    self._blank_ignored = False
                    found.append(AnswerPart("content", text))
        return found

    def _of_call(self, event: Mapping[str, Any], *, complete: bool) -> list[AnswerPart]:
        self._blank_ignored |= event["type"] == "region_close"
        if self._calls is None:
            return self._of_value(event)
        if event["type"] == "region_open":
            self._region, self._body = self._calls.reader(self._tools), ""
            return []
        assert self._region is not None
        if event["type"] == "region_chunk":
            if self._body is not None:
                self._body += event["text"]
            return self._numbered(self._region.feed(event["text"]))
        found = self._numbered(self._region.end(complete=complete))
        if self._body is not None:  # no call: the region is text
            begin, end = self._calls.around
            found = [AnswerPart("content", f"{begin}{self._body}{end if complete else ''}")]
        self._region = self._body = None
        return found

    def _of_value(self, event: Mapping[str, Any]) -> list[AnswerPart]:
        """Return the calls of a closed region of a tokenizer's response template."""
        if event["type"] == "region_chunk":
            self._body = (self._body or "") + event["text"]
        if event["type"] != "region_close":
            return []
        value, found = event["value"], []
        for one in value if isinstance(value, list) else [value]:
            call = one.get("function", one) if isinstance(one, dict) else {}
            if "name" in call:
                arguments = call.get("arguments", {})
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                found += self._numbered([CallPiece(str(call["name"]), text)])
        self._body = None
        return found

    def _numbered(self, pieces: Sequence[CallPiece]) -> list[AnswerPart]:
        found = []
        for piece in pieces:
            self._body = None
            self._count += piece.name is not None
            if self._most is not None and self._count > self._most:
                continue
            call_id = None
            if piece.name is not None:
                call_id = f"call_{uuid.uuid4().hex[:24]}" if self._calls is None else self._calls.call_id()
            found.append(AnswerPart("call", piece.arguments, self._count - 1, piece.name, call_id))
        return found


def arguments_object(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; return text that is no JSON object as `raw_arguments` of one."""
    value = json_object(arguments or "{}")
    return {"raw_arguments": arguments} if value is None else value


def message_of(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    """Join parts to `content`, `reasoning_content` and `tool_calls` of OpenAI's message or delta; absent if empty."""
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind != "call":
            key = "content" if part.kind == "content" else "reasoning_content"
            texts[key] = texts.get(key, "") + part.text
            continue
        call = calls.setdefault(part.call, {"index": part.call, "function": {}})
        if part.name is not None:
            call |= {"id": part.id, "type": "function"}
            call["function"] = {"name": part.name}
        call["function"]["arguments"] = call["function"].get("arguments", "") + part.text
    return texts | ({"tool_calls": [call for _, call in sorted(calls.items())]} if calls else {})
