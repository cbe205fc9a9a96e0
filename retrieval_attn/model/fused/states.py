"""Decoder layers that keep a state (the gated delta rule, Qwen3.5), as seven kernels in place of some 90."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from retrieval_attn.attention.state import StateLayer
from retrieval_attn.gpu.delta import Asked, DeltaRule, States, delta_step
from retrieval_attn.gpu.products import AnyWeights, Norm, add_product, alike, fits, two_products
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

TRIED_STATE = 0.1
"""Size of the states that layers are compared on: what a token adds to them is as large."""


class StateParts(NamedTuple):
    """`LayerParts` of a layer that keeps a state.

    mixed, gate, strength, fading: the projections that give `Asked`. The first two are alike, and the others are.
    """

    norm: Norm
    mixed: AnyWeights
    gate: AnyWeights
    strength: AnyWeights
    fading: AnyWeights
    rule: DeltaRule
    output: AnyWeights
    feed: Feed | None

    def without_feed(self) -> StateParts:
        """See `LayerParts.without_feed`."""
        return self._replace(feed=None)

    def compared(self, layer: Any, index: int, rows: int) -> None:
        """See `LayerParts.compared`: what is returned, and the states."""
        numbers = numbers_for(self.mixed, index)
        options: dict[str, Any] = {
            "attention_mask": None,
            "position_embeddings": None,
            "position_ids": torch.zeros(rows, 1, dtype=torch.long, device=self.mixed.device),
            "use_cache": True,
        }
        for size in TRIED_SIZES:
            hidden = numbers(rows, 1, self.mixed.shape[1]) * size
            inputs, memory = (numbers(rows, *shape) * TRIED_STATE for shape in self.state_shapes)
            own, others = (_with_states(index, inputs, memory.float()) for _ in range(2))
            with torch.no_grad():
                returned = returned_by(layer, hidden, past_key_values=own, **options)
                kernels = self.fused(layer, index, None)(hidden, past_key_values=others, **options)
            require_same(_left(own, returned), _left(others, kernels))

    def fused(self, layer: Any, index: int, found: None) -> FusedState:
        """See `LayerParts.fused`."""
        return FusedState(layer, index, self)

    def load(self) -> None:
        """See `LayerParts.load`."""
        hidden = torch.zeros(1, self.mixed.shape[1], dtype=self.mixed.dtype, device=self.mixed.device)
        inputs, memory = (hidden.new_zeros(1, *shape) for shape in self.state_shapes)
        self.step(hidden, States(inputs, memory.float()))

    def step(self, hidden: Tensor, states: States) -> Tensor:
        """hidden (rows, dim) and what the layer adds to it before its feed-forward part; advances `states`."""
        asked = Asked(
            *two_products(hidden, self.norm, self.mixed, self.gate),
            *two_products(hidden, self.norm, self.strength, self.fading),
        )
        return add_product(hidden, delta_step(asked, self.rule, states), self.output)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a row's inputs and memory."""
        rule = self.rule
        return (rule.channels, rule.taps.shape[1]), (rule.v_heads, rule.k_dim, rule.v_dim)


class FusedState:
    """`forward` of one decoder layer; anything but a step of a row that has a state goes the layer's own way."""

    def __init__(self, layer: nn.Module, index: int, parts: StateParts) -> None:
        self._layer: Any = layer
        self._own, self._index, self._parts = layer.forward, index, parts

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = None if args else self._states(hidden_states, kwargs.get("past_key_values"))
        if states is None:
            return self._own(hidden_states, *args, **kwargs)
        return fed(self._layer, self._parts.step(hidden_states[:, 0], states), self._parts.feed)

    def _states(self, hidden_states: Tensor, cache: Any) -> States | None:
        """Where the layer's states lie, if this is a step that kernels can do."""
        (rows, tokens, _), parts = hidden_states.shape, self._parts
        if tokens != 1 or cache is None or not fits(parts.mixed, rows) or hidden_states.dtype != parts.mixed.dtype:
            return None
        layer = cache.layers[self._index]
        if not isinstance(layer, StateLayer) or layer.record_past or not layer.has_previous_state[0]:
            return None
        inputs, memory = layer.conv_states[0], layer.recurrent_states[0]
        (channels, kernel), heads = parts.state_shapes
        if inputs is None or memory is None or inputs.shape[:2] != (rows, channels) or memory.shape != (rows, *heads):
            return None
        kept = inputs.is_contiguous() and memory.is_contiguous() and inputs.shape[2] >= kernel
        return States(inputs, memory) if kept and memory.dtype == torch.float32 else None


def state_parts(layer: Any, rows: int) -> StateParts:
    """Return the parts of a layer. Raises Different if they are of an unknown kind."""
    mixer = layer.linear_attn
    norm, rule = norm_of(getattr(layer, "input_layernorm", None)), _rule(mixer)
    names = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"
    mixed, gate, strength, fading, output = (weights_of(getattr(mixer, name, None), rows) for name in names)
    if norm is None or rule is None or mixed is None or gate is None or output is None:
        raise Different("it is not made of a norm, a gated delta rule and projections of one known kind")
    if strength is None or fading is None or not (_pair(mixed, gate) and _pair(strength, fading)):
        raise Different("its projections are of several kinds")
    heads = rule.v_heads * rule.v_dim
    sizes = [one.shape[0] for one in (mixed, gate, strength, fading)]
    if sizes != [rule.channels, heads, rule.v_heads, rule.v_heads] or output.shape[1] != heads:
        raise Different("its projections are not those of its heads")
    return StateParts(norm, mixed, gate, strength, fading, rule, output, feed_of(layer, rows))


def _pair(first: AnyWeights, second: AnyWeights) -> bool:
    """Whether `two_products` takes them."""
    return alike(first, second) and (first.bias is None) == (second.bias is None)


def _rule(mixer: Any) -> DeltaRule | None:
    """Return the learned parameters of a module; None if it is of an unknown kind."""
    sizes: list[Any] = [
        getattr(mixer, name, None) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    ]
    convolution, norm = getattr(mixer, "conv1d", None), getattr(mixer, "norm", None)
    decay, shift = getattr(mixer, "A_log", None), getattr(mixer, "dt_bias", None)
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    learned: tuple[Any, ...] = (getattr(convolution, "weight", None), decay, shift, weight)
    if type(convolution) is not nn.Conv1d or not all(isinstance(one, nn.Parameter) for one in learned):
        return None
    if not all(isinstance(one, int) for one in sizes) or not isinstance(eps, float):
        return None
    taps, decay, shift, weight = (one.detach() for one in learned)
    bias = None if convolution.bias is None else convolution.bias.detach()
    rule = DeltaRule(taps.flatten(1), bias, decay, shift, weight, eps, *sizes)
    return rule if rule.is_whole else None


def _with_states(index: int, inputs: Tensor, memory: Tensor) -> Cache:
    """A cache whose layer `index` has seen tokens, with copies of these states."""
    layer = StateLayer()
    layer.update_conv_state(inputs)
    layer.update_recurrent_state(memory)
    return Cache(layers=[layer] * (index + 1))


def _left(cache: Cache, output: Tensor) -> dict[str, Tensor]:
    """Return the output and the states of a step, rounded to the dtype of its inputs."""
    layer: Any = cache.layers[-1]
    inputs, memory = layer.conv_states[0], layer.recurrent_states[0]
    return {"output": output, "inputs": inputs, "state": memory.to(inputs.dtype)}
