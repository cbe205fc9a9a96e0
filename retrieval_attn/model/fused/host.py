"""Decoder layers of a model on a CPU, whose weights are stored in few bits: a decode step is two programs per layer.

As on a GPU (`layers.py`) a layer is known by what it is made of, and is compared with its own modules before it runs in
programs: an RMS norm, linear query, key, value and output projections, a rotary embedding, a gated feed-forward part,
and norms of heads and of outputs if there are any. Adapters, hooks and other changes of its modules are noticed at the
next step, which runs the modules.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrieval_attn.cpu.matrix import StoredMatrix
from retrieval_attn.cpu.program import GELU_TANH, SILU, Program
from retrieval_attn.gpu.products import Norm
from retrieval_attn.model import hooks
from retrieval_attn.model.fused.attention_parts import LayerScoring, LayerWidths, rotary_dim, scoring_of
from retrieval_attn.model.fused.parts import Different, norm_of
from retrieval_attn.model.layers import decoder_layers, modules_of
from retrieval_attn.model.stored import KERNEL_ROWS, StoredWeight

log = logging.getLogger(__name__)
_ACTIVATIONS = {SILU: nn.functional.silu, GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh")}


class _Sizes(NamedTuple):
    """Widths of a layer's buffers. turned: numbers of a head that are rotated."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    turned: int
    inner: int


def run_programs(model: PreTrainedModel) -> int:
    """Let decode steps of a model on a CPU run layers with stored weights as programs; returns how many layers do."""
    taken = 0
    for layer, index in decoder_layers(model):
        try:
            layer.__dict__["forward"] = HostLayer(layer, index)
        except Different as reason:
            log.info("layer %d runs its modules: %s", index, reason)
            continue
        taken += 1
    return taken


