"""Hybrid models: layers with a state beside layers that retrieve, against eager full attention in float32.

The state goes from chunk to chunk and from turn to turn; forks copy it, an interrupted extension puts it back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import retrieval_attn as ra
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.runner.prefill import out_of_memory
from retrieval_attn.runner.support import TESTED
from tests.model.test_models import ALL, PROMPT, STEPS, TOLERANCE, decode_pieces, eager_steps, generated, steps, worst
from tests.tiny_models import BASE, handed_out, random_ids, shared_by_tests

_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA: dict[str, Any] = {
    "layers_block_type": ["mamba", "attention"] * 2,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_LINEAR, **_EXPERTS},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_ff_dim": 64},
    "nemotron_h": _MAMBA,
}


def new_model(name: str, **changes: Any) -> Any:
    """A float32 model of `name` with seeded weights, eager attention, eval mode."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**{**BASE, "num_hidden_layers": 4, **CONFIGS.get(name, {}), **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@shared_by_tests
def shared_model(name: str) -> Any:
    """`new_model(name)`, one for all tests: leave it as it was."""
    return new_model(name)


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Handed out with eager attention and restored afterwards."""
    yield from handed_out(shared_model(request.param))


def test_verify_reports_exact(model: Any) -> None:
    """And it is on the tested list, with layers of both kinds."""
    report = ra.verify(model)
    assert report.ok and report.max_error <= TOLERANCE, report
    assert report.retrieval_layers == 2 and report.layers == 4
    assert model.config.model_type in TESTED
    layers = ra.RetrievalCache(model).layers
    assert [isinstance(layer, StateLayer) for layer in layers] == [True, False] * 2


@pytest.mark.parametrize("chunk", [4096, 37], ids=["one-shot", "layer-major"])
def test_prefill_turns_and_padding_equal_eager(model: Any, chunk: int) -> None:
    """Decoding after a prompt; three turns on one cache; a left-padded batch."""
    ids = random_ids(1, PROMPT + STEPS)
    turns = list(ids.split([70, 1, 1, 50, 1, 20, *[1] * (PROMPT + STEPS - 143)], dim=1))
    padded = random_ids(2, PROMPT + STEPS, seed=1)
    mask = torch.ones(padded.shape, dtype=torch.long)
    mask[1, :59] = 0
    cases = [(decode_pieces(ids, PROMPT), None), (turns, None), (decode_pieces(padded, PROMPT), mask)]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
    expected = [whole, whole, eager_steps(model, *cases[2])]
    for exact in (True, False):
        ra.enable(model, ALL, prefill_chunk=chunk, question_attention="exact" if exact else "retrieval")
        for (pieces, real), wanted in zip(cases, expected, strict=True):
            cache = ra.RetrievalCache(model, ALL, question_attention="exact" if exact else "retrieval")
            assert worst(steps(model, cache, pieces, real), wanted, real) <= TOLERANCE


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_comparison_has_teeth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is lost between chunks moves the logits."""
    model, ids = new_model(name), random_ids(1, PROMPT)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        ra.enable(model, ALL, prefill_chunk=37)
        monkeypatch.setattr(StateLayer, "mark", lambda layer: layer.__init__(layer.number_of_states))
        got = model(input_ids=ids, past_key_values=ra.RetrievalCache(model, ALL)).logits
    assert worst(got, expected) > 10 * TOLERANCE


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"repetition_penalty": 1.3}], ids=["greedy", "beams", "processors"]
)
def test_generate_gives_the_same_tokens(model: Any, options: dict[str, Any]) -> None:
    """Plain generate, and our loop where it serves."""
    ids = random_ids(1, 90, seed=4)
    expected = generated(model, ids, **options)
    ra.enable(model, ALL)
    assert torch.equal(generated(model, ids, **options), expected)
    if "num_beams" not in options:
        assert torch.equal(generated(model, ids, custom_generate=ra.generate, **options), expected)


