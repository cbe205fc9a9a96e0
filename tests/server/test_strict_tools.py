"""Strict tools: arguments of calls have their schema, in every format that writes arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from retrieval_attn.errors import InputDataError
from retrieval_attn.sampling.grammar import GrammarCompiler, GrammarSpec
from retrieval_attn.server.answer_parts import AnswerFormat
from tests.server.chat_templates import FAMILIES, TOOLS, Family
from tests.server.process import serving
from tests.server.scripted_model import save_scripted_model

openai = pytest.importorskip("openai", reason="tests of the server need openai")
pytest.importorskip("llguidance", reason="strict tools need retrieval-attn[grammar]")

STRICT = deepcopy(TOOLS)
for tool in STRICT:
    function = tool["function"]
    function["strict"] = True
    function["parameters"]["additionalProperties"] = False
    for schema in function["parameters"]["properties"].values():
        schema.update({"maxLength": 20} if schema["type"] == "string" else {"minimum": 0, "maximum": 99})
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Oslo "ü"', "days": 3}),
    ("write_file", {"path": "a", "text": "b\n"}),
    ("now", {}),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Oslo", "days": "three"}),
    ("get_weather", {"city": "Oslo"}),
    ("other", {"path": "a"}),
]
JSON_FAMILIES = [
    name for name, one in FAMILIES.items() if one.format not in ("qwen-xml", "glm", "gemma4", "functiongemma")
]
FORCED_ONLY = {"gpt-oss"}


def is_accepted(family: Family, spec: GrammarSpec, text: str) -> bool:
    """Return whether each token of a text and then the end is allowed."""
    tokenizer = family.tokenizer
    matcher = GrammarCompiler(tokenizer, 4096, {1}).matcher(spec)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for number, token in enumerate([*tokens, 1]):
        if not np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")[token]:
            return False
        if matcher.accept(token):
            return number >= len(tokens) - 1
    return True


@pytest.mark.parametrize("name", [name for name in JSON_FAMILIES if name not in FORCED_ONLY])
def test_a_model_may_call_or_answer(name: str) -> None:
    family = FAMILIES[name]
    spec = AnswerFormat.of(family.tokenizer).grammar_of_calls(STRICT, "", many=True)
    assert spec is not None
    for calls in ([], GOOD[:1], GOOD[1:2], GOOD[2:], GOOD):
        said = "" if name == "llama3.1" and calls else "Let me see {it}.\n" if name != "llama3.1" else "It rains."
        assert is_accepted(family, spec, family.answer("Which?", said, calls)), calls
    for call in WRONG:
        said = "" if name == "llama3.1" else "So:\n"
        assert not is_accepted(family, spec, family.answer("", said, [call])), call
    alone = AnswerFormat.of(family.tokenizer).grammar_of_calls(STRICT, "", many=False)
    assert alone is not None and is_accepted(family, alone, family.answer("", "", GOOD[:1]))
    assert not is_accepted(family, alone, family.answer("", "", GOOD[:2]))


@pytest.mark.parametrize("name", JSON_FAMILIES)
def test_a_forced_call_has_its_schema(name: str) -> None:
    family = FAMILIES[name]
    answer_format = AnswerFormat.of(family.tokenizer)
    for function in (None, "get_weather"):
        opening = answer_format.opening(function)
        tools = STRICT if function is None else STRICT[:1]
        spec = answer_format.grammar_of_calls(tools, opening, many=False)
        assert spec is not None

        def behind(call: tuple[str, dict[str, Any]], opening: str = opening) -> str:
            text = family.before + family.write(*call) + family.behind
            text = (
                text
                if text.startswith(opening)
                else text.replace(": {", ":{", 1).replace('"arguments":{', '"arguments": {')
            )
            assert text.startswith(opening), (text, opening)
            return text.removeprefix(opening)

        assert is_accepted(family, spec, behind(GOOD[0]))
        assert function is not None or is_accepted(family, spec, behind(GOOD[1]))
        assert not is_accepted(family, spec, behind(WRONG[0])) and not is_accepted(family, spec, behind(WRONG[1]))


def test_tools_that_are_not_strict_change_nothing() -> None:
    answer_format = AnswerFormat.of(FAMILIES["qwen2.5"].tokenizer)
    assert answer_format.grammar_of_calls(TOOLS, "", many=True) is None
    mixed = answer_format.grammar_of_calls([TOOLS[0], STRICT[1]], "", many=True)
    assert mixed is not None
    family = FAMILIES["qwen2.5"]
    assert is_accepted(family, mixed, family.answer("", "", [("get_weather", {"any": [1]})]))
    assert not is_accepted(family, mixed, family.answer("", "", [("write_file", {"any": [1]})]))


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(JSON_FAMILIES) | FORCED_ONLY))
def test_formats_that_cannot_be_constrained_are_refused(name: str) -> None:
    with pytest.raises(InputDataError, match="strict"):
        AnswerFormat.of(FAMILIES[name].tokenizer).grammar_of_calls(STRICT, "", many=True)


SCRIPTS = {
    "1": "Both, I think.\n</think>\n\nLet me see.\n\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": "many"}}\n</tool_call>',
    "json": "I think {so}.\n</think>\n\nno JSON",
}
BEHIND = {'{"name": "get_weather", "arguments":': ' {"town": "Bonn", "days": []}}\n</tool_call>'}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a model whose scripts have wrong arguments."""
    folder = tmp_path_factory.mktemp("strict")
    save_scripted_model(folder, FAMILIES["qwen3-thinking"], SCRIPTS, BEHIND)
    options = ("--name", "tiny", "--store", str(folder / "store"), "--warm-up", "0")
    with (
        serving(str(folder), *options, preloaded=True) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


def chat(client: Any, tools: Any, script: str = "1", **options: Any) -> Any:
    body = {"chat_template_kwargs": {"script": script}}
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Weather?"}], tools=tools, extra_body=body,
        max_tokens=400, temperature=0, **options,
    ).choices[0]  # fmt: skip


def test_calls_of_a_model_that_writes_wrong_arguments(client: Any) -> None:
    loose = chat(client, TOOLS).message.tool_calls[0].function
    assert json.loads(loose.arguments)["days"] == "many"
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for options in ({"parallel_tool_calls": False}, {"tool_choice": named}):
        found = chat(client, STRICT, **options)
        arguments = json.loads(found.message.tool_calls[0].function.arguments)
        assert found.finish_reason == "tool_calls"
        assert (
            set(arguments) == {"city", "days"} and isinstance(arguments["city"], str) and 0 <= arguments["days"] <= 99
        )


def test_a_text_has_its_schema_after_the_thinking(client: Any) -> None:
    schema = {
        "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False,
    }  # fmt: skip
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = chat(client, openai.omit, "json", response_format=form)
    assert found.message.reasoning_content.startswith("I think {so}.") and found.finish_reason == "stop"
    assert isinstance(json.loads(found.message.content)["ok"], bool)
    with pytest.raises(openai.BadRequestError, match="grammar"):
        chat(client, TOOLS, response_format=form)
