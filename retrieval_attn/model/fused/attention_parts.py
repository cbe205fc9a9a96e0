"""Decoder layers that attend, as few kernels: norm and projections, attention itself, output and feed-forward part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrieval_attn.gpu.products import AnyWeights, Attending, add_product, alike, fits, project
from retrieval_attn.model import hooks
from retrieval_attn.model.fused.parts import (
    TRIED_SIZES,
    Different,
    Feed,
    fed,
    feed_of,
    norm_of,
    numbers_for,
    require_same,
    returned_by,
    weights_of,
)


class LayerScoring(NamedTuple):
    """Scale, soft-cap and sinks of a layer's scores, see `hooks.AttendingLayer`."""

    scale: float
    softcap: float | None
    sinks: nn.Parameter | None


class LayerWidths(NamedTuple):
    """Numbers of a hidden state, query heads, numbers of a head, and those of them that are rotated."""

    hidden: int
    heads: int
    head_dim: int
    turned: int


class AttendingParts(NamedTuple):
    """`LayerParts` of a layer that attends."""

    attending: Attending
    output: AnyWeights
    feed: Feed | None

    def without_feed(self) -> AttendingParts:
        """See `LayerParts.without_feed`."""
        return self._replace(feed=None)

    def compared(self, layer: Any, index: int, rows: int) -> LayerScoring:
        """See `LayerParts.compared`: the layer's scoring, if its kernels and its modules call attention alike."""
        into = self.attending
        sizes = LayerWidths(into.query.shape[1], into.q_heads, into.head_dim, into.rotary_dim)
        numbers = numbers_for(into.query, index)
        return scoring_of(layer, numbers, rows, sizes, lambda found: self.fused(layer, index, found))

    def fused(self, layer: Any, index: int, found: LayerScoring) -> FusedAttending:
        """See `LayerParts.fused`."""
        return FusedAttending(layer, index, self, found)

    def load(self) -> None:
        """See `LayerParts.load`."""
        into, query = self.attending, self.attending.query
        rotation = torch.zeros(1, into.rotary_dim, dtype=query.dtype, device=query.device)
        hidden = torch.zeros(1, query.shape[1], dtype=query.dtype, device=query.device)
        found = project(hidden, into, (rotation, rotation))
        add_product(hidden, found.query.reshape(1, -1), self.output)


