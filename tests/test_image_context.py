"""Contexts with images: questions are answered as by transformers, and what cannot be done is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import retrieval_attn as ra
from tests.model.image_checkpoints import picture, plain_inputs, save_checkpoint

pytest.importorskip("PIL", reason="images need the extra `images`")

ONE, OTHER = picture(1), picture(2, 140, 84)
TEXT = "The pictures are of a text. "
LONG = TEXT + "Some words of it follow. " * 20
STEPS = 8


class Loaded(NamedTuple):
    """A checkpoint's name and folder, transformers' model of it, and an `LLM`."""

    name: str
    folder: Path
    model: Any
    llm: ra.LLM

    def plain(self, pictures: list[bytes], said: str, *questions: str) -> list[int]:
        """The answer of transformers to a text behind pictures, and what follows it."""
        tokenizer: Any = self.llm.tokenizer
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "PICTURES" + said + "\n\n".join(("", *questions))}],
            tokenize=False, add_generation_prompt=True,
        )  # fmt: skip
        inputs = plain_inputs(self.name, text.replace("PICTURES", "{}" * len(pictures)), pictures)
        with torch.no_grad():
            found = self.model.generate(**inputs, max_new_tokens=STEPS, do_sample=False)[0]
        return [int(token) for token in found[inputs["input_ids"].shape[1] :]]


@pytest.fixture(scope="module", params=["gemma3", "qwen2_5_vl", "qwen3_vl"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("contexts") / request.param
    model = save_checkpoint(request.param, folder)
    yield Loaded(
        request.param, folder, model, ra.LLM(folder, device="cpu", threads=1, retrieve="all", window=16, sink=4)
    )


def test_questions_are_answered_as_by_transformers(loaded: Loaded, tmp_path: Path) -> None:
    """About two images, from bytes and from a file; in other order the answers are others."""
    file = tmp_path / "other.png"
    file.write_bytes(OTHER)
    answers = []
    cases: list[tuple[list[bytes], list[bytes | str | Path]]] = [
        ([ONE, OTHER], [ONE, file]), ([OTHER, ONE], [str(file), ONE])
    ]  # fmt: skip
    for pictures, given in cases:
        for text in (TEXT, LONG):
            context = loaded.llm.read(text, images=given, progress=False)
            for question in ("What is it?", "And what else is in them?"):
                answer = context.ask(question, max_new_tokens=STEPS)
                assert answer.tokens == loaded.plain(pictures, text, question)
                answers.append(tuple(answer.tokens))
        fork = context.fork().extend("\n\nMore of it.", progress=False)
        asked = "More of it.", "What is it?"
        assert fork.ask(asked[1], max_new_tokens=STEPS).tokens == loaded.plain(pictures, LONG, *asked)
    assert answers[0] != answers[4] or answers[1] != answers[5]


def test_several_questions_and_penalties(loaded: Loaded) -> None:
    """Rows of different length, padded (in Gemma's sliding windows padding takes room); penalties count all ids."""
    context = loaded.llm.read(TEXT, images=[ONE], progress=False)
    questions = ["What is it?", "What is it?" if loaded.name == "gemma3" else "And what else is in them, and where?"]
    alone = [context.ask(one, max_new_tokens=STEPS).tokens for one in questions]
    assert [one.tokens for one in context.ask_many(questions, max_new_tokens=STEPS)] == alone
    assert len(context.ask(questions[0], max_new_tokens=STEPS, repetition_penalty=1.1).tokens) == STEPS


def test_what_cannot_be_done_is_refused(loaded: Loaded, tmp_path: Path, needle_model_path: Path) -> None:
    context = loaded.llm.read(TEXT, images=[ONE], progress=False)
    with pytest.raises(ra.InputDataError, match="with images cannot be saved"):
        context.save("seen", store=tmp_path)
    with pytest.raises(ra.InputDataError, match="cannot be saved"):
        loaded.llm.read(TEXT, images=[ONE], progress=False, save="seen", store=tmp_path)
    with pytest.raises(ra.UnsupportedModelError, match="cannot forget"):
        context.forget(2, 10)
    with pytest.raises(ra.InputDataError, match="cannot be decoded"):
        loaded.llm.read(TEXT, images=[b"no picture"], progress=False)
    llm = ra.LLM(needle_model_path, device="cpu", threads=1)
    with pytest.raises(ra.InputDataError, match="reads no images"):
        llm.read(TEXT, images=[ONE], progress=False)
