"""Tool calls and reasoning of each model family: answers in the family's format, at every cut of their text."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from typing import Any

import pytest

from retrieval_attn.errors import InputDataError
from retrieval_attn.prompt.text_stream import TextStream
from retrieval_attn.server.answer_parts import AnswerFormat, AnswerPart, message_of
from retrieval_attn.server.prompts import Extras, Prompts
from retrieval_attn.server.protocol import ChatBody
from retrieval_attn.server.tool_formats import format_of
from tests.server.chat_templates import CODE, FAMILIES, TOOLS, Family

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Oslo "N"', "days": 3}),
    ("write_file", {"path": "a/b.py", "text": CODE}),
]
THOUGHT = "Two calls: {first} < second."


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@cache
def prompts_of(family: Family) -> Prompts:
    tokenizer = family.tokenizer
    return Prompts(tokenizer, len(tokenizer), 4096)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@cache
def prompt_end(family: Family, **options: Any) -> str:
    prompts = prompts_of(family)
    return prompts.end_of(prompts.of_messages([user("Weather?")], Extras(TOOLS, options)))


def parsed(family: Family, text: str, cut: int | random.Random = 0, **options: Any) -> dict[str, Any]:
    """The message of an answer whose text comes whole (0), in pieces of `cut` characters, or in random ones."""
    reader = AnswerFormat.of(family.tokenizer).reader(options.pop("tools", TOOLS), prompt_end(family), **options)
    parts: list[AnswerPart] = []
    place = 0
    while place < len(text):
        count = cut.randint(1, 9) if isinstance(cut, random.Random) else cut or len(text)
        parts += reader.feed(text[place : place + count])
        place += count
    return message_of([*parts, *reader.end()])


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


def test_formats_are_recognized_by_the_chat_template(family: Family) -> None:
    found = AnswerFormat.of(family.tokenizer)
    assert found.calls is not None and found.calls.name == family.format
    assert f"parsed as {family.format}" in found.description


@pytest.mark.parametrize("cut", [0, 1, 2, 7], ids=["whole", "1", "2", "7"])
def test_calls_and_thinking_are_parsed_at_every_cut(family: Family, cut: int) -> None:
    thought, said = THOUGHT if family.thinks else "", "" if family.format == "llama3-json" else "I call two."
    message = parsed(family, family.answer(thought, said, CALLS), cut)
    assert calls_of(message) == CALLS
    assert message.get("reasoning_content", "") == thought and message.get("content", "") == said
    assert [call["index"] for call in message["tool_calls"]] == [0, 1]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_random_cuts_give_the_same_message(family: Family) -> None:
    text = family.answer(THOUGHT if family.thinks else "", "", CALLS)
    whole = without_ids(parsed(family, text))
    draw = random.Random(1)
    assert all(without_ids(parsed(family, text, draw)) == whole for _ in range(30))


def test_a_call_without_arguments(family: Family) -> None:
    for cut in (0, 1):
        assert calls_of(parsed(family, family.answer("", "", [("now", {})]), cut)) == [("now", {})]


def test_arguments_come_in_pieces(family: Family) -> None:
    """A long text is not held until the call ends, but for Gemma's formats, whose values are parsed as a whole."""
    text = family.answer("", "", [("write_file", {"path": "a", "text": "word " * 200})])
    reader = AnswerFormat.of(family.tokenizer).reader(TOOLS, "")
    pieces = [part for place in range(0, len(text), 5) for part in reader.feed(text[place : place + 5])] + reader.end()
    called = [part for part in pieces if part.kind == "call"]
    assert called[0].name == "write_file" and called[0].text == ""
    many = sum(1 for part in called if part.text)
    assert many == 1 if "gemma" in family.format else many > 100


def test_an_answer_without_calls_is_text(family: Family) -> None:
    text = family.answer(THOUGHT if family.thinks else "", 'It rains. {"name": "x"}', [])
    for cut in (0, 1):
        message = parsed(family, text, cut)
        assert message.get("content") == 'It rains. {"name": "x"}' and "tool_calls" not in message
        assert message.get("reasoning_content", "") == (THOUGHT if family.thinks else "")


def test_calls_are_text_without_tools(family: Family) -> None:
    """A client that gave no tools would not look for calls."""
    text = family.answer("", "", CALLS[:1])
    message = parsed(family, text, tools=[])
    assert "tool_calls" not in message
    text = text.removeprefix(family.thinks[1] if family.thinks else "")
    assert ("Oslo" in message["content"]) if family.format == "harmony" else message["content"] == text


