"""Log-probabilities: texts, offsets and bytes of tokens are those of the answer, for every kind of tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from retrieval_attn.engine.request import Event, Finished
from retrieval_attn.prompt.text_stream import TextStream
from retrieval_attn.server.formatting import ChatForm, Form, TextForm
from retrieval_attn.server.token_texts import TokenTexts
from tests.engine.test_text import KINDS, TEXT, byte_letters

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTES = ("bundled", "byte-level", "byte-fallback", "metaspace", "byt5")
"""Kinds whose tokens join to a text without a change, so that the bytes do, too."""


def tokenizer_of(kind: str, request: pytest.FixtureRequest) -> Any:
    if kind == "bundled":
        return request.getfixturevalue("loaded")[1]
    return ByT5Tokenizer() if kind == "byt5" else KINDS[kind]()


def answers(tokenizer: Any, count: int, seed: int) -> list[list[int]]:
    """Half of them ids of a text, from anywhere to anywhere, half random ids, also special and unknown ones."""
    draw = random.Random(seed)
    text = tokenizer.encode(TEXT * 3, add_special_tokens=False)
    ids = len(tokenizer) + (0 if isinstance(tokenizer, ByT5Tokenizer) else 3)  # which raises for unknown ones
    made = []
    for number in range(count):
        start, length = draw.randrange(len(text)), draw.randrange(1, 70)
        noise = [draw.randrange(ids) for _ in range(length)]
        made.append(text[start : start + length] if number % 2 else noise)
    return made


def told(tokenizer: Any, ids: Sequence[int], stop: Sequence[str], top: int = 0) -> tuple[list[Event], Finished]:
    """What an engine tells of an answer. top: likeliest tokens of each event, others than the sampled one."""
    stream, events, text = TextStream(tokenizer, stop), [], ""
    for number, token in enumerate(ids):
        others = [one for one in range(number, number + top + 1) if one != token][:top]
        events.append(
            Event(token, stream.add(token), -3.0, tuple((one, -1.0 - place) for place, one in enumerate(others)))
        )
        text += events[-1].text
        if stream.stopped:
            break
    if rest := stream.end():
        events.append(Event(-1, rest))
    ended = Finished("length", text + rest, tuple(ids), 1, 0, (0.0, 0.0))
    return events, ended


def whole(form: Form, events: Sequence[Event], end: Finished) -> Any:
    """The log-probabilities of the choice."""
    return form.whole({0: end}, {0: [one for one in events if one.token >= 0]}, {})["choices"][0]["logprobs"]


def streamed(form: Form, events: Sequence[Event]) -> tuple[str, dict[str, list[Any]]]:
    """Text and log-probabilities of all chunks; what a chunk's tokens say is text that was sent by then."""
    text = ""
    found: dict[str, list[Any]] = {}
    chunks = [form.chunk(0, one.text, (one,) if one.token >= 0 else ()) for one in events]
    for chunk in filter(None, [*chunks, form.closing(0, Finished("length", "", (), 1, 0, (0.0, 0.0)))]):
        (choice,) = json.loads(chunk.removeprefix(b"data: "))["choices"]
        text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for name, values in (choice["logprobs"] or {}).items():
            found.setdefault(name, []).extend(values or [])
        assert len("".join(tokens_of(found))) <= len(text)
    return text, found


def tokens_of(logprobs: dict[str, Any]) -> list[str]:
    return logprobs["tokens"] if "tokens" in logprobs else [one["token"] for one in logprobs.get("content", ())]


