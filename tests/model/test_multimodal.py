"""Models for text and images: their text decoder retrieves exactly; images are read as the model does, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import retrieval_attn as ra
from retrieval_attn.model.layers import decoder_layers
from retrieval_attn.model.placement import why_not_on_host
from retrieval_attn.model.rotation import Rotation
from retrieval_attn.runner.support import TESTED, TESTED_WITH_IMAGES
from tests.model.multimodal_models import IMAGE, NAMES, new_model, shared_model, with_image
from tests.model.test_models import ALL, PROMPT, STEPS, TOLERANCE, decode_pieces, eager_steps, generated, steps, worst
from tests.runner.graph_cases import CONFIG, ROARGRAPH, Decoded
from tests.tiny_models import handed_out, random_ids

WITH_IMAGES = [name for name in NAMES if name != "gemma3"]


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Handed out with eager attention and restored afterwards."""
    yield from handed_out(shared_model(request.param))


def test_every_one_is_on_the_tested_lists(model: Any) -> None:
    """Not verified at each load."""
    assert model.config.model_type in TESTED_WITH_IMAGES
    assert model.config.get_text_config().model_type in TESTED


def test_verify_reports_exact(model: Any) -> None:
    """It raised IndexError for the models whose positions have three axes."""
    report = ra.verify(model)
    assert report.ok and report.max_error <= TOLERANCE, report


@pytest.mark.parametrize("chunk", [4096, 37], ids=["one-shot", "layer-major"])
def test_text_equals_eager(model: Any, chunk: int) -> None:
    """Prompt and decoded tokens; a left-padded batch; two turns on one cache."""
    ids = random_ids(1, PROMPT + STEPS) % 80 + 3
    padded = random_ids(2, PROMPT + STEPS, seed=1) % 80 + 3
    mask = torch.ones(padded.shape, dtype=torch.long)
    mask[1, :59] = 0
    turns = list(ids.split([90, 1, 1, 50, *[1] * (PROMPT + STEPS - 142)], dim=1))
    cases = [(decode_pieces(ids, PROMPT), None), (decode_pieces(padded, PROMPT), mask), (turns, None)]
    expected = [eager_steps(model, pieces, real) for pieces, real in cases]
    ra.enable(model, ALL, prefill_chunk=chunk)
    for (pieces, real), wanted in zip(cases, expected, strict=True):
        assert worst(steps(model, ra.RetrievalCache(model, ALL), pieces, real), wanted, real) <= TOLERANCE


def test_the_towers_keep_their_attention(model: Any) -> None:
    """enable, verify and disable change the text decoder alone."""
    vision = model.config.vision_config
    vision._attn_implementation = "sdpa"
    ra.verify(model)
    ra.enable(model, ALL)
    assert (vision._attn_implementation, model.config.text_config._attn_implementation) == ("sdpa", "retrieval")
    ra.disable(model)
    assert (vision._attn_implementation, model.config.text_config._attn_implementation) == ("sdpa", "eager")


def test_generate_gives_the_same_tokens(model: Any) -> None:
    """Plain generate and our loop, on text."""
    ids = random_ids(1, 60, seed=4) % 80 + 3
    expected = generated(model, ids)
    ra.enable(model, ALL)
    assert torch.equal(generated(model, ids), expected)
    assert torch.equal(generated(model, ids, custom_generate=ra.generate), expected)


@pytest.mark.usefixtures("emulated_graphs")
def test_a_captured_step_equals_the_eager_one(model: Any) -> None:
    """The whole model's forward is recorded, its image side asleep."""
    ra.enable(model, CONFIG)
    eager, replayed = Decoded(model, False), Decoded(model, True)
    assert replayed.steps.replays == STEPS
    assert replayed.difference(eager) <= 2e-5


def logits_after(model: Any, inputs: dict[str, Tensor], more: Tensor, cache: Any) -> Tensor:
    """Logits of a prompt with an image and of the tokens `more` after it, one at a time."""
    with torch.no_grad():
        parts = [model(**inputs, past_key_values=cache).logits]
        parts += [model(input_ids=token, past_key_values=cache).logits for token in more.split(1, dim=1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [4096, 37, 12], ids=["one-shot", "layer-major", "inside the image"])
def test_an_image_is_read_as_eager_does(name: str, chunk: int) -> None:
    """Embeddings of the image, and positions of three axes with the shift that they leave behind."""
    model, inputs, more = shared_model(name), with_image(name, PROMPT), random_ids(1, STEPS, seed=9) % 80 + 3
    expected = logits_after(model, inputs, more, DynamicCache(config=model.config))
    moved = {**inputs, "pixel_values": inputs["pixel_values"].flip(0, -1)}
    other = logits_after(model, moved, more, DynamicCache(config=model.config))
    assert worst(other, expected) > 1e-3  # the image matters
    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    ra.enable(model, ALL, prefill_chunk=chunk)
    try:
        got = logits_after(model, inputs, more, ra.RetrievalCache(model, ALL))
        again = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    finally:
        ra.disable(model)
    assert worst(got, expected) <= TOLERANCE
    assert torch.equal(again, plain)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_our_loop_refuses_images_by_name(name: str) -> None:
    """It would read the placeholders as if they were words."""
    model: Any = ra.enable(new_model(name), ALL)
    inputs = with_image(name, 60)
    with pytest.raises(ra.ConfigError, match="pixel_values"):
        model.generate(**inputs, max_new_tokens=2, custom_generate=ra.generate)


def test_queries_move_by_positions_of_three_axes(model: Any) -> None:
    """A query rotated at one position, moved to another, is the query rotated there."""
    attention: Any = decoder_layers(model)[1][0].self_attn
    rotation = Rotation.of(model, attention)
    plain = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(2))
    zero, early, late = torch.zeros(5, dtype=torch.long), torch.arange(5), torch.arange(5) + 900
    at_early = rotation.move(plain, zero, early)
    assert (rotation.move(at_early, early, late) - rotation.move(plain, zero, late)).abs().max() <= 1e-4
    assert (at_early - plain).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:.*unauthenticated requests.*")
@pytest.mark.usefixtures("small_graphs")
def test_a_checkpoint_is_planned_loaded_and_asked(tmp_path: Path, needle_model_path: Path) -> None:
    """A folder that AutoModelForCausalLM does not know; the token of an image in a text is refused."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(needle_model_path)
    model = new_model("qwen3_vl", len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    planned = ra.plan(str(tmp_path), context=2000, gpu_memory=1)
    assert "prefill: hidden states" not in [item.name for item in planned.host]  # they stay on the device
    shape = planned.shape
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.active_parameters < shape.parameters and shape.full_layers == 2
    llm = ra.LLM(tmp_path, threads=1, **ROARGRAPH, window=16, sink=4)
    assert type(llm.model) is type(model)
    context = llm.read("Some words of a text. " * 40, progress=False)
    assert context.cache.index_kinds() == {"roargraph": 4}
    assert len(context.ask("And now?", max_new_tokens=4).tokens) <= 4
    with pytest.raises(ra.InputDataError, match=f"the token {IMAGE}, which stands for a part of some image"):
        context.extend([5, IMAGE, 6])
    with pytest.raises(ra.InputDataError, match="some image"):
        llm.read([5, IMAGE, 6] * 20)


def test_hidden_states_stay_on_the_device(model: Any) -> None:
    """Images are embedded before the text decoder begins: no chunk may come from the host."""
    assert "embeds images and text before" in (why_not_on_host(model) or "")
