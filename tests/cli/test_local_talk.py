"""A conversation in process: every answer is the one that the whole conversation, read anew, gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import retrieval_attn as ra
from retrieval_attn.cli.chat import local
from retrieval_attn.cli.chat.local import ChatPrompt, LocalBackend
from retrieval_attn.errors import InputDataError, UnknownContextError
from retrieval_attn.store import ContextStore

CITIES = ("Bergen", "Oslo")
FILLER = "The grass is green. The sky is blue. The sun is yellow. " * 20
DOCUMENT = (
    f"{FILLER}The special magic Bergen number is: 7391846. {FILLER}The special magic Oslo number is: 1234567. {FILLER}"
)
BERGEN, OSLO = (
    f"What is the special magic {city} number mentioned in the provided text?" for city in ("Bergen", "Oslo")
)
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SAMPLING = ra.Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def llm(needle_model_path: Path) -> ra.LLM:
    return ra.LLM(needle_model_path, device="cpu", max_context=8192, window=64, index="flat")


@pytest.fixture
def talk(llm: ra.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalBackend]:
    """Makes one, with a chat template and about a document, or without."""

    def make(template: str | None = None, document: str = "") -> LocalBackend:
        monkeypatch.setattr(llm.tokenizer, "chat_template", template)
        found = LocalBackend(llm, "the model", SAMPLING, ContextStore(tmp_path / "store"))
        if document:
            found.read(document)
        return found

    return make


def said(talk: LocalBackend, question: str) -> str:
    return "".join(talk.answer(question)).strip()


@pytest.mark.parametrize("template", [None, CHAT])
def test_answers_are_those_of_the_whole_conversation(
    llm: ra.LLM, talk: Callable[..., LocalBackend], template: str | None
) -> None:
    """Read in pieces, turn after turn, or asked at once after the document: the same text; nothing is read twice."""
    talking = talk(template, DOCUMENT)
    context, messages = llm.read(DOCUMENT, progress=False), []
    read = 0
    for question in (BERGEN, OSLO, BERGEN):
        messages.append({"role": "user", "content": question})
        expected = context.ask(messages, SAMPLING).text.strip()
        assert said(talking, question) == expected
        messages.append({"role": "assistant", "content": expected})
        read += talking._read_tokens
        assert context.num_tokens + read == talking._tokens()
        assert read + 1 == len(context.template.question_ids(messages[:-1])), "but the last, which is decoded"
    if template is None:
        assert [one["content"] for one in messages[1::2]] == ["7391846", "1234567", "7391846"]


@pytest.mark.parametrize("template", [None, CHAT])
def test_without_a_document(llm: ra.LLM, talk: Callable[..., LocalBackend], template: str | None) -> None:
    """The conversation is what the template makes of it, and nothing before it."""
    talking = talk(template)
    assert talking.stats() == "0 of 8,192 tokens, 0 questions answered"
    question = f"{DOCUMENT}\n\n{OSLO}"
    tokenizer = llm.tokenizer
    text = f"Question: {question}\nAnswer:"
    if template:
        turn = [{"role": "user", "content": question}]
        text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = llm.read(ids[:-1], progress=False).continue_with(ids[-1:], SAMPLING).text.strip()
    assert said(talking, question) == expected
    before = talking._tokens()
    said(talking, BERGEN)
    assert talking._tokens() == before + talking._read_tokens, "the first turn was not read again"


def test_a_template_that_rewrites_what_was_said(llm: ra.LLM, talk: Callable[..., LocalBackend]) -> None:
    """Then the conversation is read again, behind the document, and answers stay right."""
    talking = talk(None, DOCUMENT)
    prompt = talking._prompt

    class Rewriting(ChatPrompt):
        def asked(self, messages: Any, *, behind: bool) -> list[int]:
            return [*llm.tokenizer(f" {len(messages)}.", add_special_tokens=False)["input_ids"],
                    *prompt.asked(messages, behind=behind)]  # fmt: skip

    talking._prompt = Rewriting(llm.tokenizer)
    context = llm.read(DOCUMENT, progress=False)
    for count, question in enumerate((BERGEN, OSLO)):
        messages = [*talking._messages, {"role": "user", "content": question}]
        asked = talking._prompt.asked(messages, behind=True)
        assert said(talking, question) == context.continue_with(asked, SAMPLING).text.strip()
        assert talking._read_tokens == len(asked) - 1, f"all of turn {count}"


def test_forget_fork_and_go_back(talk: Callable[..., LocalBackend]) -> None:
    talking = talk(None, DOCUMENT)
    first = said(talking, BERGEN)
    mark, _ = talking.fork("here")
    other = said(talking, OSLO)
    assert talking.forget(1) == 1 and len(talking._messages) == 2
    assert said(talking, OSLO) == other
    assert talking.forget(None) == 2 and talking.forget(3) == 0
    assert said(talking, BERGEN) == first
    assert talking.go_back(mark).endswith("1 question answered")
    assert said(talking, OSLO) == other and said(talking, BERGEN) == first
    talking.go_back(mark)
    assert len(talking._messages) == 2, "what was said behind a mark does not change it"


@pytest.mark.parametrize("template", [None, CHAT])
def test_saved_conversations_go_on(
    llm: ra.LLM, talk: Callable[..., LocalBackend], template: str | None, tmp_path: Path
) -> None:
    """A saved one ends where the next question begins, so anyone may ask it; what is loaded is not read.

    As behind any context, a chat template has a blank line before that question: the answer may be another one then.
    """
    talking = talk(template, DOCUMENT)
    with pytest.raises(InputDataError, match="nothing to save"):
        talk(template).save("nothing")
    assert "saved" in talking.save("document")
    said(talking, BERGEN)
    assert "as 'turn'" in talking.save("turn") and "/load turn" in talking.save("turn")
    expected = said(talking, OSLO)
    tokens = talking._tokens()
    again = talk(template)
    assert "none prefilled again" in again.load("turn")
    loaded = again._tokens()
    asked = llm.open("turn", store=tmp_path / "store", progress=False).ask(OSLO, SAMPLING).text.strip()
    assert said(again, OSLO) == asked
    assert template or asked == expected == "1234567"
    assert loaded < again._tokens() <= tokens + 3 and again._read_tokens < 40
    with pytest.raises(UnknownContextError):
        again.load("other")
    assert again._tokens() > loaded, "a load that fails changes nothing"


def test_an_answer_that_is_left_stays_as_it_came(talk: Callable[..., LocalBackend]) -> None:
    talking = talk(None, DOCUMENT)
    pieces = talking.answer(BERGEN)
    came = next(piece for piece in pieces if piece.strip())
    pieces.close()
    assert talking._messages[-1] == {"role": "assistant", "content": came.strip()}
    assert said(talking, OSLO) == "1234567"
    pieces = talking.answer(BERGEN)
    pieces.close()
    assert len(talking._messages) == 4, "nothing was asked yet"


def test_interrupted_while_it_reads(talk: Callable[..., LocalBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn begins at the document again."""
    talking = talk(None, DOCUMENT)
    first = said(talking, BERGEN)
    extend = local.Context.extend

    def interrupted(*args: Any, **options: Any) -> Any:
        extend(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(local.Context, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            said(talking, OSLO)
    assert len(talking._messages) == 2 and talking._messages[1]["content"] == first
    assert said(talking, OSLO) == "1234567"