def test_samples_and_rows_copy_the_state(model: Any) -> None:
    """One prefill, three different rows after it."""
    ids, tails = random_ids(1, 100, seed=9), random_ids(3, 12, seed=10)
    with torch.no_grad():
        expected = model(input_ids=torch.cat([ids.expand(3, -1), tails], dim=1)).logits[:, 100:]
    ra.enable(model, ALL)
    cache = ra.RetrievalCache(model, ALL)
    steps(model, cache, [ids])
    cache.batch_repeat_interleave(3)
    got = steps(model, cache, list(tails.split([5, *[1] * 7], dim=1)))
    assert worst(got, expected) <= TOLERANCE


def test_a_fork_leaves_the_first_as_it_was(model: Any) -> None:
    """Both go on, in turn, from the same state; device memory counts it."""
    ids, one, other = random_ids(1, 100, seed=5), random_ids(1, 14, seed=6), random_ids(1, 14, seed=7)
    with torch.no_grad():
        expected = [model(input_ids=torch.cat([ids, tail], dim=1)).logits[:, 100:] for tail in (one, other)]
    ra.enable(model, ALL)
    first = ra.RetrievalCache(model, ALL)
    empty = first.device_nbytes
    steps(model, first, [ids])
    second = first.fork()
    states = sum(layer.nbytes for layer in first.layers if isinstance(layer, StateLayer))
    assert states > 0 and first.device_nbytes >= empty + states
    pieces = [list(tail.split([6, *[1] * 8], dim=1)) for tail in (one, other)]
    for number in range(len(pieces[0])):
        for cache, tail, wanted in zip((first, second), pieces, expected, strict=True):
            start = cache.get_seq_length() - 100
            got = steps(model, cache, [tail[number]])
            assert worst(got, wanted[:, start : start + got.shape[1]]) <= TOLERANCE


def test_the_plan_counts_the_states(model: Any) -> None:
    """As many bytes as a cache holds, for each row of a batch."""
    ra.enable(model, ALL)
    cache = ra.RetrievalCache(model, ALL)
    steps(model, cache, [random_ids(1, 40)])
    held = sum(layer.nbytes for layer in cache.layers if isinstance(layer, StateLayer))
    planned = ra.plan(model, context=1000, batch=3)
    assert next(item.bytes for item in planned.device if item.name == "states") == 3 * held
    assert next(item.bytes for item in planned.device if item.name == "states of a captured step") == 9 * held
    assert planned.shape.full_layers == planned.shape.state_layers == 2
    eager = ra.plan(model, context=1000, batch=3, config={"graph": False})
    assert planned.decode_bytes - eager.decode_bytes == planned.device_bytes - eager.device_bytes == 9 * held


def test_the_plan_leaves_hidden_states_where_they_stay(model: Any) -> None:
    """On the host where there is little room, as a Llama's; on the device all the same where a model is refused another
    place, for it has no rotary embedding.
    """
    own = "device" if model.config.model_type == "nemotron_h" else "host"
    for source, place in ((model, own), (model.config, own), (CONFIG_MAPPING["llama"](**BASE), "host")):
        planned = ra.plan(source, context=4000, gpu_memory=1, dtype="float32")
        items = {item.name: item.bytes for item in (planned.host if place == "host" else planned.device)}
        assert items["prefill: hidden states"] == 4000 * 48 * 4


def test_a_crop_is_refused_and_a_reset_is_not(model: Any) -> None:
    """A state does not know earlier tokens; nothing is changed by the refusal."""
    ids = random_ids(1, 100, seed=5)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    ra.enable(model, ALL)
    cache = ra.RetrievalCache(model, ALL)
    steps(model, cache, [ids[:, :90]])
    with pytest.raises(ra.CacheMismatchError, match="linear-attention layers keep a state"):
        cache.crop(-3)
    assert worst(steps(model, cache, [ids[:, 90:]]), expected[:, 90:]) <= TOLERANCE
    cache.crop(-100)
    assert worst(steps(model, cache, [ids]), expected) <= TOLERANCE
    cache.reset()
    assert worst(steps(model, cache, [ids]), expected) <= TOLERANCE


