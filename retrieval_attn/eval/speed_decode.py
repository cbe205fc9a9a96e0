"""Milliseconds and bytes per generated token: retrieval attention beside full attention, on the same keys.

The baseline is the unmodified model with PyTorch's attention and transformers' DynamicCache; both run in one
process, with the same weights, dtype and tokens, in turns. No time is taken before the answers agree: logits
with retrieve="all" must equal full attention's, after a prompt that both read themselves and at every measured
length.

Reading a long prompt takes minutes on a CPU and its cost is not the question here, so only the first tokens
are really read; longer contexts repeat their keys and values. An exact index does the same work for any
values.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import retrieval_attn as ra
from retrieval_attn.errors import ConfigError, ContextLengthError, UnsupportedModelError

__all__ = ["RANDOM_SHAPES", "Disagreement", "Row", "Spread", "measure", "random_model", "read_prompt"]

# Largest difference of logits allowed, relative to the largest logit: accumulation order in float32, and the
# rounding of PyTorch's own output in 16 bits, which retrieval keeps in float32 until its parts are merged.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
CHECKED_TOKENS = 3

RANDOM_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 1 << 21,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    # Two layers of Llama-3-8B: a layer's cost at full width. Multiply by 16 for the whole model.
    "llama3-8b-slice": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 4096,
        "max_position_embeddings": 1 << 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 1 << 16,
    },
}


class Disagreement(Exception):
    """Retrieval with retrieve="all" does not give full attention's logits; there is no speed to report."""


@dataclass(frozen=True)
class Spread:
    """Median and the 10th and 90th percentile of single-token times, milliseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Of at least one time in seconds."""
        milliseconds = sorted(1000 * item for item in seconds)
        last = len(milliseconds) - 1
        low, high = milliseconds[round(0.1 * last)], milliseconds[round(0.9 * last)]
        return cls(statistics.median(milliseconds), low, high)


@dataclass(frozen=True)
class Row:
    """One context length. Bytes are of keys and values per token, weights not included.

    static: retrieval over sinks and window only, the floor that does not know the context. logit_error:
    largest relative difference between full attention and retrieve="all". same_token: share of steps where
    retrieval's most likely token is full attention's; None where keys repeat, so that top-k sees few
    distinct.
    """

    context: int
    full: Spread
    retrieval: Spread
    static: Spread
    full_bytes: int
    host_bytes: int
    device_bytes: int
    keys_scanned: int
    host_gb_per_second: float
    logit_error: float
    same_token: float | None


def random_model(shape: str, dtype: torch.dtype, seed: int, device: str | torch.device = "cpu") -> Any:
    """A Llama of one of RANDOM_SHAPES with random weights, in evaluation mode, made on `device`. Raises ConfigError."""
    if shape not in RANDOM_SHAPES:
        raise ConfigError(
            f"--model random:{shape} is not a known shape; use one of "
            f"{', '.join('random:' + name for name in RANDOM_SHAPES)}."
        )
    torch.manual_seed(seed)
    # tokens of a random model mean nothing: no end of sequence to stop at
    config = LlamaConfig(**RANDOM_SHAPES[shape], eos_token_id=None, bos_token_id=None, dtype=dtype)
    before = torch.get_default_dtype()
    # numbers drawn in float32 and rounded are the same on every dtype; a large model has no room for them
    direct = torch.device(device).type == "cuda"
    torch.set_default_dtype(dtype if direct else before)
    try:
        with torch.device(device):
            model: Any = LlamaForCausalLM(config)  # transformers' annotation of `to` takes no dtype
    finally:
        torch.set_default_dtype(before)
    for weight in model.parameters():  # not model.to: rotary frequencies in 16 bits are wrong far from the start
        weight.data = weight.data.to(dtype)
    return model.eval()


