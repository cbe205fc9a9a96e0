"""A model's decoder layers in few kernels each, while a step of one token is recorded.

A layer is taken by what it is made of: an RMS norm, linear query, key, value and output projections and a rotary
embedding; behind them, where it has it, a second norm and a SiLU-gated feed-forward part. Weights are plain, or 4 bits
of torchao's in the layout of torch's own kernel. Whether that is all that it does is not read from its class but tried:
the layer and its kernels are given the same numbers, and what they ask attention and what they return has to be the
same, but for rounding. What differs, is watched by a hook, was replaced or holds its weights in another way (adapters,
other quantised linears, parts of several ranks) keeps its own modules.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrieval_attn.engine.graph.support import watchers_of
from retrieval_attn.engine.norms import eps_of, is_rms_norm
from retrieval_attn.engine.prefill import forwards_itself
from retrieval_attn.gpu.products import (
    AnyWeights,
    Attending,
    Gated,
    Norm,
    Weights,
    add_product,
    alike,
    fits,
    gated,
    project,
)
from retrieval_attn.model import hooks
from retrieval_attn.model.layers import decoder_layers, first_decoder_layer, modules_of
from retrieval_attn.model.packed import packed_weights
from retrieval_attn.model.quantization import plain_tensors

log = logging.getLogger(__name__)

TRIED_SIZES = 1.0, 1e-3
"""Of the numbers that layers are compared on: small ones show what a norm adds, and a part beside its residual."""


class _Parts(NamedTuple):
    """What of a layer runs in kernels. feed, down: None: its second norm and `mlp` stay modules."""

    attending: Attending
    output: AnyWeights
    feed: Gated | None
    down: AnyWeights | None

    @property
    def without_feed(self) -> _Parts:
        return self._replace(feed=None, down=None)


class _Scoring(NamedTuple):
    """How a layer has its keys scored, see `hooks.AttendingLayer`."""

    scale: float
    softcap: float | None
    sinks: nn.Parameter | None


class _Trial(NamedTuple):
    """What trials of a layer have found: whether its feed-forward part runs in kernels, too.

    No weights: they would stay in memory after the model was moved.
    """

    whole: bool
    scoring: _Scoring


class _Different(Exception):
    """Why a layer keeps its modules."""


@contextmanager
def fused_layers(model: PreTrainedModel, rows: int) -> Iterator[int]:
    """Within, forwards of one token for each of `rows` rows run layers in few kernels; gives how many layers do.

    Outside they are as they were. Not for two threads at once. Nothing happens on a CPU, where nothing is gained.
    """
    with ExitStack() as stack:
        taken = 0
        if _runs_kernels(model):
            layers = decoder_layers(model)
            kept: dict[str, list[int]] = {}
            for layer, index in layers:
                try:
                    fused = _fused(layer, index, rows)
                except _Different as reason:
                    kept.setdefault(str(reason), []).append(index)
                    continue
                stack.callback(_put_back, layer, layer.__dict__.get("forward"))
                layer.__dict__["forward"] = fused
                taken += 1
            log.info("steps of %d rows: %d of %d layers run in fused kernels", rows, taken, len(layers))
            for why, numbers in kept.items():
                log.info("layers %s keep their modules: %s", numbers, why)
        yield taken


def load_layer_kernels(model: PreTrainedModel) -> None:
    """Compile and load what a step of one row will launch, by multiplying zeros with a layer's weights."""
    layer = first_decoder_layer(model)
    if layer is None or not _runs_kernels(model):
        return
    try:
        parts = _parts(layer, 1)
    except _Different:
        return
    attending, query = parts.attending, parts.attending.query
    rotation = torch.zeros(1, attending.head_dim, dtype=query.dtype, device=query.device)
    hidden = torch.zeros(1, query.shape[1], dtype=query.dtype, device=query.device)
    found, _, _ = project(hidden, attending, (rotation, rotation))
    add_product(hidden, found.reshape(1, -1), parts.output)
    if parts.feed is not None and parts.down is not None:
        add_product(hidden, gated(hidden, parts.feed), parts.down)


def _put_back(layer: nn.Module, forward: Any) -> None:
    """Give a layer the forward that it had; None: its class's."""
    if forward is None:
        del layer.__dict__["forward"]
    else:
        layer.__dict__["forward"] = forward


def _runs_kernels(model: PreTrainedModel) -> bool:
    return model.device.type == "cuda"


