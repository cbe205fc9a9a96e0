"""The three hooks into an unmodified transformers model: attention function, mask function, cache handle.

`register()` adds "retrieval" to transformers' attention and mask interfaces. A retrieval cache layer's
`update()` returns `KVView` handles instead of tensors; they travel through the model's own code to the
attention function here, which finds the layer in them. A model that touches keys or values in between
therefore fails loudly. Masks are recipes (`MaskSpec`), never dense, and no tensor value is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retrieval_attn.errors import CacheMismatchError, ConfigError, UnsupportedModelError
from retrieval_attn.model.padding import Padding, PositionCheck, block_spans, read_mask

_MARK = "_retrieval_attn_capturable"


def capturable(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a module's forward hook as tensor operations only, so that a graph may record it. Return the hook.

    Unmarked hooks keep a model from being captured, because replays do not call them.
    """
    setattr(hook, _MARK, True)
    return hook


def is_capturable(hook: Callable[..., Any]) -> bool:
    """Return True if `capturable` marked this hook."""
    return hasattr(hook, _MARK)


NAME = "retrieval"


@dataclass(frozen=True)
class MaskSpec:
    """The mask of one forward: causal or sliding, plus per-row padding.

    q_offset: column of the first query; columns count padded positions of the whole sequence from 0.
    q_length: queries of this forward.
    padding: which columns are real tokens, or None when the caller gave no 2-D mask.
    window: keys a query may look back to, itself included, or None for full causal attention.
    unsupported: why this mask cannot be served through a retrieval cache, or None.
    images: columns [start, stop) of images whose tokens see each other, later ones too; of this forward.
    dense_arguments: what transformers passed, to build the dense mask where no retrieval cache is used.
    positions: looked at once for the whole forward; its parts share it.
    """

    q_offset: int
    q_length: int
    padding: Padding | None = None
    window: int | None = None
    unsupported: str | None = None
    images: tuple[tuple[int, int], ...] = ()
    dense_arguments: dict[str, Any] = field(default_factory=dict, repr=False)
    positions: PositionCheck = field(default_factory=PositionCheck, repr=False, compare=False)

    def part(self, start: int, stop: int) -> MaskSpec:
        """The recipe for queries [start, stop) of this forward (layer-major prefill)."""
        return replace(self, q_offset=self.q_offset + start, q_length=stop - start)

    def image_end(self, stop: int) -> int:
        """Return where a part of this forward that would end at query `stop` may end: not inside of an image."""
        column = self.q_offset + stop
        return next((last - self.q_offset for first, last in self.images if first < column < last), stop)

    def dense(self) -> Tensor | None:
        """The dense mask transformers would have built for scaled dot-product attention."""
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(**self.dense_arguments)

    @property
    def ndim(self) -> int:
        """Raise CacheMismatchError: code for a static cache of transformers' own wants a tensor."""
        raise CacheMismatchError(
            f'attn_implementation="{NAME}" got a cache of transformers\' own of a fixed size (StaticCache). Pass '
            "past_key_values=retrieval_attn.RetrievalCache(model), or switch back with "
            'model.set_attn_implementation("sdpa").'
        )


class _WithoutGradients(torch.autograd.Function):
    """Passes a tensor on, and raises where a gradient of it is asked for."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedModelError(
            "A RetrievalCache keeps no gradients: keys and values leave the autograd graph for host memory. Train "
            "without past_key_values and with use_cache=False, which attends to all tokens; with a cache call the "
            "model under torch.no_grad()."
        )


def without_gradients(out: Tensor) -> Tensor:
    """Return `out`, computed outside autograd, so that `backward` through it raises UnsupportedModelError."""
    result: Tensor = _WithoutGradients.apply(torch.empty((), requires_grad=True), out)
    return result


class AttendingLayer(Protocol):
    """A cache layer, as the handles know it. packs: a row of a forward may be several texts, which it tells apart."""

    packs: bool = False

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        spec: MaskSpec,
        *,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Store the pending tokens and attend `query` to all stored ones."""