class FusedAttending:
    """`forward` of one decoder layer; anything but a decode step runs the layer's own forward."""

    def __init__(self, layer: nn.Module, index: int, parts: AttendingParts, scoring: LayerScoring) -> None:
        self._layer: Any = layer
        self._own, self._index, self._parts = layer.forward, index, parts
        self._scoring = {"scaling": scoring.scale, "softcap": scoring.softcap, "s_aux": scoring.sinks}

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rotation = kwargs.get("position_embeddings")
        if args or not self._is_step(hidden_states, rotation):
            return self._own(hidden_states, *args, **kwargs)
        return self.step(hidden_states, rotation, **kwargs)

    def _is_step(self, hidden_states: Tensor, rotation: Any) -> bool:
        attending = self._parts.attending
        rows, tokens, _ = hidden_states.shape
        return (
            tokens == 1
            and fits(attending.query, rows)
            and hidden_states.dtype == attending.query.dtype
            and isinstance(rotation, tuple)
            and all(isinstance(one, Tensor) and one.shape[1:] == (1, attending.rotary_dim) for one in rotation)
        )

    def step(
        self,
        hidden_states: Tensor,
        rotation: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states (rows, 1, dim), rotation (rows or 1, 1, rotary_dim) each; the rest as a layer's `forward`."""
        layer, parts, hidden = self._layer, self._parts, hidden_states[:, 0]
        cosines, sines = (one[:, 0].expand(len(hidden), -1) for one in rotation)
        query, key, value, gate = project(hidden, parts.attending, (cosines, sines))
        keys, values = past_key_values.update(key.unsqueeze(2), value.unsqueeze(2), self._index)
        options: dict[str, Any] = {**kwargs, **self._scoring}
        mixed, _ = hooks.attention(layer.self_attn, query.unsqueeze(2), keys, values, attention_mask, **options)
        mixed = mixed.reshape(len(hidden), -1)
        if gate is not None:
            mixed = mixed * torch.sigmoid(gate).reshape(mixed.shape)
        return fed(layer, add_product(hidden, mixed, parts.output), parts.feed)


def attending_parts(layer: Any, rows: int) -> AttendingParts:
    """Return the parts of a layer. Raises Different if they are of an unknown kind."""
    attention: Any = getattr(layer, "self_attn", None)
    dim = getattr(attention, "head_dim", None)
    norm = norm_of(getattr(layer, "input_layernorm", None))
    output = weights_of(getattr(attention, "o_proj", None), rows)
    projections = _projections(attention, rows)
    if norm is None or output is None or projections is None or not isinstance(dim, int):
        raise Different("it is not made of a norm and projections of one known kind")
    if dim % 16 or any(one.shape[0] % dim for one in projections):
        raise Different("its heads are no whole tiles")
    query_norm, key_norm = (norm_of(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
    gates = projections[0].shape[0] == 2 * output.shape[1]
    turned = rotary_dim(attention.config, dim)
    attending = Attending(norm, *projections, dim, query_norm, key_norm, turned, gates)
    return AttendingParts(attending, output, feed_of(layer, rows))


def scoring_of(
    layer: Any,
    numbers: Callable[..., Tensor],
    rows: int,
    sizes: LayerWidths,
    fused: Callable[[LayerScoring], Callable[..., Tensor]],
) -> LayerScoring:
    """Return how a layer has keys scored if its kernels return the same and call attention alike. Raises Different.

    numbers: gives random ones of a shape. fused: gives the layer's forward in kernels for a scoring.
    """
    options: dict[str, Any] = {"attention_mask": hooks.MaskSpec(q_offset=0, q_length=1), "use_cache": True}
    scorings = set()
    for size in TRIED_SIZES:
        hidden = numbers(rows, 1, sizes.hidden) * size
        options["position_ids"] = hidden.new_zeros(rows, 1, dtype=torch.long)
        options["position_embeddings"] = numbers(rows, 1, sizes.turned), numbers(rows, 1, sizes.turned)
        answer = numbers(rows, sizes.heads, 1, sizes.head_dim)
        own, others = Probe(answer), Probe(answer)
        with torch.no_grad():
            returned = returned_by(layer, hidden, past_key_values=own, **options)
            kernels = fused(own.scoring)(hidden, past_key_values=others, **options)
        scorings.add(own.scoring)
        require_same({**own.asked, "output": returned}, {**others.asked, "output": kernels})
    if len(scorings) > 1:
        raise Different("how it has keys scored changes")
    return scorings.pop()


def rotary_dim(config: Any, head_dim: int) -> int:
    """Return the rotated numbers of a head by the model's config; the comparison of layers checks it."""
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return int(head_dim * factor) if isinstance(factor, float) and 0 < factor < 1 else head_dim


def _projections(attention: Any, rows: int) -> tuple[AnyWeights, AnyWeights, AnyWeights] | None:
    """Return the weights of query, key and value, from three modules or from one (Phi-3)."""
    merged = weights_of(getattr(attention, "qkv_proj", None), rows)
    if merged is None:
        found = [weights_of(getattr(attention, name, None), rows) for name in ("q_proj", "k_proj", "v_proj")]
        query, key, value = found
        if query is None or key is None or value is None:
            return None
        biased = {one.bias is None for one in (query, key, value)}
        same = len(biased) == 1 and key.shape == value.shape and alike(query, key, value)
        return (query, key, value) if same else None
    config = attention.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = [count * attention.head_dim for count in (heads, kv_heads, kv_heads)]
    if sum(sizes) != merged.shape[0]:
        return None
    query, key, value = merged.split(sizes)
    return query, key, value


class Probe:
    """Double of a cache and its layers: records the attention call and returns a given result."""

    packs = False

    def __init__(self, answer: Tensor) -> None:
        self._answer = answer
        self.asked: dict[str, Tensor] = {}
        self._scoring: LayerScoring | None = None

    @property
    def scoring(self) -> LayerScoring:
        """Scoring of the recorded attention call. Raises Different without one, or for sinks that are no parameter."""
        if self._scoring is None:
            raise Different("it does not attend through the cache")
        if not isinstance(self._scoring.sinks, nn.Parameter | None):
            raise Different("it computes the logits of its sinks")
        return self._scoring

    def update(self, key: Tensor, value: Tensor, *place: Any, **options: Any) -> tuple[hooks.KVView, hooks.KVView]:
        """Record new keys and values as a cache does."""
        self.asked = {"key": key, "value": value}
        return hooks.KVView(self, key), hooks.KVView(self, value)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        spec: hooks.MaskSpec,
        *,
        scale: float,
        softcap: float | None,
        sink_logits: Any,
    ) -> Tensor:
        """Record an attention call as a cache layer does."""
        self.asked["query"] = query
        self._scoring = LayerScoring(scale, softcap, sink_logits)
        return self._answer
