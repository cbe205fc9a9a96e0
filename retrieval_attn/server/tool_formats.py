"""Tool-call formats of model families: recognized by the chat template, written to force a call, parsed as text comes.

The regions of an answer are found by transformers' `ResponseParser`; a `CallReader` splits the text of a call region
into names and pieces of arguments.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from transformers.utils.chat_parsing.content_parsers import parse_content

from retrieval_attn.sampling.grammar import CallGrammar

Tools = Sequence[Mapping[str, Any]]
"""Tools of a request in OpenAI's form."""
NAME = r"[^\s\"<>{}\[\]|]{1,256}?"


def json_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; None for other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class CallPiece(NamedTuple):
    """A piece of a tool call. name: begins a new call; None: continues it. arguments: next characters of their JSON."""

    name: str | None
    arguments: str = ""


class CallReader(Protocol):
    """Parser of one call region, which has one or several calls."""

    def feed(self, text: str) -> list[CallPiece]:
        """Parse the next characters of the region."""

    def end(self, *, complete: bool) -> list[CallPiece]:
        """End the region. complete: its closing marker was there; otherwise the answer ended inside it."""


def function_names(tools: Tools) -> frozenset[str]:
    """Return the names of the tools' functions."""
    return frozenset(str(_function(tool).get("name")) for tool in tools)


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a tool's calls must have its schema."""
    return _function(tool).get("strict") is True


def _arguments_schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = _function(tool).get("parameters")
    return parameters if is_strict(tool) and isinstance(parameters, Mapping) else {"type": "object"}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


