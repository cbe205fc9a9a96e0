"""Prompts with images in an engine: answers are transformers' own, and only equal images share a prefix."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.engine.engine import Engine, default_limits
from retrieval_attn.engine.prefix_handle import PrefixHandle
from retrieval_attn.engine.request import Event, Finished, Request
from retrieval_attn.model.image_embedding import tower_layers
from retrieval_attn.model.images import Image, ImageReader, is_image_id, placed_images
from retrieval_attn.model.loading import load_image_reader
from retrieval_attn.sampling.sampling_params import SamplingParams
from tests.model.image_checkpoints import image_text, picture, plain_inputs, save_checkpoint

pytest.importorskip("PIL", reason="images need the extra `images`")

NAMES = ("gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TOLERANCE = 2e-5
STEPS = 8
WORDS = "Some words of a text that follow. "
TEXT = f"<|im_start|>user\nThe picture {{}}of a text. {WORDS * 12}And {{}}what is it?<|im_end|>\n"
ASKED = "<|im_start|>user\nThe picture {}of a text. "
ONE, OTHER = picture(1), picture(2, 140, 84)


class Served(NamedTuple):
    """A checkpoint's name and folder, transformers' model of it, and an engine."""

    name: str
    folder: Path
    model: Any
    engine: Engine
    reader: ImageReader

    def request(self, text: str, pictures: list[bytes], **options: Any) -> Request:
        """The request of a text with `{}` for each picture, in parts that end with them."""
        images = [self.reader.of_file(data) for data in pictures]
        tokenizer, word = self.engine._loop.tokenizer, self.reader.word
        *before, last = text.format(*[image_text(self.name, 1)] * len(images)).split(word)
        parts = [*(piece + word for piece in before), last]
        ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts if part]
        found = self.reader.placed(ids, images)
        given = {"max_tokens": STEPS, "draw": SamplingParams(temperature=0, logprobs=1), "stop_ids": frozenset()}
        return Request(found, images=tuple(images), **{**given, **options})

    def answer(self, text: str, pictures: list[bytes], **options: Any) -> tuple[Finished, list[float]]:
        """Its end, and the log-probability of each token."""
        handle = self.engine.submit(self.request(text, pictures, **options))
        logprobs = [one.logprob for one in handle if isinstance(one, Event)]
        return handle.result(), [one for one in logprobs if one is not None]

    def plain(self, text: str, pictures: list[bytes], **options: Any) -> tuple[tuple[int, ...], list[float]]:
        """The same of transformers' generate."""
        inputs = plain_inputs(self.name, text, pictures)
        with torch.no_grad():
            found = self.model.generate(
                **inputs, max_new_tokens=STEPS, do_sample=False, output_logits=True, return_dict_in_generate=True,
                **options,
            )  # fmt: skip
        tokens = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logprobs = [one.log_softmax(-1)[0, token].item() for one, token in zip(found.logits, tokens, strict=True)]
        return tuple(tokens), logprobs


