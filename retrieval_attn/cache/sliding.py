"""Sliding-window layers (Gemma-3, Mistral v0.1, GPT-OSS): exact on the device, nothing on the host.

Their memory does not grow with the context, so there is nothing to retrieve; they exist here because every
layer of a model must speak the same handle protocol and survive crops, forks and layer-major prefill.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_attn.cache.layer import CacheLayer, LayerStats
from retrieval_attn.config import Config
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.model.padding import join

# Tokens kept beyond the window so that a crop of up to this many (rejected speculative tokens) is exact.
CROP_ROOM = 256


class SlidingLayer(CacheLayer):
    """Keys and values of the last `sliding_window` tokens (and CROP_ROOM more) on the device."""

    is_sliding = True

    def __init__(self, config: Config, sliding_window: int) -> None:
        super().__init__(config)
        self.sliding_window = sliding_window
        self.record_past = False

    def activate_past_recording(self) -> None:
        """From now on forget nothing until the next crop (transformers calls this for assisted decoding)."""
        self.record_past = True

    def reset(self) -> None:
        super().reset()
        self.record_past = False

    def begin_pass(self, total: int) -> None:
        """Chunks need no announcement: each sees its window in what is kept."""

    def end_pass(self) -> None:
        """See `begin_pass`."""

    def mark(self) -> object:
        if self.record_past:
            return None
        kept = None
        if self.window is not None:
            key, value = self.window.tail()
            kept = key.clone(), value.clone(), self.window.valid
        return self.columns, self.valid, kept

    def restore(self, mark: object) -> bool:
        if not isinstance(mark, tuple):
            return False
        self.columns, self.valid, kept = mark
        self._pending = None
        if kept is None:
            self.window = None
        elif self.window is not None:
            self.window.truncate(self.window.tail_len)
            self.window.append(*kept)
        return True

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float, softcap: float | None
    ) -> Partial:
        count = key.shape[2]
        if self.window is None:
            self.window = WindowCache(key, value, self.keep + count)
        valid = self._new_columns(spec, count, self.valid)
        self.window.append(key, value, None if valid is None else valid.to(key.device))
        self.valid = join(self.valid, self.columns, valid, count, key.shape[0])
        self.columns += count
        reach = min(self.sliding_window, spec.window or self.sliding_window)
        if count <= 2 * reach:
            part = self.window.attend(query, scale=scale, softcap=softcap, reach=reach)
        else:
            part = self._attend_band(query, reach, scale, softcap)
        if not self.record_past:
            self.spill()
        return part

    def spill(self) -> None:
        """Forget what no later query sees, but for what crops may need."""
        assert self.window is not None
        self.window.drop_oldest(max(0, self.window.tail_len - self.keep))

    def _attend_band(self, query: Tensor, reach: int, scale: float, softcap: float | None) -> Partial:
        """A long chunk in blocks of `reach` queries, each against the at most 2 * reach keys it can see."""
        assert self.window is not None
        key, value = self.window.tail()
        count = query.shape[2]
        first = key.shape[2] - count  # tail position of query 0
        parts = []
        for start in range(0, count, reach):
            stop = min(start + reach, count)
            low = max(0, first + start - reach + 1)
            high = first + stop
            position = torch.arange(first + start, high, device=key.device)[:, None]
            token = torch.arange(low, high, device=key.device)
            mask = ((token <= position) & (token > position - reach))[None, None]
            if self.window.valid is not None:
                mask = mask & self.window.valid[:, None, None, low:high]
            span = slice(low, high)
            rows = query[:, :, start:stop]
            parts.append(attend(rows, key[:, :, span], value[:, :, span], scale=scale, mask=mask, softcap=softcap))
        return Partial(torch.cat([part.out for part in parts], dim=2), torch.cat([part.lse for part in parts], dim=2))

    @property
    def keep(self) -> int:
        """Tokens that are kept."""
        return self.sliding_window - 1 + CROP_ROOM

    @property
    def host_nbytes(self) -> int:
        """Nothing of a sliding layer is on the host."""
        return 0

    def _select(self, rows: Tensor) -> None:
        if self.window is None:
            return
        self.window.select(rows)
        if self.valid is not None:
            self.valid = self.valid[rows.cpu()]

    def fork(self) -> SlidingLayer:
        """An independent copy (constant size)."""
        self.settle()
        other = SlidingLayer(self.config, self.sliding_window)
        other.__dict__.update(self.__dict__)
        other.graph = None
        other.stats = LayerStats()
        other.window = None if self.window is None else self.window.clone()
        return other

    def _crop(self, count: int) -> None:
        assert self.window is not None
        left = self.window.tail_len - count
        needed = min(self.columns - count, self.sliding_window - 1)
        if left < needed:
            raise CacheMismatchError(
                f"Removing {count} tokens needs {needed} older ones of a sliding layer, {max(left, 0)} are kept: "
                f"at most {CROP_ROOM} tokens can be removed. Fork the cache before generating, or call "
                "cache.activate_past_recording() before the tokens you may remove."
            )
        self.window.truncate(count)
        self.columns -= count
        if self.valid is not None:
            self.valid = self.valid[:, : self.columns]
        self.spill()
