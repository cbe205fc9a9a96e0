"""The real `openai` client against a server that is a process: answers, streams, log-probabilities, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.process import ANSWER, QUESTION, Served, document

openai = pytest.importorskip("openai", reason="tests of the server need openai")


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def messages(question: str = QUESTION) -> list[dict[str, str]]:
    return [{"role": "system", "content": document()}, {"role": "user", "content": question}]


def chat(client: Any, **options: Any) -> Any:
    given = {"model": "bundled", "messages": messages(), "temperature": 0, "max_tokens": 16, **options}
    return client.chat.completions.create(**given)


def test_a_chat_is_answered_and_its_document_read_once(client: Any) -> None:
    first, second = chat(client), chat(client, messages=messages("What is the sky?"))
    assert ANSWER in first.choices[0].message.content and first.choices[0].finish_reason == "stop"
    usage = second.usage
    assert usage.prompt_tokens_details.cached_tokens > 800 and usage.prompt_tokens < first.usage.prompt_tokens + 20
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_is_the_answer_in_pieces(client: Any) -> None:
    whole = chat(client).choices[0].message.content
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    first, last, usage = chunks[0], chunks[-2], chunks[-1]
    assert first.choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert last.choices[0].finish_reason == "stop" and usage.choices == []
    assert usage.usage.prompt_tokens_details.cached_tokens > 800
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 6


def test_a_stop_string_is_held_back_across_tokens(client: Any) -> None:
    """The answer is " 7391846", a token for each digit."""
    assert chat(client, stop=["918"]).choices[0].message.content.strip() == "73"
    stream = chat(client, stop=["918", "x"], stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces).strip() == "73" and not any("9" in piece for piece in pieces)
    assert chat(client, stop="84").choices[0].finish_reason == "stop"


def test_logprobs_are_those_of_the_chosen_tokens(client: Any) -> None:
    found = chat(client, logprobs=True, top_logprobs=3).choices[0]
    tokens = found.logprobs.content
    assert "".join(one.token for one in tokens) == found.message.content
    for one in tokens:
        assert len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == one.logprob <= 0
        assert bytes(one.bytes).decode() == one.token
    stream = list(chat(client, logprobs=True, stream=True))
    told = [one for chunk in stream if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert [one.token for one in told] == [one.token for one in tokens] and not told[0].top_logprobs
    text = client.completions.create(model="bundled", prompt="The sky is", max_tokens=4, temperature=0, logprobs=2)
    logprobs = text.choices[0].logprobs
    assert "".join(logprobs.tokens) == text.choices[0].text and logprobs.text_offset[0] == 0
    assert [len(one) for one in logprobs.top_logprobs] == [2] * 4


def test_logprobs_of_any_token_join_to_the_answer(client: Any) -> None:
    """Hot draws sample parts of characters and special tokens: texts, bytes and offsets are those of the answer."""
    options: dict[str, Any] = {"temperature": 2, "max_tokens": 60, "seed": 1}
    messages = [{"role": "user", "content": "the"}]
    found = chat(client, messages=messages, logprobs=True, top_logprobs=3, **options).choices[0]
    tokens = found.logprobs.content
    assert "".join(one.token for one in tokens) == found.message.content and len(tokens) == 60
    assert b"".join(bytes(one.bytes) for one in tokens).decode("utf-8", "replace") == found.message.content
    assert all((one.token, one.bytes) in [(top.token, top.bytes) for top in one.top_logprobs] for one in tokens)
    stream = list(chat(client, messages=messages, logprobs=True, top_logprobs=3, stream=True, **options))
    assert [one for chunk in stream if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content] == tokens
    choice = client.completions.create(model="bundled", prompt="the", logprobs=20, **options).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    for token, offset, logprob, top in zip(
        logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert choice.text[offset : offset + len(token)] == token
        assert top[token] == logprob and len(top) in (20, 21)


def test_several_answers_and_seeds(client: Any) -> None:
    """The prompt of several answers is counted once; a seed makes the same ones again, each with one of its own."""
    options = {"n": 3, "seed": 7, "temperature": 1.5, "messages": messages("Tell a story.")}
    first, second = chat(client, **options), chat(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices] and len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    one = chat(client, seed=7, messages=messages("Tell a story."))
    assert abs(first.usage.prompt_tokens - one.usage.prompt_tokens) <= 1
    stream = chat(client, stream=True, **options)
    pieces = ["", "", ""]
    for chunk in stream:
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert pieces == texts


def test_completions_of_texts_and_ids(client: Any) -> None:
    text = f"{document()}\n\nQuestion: {QUESTION}\nAnswer:"
    options: dict[str, Any] = {"model": "bundled", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(prompt=text, **options)
    assert ANSWER in whole.choices[0].text
    several = client.completions.create(prompt=[text, "The sky is"], n=2, **options)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == whole.choices[0].text
    ids = client.completions.create(prompt=[5, 6, 7], **options)
    assert ids.usage.prompt_tokens == 3


def test_the_room_for_an_answer_is_the_models(client: Any) -> None:
    assert chat(client, max_tokens=3).choices[0].finish_reason == "length"
    assert chat(client, max_completion_tokens=2, max_tokens=None).usage.completion_tokens == 2
    with pytest.raises(openai.BadRequestError, match="maximum context length is 131072 tokens"):
        chat(client, max_tokens=131_072)


def test_errors_are_those_of_the_client(client: Any) -> None:
    """The client makes its own exceptions of status and body."""
    with pytest.raises(openai.NotFoundError) as found:
        chat(client, model="another")
    assert found.value.code == "model_not_found" and found.value.param == "model"
    with pytest.raises(openai.NotFoundError, match="no saved context 'nobody'"):
        chat(client, model="bundled@nobody")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(client, temperature=3)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        chat(client, frequency_penalty=3)
    with pytest.raises(openai.BadRequestError, match="roles|user"):
        chat(client, model="bundled@nobody", messages=[{"role": "robot", "content": "x"}])


def test_models_are_listed(client: Any) -> None:
    (found,) = [one for one in client.models.list() if "@" not in one.id]
    assert found.id == "bundled" and client.models.retrieve("bundled") == found
