"""Which models retrieval attention runs: tested exactly, refused by name, or verified once on first use."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.config import Config
from retrieval_attn.errors import RetrievalAttentionError, UnsupportedModelError
from retrieval_attn.memory.shape import splits_heads
from retrieval_attn.model.checkpoint import heads_config
from retrieval_attn.model.multimodal import is_multimodal, text_attention, text_decoder
from retrieval_attn.model.placement import input_device, tensor_ranks
from retrieval_attn.model.quantization import own_method
from retrieval_attn.model.rope import length_rope
from retrieval_attn.runner.attention import set_attention, using_retrieval

log = logging.getLogger(__name__)


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
    config = Config(sink=2, window=8, retrieve="all")
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


# Compared with eager full attention: same logits to 1e-5 with retrieve="all". tests/model/test_models.py,
# test_hybrid.py and test_multimodal.py do so.
TESTED = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gpt_oss",
        "lfm2",
        "llama",
        "mistral",
        "nemotron_h",
        "phi3",
        "qwen2",
        "qwen2_5_vl_text",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl_text",
    }
)
# Models for text and images around such a decoder, compared in tests/model/test_multimodal.py.
TESTED_WITH_IMAGES = frozenset({"gemma3", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"})

_LATENT = "its cache holds latents that are expanded after the cache (multi-head latent attention)"
_SPARSE = "it was trained with its own sparse attention, which selects keys itself"
_INDEXER = (
    "its sparse layers choose blocks of 4 tokens by an indexer, which needs index keys and rotary positions of all "
    "tokens in the cache, and a mask of all tokens"
)
_SHARED = "later layers reuse another layer's keys"
_CROSS = "some of its layers attend to an image, whose keys they keep in the cache"
_OWN_LAYERS = "its cache layers are its own and would silently ignore retrieval"
REFUSED = {
    "axk1": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "kimi_linear": _LATENT,
    "longcat_flash": _LATENT,
    "minicpm3": _LATENT,
    "mistral4": _LATENT,
    "youtu": _LATENT,
    "deepseek_v32": _SPARSE,
    "axk2": _SPARSE,
    "glm5_next_text": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "hy_v4": _SPARSE,
    "minimax_m3_vl_text": _SPARSE,
    "qwen4_exp_text": _INDEXER,
    "deepseek_v4": _OWN_LAYERS,
    "mllama_text_model": _CROSS,
    "gemma3n_text": _SHARED,
}

_verified: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()


def require_supported(model: PreTrainedModel, new_cache: NewCache) -> None:
    """Return for a model that runs exactly; raise UnsupportedModelError with the reason otherwise.

    Model types not on the tested list are verified once per model object: eager attention against retrieval
    with retrieve="all" on 64 random tokens (see `retrieval_attn.verify`). new_cache: makes the cache for that.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"A transformers PreTrainedModel is needed, got {type(model).__name__}; load the model with "
            "AutoModelForCausalLM.from_pretrained."
        )
    text_config = model.config.get_text_config(decoder=True)
    model_type = text_config.model_type
    if model_type in REFUSED:
        raise UnsupportedModelError(
            f"{model_type} is not supported: {REFUSED[model_type]}. Use it with its own attention and cache."
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{model_type} is an encoder-decoder; retrieval attention supports causal decoders only."
        )
    if _is_bidirectional(model, text_config):
        raise UnsupportedModelError(
            f"{model_type} is bidirectional; retrieval attention supports causal decoders only."
        )
    if getattr(text_config, "num_kv_shared_layers", None):
        raise UnsupportedModelError(f"{model_type} is not supported: {_SHARED}.")
    if not getattr(model, "_supports_sdpa", False) and not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{model_type} has no attention interface in transformers (its attention is written into the model), so "
            "attn_implementation cannot be set. Use a newer model class."
        )
    _check_ranks(model, text_config)
    tested = model_type in TESTED and (not is_multimodal(model) or model.config.model_type in TESTED_WITH_IMAGES)
    if tested or model in _verified:
        return
    report = compare(model, new_cache)
    mark_verified(model, report)
    if not report.ok:
        raise UnsupportedModelError(f"{model_type} is not supported: {report.reason}")


def _check_ranks(model: PreTrainedModel, text_config: PreTrainedConfig) -> None:
    """Tensor parallel: every rank must have whole heads of its own; one that has all of them is said once."""
    ranks = tensor_ranks(model)
    if ranks == 1:
        return
    if not splits_heads(text_config):
        _say_all_heads(text_config.model_type, ranks)
        return
    sizes = heads_config(text_config)
    heads = getattr(sizes, "num_key_value_heads", None) or text_config.num_attention_heads
    if heads % ranks:
        raise UnsupportedModelError(
            f"{text_config.model_type} has {heads} key-value heads, which {ranks} ranks cannot share evenly; start a "
            "number of processes that divides it, or use device_map."
        )


@functools.cache
def _say_all_heads(model_type: str, ranks: int) -> None:
    log.warning(
        "%s: transformers' tensor parallel plan leaves all heads on every rank, so each of the %d processes stores and "
        "searches all keys; device_map would do so once",
        model_type,
        ranks,
    )


def mark_verified(model: nn.Module, report: Report) -> None:
    """Remember that this model object passed, if it did."""
    if report.ok:
        _verified[model] = None


def _is_bidirectional(model: nn.Module, text_config: PreTrainedConfig) -> bool:
    """True when the config or some attention module of the text decoder says that tokens see later tokens."""
    if getattr(text_config, "is_causal", True) is False or getattr(text_config, "use_bidirectional_attention", False):
        return True
    return any(getattr(module, "is_causal", None) is False for module in text_decoder(model).modules())
