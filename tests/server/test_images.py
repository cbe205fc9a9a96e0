"""Images through the real clients and the server's process: answers are transformers' own, bad images are refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from retrieval_attn.model.images import MAX_IMAGES
from retrieval_attn.model.loading import load_image_reader
from retrieval_attn.server.messages import UserTurn
from retrieval_attn.server.prompts import Prompts
from retrieval_attn.server.run import NO_PROCESSOR, _image_reader
from retrieval_attn.server.settings import Facts
from tests.model.image_checkpoints import (
    SIZE,
    image_text,
    opened,
    picture,
    plain_inputs,
    processor_for,
    save_checkpoint,
    tokenizer_for,
    words_of,
)
from tests.server.process import Served, serving

openai = pytest.importorskip("openai", reason="tests of the server need openai")
anthropic = pytest.importorskip("anthropic", reason="tests of the server need anthropic")
pytest.importorskip("PIL", reason="images need the extra `images`")

ONE, OTHER = picture(1), picture(2, 140, 84, "JPEG")
STEPS = 8
QUESTION = "What is in the picture? "


class Running(NamedTuple):
    """A server, the kind of its model, and transformers' model and tokenizer of it."""

    served: Served
    name: str
    model: Any
    tokenizer: Any

    def plain(self, *contents: list[Any] | str) -> tuple[str, int]:
        """The answer of transformers to messages in turn, lists of texts and pictures or answers, and the tokens of
        its prompt.
        """
        turns, pictures = list[Any](), [one for content in contents for one in content if isinstance(one, bytes)]
        for number, content in enumerate(contents):
            parts: Any = (
                content
                if isinstance(content, str)
                else [{"type": "text", "text": one} if isinstance(one, str) else {"type": "image"} for one in content]
            )
            turns.append({"role": ("user", "assistant")[number % 2], "content": parts})
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        marker = words_of(self.name)["start"] if self.name == "gemma3" else image_text(self.name, 1)
        inputs = plain_inputs(self.name, text.replace(marker, "{}"), pictures)
        with torch.no_grad():
            ids = self.model.generate(**inputs, max_new_tokens=STEPS, do_sample=False)[0]
        count = inputs["input_ids"].shape[1]
        return self.tokenizer.decode(ids[count:], skip_special_tokens=True), count