class HostLayer:
    """`forward` of one decoder layer; anything but a decode step of few rows runs the layer's own forward."""

    def __init__(self, layer: Any, index: int) -> None:
        """Raises Different for a layer of an unknown kind."""
        self._layer, self._own, self._index = layer, layer.forward, index
        self._parts: list[dict[Any, Any]] = [
            part
            for module in modules_of(layer)
            for part in (module._modules, module._parameters, module._forward_hooks, module._forward_pre_hooks)
        ]
        self._seen = self._state()
        self._sizes = _sizes_of(layer)
        self._before, self._after = _before(layer, self._sizes), _after(layer, self._sizes)
        self._scoring: LayerScoring | None = None
        self._differs = False

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or not self._is_step(hidden_states, kwargs):
            return self._own(hidden_states, *args, **kwargs)
        if self._scoring is None:
            try:
                generator, sizes = torch.Generator().manual_seed(self._index), self._sizes
                self._scoring = scoring_of(
                    self._layer,
                    functools.partial(torch.randn, generator=generator),
                    2,
                    LayerWidths(sizes.hidden, sizes.heads, sizes.head_dim, sizes.turned),
                    lambda scoring: functools.partial(self._step, scoring=scoring),
                )
            except Different as reason:
                self._differs = True
                log.info("layer %d runs its modules: %s", self._index, reason)
                return self._own(hidden_states, **kwargs)
        return self._step(hidden_states, self._scoring, **kwargs)

    def _is_step(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> bool:
        rows, tokens, _ = hidden_states.shape
        rotation, mask = kwargs.get("position_embeddings"), kwargs.get("attention_mask")
        return (
            tokens == 1
            and 0 < rows <= KERNEL_ROWS
            and not self._differs
            and hidden_states.dtype == torch.float32
            and isinstance(mask, hooks.MaskSpec)
            and kwargs.get("past_key_values") is not None
            and isinstance(rotation, tuple)
            and rotation[0].shape[-1] == self._sizes.turned
            and not (torch.is_grad_enabled() and hidden_states.requires_grad)
            and self._layer.self_attn.config._attn_implementation == hooks.NAME
            and self._seen == self._state()
        )

    def _state(self) -> list[int]:
        """Identities of the layer's parts and hooks; another list if a module, a weight or a hook was changed."""
        return [id(one) for part in self._parts for one in part.values()]

    def _step(
        self,
        hidden_states: Tensor,
        scoring: LayerScoring,
        position_embeddings: Any = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states (rows, 1, dim); the rest as a layer's `forward`."""
        layer, sizes, rows = self._layer, self._sizes, len(hidden_states)
        hidden = hidden_states.contiguous()
        cosines, sines = (one.expand(rows, 1, -1).contiguous() for one in position_embeddings)
        query = torch.empty(rows, sizes.heads, 1, sizes.head_dim)
        key = torch.empty(rows, sizes.kv_heads, 1, sizes.head_dim)
        value = torch.empty_like(key)
        normed = torch.empty_like(hidden)
        self._before.run([one.data_ptr() for one in (hidden, normed, query, key, value, cosines, sines)], rows)
        keys, values = past_key_values.update(key, value, self._index)
        options = {**kwargs, "scaling": scoring.scale, "softcap": scoring.softcap, "s_aux": scoring.sinks}
        mixed, _ = hooks.attention(layer.self_attn, query, keys, values, attention_mask, **options)
        mixed, out = mixed.contiguous(), torch.empty_like(hidden)
        gate, up = torch.empty(2, rows, sizes.inner).unbind()
        added = torch.empty_like(hidden)
        self._after.run([one.data_ptr() for one in (hidden, mixed, normed, added, gate, up, out)], rows)
        return out


def _before(layer: Any, sizes: _Sizes) -> Program:
    """Return the steps before attention. Slots: hidden, normed, query, key, value, cosines, sines."""
    hidden, normed, query, key, value, cosines, sines = range(7)
    attention, program = layer.self_attn, Program()
    _append_norm(program, _norm(layer, "input_layernorm"), hidden, normed)
    for name, slot in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
        program.product(_matrix(getattr(attention, name)), normed, slot)
    for name, slot, heads in (("q_norm", query, sizes.heads), ("k_norm", key, sizes.kv_heads)):
        if hasattr(attention, name):
            norm = _norm(attention, name)
            if len(norm.weight) != sizes.head_dim:
                raise Different(f"its {name} is not of a head")
            _append_norm(program, norm, slot, slot, each=heads)
        program.turn(slot, cosines, sines, heads=heads, size=sizes.head_dim, turned=sizes.turned)
    return program


def _after(layer: Any, sizes: _Sizes) -> Program:
    """Return the steps after attention. Slots: hidden, mixed, normed, added, gate, up, out."""
    hidden, mixed, normed, added, gate, up, out = range(7)
    program = Program()
    program.product(_matrix(layer.self_attn.o_proj), mixed, normed)
    has_four = hasattr(layer, "pre_feedforward_layernorm")
    if has_four:
        _append_norm(program, _norm(layer, "post_attention_layernorm"), normed, normed)
    program.add(hidden, normed, added, size=sizes.hidden)
    before = "pre_feedforward_layernorm" if has_four else "post_attention_layernorm"
    _append_norm(program, _norm(layer, before), added, normed)
    program.product(_matrix(layer.mlp.gate_proj), normed, gate)
    program.product(_matrix(layer.mlp.up_proj), normed, up)
    program.gate(gate, up, size=sizes.inner, activation=_activation(layer.mlp))
    program.product(_matrix(layer.mlp.down_proj), gate, normed)
    if has_four:
        _append_norm(program, _norm(layer, "post_feedforward_layernorm"), normed, normed)
    program.add(added, normed, out, size=sizes.hidden)
    return program


def _sizes_of(layer: Any) -> _Sizes:
    attention: Any = getattr(layer, "self_attn", None)
    mlp, dim = getattr(layer, "mlp", None), getattr(attention, "head_dim", 0)
    shapes = [_shape(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    query, key, value, output = shapes
    gate, up, down = (_shape(mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))
    whole = isinstance(dim, int) and dim > 0 and key == value and output == query[::-1] and gate == up == down[::-1]
    if not whole or query[0] % dim or key[0] % dim or not query[1] == key[1] == gate[1]:
        raise Different("its projections are of other shapes")
    turned = rotary_dim(attention.config, dim)
    return _Sizes(query[1], query[0] // dim, key[0] // dim, dim, turned, gate[0])


def _shape(parent: Any, name: str) -> tuple[int, int]:
    module = getattr(parent, name, None)
    if type(module) is not nn.Linear or type(module.weight) is not StoredWeight:
        raise Different(f"its {name} is no linear module with stored weights")
    return module.weight.shape[0], module.weight.shape[1]


def _matrix(module: nn.Linear) -> StoredMatrix:
    weight: Any = module.weight
    found: StoredMatrix = weight.matrix if module.bias is None else weight.with_bias(module.bias.detach())
    return found


def _norm(parent: Any, name: str) -> Norm:
    norm = norm_of(getattr(parent, name, None))
    if norm is None or norm.weight.dtype != torch.float32:
        raise Different(f"its {name} is no RMS norm in float32")
    return norm


def _append_norm(program: Program, norm: Norm, given: int, out: int, each: int = 1) -> None:
    weight = norm.weight.contiguous().numpy()
    program.norm(given, out, weight, norm.eps, each=each, from_one=norm.from_one)


def _activation(mlp: Any) -> int:
    numbers = torch.linspace(-8, 8, 97)
    for number, function in _ACTIVATIONS.items():
        if torch.allclose(mlp.act_fn(numbers), function(numbers), rtol=1e-5, atol=1e-6):
            return number
    raise Different("its activation is neither SiLU nor GELU's approximation")
