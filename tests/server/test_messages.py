"""Messages as clients send them: what the chat template gets of them, and what is refused because it would be lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from retrieval_attn.errors import InputDataError
from retrieval_attn.prompt import render as rendering
from retrieval_attn.server import app as app_routes
from retrieval_attn.server.prompts import Extras, Prompts
from retrieval_attn.server.protocol import ChatBody, CompletionBody, KeepBody, TokenizeBody
from tests.prompt.test_encode import BUNDLED, PIECES, bytelevel, decoded
from tests.server.test_prompts import prompts_of, turn

TOOLS = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is false %}(none){% endif %}{% endif %}"
)
WALKS = TOOLS.replace(
    "{{ c.function.arguments | tojson }}", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}"
)
JOINS = TOOLS.replace("{{ c.function.arguments | tojson }}", "{{ 'with ' + c.function.arguments }}")
PLAIN = "{% for m in messages if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


def chat(messages: list[Any], **fields: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": messages, **fields})


def read(prompts: Prompts, messages: list[Any], **fields: Any) -> str:
    """The text that the model reads for a request."""
    body = chat(messages, **fields)
    extras = Extras(body.read_tools, body.chat_template_kwargs or {})
    parts = prompts.of_messages([message.turn for message in body.messages], extras)
    return decoded(prompts.tokenizer, [token for part in parts for token in part])


def test_tools_are_rendered_or_refused(needle_model_path: Path) -> None:
    """Never dropped: by a template that does not write them, without a template, with a saved context."""
    prompts, user = prompts_of(needle_model_path, TOOLS), [turn("user", "Weather?")]
    assert read(prompts, user, tools=[TOOL]).startswith('TOOLS [{"type": "function"')
    assert read(prompts, user, tools=[TOOL], tool_choice="none") == read(prompts, user) == read(prompts, user, tools=[])
    with pytest.raises(InputDataError, match="saved context cannot have tools"):
        prompts.of_question(user, Extras([TOOL]))
    called = [message.turn for message in chat(CALLED).messages]
    for refusing in (prompts.of_question, prompts.of_answered):
        with pytest.raises(InputDataError, match="saved context cannot have tools"):
            refusing([*called[:2], turn("user", "So?")])
    for template, message in ((None, "no chat template"), (PLAIN, "does not write")):
        other = prompts_of(needle_model_path, template)
        with pytest.raises(InputDataError, match=message):
            read(other, user, tools=[TOOL])
        for messages in (CALLED, [CALLED[0], CALLED[2]], CALLED[:2]):
            with pytest.raises(InputDataError, match=message):
                read(other, messages)
            with pytest.raises(InputDataError, match=message):
                other.of_conversation([one.turn for one in chat(messages).messages])
    with pytest.raises(InputDataError, match="no chat template"):
        prompts_of(needle_model_path, None).of_conversation(called)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [(TOOLS, 'weather {"city": "Oslo"}'), (WALKS, "weather city=Oslo;"), (JOINS, 'weather with {"city": "Oslo"}')],
)
def test_arguments_are_what_the_template_takes(needle_model_path: Path, template: str, wanted: str) -> None:
    text = read(prompts_of(needle_model_path, template), CALLED, tools=[TOOL])
    assert f"CALL {wanted}<|end|>\n<|tool|>rain" in text
    without = [CALLED[0], {**CALLED[1], "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": ""}}]}]
    assert "CALL weather" in read(prompts_of(needle_model_path, template), without)


def test_null_is_not_given() -> None:
    """As openai-python dumps an answer's message, and in all other bodies, known fields and unknown ones."""
    dumped = {
        "role": "assistant", "content": "Hello.", "refusal": None, "annotations": None, "audio": None,
        "function_call": None, "tool_calls": None, "reasoning_content": None,
    }  # fmt: skip
    user = turn("user", "Hi.")
    assert chat([user, dumped, user]).messages[1].turn == turn("assistant", "Hello.")
    assert chat([user, {**dumped, "annotations": []}]).messages[1].turn == turn("assistant", "Hello.")
    assert chat([user], functions=None, function_call=None, prediction=None, tools=None, n=None).read_tools == []
    assert CompletionBody.model_validate({"model": "m", "prompt": "x", "guided_json": None}).prompts == ["x"]
    assert TokenizeBody.model_validate({"prompt": "x", "messages": None, "tools": None, "return_token_strs": None})
    assert KeepBody.model_validate({"name": "n", "text": "x", "messages": None, "ttl": None}).text == "x"
    wrong: dict[str, Any]
    for wrong in ({"audio": {}}, {"annotations": [{}]}, {"function_call": {"name": "f"}}):
        with pytest.raises(ValidationError):
            chat([user, turn("assistant", "Hello.") | wrong])


