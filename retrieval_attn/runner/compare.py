"""Does retrieval attention with retrieve="all" reproduce a model's eager attention exactly?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.config import Config
from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.model.multimodal import text_attention
from retrieval_attn.model.placement import input_device
from retrieval_attn.model.quantization import own_method
from retrieval_attn.model.rope import length_rope
from retrieval_attn.runner.attention import set_attention, using_retrieval

# Largest logit difference accepted, relative to max(1, largest logit), by the arithmetic's own precision.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}

ROUNDING_TOLERANCE = 0.1
"""The same where linear layers round what goes into them to 8 bits or bfloat16 at every call (bitsandbytes)."""

NewCache = Callable[[PreTrainedModel, Config], Any]
"""Makes an empty `RetrievalCache` without asking whether the model is supported."""


@dataclass(frozen=True)
class Report:
    """Result of `verify`.

    max_error: largest |logit difference| to eager attention, relative to max(1, largest |logit|), over
    prefill, layer-major prefill and decoding. retrieval_layers: full-attention layers that were searched.
    """

    model_type: str
    ok: bool
    max_error: float
    tolerance: float
    layers: int
    retrieval_layers: int
    reason: str

    def __str__(self) -> str:
        verdict = "exact" if self.ok else f"NOT exact: {self.reason}"
        return (
            f"{self.model_type}: {verdict}; largest logit difference {self.max_error:.2e} (allowed "
            f"{self.tolerance:.0e}), {self.retrieval_layers} of {self.layers} layers retrieve"
        )


def compare(model: PreTrainedModel, new_cache: NewCache, tokens: int = 64, decode_steps: int = 2) -> Report:
    """Compare eager full attention with retrieval over all keys on `tokens` random tokens.

    The prompt is read once whole and once layer-major in chunks, then `decode_steps` tokens are decoded with a
    window so small that most keys come from the host. The model is left as it was. Never raises for a model
    that fails; the report says why.
    """
    text_config = model.config.get_text_config(decoder=True)
    device = input_device(model)
    rope = length_rope(model)
    while rope is not None and tokens > 1 and not rope.decodes_on(rope.factors(tokens), tokens + decode_steps):
        tokens -= 1  # transformers' own cache would mix keys of two sets of rotary factors behind a switch
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, text_config.vocab_size, (1, tokens + decode_steps), generator=generator).to(device)
    dtype = next(model.parameters()).dtype
    tolerance = ROUNDING_TOLERANCE if own_method(model.config) == "bitsandbytes" else TOLERANCE.get(dtype, 1e-4)
    config = Config(sink=2, window=8, spill=4, retrieve="all")
    was_training = model.training
    model.eval()
    retrieval_layers = 0
    errors = []
    try:
        expected = _eager_logits(model, ids, tokens)
        largest = max(1.0, float(expected.abs().max()))
        for chunk in (tokens, max(1, tokens // 3)):
            with using_retrieval(model, chunk):
                cache = new_cache(model, config)
                retrieval_layers = sum(isinstance(layer, RetrievalLayer) for layer in cache.layers)
                got = _logits(model, ids, tokens, cache)
            error = float((got - expected).abs().max()) / largest
            errors.append(error if torch.isfinite(got).all() else float("inf"))
    except (RetrievalAttentionError, ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        return Report(text_config.model_type, False, float("inf"), tolerance, 0, retrieval_layers, reason)
    finally:
        model.train(was_training)
    worst = max(errors)
    ok = worst <= tolerance
    reason = "" if ok else f"retrieval over all keys differs from eager attention by {worst:.2e}"
    if not ok and errors[0] <= tolerance and any(isinstance(layer, StateLayer) for layer in cache.layers):
        reason = (
            "its linear-attention layers lose their state where a text comes in pieces, as a context and a question do "
            f"(difference {worst:.2e})"
        )
    layers = len(cache.layers)
    return Report(text_config.model_type, ok, worst, tolerance, layers, retrieval_layers, reason)


def _eager_logits(model: PreTrainedModel, ids: Tensor, tokens: int) -> Tensor:
    before = text_attention(model)
    set_attention(model, "eager")
    try:
        return _logits(model, ids, tokens, DynamicCache(config=model.config))
    finally:
        set_attention(model, before)


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor, tokens: int, cache: object) -> Tensor:
    """Logits of the whole prompt and of each decoded token, (1, tokens + steps, vocabulary) float32."""
    parts = [model(input_ids=ids[:, :tokens], past_key_values=cache, use_cache=True).logits.float()]
    for step in range(tokens, ids.shape[1]):
        parts.append(model(input_ids=ids[:, step : step + 1], past_key_values=cache, use_cache=True).logits.float())
    return torch.cat(parts, dim=1)