def test_a_region_that_has_no_call_is_text(family: Family) -> None:
    """Nothing that a model wrote is lost."""
    if family.format == "llama3-json":
        text = '{"name": "unknown", "parameters": {"a": 1}}'
    elif family.format == "harmony":
        text = "<|channel|>commentary to=functions.f nonsense<|call|>"
    else:
        text = f"{AnswerFormat.of(family.tokenizer).calls.around[0]}no call at all"  # type: ignore[union-attr]
    for cut in (0, 1):
        message = parsed(family, (family.thinks[1] if family.thinks and family.prompted else "") + text, cut)
        assert "tool_calls" not in message and message["content"] == text


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.97])
def test_an_answer_that_is_cut_off_keeps_what_there_is(family: Family, share: float) -> None:
    text = family.answer("", "", CALLS)
    text = text[: int(len(text) * share)]
    for cut in (0, 1):
        message = parsed(family, text, cut)
        for call, (name, _) in zip(message.get("tool_calls", ()), CALLS, strict=False):
            assert call["function"]["name"] == name
        assert message.get("tool_calls") or message.get("content")


def test_thinking_is_cut_off_or_off(family: Family) -> None:
    if family.thinks is None:
        return
    text = family.answer(THOUGHT, "", [])
    message = parsed(family, text[: text.index("second")])
    assert message["reasoning_content"] == "Two calls: {first} < "
    assert "content" not in message
    if "enable_thinking" in family.template and family.prompted:
        end = prompt_end(family, enable_thinking=False)
        reader = AnswerFormat.of(family.tokenizer).reader(TOOLS, end)
        assert message_of([*reader.feed("No."), *reader.end()]) == {"content": "No."}


@pytest.mark.parametrize("name", ["get_weather", None])
def test_a_forced_call_is_begun_by_the_prompt(family: Family, name: str | None) -> None:
    """The text that is put behind the prompt, and what the model then adds, are the answer without its thinking."""
    found = AnswerFormat.of(family.tokenizer)
    opening = found.opening(name)
    text = family.answer("", "", CALLS[:1])
    text = text.removeprefix(found.thinking_end(prompt_end(family)))
    rest = text.removeprefix(opening)
    assert rest != text and "Oslo" in rest
    for cut in (0, 1):
        message = parsed(family, rest, cut, opening=opening)
        assert calls_of(message) == CALLS[:1] and "content" not in message
    prompts = prompts_of(family)
    parts = prompts.of_messages([user("Weather?")], Extras(TOOLS))
    end = found.thinking_end(prompts.end_of(parts))
    assert bool(end) == (family.prompted and family.thinks is not None)
    ids = [token for part in prompts.continued(parts, end + opening) for token in part]
    special = {token for token in ids if token in set(prompts.tokenizer.all_special_ids)}
    told = set(prompts.tokenizer.convert_ids_to_tokens(sorted(special)))
    assert all(word in told for word in family.special if word in opening)  # control tokens, not their letters


def test_one_call_at_most(family: Family) -> None:
    assert calls_of(parsed(family, family.answer("", "", CALLS), most_calls=1)) == CALLS[:1]


def test_markers_that_are_special_tokens_stay_in_the_text(family: Family) -> None:
    """From token ids, as the engine decodes them; without `visible`, no marker would be there to find."""
    tokenizer = family.tokenizer
    found = AnswerFormat.of(tokenizer)
    text = family.answer(THOUGHT if family.thinks else "", "", CALLS[:1])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, visible=found.visible)
    assert "".join(map(stream.add, ids)) + stream.end() == text
    plain = TextStream(tokenizer)
    without = "".join(map(plain.add, ids)) + plain.end()
    assert (without == text) == (not any(word in text for word in family.special))


def test_calls_and_results_come_back_through_the_template(family: Family) -> None:
    """A second turn with what the client was given, whatever ids another server made."""
    prompts, found = prompts_of(family), AnswerFormat.of(family.tokenizer)
    assert found.calls is not None
    for call_id in (found.calls.call_id(), "toolu_01ABCdef"):
        call = {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
        said = [
            user("Weather?"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": "rain"},
        ]
        body = ChatBody.model_validate({"model": "m", "messages": said, "tools": TOOLS})
        parts = prompts.of_messages([message.turn for message in body.messages], Extras(TOOLS))
        text = prompts.tokenizer.decode([token for part in parts for token in part])
        assert "Oslo" in text and "rain" in text


@pytest.mark.parametrize(
    ("family", "effort", "thinking", "wanted"),
    [
        ("qwen3-thinking", "none", None, {"enable_thinking": False}),
        ("qwen3-thinking", "high", None, {"enable_thinking": True}),
        ("qwen3-thinking", "high", False, {"enable_thinking": False}),
        ("deepseek-v3.1", "low", None, {"thinking": True}),
        ("gpt-oss", "high", None, {"reasoning_effort": "high"}),
        ("qwen2.5", "high", True, {}),
    ],
)
def test_effort_sets_the_variables_that_a_template_has(
    family: str, effort: str | None, thinking: bool | None, wanted: dict[str, Any]
) -> None:
    assert prompts_of(FAMILIES[family]).thinking_options(effort, thinking) == wanted


SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
    "number": {"type": "number"}, "flag": {"type": "boolean"}, "list": {"type": "array"}, "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "kind": {"enum": ["1", "2"]},
}}}}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3.5", "glm4.5"])
def test_tagged_values_have_the_types_of_the_schema(name: str) -> None:
    family = FAMILIES[name]
    given = {
        "number": "1.5",
        "flag": "True",
        "list": '[1, "a"]',
        "text": "17",
        "maybe": "null",
        "kind": "1",
        "other": "7",
    }
    wanted = {"number": 1.5, "flag": True, "list": [1, "a"], "text": "17", "maybe": None, "kind": "1", "other": 7}
    message = parsed(family, family.answer("", "", [("f", given)]), tools=[SCHEMA])
    assert calls_of(message) == [("f", wanted)]
    wrong = parsed(family, family.answer("", "", [("f", {"number": "many"})]), tools=[SCHEMA])
    assert calls_of(wrong) == [("f", {"number": "many"})]


