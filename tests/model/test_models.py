"""Retrieval with retrieve="all" against eager full attention, on every supported model type, in float32.

The window is far smaller than the prompts, so nearly all keys come from the host; dropping the host part or
merging by plain averages moves these logits by 0.01 to 1 (see test_the_comparison_has_teeth).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import retrieval_attn as ra
from retrieval_attn.attention import retrieval as layers_module
from retrieval_attn.gpu.attention.merge import Partial
from tests.pairs import pairwise
from tests.tiny_models import CONFIGS, handed_out, random_ids, tiny_model

# One thread: for so few keys, waking a second one costs more than the work.
ALL = ra.Config(sink=4, window=16, retrieve="all", threads=1)
TOLERANCE = 1e-5
PROMPT, STEPS = 150, 12
RETRIEVING = [name for name in CONFIGS if name != "mistral_sliding"]


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One model per type, handed out with eager attention and restored afterwards."""
    yield from handed_out(tiny_model(request.param))


def steps(model: Any, cache: Any, pieces: list[Tensor], mask: Tensor | None = None) -> Tensor:
    """Logits of `pieces` fed one after the other through `cache`."""
    logits = []
    seen = 0
    for piece in pieces:
        seen += piece.shape[1]
        arguments: dict[str, Any] = {"input_ids": piece, "past_key_values": cache}
        if mask is not None:
            part = mask[:, :seen]
            arguments["attention_mask"] = part
            place = (part.cumsum(1) - 1).masked_fill(part == 0, 1)
            arguments["position_ids"] = place[:, -piece.shape[1] :]
        with torch.no_grad():
            logits.append(model(**arguments).logits)
    return torch.cat(logits, dim=1)


_eager: dict[tuple[Any, ...], Tensor] = {}


def eager_steps(model: Any, pieces: list[Tensor], mask: Tensor | None = None) -> Tensor:
    """What `steps` gives with transformers' own attention and cache: once per model and input, for all tests."""
    given = [*pieces, *([] if mask is None else [mask])]
    key = (id(model), mask is None, *((tuple(tensor.shape), tensor.numpy().tobytes()) for tensor in given))
    if key not in _eager:
        assert model.config._attn_implementation == "eager"
        _eager[key] = steps(model, DynamicCache(config=model.config), pieces, mask)
    return _eager[key]


def decode_pieces(ids: Tensor, prompt: int) -> list[Tensor]:
    """The prompt, then one token at a time."""
    return [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]


def worst(got: Tensor, expected: Tensor, where: Tensor | None = None) -> float:
    """Largest logit difference, over real tokens when `where` (batch, tokens) says which are."""
    difference = (got - expected).abs().amax(dim=-1)
    return float(difference.max() if where is None else difference[where.bool()].max())


@pytest.mark.parametrize("chunk", [4096, 37], ids=["one-shot", "layer-major"])
def test_prefill_and_decode_equal_eager(model: Any, chunk: int) -> None:
    """Prompt and decoded tokens, the prompt read whole or layer by layer in chunks of 37."""
    ids = random_ids(1, PROMPT + STEPS)
    expected = eager_steps(model, decode_pieces(ids, PROMPT))
    ra.enable(model, ALL, prefill_chunk=chunk)
    cache = ra.RetrievalCache(model, ALL)
    got = steps(model, cache, decode_pieces(ids, PROMPT))
    assert worst(got, expected) <= TOLERANCE
    assert cache.get_seq_length() == PROMPT + STEPS


@pytest.mark.parametrize("chunk", [4096, 37], ids=["one-shot", "layer-major"])
def test_left_padded_batch_equals_eager(model: Any, chunk: int) -> None:
    """Rows of 150, 91 and 9 tokens: the last lies wholly inside the window and has sinks in its tail."""
    ids = random_ids(3, PROMPT + STEPS, seed=1)
    mask = torch.ones(3, PROMPT + STEPS, dtype=torch.long)
    mask[1, : PROMPT - 91] = 0
    mask[2, : PROMPT - 9] = 0
    expected = eager_steps(model, decode_pieces(ids, PROMPT), mask)
    ra.enable(model, ALL, prefill_chunk=chunk)
    got = steps(model, ra.RetrievalCache(model, ALL), decode_pieces(ids, PROMPT), mask)
    assert worst(got, expected, mask) <= TOLERANCE


