"""Cut older tokens out of a cache: later tokens no longer attend to them.

Tokens keep their positions, so keys and indexes stay as they are. The sinks, which lie before what is forgotten, are
turned by the model's own rotary embedding to stand directly before what follows it: distances are then those of the
text without the forgotten tokens. Which layers turn keys by position, and that only distances count, is not taken from
names but seen: a few tokens are read at two places, once for each model.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache, Rollback, unchecked_cache
from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import Forgotten, distinct, rows_by_path
from retrieval_attn.attention.sliding import SlidingLayer
from retrieval_attn.config import Config
from retrieval_attn.errors import ConfigError, UnsupportedModelError
from retrieval_attn.model.placement import input_device
from retrieval_attn.model.rotation import Rotation, rope_types
from retrieval_attn.runner.attention import using_retrieval
from retrieval_attn.runner.decode import forward

PROBE_TOKENS = 8
PROBE_SHIFT = 1021
"""Positions between the two places at which a few tokens are read."""
PROBE_ERROR = 0.1
"""Relative difference of their keys, of the median token, at most: hidden states in bfloat16 differ a little."""
_QUERY_SCALES = ("attn_temperature_tuning", "llama_4_scaling_beta")
"""Options of configs by which queries grow with their position."""

Rotations = dict[int, Rotation | None]
"""By layer number; None: the layer's keys do not depend on positions."""

_rotations: weakref.WeakKeyDictionary[nn.Module, Rotations] = weakref.WeakKeyDictionary()


def forget_tokens(cache: RetrievalCache, model: PreTrainedModel, start: int, stop: int) -> None:
    """No token attends to tokens [start, stop) of any row any more; see `Context.forget`. All or nothing.

    model: the cache's. Raises ConfigError, UnsupportedModelError for rows with padding.
    """
    cache.quiet()
    span = _checked_span(cache, start, stop)
    layers: list[CacheLayer] = [layer for layer in cache.layers if isinstance(layer, CacheLayer)]
    if len(layers) < len(cache.layers):
        raise UnsupportedModelError(
            f"Layers of this {cache.model_type} model use linear attention, whose recurrent state cannot forget single "
            "tokens. Read the text without these tokens in a new Context."
        )
    if cache.batch.valid is not None and not bool(cache.batch.valid[:, : span.stop].all()):
        raise UnsupportedModelError(
            f"Rows with padding among the first {span.stop} tokens cannot forget tokens together; forget them in a "
            "cache of one row, or read the text without these tokens."
        )
    if span == cache.batch.forgotten:
        return
    rotations = _rotations_of(model)
    before = Rollback(cache)
    try:
        with torch.no_grad():
            for number, layer in enumerate(layers):
                _forget(layer, span, rotations[number])
        cache.batch.forgotten, cache.batch.epoch = span, cache.batch.epoch + 1
    except BaseException:  # Ctrl-C too
        before.undo()
        raise
    for number in range(len(layers)):
        for host in distinct(cache.batch.hosts(number)):
            host.release_before(span.stop)


def _checked_span(cache: RetrievalCache, start: int, stop: int) -> Forgotten:
    """Return the forgotten span after the call. Raises ConfigError."""
    for name, value in (("start", start), ("stop", stop)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} must be a whole number of tokens, got {value!r}.")
    if cache.config.keeps_all:
        raise ConfigError(
            'index="full" keeps all tokens in the window, which cannot forget tokens; make a Context with another '
            "index "
            "to cut tokens out."
        )
    earlier, batch = cache.batch.forgotten, cache.batch
    tails = [one.held.tail_start for one in cache.layers if isinstance(one, RetrievalLayer) and one.held is not None]
    last = min(tails, default=batch.columns - cache.config.window)
    most = earlier.start if earlier.tokens else min(cache.config.sink, max(0, last))
    if not 0 <= start <= most or start >= stop:
        kept = f"{earlier.start} that an earlier call left" if earlier.tokens else f"config.sink={cache.config.sink}"
        raise ConfigError(
            f"start={start}, stop={stop}: start must lie in 0 .. {most} and before stop. The tokens before start stay "
            f"as sinks, of which there are at most {kept}; make a Context with a larger sink to keep more."
        )
    if stop > last:
        raise ConfigError(
            f"stop={stop} must be at most {last}: the window holds the last {batch.columns - last} of {batch.columns} "
            "tokens and keeps them. Forget fewer tokens, or use a smaller config.window."
        )
    if stop < earlier.stop:
        raise ConfigError(
            f"stop={stop} must be at least {earlier.stop}: tokens {earlier.start} to {earlier.stop} are forgotten "
            "already. Tokens are numbered as they were read."
        )
    return Forgotten(start, stop)