@pytest.mark.parametrize("kind", ["bundled", "byt5", *KINDS])
def test_tokens_join_to_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    """Whole and as a stream, with and without a stop string; every offset points at its token."""
    tokenizer, draw = tokenizer_of(kind, request), random.Random(1)
    texts = TokenTexts(tokenizer)
    for ids in answers(tokenizer, 120, 2):
        read = tokenizer.decode(ids, skip_special_tokens=True)
        start = draw.randrange(max(len(read), 1))
        picked = read[start : start + draw.randrange(1, 5)]
        for stop in ((), (picked,)) if picked and REPLACEMENT not in picked else ((),):
            events, end = told(tokenizer, ids, stop)
            found = whole(TextForm("m", texts, 0), events, end)
            assert "".join(found["tokens"]) == end.text, ids
            for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
                assert end.text[offset : offset + len(token)] == token
            if not stop:
                assert len(found["tokens"]) == len(ids)
            text, pieces = streamed(TextForm("m", texts, 0), events)
            assert text == end.text
            for name in ("tokens", "text_offset", "token_logprobs"):
                assert pieces.get(name, []) == found[name], (ids, stop)
            _, pieces = streamed(ChatForm("m", texts, 0), events)
            content = whole(ChatForm("m", texts, 0), events, end)["content"]
            assert pieces.get("content", []) == content and [one["token"] for one in content] == found["tokens"]


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_join_to_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    """Also where a token is a part of a character."""
    tokenizer = tokenizer_of(kind, request)
    texts = TokenTexts(tokenizer)
    for ids in answers(tokenizer, 120, 3):
        events, end = told(tokenizer, ids, ())
        content = whole(ChatForm("m", texts, 0), events, end)["content"]
        joined = b"".join(bytes(one["bytes"]) for one in content)
        assert joined.decode("utf-8", "ignore" if kind == "byt5" else "replace") == end.text, ids


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    """The sampled tokens complete the character; one that was not sampled is told as OpenAI tells it."""
    tokenizer = KINDS["byte-level"]()
    letters, spelled = tokenizer.get_vocab(), byte_letters()
    ids = [letters[spelled[byte]] for byte in "😀".encode()]
    events = [
        Event(token, text, -1.0, ((ids[0], -0.5), (ids[1], -0.7)))
        for token, text in zip(ids, ["", "", "", "😀"], strict=True)
    ]
    end = Finished("length", "😀", tuple(ids), 1, 0, (0.0, 0.0))
    content = whole(ChatForm("m", TokenTexts(tokenizer), 2), events, end)["content"]
    assert [one["token"] for one in content] == ["", "", "", "😀"]
    assert [one["bytes"] for one in content] == [[0xF0], [0x9F], [0x98], [0x80]]
    likeliest = content[3]["top_logprobs"]
    assert [one["token"] for one in likeliest] == ["bytes:\\xf0", "bytes:\\x9f", "😀"]
    assert [one["bytes"] for one in likeliest] == [[0xF0], [0x9F], [0x80]]


@pytest.mark.parametrize("kind", ["bundled", "byt5", *KINDS])
def test_the_likeliest_tokens_keep_apart(kind: str, request: pytest.FixtureRequest) -> None:
    """As many as were asked for, and the sampled one with its log-probability, whatever their texts are."""
    tokenizer = tokenizer_of(kind, request)
    texts = TokenTexts(tokenizer)
    for ids in answers(tokenizer, 40, 4):
        events, end = told(tokenizer, ids, (), top=20)
        found = whole(TextForm("m", texts, 20), events, end)
        for token, logprob, likeliest in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert len(likeliest) == 21 and likeliest[token] == logprob
        content = whole(ChatForm("m", texts, 20), events, end)["content"]
        assert all(one["token"] in [other["token"] for other in one["top_logprobs"]] for one in content)


def test_a_sampled_token_among_the_likeliest_is_told_once() -> None:
    tokenizer = KINDS["metaspace"]()
    event = Event(5, "x", -0.5, ((5, -0.5), (6, -1.0), (7, -2.0)))
    end = Finished("length", tokenizer.decode([5]), (5,), 1, 0, (0.0, 0.0))
    (likeliest,) = whole(TextForm("m", TokenTexts(tokenizer), 2), [event], end)["top_logprobs"]
    assert list(likeliest.values()) == [-0.5, -1.0]
    assert whole(TextForm("m", TokenTexts(tokenizer), 0), [event], end)["top_logprobs"] is None


def test_a_leading_space_is_told() -> None:
    """Of a word that follows another, and not of the first one, which the answer has without it."""
    tokenizer = KINDS["byte-fallback"]()
    ids = [tokenizer.convert_tokens_to_ids(word) for word in ("▁the", "▁fox", "<0xC3>", "<0xA9>", ".")]
    events, end = told(tokenizer, ids, ())
    content = whole(ChatForm("m", TokenTexts(tokenizer), 0), events, end)["content"]
    assert [one["token"] for one in content] == ["the", " fox", "", "é", "."]
    assert [bytes(one["bytes"]) for one in content] == [b"the", b" fox", b"\xc3", b"\xa9", b"."]


def test_a_special_token_has_a_name_and_no_bytes() -> None:
    """As one of the likeliest; where it was sampled, it adds nothing to the text."""
    tokenizer = KINDS["byte-level"]()
    special = tokenizer.convert_tokens_to_ids("<s>")
    letter = tokenizer.convert_tokens_to_ids("x")
    event = Event(letter, "x", -0.5, ((letter, -0.5), (special, -1.0)))
    sampled = Event(special, "", -0.5, ((special, -0.5), (letter, -1.0)))
    end = Finished("length", "x", (letter, special), 1, 0, (0.0, 0.0))
    content = whole(ChatForm("m", TokenTexts(tokenizer), 2), [event, sampled], end)["content"]
    assert content[0]["top_logprobs"][1] == {"token": "<s>", "logprob": -1.0, "bytes": []}
    assert (content[1]["token"], content[1]["bytes"]) == ("", [])