@pytest.fixture(scope="module", params=["gemma3", "mistral3", "qwen2_5_vl"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("served") / request.param
    model = save_checkpoint(request.param, folder)
    options = "--dtype", "float32", "--device", "cpu", "--warm-up", "0", "--name", "tiny"
    with serving(str(folder), "--store", str(folder / "store"), *options, preloaded=True) as served:
        yield Running(served, request.param, model, AutoTokenizer.from_pretrained(folder))


@pytest.fixture
def client(running: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{running.served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def claude(running: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=running.served.url, api_key="none", max_retries=0) as found:
        yield found


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def large() -> bytes:
    """A small file of a picture with too many pixels."""
    import PIL.Image

    out = io.BytesIO()
    PIL.Image.new("1", (6000, 6000)).save(out, "PNG")
    return out.getvalue()


def parts(content: list[Any]) -> list[dict[str, Any]]:
    """A message's content in OpenAI's form, of texts, pictures and URLs in tuples."""
    found: list[dict[str, Any]] = []
    for one in content:
        if isinstance(one, str):
            found.append({"type": "text", "text": one})
        else:
            found.append({"type": "image_url", "image_url": {"url": url(one) if isinstance(one, bytes) else one[0]}})
    return found


def chat(client: Any, content: list[Any], **options: Any) -> Any:
    given = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": STEPS, **options}
    return client.chat.completions.create(messages=[{"role": "user", "content": parts(content)}], **given)


def test_answers_are_those_of_transformers(running: Running, client: Any) -> None:
    """Images before, between and after texts; other images give other answers."""
    contents: list[list[Any]] = [
        [ONE, QUESTION], [OTHER, QUESTION], [QUESTION, ONE, "or ", OTHER], [QUESTION, OTHER, "or ", ONE], [QUESTION],
    ]  # fmt: skip
    texts = set()
    for content in contents:
        expected, tokens = running.plain(content)
        found = chat(client, content)
        assert found.choices[0].message.content == expected
        assert found.usage.prompt_tokens == tokens
        texts.add(expected)
    assert len(texts) == len(contents)
    stream = chat(client, contents[0], stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in stream) == running.plain(contents[0])[0]


def test_a_second_question_reuses_the_image(running: Running, client: Any) -> None:
    """The usage says so; another image of the same size shares nothing but what precedes it."""
    data, other, more = picture(7), picture(8), "And where was it taken, and by whom? "
    first = chat(client, [data, QUESTION])
    second = chat(client, [data, more])
    assert second.choices[0].message.content == running.plain([data, more])[0]
    tokens = {"gemma3": 4, "mistral3": (84 // 28 + 1) * (SIZE // 28)}.get(running.name, (84 // 28) * (SIZE // 28))
    assert second.usage.prompt_tokens_details.cached_tokens >= tokens
    third = chat(client, [other, more])
    assert (
        third.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens_details.cached_tokens - tokens + 1
    )
    assert third.choices[0].message.content == running.plain([other, more])[0]
    assert first.usage.prompt_tokens_details.cached_tokens < tokens + 4


def test_a_conversation_goes_on(running: Running, client: Any) -> None:
    """The second turn reads neither the image nor the first question again, and may bring another image."""
    model, said = client.models.list().data[0].id, [picture(9), QUESTION]
    first = chat(client, said)
    answer, more = "A picture.", [OTHER, "And what is this?"]
    turns: Any = [
        {"role": "user", "content": parts(said)},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": parts(more)},
    ]
    expected, tokens = running.plain(said, answer, more)
    for count in (1, 2):
        second = client.chat.completions.create(model=model, messages=turns, temperature=0, max_tokens=STEPS, n=count)
        assert [one.message.content for one in second.choices] == [expected] * count
        assert second.usage.prompt_tokens == tokens
        assert second.usage.prompt_tokens_details.cached_tokens >= 8
    assert tokens > first.usage.prompt_tokens


def test_other_apis_give_the_same_answer(running: Running, client: Any, claude: Any) -> None:
    """Anthropic's messages and OpenAI's responses, with a follow-up turn; token counts."""
    expected, tokens = running.plain([ONE, QUESTION])
    model = client.models.list().data[0].id
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}
    said: Any = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]}]
    answer = claude.messages.create(model=model, max_tokens=STEPS, messages=said, extra_body={"temperature": 0})
    assert answer.content[0].text == expected and answer.usage.input_tokens + (
        answer.usage.cache_read_input_tokens or 0
    ) == tokens  # fmt: skip
    assert claude.messages.count_tokens(model=model, messages=said).input_tokens == tokens
    content = [{"type": "input_image", "image_url": url(ONE)}, {"type": "input_text", "text": QUESTION}]
    given: dict[str, Any] = {"model": model, "max_output_tokens": 16, "temperature": 0}
    response = client.responses.create(input=[{"role": "user", "content": content}], **given)
    assert response.output_text.startswith(expected) and response.usage.input_tokens == tokens
    follow = client.responses.create(input="And then?", previous_response_id=response.id, **given)
    assert follow.usage.input_tokens_details.cached_tokens > 4
    with running.served.client() as http:
        body = {"messages": [{"role": "user", "content": parts([ONE, QUESTION])}]}
        ids = http.post("/tokenize", json=body).json()["tokens"]
        assert len(ids) == tokens and min(ids) >= 0
        assert http.get("/props").json()["modalities"] == {"vision": True, "audio": False}


def test_images_of_results_follow_them() -> None:
    """A chat template takes texts of tools alone: an image from a tool is moved to the message of the user."""
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1"}
    result["content"] = [{"type": "text", "text": "Read."}, {"type": "image", "source": source}]
    turn = UserTurn.model_validate({"role": "user", "content": [result, {"type": "text", "text": QUESTION}]})
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert turn.turns == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Read."},
        {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]},
    ]