@pytest.fixture(scope="module", params=NAMES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("images") / request.param
    model = save_checkpoint(request.param, folder)
    llm = ra.LLM(folder, threads=1, retrieve="all", window=16, sink=4, dtype="float32", device="cpu")
    reader = load_image_reader(folder, llm.tokenizer)
    assert reader is not None
    with Engine(llm, store=tmp_path_factory.mktemp("store")) as engine:
        yield Served(request.param, folder, model, engine, reader)


def test_answers_are_those_of_transformers(served: Served) -> None:
    """Two images, read alone and as a continuation of a cached one; swapped, the answer is that of swapped images."""
    expected = {order: served.plain(TEXT, list(order)) for order in ((ONE, OTHER), (OTHER, ONE))}
    assert max(abs(a - b) for a, b in zip(*(one[1] for one in expected.values()), strict=True)) > 1e-3
    for _ in range(2):
        for order, (tokens, logprobs) in expected.items():
            end, found = served.answer(TEXT, list(order))
            assert end.tokens == tokens and end.error is None
            assert max(abs(a - b) for a, b in zip(found, logprobs, strict=True)) <= TOLERANCE


def test_ids_are_those_of_the_processor(served: Served) -> None:
    request = served.request(TEXT, [ONE, OTHER])
    assert served.reader.plain(request.ids) == plain_inputs(served.name, TEXT, [ONE, OTHER])["input_ids"][0].tolist()
    spans = [(one.start, one.stop) for one in placed_images(request.ids, request.images)]
    assert all(is_image_id(token) == any(a <= n < b for a, b in spans) for n, token in enumerate(request.ids))


def test_a_second_question_reuses_the_image(served: Served) -> None:
    """Its keys come from the prefix cache, and its embedding is computed once."""
    data = picture(3)
    first, _ = served.answer(ASKED + "What is it?", [data])
    encoder = served.engine._admission._encoder
    assert encoder is not None
    computed = encoder.computed
    second, found = served.answer(ASKED + "And what else may it be, and where?", [data])
    assert second.tokens, second.error
    request = served.request(ASKED, [data])
    (image,) = placed_images(request.ids, request.images)
    assert second.cached_tokens >= image.stop and first.prompt_tokens > image.stop
    assert encoder.computed == computed
    tokens, logprobs = served.plain(ASKED + "And what else may it be, and where?", [data])
    assert second.tokens == tokens
    assert max(abs(a - b) for a, b in zip(found, logprobs, strict=True)) <= TOLERANCE


def test_images_of_few_pixels_are_read_or_refused(served: Served) -> None:
    """An image of one part, which transformers' Mistral 3 cannot read, and a shape that would vanish."""
    for width, height in ((1, 1), (9, 9), (28, 28), (1, 50), (50, 3)):
        end, _ = served.answer(ASKED + "What is it?", [picture(31, width, height)])
        assert end.error is None and len(end.tokens) == STEPS
    if served.name == "gemma3":  # its processor makes every image a square
        return
    for width, height in ((1, 5000), (5000, 1)):
        with pytest.raises(ra.InputDataError, match=f"{width} x {height} pixels is not read"):
            served.reader.of_file(picture(31, width, height))


def test_two_images_share_no_prefix(served: Served) -> None:
    """The model's ids of both are equal: a tree over those would give the second the first one's keys."""
    text = ASKED + "What is it?"
    pictures = [picture(seed) for seed in (4, 5)]
    ids = [served.reader.plain(served.request(text, [data]).ids) for data in pictures]
    assert ids[0] == ids[1]
    request = served.request(text, pictures[:1])
    start = placed_images(request.ids, request.images)[0].start
    served.answer(text, pictures[:1])
    second, found = served.answer(text, pictures[1:])
    assert second.cached_tokens <= start
    tokens, logprobs = served.plain(text, pictures[1:])
    assert second.tokens == tokens and max(abs(a - b) for a, b in zip(found, logprobs, strict=True)) <= TOLERANCE


def test_a_long_prefix_is_never_cut_inside_an_image(served: Served) -> None:
    """Two texts that differ soon after an image, whose cut by tokens would lie in it."""
    before = f"<|im_start|>user\n{WORDS * 20}The picture {{}}"
    data = picture(6, 280, 280)
    for rest in ("is nice, is it not?", "was what, and when?"):
        end, found = served.answer(before + rest, [data])
        tokens, logprobs = served.plain(before + rest, [data])
        assert end.tokens == tokens and max(abs(a - b) for a, b in zip(found, logprobs, strict=True)) <= TOLERANCE
    handle = served.engine.submit(served.request(before + "is nice, or not?", [data])).result()
    assert handle.cached_tokens > 40


def test_a_prefix_ends_outside_of_images() -> None:
    """Tokens of an image may attend to later ones, so that a part of them is of no use."""
    image = Image(ONE, 6)
    ids = np.array([-1, 5, 6, *image.ids, 7, 8], np.int32)
    handle = PrefixHandle(ids, [len(ids)], 1, "", saved=False, crops=True)
    assert [handle._image_start(end) for end in range(1, len(ids) + 1)] == [1, 2, *[3] * 6, 9, 10, 11]


def test_lines_of_an_image_end_with_their_own_tokens() -> None:
    """Ids tell them apart without the image, and stay in the range of image ids."""
    ids = Image(ONE, 6, line=2).ids
    assert [token & 3 for token in ids] == [0, 0, 1, 0, 0, 2] and all(map(is_image_id, ids)) and len(set(ids)) == 6
    assert Image(OTHER, 6, line=2).ids != ids and Image(ONE, 6, line=2).without_data().ids == ids


def test_penalties_count_the_placeholder(served: Served) -> None:
    """As transformers counts it, and not ids that the vocabulary lacks."""
    draw = SamplingParams(temperature=0, repetition_penalty=1.5)
    end = served.engine.submit(served.request(ASKED + "What is it?", [ONE], draw=draw)).result()
    assert end.tokens == served.plain(ASKED + "What is it?", [ONE], repetition_penalty=1.5)[0]


def test_chunks_end_outside_of_images(served: Served, tmp_path: Path) -> None:
    """Chunks of three tokens, each of which would begin or end in an image; other rows decode meanwhile."""
    llm = ra.LLM(served.folder, threads=1, retrieve="all", window=16, sink=4, dtype="float32", prefill_chunk=3)
    pictured, text = WORDS * 6 + ASKED + "What is it?", WORDS * 6 + "What was it?"
    ids = plain_inputs_of_text(served, text)
    plain = served.model.generate(ids, max_new_tokens=STEPS, do_sample=False)[0, ids.shape[1] :].tolist()
    with Engine(llm, store=tmp_path) as engine:
        for data in (ONE, OTHER):
            requests = [served.request(pictured, [data]), served.request(text, [])]
            answers = [handle.result().tokens for handle in [engine.submit(one) for one in requests]]
            assert answers == [served.plain(pictured, [data])[0], tuple(plain)]


@pytest.mark.usefixtures("emulated_graphs")
def test_captured_steps_continue_an_image(served: Served, tmp_path: Path) -> None:
    """Replays get the positions behind the image. Two rows, with images of other sizes."""
    llm = ra.LLM(served.folder, threads=1, retrieve=64, window=256, sink=4, dtype="float32", device="cpu")
    asked = [(ASKED + "What is it?", [ONE]), (ASKED + "And what is it?", [OTHER])]
    with Engine(llm, store=tmp_path) as engine:
        handles = [engine.submit(served.request(*one)) for one in asked]
        assert [handle.result().tokens for handle in handles] == [served.plain(*one)[0] for one in asked]
        assert engine._stepper._runner.replays > STEPS // 2


def test_texts_are_served_as_before(served: Served) -> None:
    """Together with a request that has an image: their positions differ by its shift."""
    text = "<|im_start|>user\n" + WORDS * 3
    handles = [served.engine.submit(served.request(*one)) for one in ((text, []), (ASKED + "Is it?", [OTHER]))]
    answers = [handle.result().tokens for handle in handles]
    ids = plain_inputs_of_text(served, text)
    plain = served.model.generate(ids, max_new_tokens=STEPS, do_sample=False)[0, ids.shape[1] :].tolist()
    assert answers == [tuple(plain), served.plain(ASKED + "Is it?", [OTHER])[0]]


def plain_inputs_of_text(served: Served, text: str) -> torch.Tensor:
    return torch.tensor([served.engine._loop.tokenizer(text, add_special_tokens=False)["input_ids"]])


def test_saves_of_images_are_refused(served: Served) -> None:
    served.answer(ASKED + "What is it?", [ONE])
    request = served.request(ASKED, [ONE])
    with pytest.raises(ra.InputDataError, match="with images cannot be saved"):
        served.engine.save("pictured", request.ids[: placed_images(request.ids, request.images)[0].stop])


def test_wrong_requests_are_refused(served: Served) -> None:
    request = served.request(ASKED, [ONE])
    with pytest.raises(ra.InputDataError, match="not those of its 1 images"):
        dataclasses.replace(request, images=(served.reader.of_file(OTHER),))
    with pytest.raises(ra.InputDataError, match="negative token ids"):
        served.engine.submit(Request(request.parts))
    with pytest.raises(ra.ConfigError, match="prompt_logprobs"):
        dataclasses.replace(request, prompt_logprobs=0)
    with pytest.raises(ra.InputDataError, match="stands for a part of some image"):
        end = served.engine.submit(Request(tuple(tuple(served.reader.plain(one)) for one in request.parts))).result()
        raise end.error or AssertionError


def test_rows_decode_between_layers_of_the_tower(served: Served, tmp_path: Path) -> None:
    """A row decodes between the decoding of an image and each layer of the tower, and not during a layer."""
    llm = ra.LLM(served.folder, threads=1, retrieve="all", window=16, sink=4, dtype="float32", device="cpu")
    limits = dataclasses.replace(default_limits(llm.model, llm.config), inter_token_seconds=1e-6)
    pictures = [picture(seed) for seed in (21, 22)]
    with Engine(llm, limits=limits, store=tmp_path) as engine:
        row = engine.submit(served.request("<|im_start|>user\n" + WORDS, [], max_tokens=3000))
        next(iter(row))
        (running,) = engine._rows.values()
        seen: list[int] = []
        inside: list[int] = []

        def noted(*_: Any) -> None:
            seen.append(len(running.tokens))
            time.sleep(0.05)  # many steps
            inside.append(len(running.tokens) - seen[-1])

        hooks = [layer.register_forward_pre_hook(noted) for layer in tower_layers(llm.model.model)]
        end = engine.submit(served.request(TEXT, pictures)).result()
        at_end = len(running.tokens)
        for hook in hooks:
            hook.remove()
        row.cancel()
    assert end.tokens == served.plain(TEXT, pictures)[0]
    assert len(seen) == 2 * len(hooks) and len({*seen, at_end}) == len(seen) + 1, (seen, at_end)
    assert not any(inside), "a layer runs beside steps, or through several rounds"


def test_a_cancelled_request_stops_inside_the_tower(served: Served, tmp_path: Path) -> None:
    """Its image is not embedded, and the engine serves the next one."""
    llm = ra.LLM(served.folder, threads=1, retrieve="all", window=16, sink=4, dtype="float32", device="cpu")
    with Engine(llm, store=tmp_path) as engine:
        (layer, *_) = tower_layers(llm.model.model)
        handle = engine.submit(request := served.request(ASKED + "What is it?", [picture(23)]))
        hook = layer.register_forward_pre_hook(lambda *_: handle.cancel())
        assert handle.result().reason == "cancelled"
        hook.remove()
        end = engine.submit(request).result()
    assert end.tokens == served.plain(ASKED + "What is it?", [picture(23)])[0]


def test_a_model_with_an_encoder_is_copied_whole(served: Served) -> None:
    """The copy's images are embedded by its own tower."""
    served.answer(ASKED + "What is it?", [ONE])
    model = served.engine._loop.model
    copied: Any = copy.deepcopy(model)
    assert copied.model.get_image_features._module is copied.model
    if served.name != "mistral3":  # whose hooks of transformers, for hidden states, cannot be pickled
        pickle.dumps(copied.model.get_image_features)


def test_a_text_model_refuses_images(needle_model_path: Path) -> None:
    llm = ra.LLM(needle_model_path, device="cpu", threads=1)
    image = Image(ONE, 4)
    with Engine(llm) as engine, pytest.raises(ra.InputDataError, match="reads no images"):
        engine.submit(Request(((5, *image.ids, 6),), images=(image,)))
