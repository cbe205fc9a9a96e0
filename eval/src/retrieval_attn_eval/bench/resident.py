"""Full attention over keys that stay on the device, without what transformers' caches add: a baseline.

The context's keys are never copied or masked; new tokens go to a small buffer of fixed address, attended with a mask
that a counter on the device makes. Two parts, one merge, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from retrieval_attn.testing import attend, merge, set_attention
from retrieval_attn_eval.bench.source import Source, Span, blocks, tokens_of

NAME = "bench_resident"


class ResidentLayer(CacheLayerMixin):
    """Keys and values of one layer: the context's, and a buffer for new tokens."""

    is_compileable = False
    is_sliding = False

    def __init__(self, key: Tensor, value: Tensor, room: int, count: Tensor) -> None:
        """count: (1,) int64, tokens in the buffer before the current step; shared by all layers."""
        super().__init__()
        self.context = key, value
        batch, heads, _, dim = key.shape
        self.tail = tuple(part.new_zeros(batch, heads, room, part.shape[3]) for part in (key, value))
        self.count, self.room, self.is_initialized = count, room, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: made whole."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store one new token; hands out this layer in place of tensors."""
        for buffer, new in zip(self.tail, (key_states, value_states), strict=True):
            buffer.index_copy_(2, self.count, new)
        return self, self

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """Attention of query (batch, q_heads, 1, dim) over everything, in its dtype."""
        seen = torch.arange(self.room, device=query.device) <= self.count
        near = attend(query, *self.tail, scale=scale, mask=seen[None, None, None])
        return merge([attend(query, *self.context, scale=scale), near]).out.to(query.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.context[0].shape[2] + self.room, 0

    def get_seq_length(self) -> int:
        return self.context[0].shape[2]

    def get_max_length(self) -> int:
        return self.context[0].shape[2] + self.room


class ResidentCache(Cache):
    """A context on the device, with room for new tokens."""

    def __init__(self, source: Source, spans: Sequence[Span], room: int) -> None:
        """Take the spans of `source`."""
        self._start, self._count = source.tokens, torch.zeros(1, dtype=torch.long, device=source.model.device)
        layers: list[Any] = []
        for number in range(source.num_layers):
            key, value = source.block(number, 0, 1)
            shape = (*key.shape[:2], tokens_of(spans), key.shape[3])
            whole = key.new_empty(shape), value.new_empty(shape)
            filled = 0
            for start, stop in blocks(spans):
                for buffer, part in zip(whole, source.block(number, start, stop), strict=True):
                    buffer[:, :, filled : filled + stop - start] = part
                filled += stop - start
            layers.append(ResidentLayer(*whole, room, self._count))
        super().__init__(layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """See `ResidentLayer.update`."""
        layer: Any = self.layers[layer_idx]
        found: tuple[Any, Any] = layer.update(key_states, value_states)
        return found

    def rewind(self, position: int) -> None:
        """The next token is number `position` of the sequence."""
        self._count.fill_(position - self._start)

    def step_done(self) -> None:
        """Count the token that all layers have stored."""
        self._count.add_(1)


def _attention(
    module: Any, query: Tensor, key: Any, value: Any, mask: Any, scaling: float | None = None, **rest: Any
) -> Any:
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return key.attend(query, scale).transpose(1, 2), None


@contextmanager
def resident_attention(model: Any) -> Iterator[None]:
    """`model` attends through a ResidentCache for the duration."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *given, **more: None)
    before = model.config._attn_implementation
    set_attention(model, NAME)
    hook = model.register_forward_hook(_counted, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        set_attention(model, before)


def _counted(module: Any, args: Any, kwargs: Any, out: Any) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, ResidentCache):
        cache.step_done()