def test_prompts_are_those_of_gemmas_processor(tmp_path: Path) -> None:
    """Lines around an image, which tokenizers join with those of the text, and the pixels."""
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    save_checkpoint("gemma3", tmp_path)
    tokenizer, words = tokenizer_for("gemma3"), words_of("gemma3")
    for name, word in (("boi", words["start"]), ("eoi", words["end"]), ("image", words["image"])):
        setattr(tokenizer, f"{name}_token", word)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(word))
    said: list[dict[str, str]] = [
        {"type": "text", "text": "What?\n"}, {"type": "image", "url": url(ONE)}, {"type": "text", "text": "\nIt?"}
    ]  # fmt: skip
    turns: Any = [{"role": "user", "content": said}]
    processor: Any = Gemma3Processor(processor_for("gemma3"), tokenizer, tokenizer.chat_template, image_seq_length=4)
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    expected = processor(images=[opened(ONE)], text=text, add_special_tokens=False, return_tensors="pt")
    reader = load_image_reader(tmp_path, tokenizer)
    assert reader is not None
    prompts = Prompts(tokenizer, len(tokenizer), 4096, images=reader)
    images = prompts.images_of(turns)
    parts = prompts.of_messages(turns, images=images)
    assert prompts.plain([token for part in parts for token in part]) == expected["input_ids"][0].tolist()
    assert len(parts) == 2 and torch.equal(reader.pixels(images[0])["pixel_values"], expected["pixel_values"])


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow, and the processor of a checkpoint, whose path no client sees."""
    save_checkpoint("gemma3", tmp_path)
    facts = Facts(5000, 4096, has_vision=True)
    (tmp_path / "preprocessor_config.json").unlink()
    assert _image_reader(str(tmp_path), tokenizer_for("gemma3"), facts) == NO_PROCESSOR
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "retrieval-attn[images]" in str(_image_reader(str(tmp_path), tokenizer_for("gemma3"), facts))


def test_words_of_images_in_a_text_are_text(running: Running, client: Any) -> None:
    """A user's text cannot make a place for an image."""
    words = words_of(running.name)
    found = chat(client, [ONE, f"What is {words['image']} or {words['start']}?"])
    assert found.usage.prompt_tokens > running.plain([ONE, "What is  or ?"])[1]


def test_bad_images_are_refused(running: Running, client: Any) -> None:
    wrongs: list[tuple[str, Any]] = [
        ("fetches no URLs", ("https://images.example/a.png",)),
        ("fetches no URLs", ("file:///etc/passwd",)),
        ("fetches no URLs", ("data:text/plain;base64,aGk=",)),
        ("not valid base64", ("data:image/png;base64,@@@@",)),
        ("not valid base64", ("data:image/png;base64,\u00e9",)),
        ("cannot be decoded", b"not a picture"),
        ("cannot be decoded", ONE[: len(ONE) // 2]),
        ("at most 33,554,432", large()),
    ]
    for words, image in wrongs:
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            chat(client, [image, QUESTION])
        assert refused.value.param == "messages" and refused.value.code == "invalid_image"
    with pytest.raises(openai.BadRequestError, match=f"may have {MAX_IMAGES}"):
        chat(client, [ONE] * (MAX_IMAGES + 1))
    model = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match="belong to messages of the user"):
        client.chat.completions.create(model=model, messages=[{"role": "system", "content": parts([ONE])}])
    assert chat(client, [ONE, QUESTION]).choices[0].message.content == running.plain([ONE, QUESTION])[0]


def test_saved_contexts_take_no_images(running: Running, client: Any) -> None:
    with running.served.client() as http:
        body = {"name": "seen", "messages": [{"role": "user", "content": parts([ONE, QUESTION])}]}
        reply = http.post("/v1/contexts", json=body)
        assert reply.status_code == 400 and "take no images" in reply.json()["error"]["message"]
        body = {"name": "said", "text": "Some words of a text. " * 40}
        assert http.post("/v1/contexts", json=body).status_code == 200
    with pytest.raises(openai.BadRequestError, match="take no images"):
        chat(client, [ONE, QUESTION], extra_body={"context": "said"})


def test_a_text_model_refuses_images(served: Served) -> None:
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="reads text only"),
    ):
        chat(client, [ONE, QUESTION])
