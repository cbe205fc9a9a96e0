"""What retrieval attention cannot give is refused by name: texts packed into one row, attention weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import retrieval_attn as ra
from tests.model.test_models import ALL, TOLERANCE
from tests.tiny_models import CONFIGS, random_ids, tiny_model

TOKENS, FIRST = 90, 60


def packed_positions() -> Tensor:
    """(1, 90): a text of 60 tokens and one of 30."""
    return torch.cat([torch.arange(FIRST), torch.arange(TOKENS - FIRST)])[None]


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Any:
    """A copy that may be enabled."""
    return copy.deepcopy(tiny_model(request.param))


@pytest.mark.parametrize("chunk", [4096, 30], ids=["one-shot", "restart between chunks"])
def test_packed_position_ids_are_refused(model: Any, chunk: int) -> None:
    """transformers keeps such texts apart; a cache would join them. The cache is as empty as before."""
    ids = random_ids(1, TOKENS)
    with torch.no_grad():
        apart = model(input_ids=ids, position_ids=packed_positions(), use_cache=False).logits
        joined = model(input_ids=ids, position_ids=packed_positions(), attention_mask=torch.ones_like(ids)).logits
    if model.config.model_type != "gpt_oss":  # transformers does not keep them apart there
        assert (apart - joined).abs().max() > 0.01  # so a cache that joins them without a word answers wrongly
    ra.enable(model, ALL, prefill_chunk=chunk)
    cache = ra.RetrievalCache(model, ALL)
    with torch.no_grad(), pytest.raises(ra.UnsupportedModelError, match="go from 59 to 0 at token 60"):
        model(input_ids=ids, position_ids=packed_positions(), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_packed_position_ids_are_refused_in_a_model_that_is_not_enabled() -> None:
    """Only the attention function is there to see them."""
    model = copy.deepcopy(tiny_model("llama"))
    model.set_attn_implementation("retrieval")
    cache = ra.RetrievalCache(model, ALL)
    with torch.no_grad(), pytest.raises(ra.UnsupportedModelError, match="packed into one row"):
        model(input_ids=random_ids(1, TOKENS), position_ids=packed_positions(), past_key_values=cache)


def test_the_lengths_of_packed_texts_are_refused() -> None:
    """The other way to pack: cumulative lengths for attention of variable length."""
    model = ra.enable(copy.deepcopy(tiny_model("llama")), ALL)
    lengths = torch.tensor([0, FIRST, TOKENS])
    with torch.no_grad(), pytest.raises(ra.UnsupportedModelError, match="cu_seq_lens_q"):
        model(input_ids=random_ids(1, TOKENS), cu_seq_lens_q=lengths, past_key_values=ra.RetrievalCache(model, ALL))


@pytest.mark.parametrize("chunk", [4096, 37], ids=["one-shot", "layer-major"])
def test_one_text_with_positions_of_its_own_is_served(chunk: int) -> None:
    """Positions that begin later, and any positions beside an attention mask: as transformers takes them."""
    model = copy.deepcopy(tiny_model("llama"))
    ids, ones = random_ids(1, TOKENS), torch.ones(1, TOKENS, dtype=torch.long)
    later = torch.arange(7, 7 + TOKENS)[None]
    cases: list[dict[str, Any]] = [
        {"position_ids": later},
        {"position_ids": packed_positions(), "attention_mask": ones},
    ]
    with torch.no_grad():
        expected = [model(input_ids=ids, **case).logits for case in cases]
        ra.enable(model, ALL, prefill_chunk=chunk)
        for case, wanted in zip(cases, expected, strict=True):
            got = model(input_ids=ids, past_key_values=ra.RetrievalCache(model, ALL), **case).logits
            assert (got - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda m, ids: m(input_ids=ids, output_attentions=True), id="without a cache"),
        pytest.param(
            lambda m, ids: m(input_ids=ids, output_attentions=True, past_key_values=ra.RetrievalCache(m, ALL)),
            id="with a cache",
        ),
        pytest.param(lambda m, ids: m.generate(ids, output_attentions=True, **GENERATED), id="generate"),
        pytest.param(
            lambda m, ids: m.generate(ids, output_attentions=True, custom_generate=ra.generate, **GENERATED),
            id="custom generate",
        ),
    ],
)
def test_attention_weights_are_refused(model: Any, call: Callable[[Any, Tensor], Any]) -> None:
    """Instead of an empty list, or an IndexError in the caller."""
    ra.enable(model, ALL)
    with torch.no_grad(), pytest.raises(ra.ConfigError, match="output_attentions=True"):
        call(model, random_ids(1, 20))


GENERATED: dict[str, Any] = {"max_new_tokens": 2, "return_dict_in_generate": True, "pad_token_id": 0}


def test_attention_weights_that_the_config_asks_for_are_refused() -> None:
    """`config.output_attentions = True`, set while attention was eager."""
    model = copy.deepcopy(tiny_model("llama"))
    model.config.output_attentions = True
    ra.enable(model, ALL)
    with torch.no_grad(), pytest.raises(ra.ConfigError, match="output_attentions=True"):
        model(input_ids=random_ids(1, 20))
    ra.disable(model)
    with torch.no_grad():
        assert len(model(input_ids=random_ids(1, 20)).attentions) == 2


def test_hidden_states_are_refused_where_they_are_not_collected() -> None:
    """Our loop would give None for them."""
    model: Any = ra.enable(copy.deepcopy(tiny_model("llama")), ALL)
    with pytest.raises(ra.ConfigError, match="output_hidden_states=True"):
        model.generate(random_ids(1, 20), output_hidden_states=True, custom_generate=ra.generate, **GENERATED)