@pytest.mark.parametrize("name", ["qwen2.5", "mistral-v3"])
def test_json_calls_with_keys_in_another_order(name: str) -> None:
    family = FAMILIES[name]
    text = '{"arguments": {"city": "Oslo"}, "name": "get_weather"}'
    for cut in (0, 1):
        around = ("[TOOL_CALLS][", "]") if name == "mistral-v3" else ("<tool_call>", "</tool_call>")
        message = parsed(family, f"{around[0]}{text}{around[1]}", cut)
        assert calls_of(message) == [("get_weather", {"city": "Oslo"})]


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_calls_of_a_list_may_have_ids(cut: int) -> None:
    """As Mistral's templates write earlier calls, so that models copy it."""
    one = '{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "a1b2c3d4e"}'
    text = f"[TOOL_CALLS][{one}, {one.replace('Oslo', 'Bergen')}, {one.replace('get_weather', 'now')}]"
    message = parsed(FAMILIES["mistral-v3"], text, cut)
    cities = [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Bergen"}), ("now", {"city": "Oslo"})]
    assert calls_of(message) == cities


@pytest.mark.parametrize(
    "call", ['[<tool_call>\n]<]m[>[<invoke name="', '<tool_call></tool_call> <tool_calls>[{"name": "']
)
def test_other_formats_with_the_same_tag_are_unknown(call: str) -> None:
    """Of MiniMax-M3 and Apriel 1.5: their calls would stay in the text without a warning at start."""
    assert format_of("{{ tools }}{{ messages }}" + call) is None


def test_an_unknown_format_is_said_and_cannot_be_forced() -> None:
    tokenizer = copy.deepcopy(FAMILIES["qwen2.5"].tokenizer)
    tokenizer.chat_template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    found = AnswerFormat.of(tokenizer)
    assert "no known format" in found.description and "\n" not in found.description and not found.visible
    with pytest.raises(InputDataError, match="cannot force a call"):
        found.opening(None)
    reader = found.reader(TOOLS, "")
    assert message_of([*reader.feed("<tool_call>"), *reader.end()]) == {"content": "<tool_call>"}


OWN: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "{{think}}", "close": "{{/think}}"},
        "tool_calls": {
            "open": "<|im_start|>", "close": "!!", "content": "json", "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}  # fmt: skip


def test_a_tokenizers_own_response_template_is_used() -> None:
    """For a chat template whose format is unknown here; its markers may be special tokens."""
    tokenizer = copy.deepcopy(FAMILIES["qwen2.5"].tokenizer)
    tokenizer.chat_template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n"
    tokenizer.response_template = OWN
    found = AnswerFormat.of(tokenizer)
    assert found.visible == {tokenizer.convert_tokens_to_ids("<|im_start|>")} and "own" not in found.description
    call = '<|im_start|>{"name": "get_weather", "arguments": {"city": "Oslo"}}!!'
    for step in (1, 1000):
        for text, calls in ((f"{{{{think}}}}why{{{{/think}}}}Yes.{call}", 1), ("Yes.<|im_start|>no JSON!! More.", 0)):
            reader = found.reader(TOOLS, "<|im_start|>assistant\n")
            parts = [part for at in range(0, len(text), step) for part in reader.feed(text[at : at + step])]
            message = message_of([*parts, *reader.end()])
            assert len(calls_of(message)) == calls and "Yes." in message["content"]
            assert (message.get("reasoning_content") == "why") == bool(calls)
            assert calls or ("no JSON" in message["content"] and "More." in message["content"])