@pytest.mark.parametrize("template", [None, TOOLS], ids=["untemplated", "templated"])
def test_contents_that_are_empty(needle_model_path: Path, template: str | None) -> None:
    prompts, user = prompts_of(needle_model_path, template), turn("user", "Hi.")
    contents: list[Any] = ["", []]
    for content in contents:
        for messages in (
            [{"role": "system", "content": content}, user],
            [{"role": "user", "content": content}],
            [user, {"role": "assistant", "content": content}, user],
            [user, {"role": "assistant", "content": None}, user],
            [user, {"role": "assistant"}, user],
        ):
            assert read(prompts, messages)
    turns = [turn("user", ""), turn("assistant", ""), turn("user", "")]
    assert prompts.of_question(turns) and prompts.of_question(turns[:1]) and prompts.of_answered(turns[:2])


def test_parts_stand_on_lines_of_their_own() -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    assert chat([{"role": "user", "content": parts}]).messages[0].text == "one\ntwo"


def test_variables_and_reasoning_go_to_the_template(needle_model_path: Path) -> None:
    prompts, user = prompts_of(needle_model_path, TOOLS), turn("user", "Hi.")
    assert read(prompts, [user], chat_template_kwargs={"enable_thinking": False}).endswith("<|assistant|>(none)")
    assert read(prompts, [user], chat_template_kwargs={"enable_thinking": True}).endswith("<|assistant|>")
    said = [user, turn("assistant", "Yes.") | {"reasoning_content": "because"}, user]
    assert "Yes.(because)<|end|>" in read(prompts, said)
    for name in ("chat_template", "tokenize", "messages", "tools", "add_generation_prompt", "continue_final_message"):
        with pytest.raises(ValidationError, match=f"cannot have {name}"):
            chat([user], chat_template_kwargs={name: "x"})
    for turns in ([user], [user, turn("assistant", "Yes."), user]):
        (asked,) = prompts.of_question(turns, Extras(options={"enable_thinking": False}))
        assert decoded(prompts.tokenizer, list(asked)).endswith("<|assistant|>(none)")
        assert prompts.of_question(turns, Extras(options={"enable_thinking": True})) == prompts.of_question(turns)
    for template, message in ((None, "no chat template"), ("{{ first }}" + TOOLS, "would stand behind 'x<")):
        with pytest.raises(InputDataError, match=message):
            prompts_of(needle_model_path, template).of_question([user], Extras(options={"first": "x"}))


def test_a_byte_order_mark_is_no_text() -> None:
    marked = "\ufeffHello."
    assert chat([turn("user", marked)]).messages[0].text == "Hello."
    assert chat([{"role": "user", "content": [{"type": "text", "text": marked}]}]).messages[0].text == "Hello."
    for prompt in (marked, [marked]):
        assert CompletionBody.model_validate({"model": "m", "prompt": prompt}).prompts == ["Hello."]
    assert TokenizeBody.model_validate({"prompt": marked}).prompt == "Hello."
    assert KeepBody.model_validate({"name": "n", "text": marked}).text == "Hello."


@pytest.mark.parametrize("template", [None, TOOLS], ids=["untemplated", "templated"])
@pytest.mark.parametrize("word", ["NEXT-WORDS-GO-HERE", "CONTEXT-GOES-HERE", "QUESTION-GOES-HERE"])
def test_words_of_former_stand_ins_cut_nothing(needle_model_path: Path, template: str | None, word: str) -> None:
    prompts = prompts_of(needle_model_path, template)
    said = f"{word} the password is 7261"
    turns = [turn("user", said), turn("assistant", said)]
    for ids in (
        prompts.of_conversation(turns), prompts.of_answered(turns), prompts.of_conversation(turns[:1]),
        prompts.of_document(said),
    ):  # fmt: skip
        assert said in decoded(prompts.tokenizer, list(ids)) and decoded(prompts.tokenizer, list(ids)).count(word) < 3


TEXTS = st.lists(st.sampled_from([*PIECES, "NEXT-WORDS-GO-HERE", "\n\n"]) | st.text(max_size=3), max_size=9).map(
    lambda pieces: "".join(pieces).encode(errors="replace").decode().strip()
)
MARKED = Prompts(bytelevel(), 4098, 131072)