@pytest.mark.parametrize(
    ("model", "chunk", "exact"), pairwise(list(CONFIGS), [4096, 37], [True, False]), indirect=["model"]
)
def test_three_turns_on_one_cache_equal_eager(model: Any, chunk: int, exact: bool) -> None:
    """Turns of 90, 60 and 45 tokens with decoding between them; appended turns read exactly or retrieved."""
    ids = random_ids(1, 90 + 5 + 60 + 30 + 45 + 5, seed=2)
    sizes = [90, *[1] * 5, 60, *[1] * 30, 45, *[1] * 5]
    pieces = list(ids.split(sizes, dim=1))
    expected = eager_steps(model, pieces)
    ra.enable(model, ALL, prefill_chunk=chunk, question_attention="exact" if exact else "retrieval")
    cache = ra.RetrievalCache(model, ALL, question_attention="exact" if exact else "retrieval")
    assert worst(steps(model, cache, pieces), expected) <= TOLERANCE


def test_two_turns_of_a_padded_batch_equal_eager(model: Any) -> None:
    """The second turn is padded too, so one row has padding in the middle of its sequence."""
    ids = random_ids(2, 80 + 4 + 50 + 4, seed=3)
    mask = torch.ones(ids.shape, dtype=torch.long)
    mask[1, :33] = 0
    mask[0, 84:104] = 0
    pieces = list(ids.split([80, 1, 1, 1, 1, 50, 1, 1, 1, 1], dim=1))
    expected = eager_steps(model, pieces, mask)
    ra.enable(model, ALL)
    assert worst(steps(model, ra.RetrievalCache(model, ALL), pieces, mask), expected, mask) <= TOLERANCE


def generated(model: Any, ids: Tensor, **options: Any) -> Any:
    """Ids that transformers' generate returns, without an early end."""
    defaults: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 24,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return model.generate(ids, **{**defaults, **options})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"num_beams": 3}, id="beams", marks=pytest.mark.fuzz),
        pytest.param({"num_beams": 4, "num_return_sequences": 2}, id="beams-return-2"),
        pytest.param({"prompt_lookup_num_tokens": 3}, id="prompt-lookup"),
        pytest.param({"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}, id="processors"),
    ],
)
def test_generate_gives_the_same_tokens(model: Any, options: dict[str, Any]) -> None:
    """Plain model.generate after enable(): no cache is named, one is made."""
    # a repeated prompt gives prompt lookup something to find
    ids = random_ids(1, 60, seed=4).repeat(1, 2)
    if model.config.model_type == "phi3":
        # Past original_max_position_embeddings (64), Phi-3 drops the cache that generate() hands it; longer
        # prompts are read in test_custom_generate_gives_the_same_tokens.
        ids = random_ids(1, 20, seed=4).repeat(1, 2)
        options = {**options, "max_new_tokens": 16}
    expected = generated(model, ids, **options)
    ra.enable(model, ALL)
    assert torch.equal(generated(model, ids, **options), expected)


def test_custom_generate_gives_the_same_tokens(model: Any) -> None:
    """The own loop inside transformers' generate, greedy with processors and sampled with a seed."""
    ids = random_ids(1, 120, seed=5)
    choices: list[dict[str, Any]] = [{"repetition_penalty": 1.2}, {"do_sample": True, "top_p": 0.9, "temperature": 0.8}]
    for options in choices:
        torch.manual_seed(7)
        expected = generated(model, ids, **options)
        torch.manual_seed(7)
        streamed: list[list[int]] = []
        got = generated(model, ids, custom_generate=ra.generate, retrieval=ALL, on_token=streamed.append, **options)
        assert torch.equal(got, expected)
        assert [row[0] for row in streamed] == got[0, 120:].tolist()