def _forget(layer: CacheLayer, span: Forgotten, rotation: Rotation | None) -> None:
    gap = layer.batch.forgotten.tokens
    if isinstance(layer, SlidingLayer):
        layer.forget(span, lambda keys, first: _turned(rotation, keys, first + gap, span.tokens - gap))
    elif isinstance(layer, RetrievalLayer) and layer.held is not None:
        layer.held.forget(span, functools.partial(_turned, rotation, first=0, by=span.tokens))
        for host, (row, *_) in rows_by_path(layer.hosts):
            stop = layer.held.ranges[row][1]
            host.forget(span.stop, stop)


def _turned(rotation: Rotation | None, keys: Tensor, first: int, by: int) -> Tensor:
    """Keys (batch, kv_heads, n, head_dim) of the positions from `first` on as they would be `by` positions later."""
    if rotation is None or not keys.shape[2]:
        return keys.clone()
    places = torch.arange(first, first + keys.shape[2], device=keys.device)
    plain = keys.flatten(0, 1)
    plain = plain if plain.dtype == torch.float64 else plain.float()
    return rotation.move(plain, places, places + by).to(keys.dtype).view(keys.shape)


# -- what positions do in a model ---------------------------------------------------------------------------------


def _rotations_of(model: PreTrainedModel) -> Rotations:
    """The rotary embedding of each layer. Raises UnsupportedModelError where more than distances count."""
    if model not in _rotations:
        text = model.config.get_text_config(decoder=True)
        options = text.to_dict()
        changing = sorted(rope_types(options) & {"dynamic", "longrope"})
        if changing:
            raise UnsupportedModelError(
                f"{text.model_type}: its rotary embedding is of type {changing[0]}, whose angles depend on the length "
                "of the text, so tokens cannot be forgotten. Read the text without them in a new Context."
            )
        scaled = sorted(_named(options, _QUERY_SCALES))
        if scaled:
            raise UnsupportedModelError(
                f"{text.model_type}: its queries are scaled by their position ({scaled[0]}), so tokens cannot be "
                "forgotten. Read the text without them in a new Context."
            )
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise UnsupportedModelError(
                f"{type(model).__name__} takes no position_ids, so the effect of a position on a key cannot be "
                "checked and tokens cannot be forgotten. Read the text without them in a new Context."
            )
        _rotations[model] = _seen_rotations(model)
    return _rotations[model]


def _named(options: object, names: tuple[str, ...]) -> set[str]:
    """Those of `names` that have a value in a config's dictionary, or in one inside it."""
    if not isinstance(options, dict):
        return set()
    own = {name for name in names if options.get(name)}
    return own.union(*(_named(value, names) for value in options.values()))


@torch.no_grad()
def _seen_rotations(model: PreTrainedModel) -> Rotations:
    """Read the same tokens at two places, and find what moves the keys from the one to the other, layer by layer."""
    device = input_device(model)
    generator = torch.Generator().manual_seed(0)
    embeddings: Any = model.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (1, PROBE_TOKENS), generator=generator).to(device)
    places = torch.arange(PROBE_TOKENS, device=device)
    config = Config(sink=0, window=PROBE_TOKENS, index="flat", tail=False)
    caches = []
    was_training = model.training
    model.eval()
    try:
        for shift in (0, PROBE_SHIFT):
            caches.append(unchecked_cache(model, config))
            with using_retrieval(model, config.prefill_chunk):
                forward(model, caches[-1], ids, mask=None, position_ids=places[None] + shift)
    finally:
        model.train(was_training)
    return {
        number: _seen_rotation(model, number, near, far)
        for number, (near, far) in enumerate(zip(*(cache.layers for cache in caches), strict=True))
    }


def _seen_rotation(model: PreTrainedModel, number: int, near: object, far: object) -> Rotation | None:
    assert isinstance(near, CacheLayer) and isinstance(far, CacheLayer)
    assert near.window is not None and far.window is not None and near._owner is not None
    module = near._owner()
    assert module is not None
    keys, moved = near.window.tail()[0], far.window.tail()[0]
    unturned, rotation = _difference(keys, moved), None
    try:
        rotation = Rotation.of(model, module)
        turned = _difference(_turned(rotation, keys, 0, PROBE_SHIFT), moved)
    except UnsupportedModelError as error:
        turned, reason = float("inf"), str(error)
    else:
        reason = f"turning them leaves a difference of {min(turned, unturned):.1e}"
    if min(turned, unturned) > PROBE_ERROR:
        raise UnsupportedModelError(
            f"layer {number} of {type(model).__name__}: its keys do not depend on positions by a rotary embedding "
            f"alone ({reason}), so tokens cannot be forgotten. Read the text without them in a new Context."
        )
    return rotation if turned < unturned else None


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the median relative difference of the tokens."""
    apart = torch.linalg.vector_norm((one - other).float(), dim=3)
    return float((apart / torch.linalg.vector_norm(other.float(), dim=3).clamp_min(1e-30)).median())