class _FusedLayer:
    """`forward` of one decoder layer; anything but a step goes the layer's own way."""

    def __init__(self, layer: nn.Module, index: int, parts: _Parts, scoring: _Scoring) -> None:
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
            and all(isinstance(one, Tensor) and one.shape[1:] == (1, attending.head_dim) for one in rotation)
        )

    def step(
        self,
        hidden_states: Tensor,
        rotation: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states (rows, 1, dim), rotation (rows or 1, 1, head_dim) each; the rest as a layer's `forward`."""
        layer, parts, hidden = self._layer, self._parts, hidden_states[:, 0]
        cosines, sines = (one[:, 0].expand(len(hidden), -1) for one in rotation)
        query, key, value = project(hidden, parts.attending, (cosines, sines))
        keys, values = past_key_values.update(key.unsqueeze(2), value.unsqueeze(2), self._index)
        options: dict[str, Any] = {**kwargs, **self._scoring}
        mixed, _ = hooks.attention(layer.self_attn, query.unsqueeze(2), keys, values, attention_mask, **options)
        hidden = add_product(hidden, mixed.reshape(len(hidden), -1), parts.output)
        if parts.feed is not None and parts.down is not None:
            return add_product(hidden, gated(hidden, parts.feed), parts.down).unsqueeze(1)
        residual = hidden.unsqueeze(1)
        fed = layer.mlp(layer.post_attention_layernorm(residual))
        return residual + (fed[0] if isinstance(fed, tuple) else fed)


_Known = dict[bool, _Trial | str]
"""What was found, by whether there are several rows, for which the kernels are others; a text: why the layer keeps its
modules.
"""
_tried: weakref.WeakKeyDictionary[nn.Module, tuple[Any, _Known]] = weakref.WeakKeyDictionary()
"""What trials of layers have found, beside what it depends on: where their weights lie."""


def _fused(layer: nn.Module, index: int, rows: int) -> _FusedLayer:
    """The layer's kernels. Raises _Different where it keeps its modules."""
    _require_unwatched(layer)
    parts = _parts(layer, rows)
    weights = tuple((weight.data_ptr(), weight.shape, weight.dtype) for weight in plain_tensors(layer.parameters()))
    before, known = _tried.get(layer, (weights, _Known()))
    if before != weights:
        known = {}
    _tried[layer] = weights, known
    several = rows > 1
    if several not in known:
        try:
            known[several] = _trial(layer, index, parts, rows)
        except _Different as reason:
            known[several] = str(reason)
    found = known[several]
    if isinstance(found, str):
        raise _Different(found)
    return _FusedLayer(layer, index, parts if found.whole else parts.without_feed, found.scoring)


def _require_unwatched(layer: nn.Module) -> None:
    if not forwards_itself(layer):
        raise _Different("its forward was replaced")
    for module in modules_of(layer):
        if watchers_of(module):
            raise _Different(f"a hook watches its {type(module).__name__}")
        if module is not layer and not forwards_itself(module):
            raise _Different(f"the forward of its {type(module).__name__} was replaced")


def _trial(layer: nn.Module, index: int, parts: _Parts, rows: int) -> _Trial:
    """Raises _Different where neither the whole layer nor what stands around attention can be kernels."""
    if parts.feed is not None:
        try:
            return _Trial(True, _compared(layer, index, parts, rows))
        except _Different as reason:
            log.debug("layer %d: %s", index, reason)
    return _Trial(False, _compared(layer, index, parts.without_feed, rows))


def _parts(layer: Any, rows: int) -> _Parts:
    """What a layer is made of. Raises _Different where it is made of something else."""
    attention = getattr(layer, "self_attn", None)
    dim = getattr(attention, "head_dim", None)
    norm, output = _norm(getattr(layer, "input_layernorm", None)), _weights(getattr(attention, "o_proj", None), rows)
    projections = _projections(attention, rows)
    if norm is None or output is None or projections is None or not isinstance(dim, int):
        raise _Different("it is not made of a norm and projections of one known kind")
    if dim % 16 or any(one.shape[0] % dim for one in projections):
        raise _Different("its heads are no whole tiles")
    norms = tuple(_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm"))
    feed, down = _feed(layer, rows)
    return _Parts(Attending(norm, *projections, dim, *norms), output, feed, down)


def _projections(attention: Any, rows: int) -> tuple[AnyWeights, AnyWeights, AnyWeights] | None:
    """Query, key and value, of three modules or of one (Phi-3)."""
    merged = _weights(getattr(attention, "qkv_proj", None), rows)
    if merged is None:
        found = [_weights(getattr(attention, name, None), rows) for name in ("q_proj", "k_proj", "v_proj")]
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


def _feed(layer: Any, rows: int) -> tuple[Gated, AnyWeights] | tuple[None, None]:
    """The parts of a gated feed-forward module, of two projections or of one that holds both (Phi-3)."""
    mlp, norm = getattr(layer, "mlp", None), _norm(getattr(layer, "post_attention_layernorm", None))
    down = _weights(getattr(mlp, "down_proj", None), rows)
    merged = _weights(getattr(mlp, "gate_up_proj", None), rows)
    gate: AnyWeights | None
    up: AnyWeights | None
    if merged is None:
        gate, up = (_weights(getattr(mlp, name, None), rows) for name in ("gate_proj", "up_proj"))
    else:
        gate, up = merged.split([merged.shape[0] // 2] * 2)
    if norm is None or gate is None or up is None or down is None:
        return None, None
    return (Gated(norm, gate, up), down) if gate.shape == up.shape and alike(gate, up) else (None, None)


def _weights(module: Any, rows: int) -> AnyWeights | None:
    """Those of a linear module that can be multiplied; None: it is something else, or holds them in another way."""
    if type(module) is not nn.Linear:
        return None
    weights: AnyWeights | None = packed_weights(module)
    if weights is None and type(module.weight) is nn.Parameter:
        weights = Weights(module.weight.detach(), None if module.bias is None else module.bias.detach())
    return weights if weights is not None and fits(weights, rows) else None


def _norm(module: Any) -> Norm | None:
    if not isinstance(module, nn.Module) or not is_rms_norm(module):
        return None
    weight: Any = module.weight
    return Norm(weight.detach(), eps_of(module))


def _compared(layer: nn.Module, index: int, parts: _Parts, rows: int) -> _Scoring:
    """How the layer has keys scored, if its kernels ask attention the same and return the same. Raises _Different."""
    query, head_dim = parts.attending.query, parts.attending.head_dim
    generator = torch.Generator(query.device).manual_seed(index)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=query.device).to(query.dtype)

    options: dict[str, Any] = {
        "attention_mask": hooks.MaskSpec(q_offset=0, q_length=1),
        "position_ids": torch.zeros(rows, 1, dtype=torch.long, device=query.device),
        "use_cache": True,
    }
    scorings = set()
    for size in TRIED_SIZES:
        hidden = numbers(rows, 1, query.shape[1]) * size
        options["position_embeddings"] = numbers(rows, 1, head_dim), numbers(rows, 1, head_dim)
        answer = numbers(rows, query.shape[0] // head_dim, 1, head_dim)
        own, fused = _Probe(answer), _Probe(answer)
        with torch.no_grad():
            returned = _returned(layer, hidden, past_key_values=own, **options)
            scoring = own.scoring
            kernels = _FusedLayer(layer, index, parts, scoring)(hidden, past_key_values=fused, **options)
        scorings.add(scoring)
        _require_same({**own.asked, "output": returned}, {**fused.asked, "output": kernels})
    if len(scorings) > 1:
        raise _Different("how it has keys scored changes")
    return scorings.pop()


def _returned(layer: nn.Module, hidden: Tensor, **options: Any) -> Tensor:
    """What a layer's own forward returns. Raises _Different where that is no tensor."""
    forward: Any = type(layer).forward
    try:
        returned = forward(layer, hidden, **options)
    except Exception as error:  # whatever a module raises that is called in another way than it expects
        raise _Different(f"it cannot be tried: {type(error).__name__}: {error}") from error
    if not isinstance(returned, Tensor):
        raise _Different("it returns more than its hidden states")
    return returned


def _require_same(own: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Raise _Different, with its name, where a tensor is not what it should be but for rounding."""
    for name, right in own.items():
        if others[name].shape != right.shape or others[name].dtype != right.dtype:
            raise _Different(f"its {name} has another shape or dtype than that of its kernels")
    pairs = [(right.float(), others[name].float()) for name, right in own.items()]
    shares = torch.stack([(right - other).norm() / right.norm() for right, other in pairs]).tolist()  # one wait for all
    for (name, right), share in zip(own.items(), shares, strict=True):
        if not share <= _rounding(right.dtype):  # it may be no number
            raise _Different(f"its {name} differs from that of its kernels")


def _rounding(dtype: torch.dtype) -> float:
    """What two ways of rounding may differ by: each number of both is off by up to half of its last place, some twice.

    float32: what sums of some thousand terms in another order differ by. Weights of 4 bits are no reason to allow more:
    a module rounds each of them to bfloat16, and kernels do not, which is .001 of a product.
    """
    return max(4 * torch.finfo(dtype).eps, 1e-5)


class _Probe:
    """Stands for a cache and its layers: keeps what attention is asked, and gives a known answer."""

    packs = False

    def __init__(self, answer: Tensor) -> None:
        self._answer = answer
        self.asked: dict[str, Tensor] = {}
        self._scoring: _Scoring | None = None

    @property
    def scoring(self) -> _Scoring:
        """What attention was asked with. Raises _Different where it was not, or with logits that are no parameter."""
        if self._scoring is None:
            raise _Different("it does not attend through the cache")
        if not isinstance(self._scoring.sinks, nn.Parameter | None):
            raise _Different("it computes the logits of its sinks")
        return self._scoring

    def update(self, key: Tensor, value: Tensor, *place: Any, **options: Any) -> tuple[hooks.KVView, hooks.KVView]:
        """As a cache's."""
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
        """As a cache layer's."""
        self.asked["query"] = query
        self._scoring = _Scoring(scale, softcap, sink_logits)
        return self._answer