@dataclass(frozen=True)
class _Source:
    """Keys and values of really read tokens, per layer (1, kv_heads, tokens, dim)."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[2]

    def layers(self, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values for `tokens` tokens: a prefix, or all of them again and again."""
        for key, value in zip(self.keys, self.values, strict=True):
            copies = -(-tokens // key.shape[2])
            yield (
                key.repeat(1, 1, copies, 1)[:, :, :tokens].contiguous(),
                value.repeat(1, 1, copies, 1)[:, :, :tokens].contiguous(),
            )


@torch.no_grad()
def read_prompt(model: Any, ids: Tensor, config: ra.Config) -> _Source:
    """Read `ids` (1, tokens) with both methods and compare; the keys for everything after come from this.

    Raises Disagreement when logits differ, UnsupportedModelError for layers that do not attend to everything.
    """
    full = DynamicCache(config=model.config)
    wanted = model(ids, past_key_values=full, logits_to_keep=1).logits[:, -1]
    if any(getattr(layer, "is_sliding", False) or not hasattr(layer, "keys") for layer in full.layers):
        raise UnsupportedModelError(
            f"speed decode repeats keys and values, which {model.config.model_type}'s sliding or recurrent "
            "layers do "
            "not allow; measure a model whose layers all attend to everything."
        )
    everything = config.replace(retrieve="all")
    ra.enable(model, everything)
    try:
        cache = ra.RetrievalCache(model, everything)
        got = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        error = _compare(got, wanted, f"after reading {ids.shape[1]} tokens")
    finally:
        ra.disable(model)
    assert error >= 0
    layers: list[Any] = list(full.layers)
    return _Source([layer.keys for layer in layers], [layer.values for layer in layers])


@torch.no_grad()
def measure(model: Any, source: _Source, context: int, config: ra.Config, *, ids: Tensor, rounds: int) -> Row:
    """Time `rounds` turns of decode steps after `context` tokens, full and retrieval alternating.

    ids: (steps,) at least two tokens that every turn feeds; the first step of a turn is not timed.
    Raises Disagreement, ContextLengthError.
    """
    limit = model.config.max_position_embeddings
    if context + len(ids) > limit:
        raise ContextLengthError(
            f"{context} tokens of context and {len(ids)} steps need that many positions, the model has "
            f"{limit}; give smaller --lengths."
        )
    full = _full_cache(model, source, context)
    error, wanted = _check(model, source, full, ids, context, config)
    retrieval = _retrieval_cache(model, source, context, config)
    static_context = config.sink + config.window
    static = _retrieval_cache(model, source, static_context, config)
    with _enabled(model, config):  # compile the kernels that this retrieve uses
        _decode(model, retrieval.fork(), ids[:2], context)
    times: dict[str, list[float]] = {"full": [], "retrieval": [], "static": []}
    forks, agreed = [], 0
    for turn in range(rounds):
        # A machine that slows down or speeds up must not favour whoever runs last.
        for name in ("full", "retrieval") if turn % 2 == 0 else ("retrieval", "full"):
            if name == "full":
                times[name] += _decode(model, full, ids, context)[0]
                full.crop(-len(ids))
                continue
            with _enabled(model, config):
                fork = retrieval.fork()
                taken, chosen = _decode(model, fork, ids, context)
                times[name] += taken
                agreed += int((chosen == wanted).sum())
                forks.append(fork.stats())
                times["static"] += _decode(model, static.fork(), ids, static_context)[0]
    steps = len(forks) * len(ids)
    host_seconds = sum(stats.host_seconds for stats in forks)
    host_bytes = sum(stats.bytes_read for stats in forks)
    per_token = sum(item[:, :, :1].nbytes for item in (*source.keys, *source.values))
    return Row(
        context=context,
        full=Spread.of(times["full"]),
        retrieval=Spread.of(times["retrieval"]),
        static=Spread.of(times["static"]),
        full_bytes=(context + len(ids) // 2) * per_token,
        host_bytes=host_bytes // steps,
        device_bytes=(min(static_context, context) + len(ids) // 2) * per_token,
        keys_scanned=sum(stats.keys_scanned for stats in forks) // steps,
        host_gb_per_second=host_bytes / host_seconds / 1e9 if host_seconds else 0.0,
        logit_error=error,
        same_token=agreed / steps if context <= source.tokens else None,
    )


class _enabled:
    """The model with retrieval attention inside, as it was before outside."""

    def __init__(self, model: Any, config: ra.Config) -> None:
        self._model, self._config = model, config

    def __enter__(self) -> None:
        ra.enable(self._model, self._config)

    def __exit__(self, *error: object) -> None:
        ra.disable(self._model)


def _check(
    model: Any, source: _Source, full: DynamicCache, ids: Tensor, context: int, config: ra.Config
) -> tuple[float, Tensor]:
    """Largest relative logit difference of retrieve="all", and full attention's choice at every step."""
    wanted = [_step(model, full, token, context + i) for i, token in enumerate(ids)]
    full.crop(-len(ids))
    everything = config.replace(retrieve="all")
    error = 0.0
    with _enabled(model, everything):
        cache = _retrieval_cache(model, source, context, everything)
        for i, token in enumerate(ids[:CHECKED_TOKENS]):
            got = _step(model, cache, token, context + i)
            error = max(error, _compare(got, wanted[i], f"{i + 1} tokens after a context of {context}"))
    del cache
    gc.collect()
    return error, torch.stack(wanted).argmax(dim=-1)


def _compare(got: Tensor, wanted: Tensor, where: str) -> float:
    """Largest difference relative to the largest logit; raises Disagreement beyond the dtype's tolerance."""
    error = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    limit = TOLERANCE[wanted.dtype]
    if not error <= limit:  # also catches NaN
        raise Disagreement(
            f'retrieval with retrieve="all" differs from full attention {where}: relative logit error '
            f"{error:.2e}, at most {limit:.0e} allowed for {wanted.dtype}. No speed is reported for a wrong "
            "answer."
        )
    return error


def _full_cache(model: Any, source: _Source, tokens: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    for index, (key, value) in enumerate(source.layers(tokens)):
        cache.update(key, value, index)
    return cache


def _retrieval_cache(model: Any, source: _Source, tokens: int, config: ra.Config) -> ra.RetrievalCache:
    """A cache that holds `tokens` tokens, placed as a prefill places them, without computing attention."""
    cache = ra.RetrievalCache(model, config)
    for layer, (key, value) in zip(cache.layers, source.layers(tokens), strict=True):
        _place(layer, key, value)
    return cache


def _place(layer: Any, key: Tensor, value: Tensor) -> None:
    """Commit keys and values to an empty layer as one finished prefill pass."""
    layer._start(key, value)
    done = layer._open_pass(key.shape[2])
    done._store(key, value, 0)
    done.filled = key.shape[2]
    layer._commit(done)


def _step(model: Any, cache: Any, token: Tensor, position: int) -> Tensor:
    """Logits (vocabulary,) after one more token."""
    place = torch.tensor([[position]], device=token.device)
    out = model(input_ids=token.view(1, 1), past_key_values=cache, position_ids=place, use_cache=True)
    logits: Tensor = out.logits[0, -1]
    return logits


def _decode(model: Any, cache: Any, ids: Tensor, context: int) -> tuple[list[float], Tensor]:
    """Seconds of every step but the first, and the most likely token after every step."""
    seconds, chosen = [], []
    for i, token in enumerate(ids):
        begin = time.perf_counter()
        best = _step(model, cache, token, context + i).argmax()
        chosen.append(int(best))  # waits for the device
        seconds.append(time.perf_counter() - begin)
    # The first step touches caches that the other method has evicted, and pays for growing them.
    return seconds[1:], torch.tensor(chosen, device=ids.device)