class KVView:
    """Stands for a layer's keys or values on their way through a model; any use as a tensor fails."""

    def __init__(self, layer: AttendingLayer, new: Tensor) -> None:
        self.layer = layer
        self.shape = new.shape
        self.dtype = new.dtype
        self.device = new.device
        self.ndim = new.ndim

    def to(self, *args: object, **kwargs: object) -> KVView:
        """Models that move keys to the query's device get the same handle back."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedModelError(
            f"The model applied {getattr(func, '__name__', func)} to cached keys or values, which live on the host. "
            'Either its attn_implementation is not "retrieval" (call retrieval_attn.enable(model)), or this model '
            "transforms its keys after the cache and cannot run with a RetrievalCache."
        )

    def _touched(self, *args: object) -> Any:
        raise UnsupportedModelError(
            "The model indexed or computed with cached keys or values, which are in host memory. Either its "
            'attn_implementation is not "retrieval" (call retrieval_attn.enable(model)), or it transforms its keys '
            "after the cache and cannot run with a RetrievalCache."
        )

    __getitem__ = __iter__ = __len__ = __matmul__ = __rmatmul__ = __mul__ = __add__ = _touched

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedModelError(
            f"The model used .{name} of cached keys or values, which are in host memory. Either its "
            "attn_implementation "
            'is not "retrieval" (call retrieval_attn.enable(model)), or this model cannot run with a RetrievalCache.'
        )


def mask_recipe(**arguments: Any) -> MaskSpec:
    """Mask function for transformers' AttentionMaskInterface: describes the mask instead of building it.

    arguments: those of transformers' own mask functions, see `sdpa_mask`, which it passes by name.
    """
    padding = arguments.get("attention_mask")
    found = read_mask(arguments.get("mask_function"), arguments.get("local_size"))
    first, count = arguments.get("q_offset", 0), arguments["q_length"]
    spans = () if found.blocks is None else block_spans(found.blocks, count)
    differ = "in which the tokens of images see each other, at other places in each row" if spans is None else None
    return MaskSpec(
        q_offset=first,
        q_length=count,
        padding=None if padding is None else Padding(padding),
        window=found.window,
        unsupported=found.unsupported or differ,
        images=tuple((first + start, first + stop) for start, stop in spans or ()),
        dense_arguments=arguments,
    )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | KVView,
    value: Tensor | KVView,
    attention_mask: MaskSpec | Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' AttentionInterface.

    query: (batch, q_heads, queries, head_dim), after RoPE. key, value: handles of a retrieval cache layer, or
    plain tensors when the model runs without a retrieval cache (then: ordinary scaled dot-product attention).
    kwargs: what models add: dropout, softcap, s_aux (learned sink logits), and others for plain attention alone.
    Returns (batch, queries, q_heads, value_dim) in the query's dtype, and None for the weights.
    Raises ConfigError where the weights were asked for, UnsupportedModelError for several texts in one row. `backward`
    through a retrieval cache raises UnsupportedModelError.
    """
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise ConfigError(
            'output_attentions=True was asked for, but attn_implementation="retrieval" computes no attention weights. '
            'Leave it out, or switch with model.set_attn_implementation("eager") (retrieval_attn.disable(model)).'
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if isinstance(key, KVView):
        spec = _checked_spec(module, attention_mask)
        if not key.layer.packs:
            spec.positions.require_one_text(spec.padding, spec.q_length, kwargs)
        sinks = kwargs.get("s_aux")
        with torch.no_grad():
            out = key.layer.attend(module, query, spec, scale=scale, softcap=kwargs.get("softcap"), sink_logits=sinks)
            out = out.transpose(1, 2).to(query.dtype)
        return without_gradients(out) if torch.is_grad_enabled() and query.requires_grad else out, None
    assert isinstance(value, Tensor)
    if isinstance(attention_mask, MaskSpec) and attention_mask.q_offset > 0:
        raise CacheMismatchError(
            f'attn_implementation="{NAME}" got tensors of another cache that already holds '
            f"{attention_mask.q_offset} tokens. Pass past_key_values=retrieval_attn.RetrievalCache(model), call "
            "retrieval_attn.enable(model) if generate() makes the cache (guidance_scale does so), or switch back with "
            'model.set_attn_implementation("sdpa").'
        )
    return _plain_attention(module, (query, key, value), attention_mask, scale, kwargs), None


def _checked_spec(module: nn.Module, attention_mask: MaskSpec | Tensor | None) -> MaskSpec:
    if not isinstance(attention_mask, MaskSpec):
        given = "no mask recipe" if attention_mask is None else f"a dense mask {tuple(attention_mask.shape)}"
        raise UnsupportedModelError(
            f"{type(module).__name__} passed {given}; a RetrievalCache needs the 2-D padding mask or none. "
            "Pass attention_mask of shape (batch, tokens), and load the model with "
            f'attn_implementation="{NAME}".'
        )
    if attention_mask.unsupported is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for the mask {attention_mask.unsupported}; a RetrievalCache supports "
            "causal and sliding-window masks with padding only. Use another cache for this model."
        )
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(
            f"{type(module).__name__} is bidirectional (is_causal=False); retrieval attention supports causal "
            "decoders only. Use another attn_implementation for it."
        )
    return attention_mask


def _plain_attention(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    attention_mask: MaskSpec | Tensor | None,
    scale: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention without a retrieval cache: transformers' own, with the dense mask it would have built.

    tensors: query, key, value. kwargs: see `attention`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from retrieval_attn.gpu.attention.flash import attend
    from retrieval_attn.gpu.attention.merge import merge, sink_logit_partial

    query, key, value = tensors
    softcap, s_aux = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    mask = attention_mask.dense() if isinstance(attention_mask, MaskSpec) else attention_mask
    if softcap is None and s_aux is None:
        is_causal = kwargs.pop("is_causal", None)
        out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scale, is_causal=is_causal, **kwargs)
        return out
    if mask is not None and mask.dtype != torch.bool:
        raise UnsupportedModelError(
            "Models with a soft-cap or attention sinks need a boolean mask, got an additive one; pass a padding mask."
        )
    causal = mask is None and query.shape[2] == key.shape[2]
    part = attend(query, key, value, scale=scale, causal=causal, mask=mask, softcap=softcap)
    if s_aux is not None:
        part = merge([part, sink_logit_partial(s_aux, query, value.shape[3])])
    return part.out.transpose(1, 2).to(query.dtype)


def register() -> None:
    """Make attn_implementation="retrieval" known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_recipe)