def test_a_chunk_that_does_not_fit_is_read_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of before the chunk is put back, and smaller chunks go on from it."""
    ids = random_ids(1, 600, seed=5)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    ra.enable(model, ALL, prefill_chunk=512)
    layer = next(one for one in model.model.layers if _keeps_a_state(one))
    mixer = next(child for child in layer.children() if hasattr(child, "layer_idx"))
    forward = mixer.forward
    failed: list[bool] = []

    def short_of_memory(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)  # the state has changed already
        if not failed:
            failed.append(True)
            raise torch.cuda.OutOfMemoryError("ALLOC_FAILED")
        return out

    monkeypatch.setitem(mixer.__dict__, "forward", short_of_memory)
    with torch.no_grad():
        got = model(input_ids=ids, past_key_values=ra.RetrievalCache(model, ALL)).logits
    assert failed and out_of_memory(torch.cuda.OutOfMemoryError())
    assert worst(got, expected) <= TOLERANCE


def _keeps_a_state(layer: Any) -> bool:
    return not any("Attention" in type(child).__name__ for child in layer.children())


@pytest.fixture(scope="module")
def hybrid(needle_model_path: Any) -> tuple[Any, Any]:
    """A hybrid with the bundled model's vocabulary, and its tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(needle_model_path)
    return new_model("qwen3_next", vocab_size=len(tokenizer)), tokenizer


def test_questions_leave_the_context_as_it_was(hybrid: tuple[Any, Any]) -> None:
    """An exact question is appended to a fork: the same question has the same answer, after others too."""
    model, tokenizer = hybrid
    context = ra.Context(model, tokenizer, ALL).read("Some words of a text. " * 30, progress=False)
    before = [layer.snapshot() for layer in context.cache.layers if isinstance(layer, StateLayer)]
    first = context.ask("What is it?", max_new_tokens=8)
    context.ask_many(["And then?", "Or not at all, as it seems?"], max_new_tokens=5)
    assert context.ask("What is it?", max_new_tokens=8).tokens == first.tokens
    after = [layer.snapshot() for layer in context.cache.layers if isinstance(layer, StateLayer)]
    assert all(_same(one, other) for one, other in zip(before, after, strict=True))
    ids = [*context.cache.batch.sequences[0].token_ids, *context.template.question_ids("What is it?", False)]
    expected = generated(model, torch.tensor([ids]), max_new_tokens=8)[0, len(ids) :].tolist()
    assert first.tokens == expected[: len(first.tokens)]


def test_an_interrupted_extension_is_undone(hybrid: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the last layer, when states have changed: the context answers as before, and can be extended."""
    model, tokenizer = hybrid
    context = ra.Context(model, tokenizer, ALL).read("Some words of a text. " * 30, progress=False)
    whole = ra.Context(model, tokenizer, ALL).read("Some words of a text. " * 30, progress=False)
    first = context.ask("What is it?", max_new_tokens=8)
    mlp: Any = model.model.layers[-1].mlp

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(mlp.__dict__, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.extend("More of it, and more. " * 5, progress=False)
    assert context.ask("What is it?", max_new_tokens=8).tokens == first.tokens
    context.extend("More. " * 5, progress=False)
    whole.extend("More. " * 5, progress=False)
    assert context.ask("And?", max_new_tokens=8).tokens == whole.ask("And?", max_new_tokens=8).tokens


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = [name for name in ("conv_states", "recurrent_states")]
    return all(
        (mine is None and one[name][number] is None) or torch.equal(one[name][number], mine)
        for name in tensors
        for number, mine in other[name].items()
    )


def test_a_model_that_loses_its_state_between_pieces_is_refused() -> None:
    """Its answers to a question about a context would be wrong without a word."""
    options = {key: value for key, value in _LINEAR.items() if key != "layer_types"}
    model = new_model("olmo_hybrid", layer_types=_LINEAR["layer_types"], **options)
    with pytest.raises(ra.UnsupportedModelError, match="lose their state where a text comes in pieces"):
        ra.enable(copy.deepcopy(model))


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_hybrid_on_a_gpu(name: str) -> None:
    """Read in chunks and decoded there as on the CPU, eagerly."""
    model, ids = new_model(name).cuda(), random_ids(1, PROMPT + STEPS).cuda()
    pieces = decode_pieces(ids, PROMPT)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        ra.enable(model, ALL, prefill_chunk=37)
        got = steps(model, ra.RetrievalCache(model, ALL), pieces)
    assert worst(got, expected) <= 100 * TOLERANCE
