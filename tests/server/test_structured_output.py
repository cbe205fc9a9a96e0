"""Structured output through the real `openai` client: every answer is valid, and what cannot be enforced is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.answer_schemas import SCHEMAS
from tests.server.process import Served

openai = pytest.importorskip("openai", reason="tests of the server need openai")
jsonschema_rs = pytest.importorskip("jsonschema_rs", reason="answers are checked with jsonschema-rs")
pytest.importorskip("llguidance", reason="structured output needs retrieval-attn[grammar]")

QUESTION = [{"role": "user", "content": "The sky is blue. Answer with a record."}]


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def chat(client: Any, **options: Any) -> Any:
    given = {"model": "bundled", "messages": QUESTION, "temperature": 1, "max_tokens": 700, "seed": 1, **options}
    return client.chat.completions.create(**given).choices[0]


def complete(client: Any, **extra: Any) -> Any:
    return client.completions.create(
        model="bundled", prompt="The sky is", max_tokens=300, temperature=1, seed=3, extra_body=extra
    ).choices[0]


def formatted(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def require_valid(text: str, schema: Any) -> None:
    """Fail unless a text is JSON of a schema, formats included."""
    jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(text))


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_have_their_schema(client: Any, temperature: float) -> None:
    """All at once: each row has a grammar of its own."""

    def answer(name: str) -> Any:
        return chat(client, response_format=formatted(SCHEMAS[name]), temperature=temperature)

    with ThreadPoolExecutor(len(SCHEMAS)) as pool:
        for name, choice in zip(SCHEMAS, pool.map(answer, SCHEMAS), strict=True):
            assert choice.finish_reason == "stop", (name, choice.message.content)
            require_valid(choice.message.content, SCHEMAS[name])


def test_a_batch_of_all_kinds_answers_as_each_alone(client: Any) -> None:
    """Greedy and drawn rows, with and without grammar and penalties."""
    schema = SCHEMAS["sentiment"]
    cases: list[dict[str, Any]] = [
        {"max_tokens": 24}, {"response_format": formatted(schema)}, {"temperature": 0, "max_tokens": 24},
        {"response_format": formatted(schema), "temperature": 0, "frequency_penalty": 1.0},
        {"extra_body": {"guided_regex": "[a-f]{3}-[0-9]{4}"}, "top_p": 0.9},
        {"extra_body": {"guided_choice": ["the grass", "the sky", "neither"]}, "logit_bias": {"42": 5}},
        {"response_format": {"type": "json_object"}, "max_tokens": 30},
    ]  # fmt: skip
    alone = [chat(client, **case).message.content for case in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(lambda case: chat(client, **case).message.content, cases * 2))
    assert together == alone * 2
    require_valid(alone[1], schema)
    require_valid(alone[3], schema)
    assert re.fullmatch("[a-f]{3}-[0-9]{4}", alone[4]) and alone[5] in ("the grass", "the sky", "neither")
    assert alone[6].startswith("{")


def test_the_forms_of_vllm(client: Any) -> None:
    record = SCHEMAS["person"]
    forms: list[dict[str, Any]] = [
        {"guided_json": record}, {"guided_json": json.dumps(record)}, {"structured_outputs": {"json": record}},
        {"response_format": formatted(record)},
    ]  # fmt: skip
    for form in forms:
        require_valid(complete(client, **form).text, record)
    forms = [{"guided_choice": ["yes", "no 1"]}, {"structured_outputs": {"choice": ["yes", "no 1"]}}]
    for form in forms:
        assert complete(client, **form).text in ("yes", "no 1")
    pattern = r"(\d{2}/){2}\d{4}"
    forms = [{"guided_regex": pattern}, {"structured_outputs": {"regex": pattern}}]
    for form in forms:
        assert re.fullmatch(pattern, complete(client, **form).text)
    for grammar in ('root ::= "a" [0-9] ("b" | "cd") "e"', 'start: "a" /[0-9]/ ("b" | "cd") "e"'):
        forms = [{"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}]
        for form in forms:
            assert re.fullmatch("a[0-9](b|cd)e", complete(client, **form).text)


def test_an_object_and_a_stream(client: Any) -> None:
    whole = chat(client, response_format={"type": "json_object"}, seed=5, max_tokens=900)
    if whole.finish_reason == "stop":
        assert isinstance(json.loads(whole.message.content), dict)
    assert whole.message.content.startswith("{")
    options: dict[str, Any] = {"response_format": formatted(SCHEMAS["address"]), "logprobs": True}
    stream = client.chat.completions.create(
        model="bundled", messages=QUESTION, temperature=1, seed=2, max_tokens=700, stream=True, **options
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    require_valid(text, SCHEMAS["address"])
    assert text == chat(client, seed=2, **options).message.content


def test_several_answers_have_their_schema(client: Any) -> None:
    found = client.chat.completions.create(
        model="bundled", messages=QUESTION, temperature=1.5, seed=4, n=3, max_tokens=700,
        response_format=formatted(SCHEMAS["plan"]),
    )  # fmt: skip
    for choice in found.choices:
        require_valid(choice.message.content, SCHEMAS["plan"])
    assert len({choice.message.content for choice in found.choices}) > 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not": (
        {"response_format": formatted({"type": "object", "properties": {"a": {"not": {"type": "null"}}}})},
        '"not"',
    ),
    "uniqueItems": ({"response_format": formatted({"type": "array", "uniqueItems": True})}, '"uniqueItems"'),
    "a format": ({"response_format": formatted({"type": "string", "format": "color"})}, "color"),
    "lenient": ({"response_format": formatted({"not": {}, "x-guidance": {"lenient": True}})}, '"not"'),
    "contradiction": ({"response_format": formatted({"type": "string", "minLength": 3, "maxLength": 1})}, "minLength"),
    "look-around": ({"guided_regex": "(?=a)b"}, "look-around"),
    "a grammar": ({"guided_grammar": "root ::= ("}, "grammar"),
    "two grammars": ({"guided_regex": "a", "guided_choice": ["b"]}, "one grammar"),
    "no choice": ({"guided_choice": []}, "guided_choice"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "json_schema"),
    "an unknown type": ({"response_format": {"type": "structural_tag"}}, "response_format"),
    "no JSON": ({"guided_json": "{"}, "guided_json"),
    "min_tokens": ({"guided_regex": "a", "min_tokens": 2, "max_tokens": 9}, "min_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused(client: Any, name: str) -> None:
    extra, word = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="bundled", messages=QUESTION, extra_body=extra)
    assert word in str(error.value), error.value


def test_responses_have_their_schema(client: Any) -> None:
    """The format of a response is flat: name and schema lie beside its type."""
    name = next(iter(SCHEMAS))
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMAS[name], "strict": True}
    found = client.responses.create(
        model="bundled", input="The sky is blue.", temperature=1, max_output_tokens=700, text={"format": form}
    )
    assert found.status == "completed"
    require_valid(found.output_text, SCHEMAS[name])