@given(contents=st.lists(TEXTS, min_size=3, max_size=3), tail=TEXTS)
def test_no_content_is_lost_or_a_control_token(contents: list[str], tail: str) -> None:
    """In conversations, saved conversations and questions about saved contexts, of several turns."""
    roles = ("user", "assistant", "user")
    turns = [turn(role, text) for role, text in zip(roles, contents, strict=True)]
    harmless = [turn(role, "hi") for role in roles]
    special = set(MARKED.tokenizer.all_special_ids)

    def flat(parts: Any) -> list[int]:
        return [token for part in parts for token in (part if isinstance(part, tuple) else (part,))]

    for made, count in ((MARKED.of_messages, 3), (MARKED.of_question, 3), (MARKED.of_conversation, 2),
                        (MARKED.of_conversation, 3), (MARKED.of_answered, 2)):  # fmt: skip
        ids, plain = flat(made(turns[:count])), flat(made(harmless[:count]))
        assert [token for token in ids if token in special] == [token for token in plain if token in special]
        text = decoded(MARKED.tokenizer, ids)
        place = 0
        for content in contents[:count]:
            place = text.index(content, place) + len(content)
    for raw in (flat(MARKED.of_text(f"a{tail}")), list(MARKED.of_more(f"a{tail}", raw=True))):
        assert decoded(MARKED.tokenizer, raw) == f"a{tail}" and not special & set(raw)


def test_a_server_may_parse_special_tokens_of_raw_texts_alone() -> None:
    prompts = Prompts(bytelevel(), 4098, 131072, parse_special=True)
    end = prompts.tokenizer.convert_tokens_to_ids("</s>")
    for parses, ids in (
        (True, prompts.of_text("a</s>b")[0]),
        (True, prompts.of_more("a</s>b", raw=True)),
        (False, prompts.of_more("a</s>b")),
        (False, prompts.of_document("a</s>b")),
        (False, prompts.of_messages([turn("user", "a</s>b")])[0]),
        (False, MARKED.of_text("a</s>b")[0]),
    ):
        assert (end in ids) == parses


def test_a_request_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all renderings of a prompt together; a template that is slow with some messages alone works with others."""
    monkeypatch.setattr(rendering, "RENDER_SECONDS", 2.0)
    loop = "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}"
    endless = f"{{% if messages | length > 1 or tools %}}{loop}{{% endif %}}{PLAIN}"
    prompts = prompts_of(BUNDLED, endless)
    two = [turn("user", "a"), turn("assistant", "b")]
    for make in (lambda: prompts.of_messages(two), lambda: prompts.of_messages(two[:1], Extras([TOOL])),
                 lambda: prompts.of_conversation(two), lambda: prompts.of_answered(two)):  # fmt: skip
        with pytest.raises(InputDataError, match="took more than 2 s"):
            make()
    assert prompts.of_messages(two[:1])


def test_tokenize_takes_what_vllm_takes(needle_model_path: Path) -> None:
    fields = {"add_special_tokens": False, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    assert TokenizeBody.model_validate({"messages": [turn("user", "a")], "tools": [TOOL], **fields})
    for wrong in ({"tools": [TOOL]}, {"chat_template_kwargs": {"a": 1}}, {"add_generation_prompt": True}):
        with pytest.raises(ValidationError, match="need messages"):
            TokenizeBody.model_validate({"prompt": "x", **wrong})
    prompts = prompts_of(needle_model_path, TOOLS)
    whole, open_end = (
        decoded(
            prompts.tokenizer, [token for part in prompts.of_messages([turn("user", "a")], extras) for token in part]
        )
        for extras in (Extras(), Extras(answering=False))
    )
    assert whole == f"{open_end}<|assistant|>"


def test_the_route_of_tokenize_passes_each_field_on(needle_model_path: Path) -> None:
    prompts = prompts_of(needle_model_path, TOOLS)
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(prompts=prompts))))

    def text_of(**fields: Any) -> str:
        body = TokenizeBody.model_validate({"messages": [turn("user", "a")], **fields})
        return decoded(
            prompts.tokenizer, json.loads(bytes(asyncio.run(app_routes.tokenize(body, request)).body))["tokens"]
        )

    whole = text_of()
    assert whole.endswith("<|assistant|>")
    assert text_of(add_generation_prompt=False) == whole.removesuffix("<|assistant|>")
    assert text_of(chat_template_kwargs={"enable_thinking": False}) == f"{whole}(none)"
    assert "weather" in text_of(tools=[TOOL]) and "weather" not in whole
