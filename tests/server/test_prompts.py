"""Prompts: which parts requests share, with the bundled tokenizer, without a chat template and with some."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from retrieval_attn.errors import ContextLengthError, InputDataError
from retrieval_attn.server.prompts import MIN_CHARACTERS, Prompts, forked
from retrieval_attn.template import PromptTemplate
from tests.server.process import document

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REWRITES = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if m.role != 'assistant' or loop.last else 'short' }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user first') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LONG = document(12)
SAID = "The sea is wide and the wind is strong. " * 10


def prompts_of(path: Path, template: str | None) -> Prompts:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    return Prompts(tokenizer, 4096, 131072)


@pytest.fixture(params=[None, CHATML], ids=["untemplated", "templated"])
def prompts(request: pytest.FixtureRequest, needle_model_path: Path) -> Prompts:
    return prompts_of(needle_model_path, request.param)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def text_of(prompts: Prompts, parts: Any) -> str:
    return str(prompts.tokenizer.decode([token for part in parts for token in part]))


CONVERSATION = [
    turn("system", LONG),
    turn("user", SAID),
    turn("assistant", "Yes."),
    turn("user", f"{LONG}\n\nWhat is it?"),
    turn("assistant", SAID),
    turn("user", "And then?"),
]


def test_a_turn_begins_with_the_parts_of_the_turn_before(prompts: Prompts) -> None:
    """All but the last part: requests share whole parts, and the last is what is asked."""
    before: tuple[tuple[int, ...], ...] = ()
    for count in (2, 4, 6):
        parts = prompts.of_messages(CONVERSATION[:count])
        shared = before[:-1]
        assert parts[: len(shared)] == shared and len(parts) > len(shared)
        assert sum(map(len, shared)) > sum(map(len, before)) - 30, "the answer is asked behind what is shared"
        before = parts


def test_parts_are_the_text_and_not_too_short(prompts: Prompts) -> None:
    parts = prompts.of_messages(CONVERSATION)
    text = text_of(prompts, parts)
    for message in CONVERSATION:
        assert message["content"].strip() in text
    for part in parts[:-1]:
        assert len(prompts.tokenizer.decode(list(part))) >= MIN_CHARACTERS


def test_questions_about_one_document_share_it(prompts: Prompts) -> None:
    """In one message, as chat pages send what was pasted, as in two, and as a text completion."""
    for messages in (
        [[turn("user", f"{LONG}\n\n{question}")] for question in ("What is it?", "Who was there?")],
        [[turn("system", LONG), turn("user", question)] for question in ("What is it?", "Who was there?")],
    ):
        first, second = (prompts.of_messages(one) for one in messages)
        assert first[:-1] == second[:-1] and sum(map(len, first[:-1])) > 250 and first[-1] != second[-1]
    first, second = (prompts.of_text(f"{LONG}\n\nQuestion: {one}\nAnswer:") for one in ("What?", "Who?"))
    assert first[0] == second[0] and len(first) == len(second) == 2
    whole = prompts.tokenizer(f"{LONG}\n\nQuestion: What?\nAnswer:")["input_ids"]
    assert [token for part in first for token in part] == whole


def test_a_context_is_continued_as_python_does(prompts: Prompts) -> None:
    template = PromptTemplate.of(prompts.tokenizer)
    asked = prompts.of_question([turn("user", "What is it?")])
    assert asked == (tuple(template.question_ids("What is it?")),)
    assert prompts.of_document(LONG) == tuple(template.context_ids(LONG))
    with_system = prompts.of_question([turn("system", "Be short."), turn("user", "What is it?")])
    assert with_system == (tuple(template.question_ids("Be short.\n\nWhat is it?")),)
    turns = [turn("user", SAID), turn("assistant", "Yes."), turn("user", "And?")]
    parts = prompts.of_question(turns)
    assert parts[0] == prompts.of_question(turns[:1])[0] and len(parts) == 2
    assert text_of(prompts, parts) == prompts.tokenizer.decode(template.question_ids(turns))


def test_a_saved_conversation_goes_on_as_one_that_was_not_saved(prompts: Prompts) -> None:
    talked = [turn("user", "What is it?"), turn("assistant", "A sea.")]
    kept, question = prompts.of_answered(talked), prompts.of_question([turn("user", "And?")])
    whole = prompts.of_question([*talked, turn("user", "And?")])
    texts = [text_of(prompts, one).replace("\n\n", "") for one in ((kept, *question), whole)]
    assert texts[0].split() == texts[1].split()


def test_templates_that_rewrite_or_refuse(needle_model_path: Path) -> None:
    """There is no cut where the beginning of a conversation is not the beginning of its text."""
    rewrites = prompts_of(needle_model_path, REWRITES)
    parts = rewrites.of_messages(CONVERSATION)
    again = rewrites.of_messages([*CONVERSATION, turn("assistant", SAID), turn("user", "Why?")])
    shared = sum(one == two for one, two in zip(parts, again, strict=False))
    assert shared >= 2 and "short" in text_of(rewrites, again)
    alternates = prompts_of(needle_model_path, ALTERNATES)
    with pytest.raises(InputDataError, match="user first"):
        alternates.of_messages(CONVERSATION)
    assert alternates.of_messages(CONVERSATION[1:])


def test_a_turn_of_a_long_session_begins_with_a_part_of_the_turn_before(prompts: Prompts) -> None:
    """Models that cannot crop continue whole parts: the end of the turn before must be the end of one."""
    turns = [turn("user" if number % 2 == 0 else "assistant", f"{number} {SAID}") for number in range(205)]
    ends = []
    for count in (201, 203, 205):
        parts = prompts.of_messages(turns[:count])
        ends.append([sum(map(len, parts[:number])) for number in range(len(parts))])
    for before, after in pairwise(ends):
        assert before[-1] in after, "the turn before without the start of its answer"


def test_what_is_refused(prompts: Prompts) -> None:
    with pytest.raises(ContextLengthError, match="131,072"):
        prompts.of_text("x" * 50_000_000)
    for bad in ((), [4096], [-1]):
        with pytest.raises(InputDataError):
            prompts.of_ids(bad)
    for text in ("", "   "):
        with pytest.raises(InputDataError):
            prompts.of_document(text)
    with pytest.raises(InputDataError, match="user"):
        prompts.of_question([turn("assistant", "x")])


def test_forked_prompts_have_one_token_of_their_own() -> None:
    assert forked(((1, 2, 3),)) == ((1, 2), (3,))
    assert forked(((1,), (2, 3))) == ((1,), (2,), (3,)) and forked(((1,),)) == ((1,),)