def test_samples_share_one_prefill_and_one_host_copy(model: Any) -> None:
    """num_return_sequences=3, seeded: same tokens as transformers, host memory held once."""
    ids = random_ids(1, 120, seed=6)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 6, "return_dict_in_generate": True}
    torch.manual_seed(8)
    expected = generated(model, ids, **options)
    torch.manual_seed(8)
    got = generated(model, ids, custom_generate=ra.generate, retrieval=ALL, **options)
    assert torch.equal(got.sequences, expected.sequences)
    one = ra.RetrievalCache(model, ALL)
    ra.enable(model, ALL)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=one)
    assert got.past_key_values.host_nbytes == one.host_nbytes


def test_fork_by_repeat_then_sample(model: Any) -> None:
    """Read once, cache.batch_repeat_interleave(3), continue with three different rows."""
    ids = random_ids(1, 100, seed=9)
    tails = random_ids(3, 40, seed=10)
    whole = torch.cat([ids.expand(3, -1), tails], dim=1)
    pieces = [ids.expand(3, -1), *tails.split(1, dim=1)]
    expected = eager_steps(model, pieces)[:, 100:]
    ra.enable(model, ALL)
    cache = ra.RetrievalCache(model, ALL)
    steps(model, cache, [ids])
    held = cache.host_nbytes
    cache.batch_repeat_interleave(3)
    assert cache.host_nbytes == held
    got = steps(model, cache, list(whole[:, 100:].split(1, dim=1)))
    assert worst(got, expected) <= TOLERANCE


@pytest.mark.parametrize("removed", [3, 20, 60])
def test_crop_then_continue_equals_never_having_been(model: Any, removed: int) -> None:
    """Tokens removed from inside the window, from just past it, and from deep in the host's part."""
    ids = random_ids(1, 130, seed=11)
    other = random_ids(1, removed, seed=12)
    again = random_ids(1, 30, seed=13)
    kept = 130
    pieces = [ids, *again.split(1, dim=1)]
    expected = eager_steps(model, pieces)[:, kept:]
    ra.enable(model, ALL)
    cache = ra.RetrievalCache(model, ALL)
    steps(model, cache, [ids, *other.split(1, dim=1)])
    cache.crop(-removed)
    assert cache.get_seq_length() == kept
    got = steps(model, cache, list(again.split(1, dim=1)))
    assert worst(got, expected) <= TOLERANCE


@pytest.mark.parametrize("name", RETRIEVING)
@pytest.mark.parametrize("broken", ["host part dropped", "plain average", "one key lost"])
def test_the_comparison_has_teeth(name: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaking the retrieval in three ways must fail the comparison above by a wide margin."""
    model = tiny_model(name)
    ids = random_ids(1, PROMPT + STEPS)
    expected = eager_steps(model, decode_pieces(ids, PROMPT))
    merge = layers_module.merge

    def dropped(parts: list[Partial]) -> Partial:
        return merge(parts[:1]) if parts[0].out.shape[2] == 1 else merge(parts)

    def averaged(parts: list[Partial]) -> Partial:
        if len(parts) == 1 or parts[0].out.shape[2] != 1:
            return merge(parts)
        return Partial(sum(part.out for part in parts) / len(parts), parts[0].lse)  # type: ignore[arg-type]

    config = ALL
    if broken == "one key lost":
        config = ALL.replace(retrieve=PROMPT - ALL.window - ALL.sink - 1)
    else:
        monkeypatch.setattr(layers_module, "merge", dropped if broken == "host part dropped" else averaged)
    ra.enable(model, config)
    try:
        got = steps(model, ra.RetrievalCache(model, config), decode_pieces(ids, PROMPT))
    finally:
        ra.disable(model)
        model.set_attn_implementation("eager")
    assert worst(got, expected) > (TOLERANCE if broken == "one key lost" else 100 * TOLERANCE)


def test_verify_reports_exact(model: Any) -> None:
    """verify() agrees for every tested type and leaves the model as it was."""
    report = ra.verify(model)
    assert report.ok, report
    assert report.max_error <= TOLERANCE
    assert model.config._attn_implementation == "eager"