class _JsonScan:
    """Finds the end of a JSON object that comes in pieces."""

    _STRUCTURE, _STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self.complete = False

    def scan(self, text: str) -> int:
        """Return how many of the next characters belong to the object."""
        place = 0
        while place < len(text):
            if self._escaped:
                place, self._escaped = place + 1, False
                continue
            found = (self._STRING if self._in_string else self._STRUCTURE).search(text, place)
            if found is None:
                return len(text)
            place = found.end()
            if found[0] == "\\":
                self._escaped = True
            elif found[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth <= 0:
                    self.complete = True
                    return place
        return place


class JsonCalls(CallReader):
    """Calls whose arguments are a JSON object behind a head with the name.

    Arguments are passed on as the model writes them. A region of another form, such as keys in another order, is
    parsed as a whole when it ends.
    """

    def __init__(self, head: str, known: frozenset[str] | None = None) -> None:
        """head: pattern of all before the object, with a group `name`. known: names of calls; None: any name."""
        self._head, self._known = re.compile(head, re.DOTALL), known
        self._text, self._begun = "", False
        self._scan: _JsonScan | None = None

    def feed(self, text: str) -> list[CallPiece]:
        self._text += text
        found: list[CallPiece] = []
        while True:
            if self._scan is None:
                head = self._head.match(self._text)
                if head is None or (self._known is not None and head["name"] not in self._known):
                    return found
                found.append(CallPiece(head["name"]))
                self._text, self._scan, self._begun = self._text[head.end() :], _JsonScan(), True
            count = self._scan.scan(self._text)
            if count:
                found.append(CallPiece(None, self._text[:count]))
                self._text = self._text[count:]
            if not self._scan.complete:
                return found
            self._scan = None

    def end(self, *, complete: bool) -> list[CallPiece]:
        if self._begun:
            return []
        try:
            value = json.loads(self._text)
        except (ValueError, RecursionError):
            return []
        calls = [_json_call(one) for one in (value if isinstance(value, list) else [value])]
        found = [call for call in calls if call is not None and (self._known is None or call.name in self._known)]
        return found if len(found) == len(calls) else []


def _json_call(value: object) -> CallPiece | None:
    """Return the call of a JSON object with name and arguments, None for any other value."""
    call = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return CallPiece(call["name"], arguments)
    return CallPiece(call["name"], json.dumps(arguments, ensure_ascii=False))


class TaggedCalls(CallReader):
    """Calls whose arguments are tags, one for each: texts as they are, other values as JSON, by the tool's schema.

    Arguments whose schema is a string are returned as the text comes, others when their tag is closed.
    """

    def __init__(
        self, head: str, key: str, value_end: str, tools: Tools, *, call_end: str | None = None, margin: str = ""
    ) -> None:
        """head: pattern before the first tag. key: pattern before a value. Both have a group `name`. value_end: closing
        tag of a value. call_end: closing tag of a call; None: the region's end. margin: text around a value that is not
        part of it.
        """
        self._head, self._key = re.compile(head), re.compile(key)
        self._value_end, self._call_end, self._margin = value_end, call_end, margin
        self._schemas = {str(_function(tool).get("name")): _properties(tool) for tool in tools}
        self._properties: Mapping[str, Any] = {}
        self._text = ""
        self._in_call = self._in_value = self._streams = False
        self._types: frozenset[str] = frozenset()
        self._count = 0

    def feed(self, text: str) -> list[CallPiece]:
        self._text += text
        found: list[CallPiece] = []
        while (piece := self._next()) is not None:
            found.append(piece)
        return [piece for piece in found if piece.name is not None or piece.arguments]

    def end(self, *, complete: bool) -> list[CallPiece]:
        found = self.feed("\n<") if complete and not self._in_call else []  # a head ends before the next tag
        if self._in_value and self._streams:
            found.append(CallPiece(None, _quoted(self._text)))
        elif complete and self._in_call:
            found.append(CallPiece(None, self._closing()))
        self._in_call = self._in_value = False
        return found

    def _next(self) -> CallPiece | None:
        """Return the next piece, possibly an empty one; None if more text is needed."""
        if self._in_value:
            return self._value()
        pattern = self._key if self._in_call else self._head
        match = pattern.match(self._text)
        if match is not None:
            self._text = self._text[match.end() :]
            return self._argument(match["name"]) if self._in_call else self._call(match["name"])
        stripped = self._text.lstrip()
        if self._in_call and self._call_end is not None and stripped.startswith(self._call_end):
            self._text, self._in_call = stripped[len(self._call_end) :], False
            return CallPiece(None, self._closing())
        return None

    def _call(self, name: str) -> CallPiece:
        self._in_call, self._count = True, 0
        self._properties = self._schemas.get(name, {})
        return CallPiece(name)

    def _argument(self, name: str) -> CallPiece:
        self._types = _types(self._properties.get(name))
        self._in_value, self._streams = True, self._types == {"string"}
        comma = ", " if self._count else "{"
        self._count += 1
        return CallPiece(None, f"{comma}{json.dumps(name, ensure_ascii=False)}: " + ('"' if self._streams else ""))

    def _value(self) -> CallPiece | None:
        place = self._text.find(self._value_end)
        if place >= 0:
            raw = self._text[:place].removesuffix(self._margin)
            self._text, self._in_value = self._text[place + len(self._value_end) :], False
            return CallPiece(None, f'{_quoted(raw)}"' if self._streams else _json_value(raw, self._types))
        ready = len(self._text) - len(self._value_end) - len(self._margin)
        if not self._streams or ready <= 0:
            return None
        text, self._text = self._text[:ready], self._text[ready:]
        return CallPiece(None, _quoted(text))

    def _closing(self) -> str:
        return "}" if self._count else "{}"


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = _function(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _types(schema: object) -> frozenset[str]:
    """Return the JSON types that a schema allows, none if it does not name them."""
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given if isinstance(given, list) else ())
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        for one in choices if isinstance(choices, list) else ():
            found |= _types(one)
    if not found and isinstance(schema.get("enum"), list) and all(isinstance(one, str) for one in schema["enum"]):
        found = {"string"}
    return frozenset(str(one) for one in found)


def _json_value(raw: str, types: frozenset[str]) -> str:
    """Return a value as JSON: a text if the schema allows a string and nothing else fits, or if it is no JSON."""
    word = raw.strip()
    if types & {"boolean", "null"} and word in ("True", "False", "None"):
        word = {"True": "true", "False": "false", "None": "null"}[word]
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return json.dumps(raw, ensure_ascii=False)
    if "string" in types and not isinstance(value, str) and _type_of(value) not in types:
        return json.dumps(raw, ensure_ascii=False)
    return word if not isinstance(value, str) or not types or "string" in types else json.dumps(value)


def _type_of(value: object) -> str:
    kinds: list[tuple[type, str]] = [(bool, "boolean"), (int, "integer"), (float, "number"), (dict, "object")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "null" if value is None else "array")


def _quoted(text: str) -> str:
    """Return a text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class RelaxedCalls(CallReader):
    """Calls `call:NAME{key:value}` with words as keys and texts between `quote`; parsed as a whole when they end."""

    def __init__(self, quote: str) -> None:
        """quote: the marker before and after a text."""
        self._quote, self._text, self._begun = quote, "", False
        self._head = re.compile(r"\s*call:(?P<name>[\w.:-]+)(?=\{)")

    def feed(self, text: str) -> list[CallPiece]:
        self._text += text
        head = None if self._begun else self._head.match(self._text)
        if head is None:
            return []
        self._text, self._begun = self._text[head.end() :], True
        return [CallPiece(head["name"])]

    def end(self, *, complete: bool) -> list[CallPiece]:
        if not self._begun:
            return []
        options = {"unquoted_keys": True, "string_delims": [[self._quote, self._quote]]}
        try:
            return [CallPiece(None, json.dumps(parse_content(self._text, "json", options), ensure_ascii=False))]
        except ValueError:
            return [CallPiece(None, self._text)]


class ToolFormat:
    """Tool calls of a model family.

    Attributes:
        name: for logs.
        marks: words of the chat templates of the family; all of them must be there.
        others: words of templates of other families with the same marks; none of them may be there.
        words: markers that may be special tokens of the tokenizer, so that the text must keep them.
        region: anchors of the call region, as in transformers' response templates.
        around: text that opened and closed a region, to return one that has no call.
        begin: text that begins a call.
        named: text after the name of a call.
        call: pattern of all before the JSON object of a call, with a group `name`, see `JsonCalls`.
        close: text after the arguments of a call. None: arguments are not written as a JSON object.
        between: text between two calls, before the opening of the next one. None: an answer has one call.
        shared: text of `opening` that only the first call has.
        last: text after the last call.
        trigger: text that begins calls, "" if nothing does. None: calls cannot be told from the text before them.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    others: ClassVar[tuple[str, ...]] = ()
    words: ClassVar[tuple[str, ...]] = ()
    region: ClassVar[Mapping[str, str | list[str]]]
    around: ClassVar[tuple[str, str]] = ("", "")
    begin: ClassVar[str]
    named: ClassVar[str]
    call: ClassVar[str]
    close: ClassVar[str | None] = None
    between: ClassVar[str | None] = None
    shared: ClassVar[str] = ""
    last: ClassVar[str] = ""
    trigger: ClassVar[str | None] = None

    def opening(self, name: str | None) -> str:
        """Return the text that begins a call of `name`, of any function if that is None."""
        return self.begin + ("" if name is None else name + self.named)

    def reader(self, tools: Tools) -> CallReader:
        """Return a parser of one call region."""
        return JsonCalls(self.call)

    def grammar(self, tools: Tools, opening: str, *, many: bool, markers: Sequence[str] = ()) -> CallGrammar | None:
        """Return the grammar of calls of these tools; None if their arguments cannot be constrained.

        Arguments of a tool that is not strict are any object. opening: the text of a forced call that the prompt has;
        "": the model may answer with a text. many: an answer may have several calls. markers: see `CallGrammar`.
        """
        trigger = None if opening else self.trigger
        if self.close is None or (not opening and trigger is None):
            return None
        names, begun = sorted(function_names(tools)), len(opening or trigger or "")
        schemas = {str(_function(tool).get("name")): _arguments_schema(tool) for tool in tools}
        openings = {name: self.opening(name) for name in names}
        fitting = [name for name in names if openings[name].startswith(opening or trigger or "")]
        nexts: list[str] = []
        if many and self.between is not None:
            nexts = [self.between + openings[name].removeprefix(self.shared) for name in fitting]
        return CallGrammar(
            fitting, [schemas[name] for name in fitting], [openings[name][begun:] for name in fitting], nexts,
            self.close, self.last, trigger, markers,
        )  # fmt: skip

    def call_id(self) -> str:
        """Return an id for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def turn(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message as the chat template takes it."""
        return message


_OBJECT = (
    r'(?:\s*,\s*"id"\s*:\s*"[^"]*")?[\s,;\[\]}]*'  # behind the arguments of the call before
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*"name"\s*:\s*"(?P<name>' + NAME + r')"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class HermesFormat(ToolFormat):
    """JSON objects between <tool_call> tags: Hermes, Qwen 2.5 and Qwen 3."""

    name = "hermes"
    marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    others: ClassVar[tuple[str, ...]] = ("<tool_calls>", "<invoke name=")
    words: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    region = {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>"}
    around = ("<tool_call>", "</tool_call>")
    close: ClassVar[str | None] = "}\n</tool_call>"
    between: ClassVar[str | None] = "\n"
    trigger: ClassVar[str | None] = "<tool_call>"
    begin: ClassVar[str] = '<tool_call>\n{"name": "'
    named: ClassVar[str] = '", "arguments":'
    call: ClassVar[str] = _OBJECT


class QwenCoderFormat(HermesFormat):
    """Tags <function=NAME> and <parameter=KEY> inside <tool_call>: Qwen3-Coder, Qwen 3.5 and later."""

    name = "qwen-xml"
    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=", "<parameter=")
    close = None
    begin, named = "<tool_call>\n<function=", ">\n"

    def reader(self, tools: Tools) -> CallReader:
        key = r"\s*<parameter=(?P<name>[^>\n]+)>(?:\n|(?=[^\n]))"
        head = r"\s*<function=(?P<name>[^>\n]+)>"
        return TaggedCalls(head, key, "</parameter>", tools, call_end="</function>", margin="\n")


class GlmFormat(HermesFormat):
    """The name and tags <arg_key>, <arg_value> inside <tool_call>: GLM 4.5 and later."""

    name = "glm"
    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "<arg_key>", "<arg_value>")
    words: ClassVar[tuple[str, ...]] = (*HermesFormat.words, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    close = None
    begin, named = "<tool_call>", "\n"

    def reader(self, tools: Tools) -> CallReader:
        key = r"\s*<arg_key>\s*(?P<name>[^<\n]+?)\s*</arg_key>\s*<arg_value>"
        return TaggedCalls(r"\s*(?P<name>[^\s<]+)\s*(?=<)", key, "</arg_value>", tools)


class LlamaFormat(ToolFormat):
    """A JSON object with name and parameters as the whole answer: Llama 3.1, 3.2 and 3.3.

    There is no marker: an object that names no function of the request is text.
    """

    name = "llama3-json"
    marks: ClassVar[tuple[str, ...]] = ("<|start_header_id|>", '"parameters"')
    words: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    region = {"open_pattern": r'\A\s*(?=\{\s*"(?:name|type)")|<\|python_tag\|>'}
    close = "}"
    between = "; "
    trigger = ""
    begin, named = '{"name": "', '", "parameters":'

    def reader(self, tools: Tools) -> CallReader:
        return JsonCalls(_OBJECT, function_names(tools))


def _short_id(given: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", given):
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogateescape")).hexdigest()[:9]


class MistralFormat(ToolFormat):
    """A JSON list after [TOOL_CALLS]: Mistral before version 11 of its tokenizer."""

    name = "mistral"
    marks: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    words: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    region = {"open_pattern": r"\s*\[TOOL_CALLS\]"}
    around = ("[TOOL_CALLS]", "")
    close: ClassVar[str | None] = "}"
    between: ClassVar[str | None] = ", "
    shared: ClassVar[str] = "[TOOL_CALLS]["
    last: ClassVar[str] = "]"
    trigger = "[TOOL_CALLS]"
    begin: ClassVar[str] = '[TOOL_CALLS][{"name": "'
    named: ClassVar[str] = '", "arguments":'
    call: ClassVar[str] = _OBJECT

    def call_id(self) -> str:
        """Return nine letters and digits, which the chat templates require."""
        return uuid.uuid4().hex[:9]

    def turn(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with such ids: those of other servers are hashed."""
        changed = dict(message)
        if isinstance(message.get("tool_call_id"), str):
            changed["tool_call_id"] = _short_id(message["tool_call_id"])
        if "tool_calls" in message:
            changed["tool_calls"] = [
                {**call, "id": _short_id(call["id"])} if isinstance(call.get("id"), str) else call
                for call in message["tool_calls"]
            ]
        return changed


class MistralArgsFormat(MistralFormat):
    """[TOOL_CALLS]NAME[ARGS]{...}, once for each call: Mistral since version 11 of its tokenizer."""

    name = "mistral-args"
    marks: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]")
    words: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    close = between = shared = last = ""
    begin, named = "[TOOL_CALLS]", "[ARGS]"
    call = r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>" + NAME + r")\s*(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(?=\{)"


_DEEPSEEK_CALL = r"\s*(?:<｜tool▁call▁end｜>)?\s*<｜tool▁call▁begin｜>"


class DeepSeekFormat(ToolFormat):
    """NAME and JSON between <｜tool▁call▁begin｜> and <｜tool▁call▁end｜>: DeepSeek V3.1."""

    name = "deepseek-v3.1"
    marks: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")
    words: ClassVar[tuple[str, ...]] = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )
    region = {"open_pattern": r"\s*<｜tool▁calls▁begin｜>", "close": "<｜tool▁calls▁end｜>"}
    around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    close: ClassVar[str | None] = "<｜tool▁call▁end｜>"
    between: ClassVar[str | None] = ""
    shared = "<｜tool▁calls▁begin｜>"
    last = "<｜tool▁calls▁end｜>"
    trigger = "<｜tool▁calls▁begin｜>"
    begin: ClassVar[str] = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    named: ClassVar[str] = "<｜tool▁sep｜>"
    call: ClassVar[str] = _DEEPSEEK_CALL + r"(?P<name>" + NAME + r")\s*<｜tool▁sep｜>\s*(?=\{)"


class DeepSeekBlockFormat(DeepSeekFormat):
    """The same with a type before the name and JSON in a code block: DeepSeek V3 and R1."""

    name = "deepseek-v3"
    marks: ClassVar[tuple[str, ...]] = (*DeepSeekFormat.marks, "```json")
    close = "\n```<｜tool▁call▁end｜>"
    between = "\n"
    begin, named = DeepSeekFormat.begin + "function<｜tool▁sep｜>", "\n```json\n"
    call = rf"(?:\s*```)?{_DEEPSEEK_CALL}\w+<｜tool▁sep｜>(?P<name>{NAME})\s*```json\s*(?=\{{)"


class HarmonyFormat(ToolFormat):
    """Messages to functions.NAME in the commentary channel: GPT-OSS. See `HARMONY` for the other channels."""

    name = "harmony"
    marks: ClassVar[tuple[str, ...]] = ("<|channel|>", "<|message|>", "functions.")
    words: ClassVar[tuple[str, ...]] = (
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    )
    region = {
        "open_pattern": r"(?:<\|start\|>assistant)?\s*(?:<\|channel\|>\w+\s+)?to=functions\.",
        "close": ["<|call|>", "<|end|>", "<|return|>"],
    }
    around = ("<|channel|>commentary to=functions.", "<|call|>")
    close = ""
    begin, named = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"
    call = (
        r"(?P<name>" + NAME + r")\s*"
        r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>\s*(?=\{)"
    )


class Gemma4Format(ToolFormat):
    """call:NAME{key:value} between <|tool_call> and <tool_call|>: Gemma 4."""

    name = "gemma4"
    marks: ClassVar[tuple[str, ...]] = ("<|tool_call>", "<tool_call|>", '<|"|>')
    words: ClassVar[tuple[str, ...]] = marks
    region = {"open_pattern": r"\s*<\|tool_call>", "close": "<tool_call|>"}
    around = ("<|tool_call>", "<tool_call|>")
    quote: ClassVar[str] = '<|"|>'
    begin: ClassVar[str] = "<|tool_call>call:"
    named: ClassVar[str] = "{"

    def reader(self, tools: Tools) -> CallReader:
        return RelaxedCalls(self.quote)


class FunctionGemmaFormat(Gemma4Format):
    """call:NAME{key:value} between <start_function_call> and <end_function_call>: FunctionGemma."""

    name = "functiongemma"
    marks: ClassVar[tuple[str, ...]] = ("<start_function_call>", "<end_function_call>", "<escape>")
    words: ClassVar[tuple[str, ...]] = marks
    region = {"open_pattern": r"\s*<start_function_call>", "close": "<end_function_call>"}
    around = ("<start_function_call>", "<end_function_call>")
    begin = "<start_function_call>call:"
    quote = "<escape>"


FORMATS: tuple[ToolFormat, ...] = (
    HarmonyFormat(), Gemma4Format(), FunctionGemmaFormat(), QwenCoderFormat(), GlmFormat(), HermesFormat(),
    MistralArgsFormat(), MistralFormat(), DeepSeekBlockFormat(), DeepSeekFormat(), LlamaFormat(),
)  # fmt: skip
"""All known formats; the first whose marks are in a chat template is taken."""


def format_of(template: str) -> ToolFormat | None:
    """Return the format of a chat template, None if it is not known."""
    return next(
        (
            one
            for one in FORMATS
            if all(mark in template for mark in one.marks) and not any(mark in template for mark in one.others)
        ),
        None,
    )
