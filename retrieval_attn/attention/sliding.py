"""Sliding-window layers (Gemma-3, Mistral v0.1, GPT-OSS): exact on the device, nothing on the host.

Their memory does not grow with the context, so there is nothing to retrieve; they exist here because every
layer of a model must speak the same handle protocol and survive crops, forks and layer-major prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.attention.layer import CacheLayer
from retrieval_attn.attention.sequence import Batch, Forgotten
from retrieval_attn.config import Config
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.offload.traffic import LayerStats

CROP_ROOM = 256
"""Tokens kept beyond the window, so that a crop of up to this many (rejected speculative tokens) is exact."""


class SlidingLayer(CacheLayer):
    """Keys and values of the last `sliding_window` tokens (and CROP_ROOM more) on the device.

    Distances are counted in columns. With `Batch.rows_alone` the tokens of a padded row are kept next to each other,
    padding in front.
    """

    is_sliding = True

    def __init__(self, config: Config, sliding_window: int, batch: Batch | None = None) -> None:
        super().__init__(config, batch)
        self.sliding_window = sliding_window
        self.record_past = False
        self.unseen = 0
        """First columns that the window need not have: forgotten, or gone when others were forgotten."""
        self._window: WindowCache | None = None

    @property
    def window(self) -> WindowCache | None:
        return self._window

    @property
    def keep(self) -> int:
        """Tokens that are kept."""
        return self.sliding_window - 1 + CROP_ROOM

    def activate_past_recording(self) -> None:
        """From now on forget nothing until the next crop (transformers calls this for assisted decoding)."""
        self.record_past = True

    def reset(self) -> None:
        super().reset()
        self._window = None
        self.record_past, self.unseen = False, 0

    def mark(self) -> object:
        if self.record_past:
            return None
        if self._window is None:
            return _SlidingMark(self.columns, None, None)
        key, value = self._window.tail()
        return _SlidingMark(self.columns, (key.clone(), value.clone()), self._window.valid)

    def restore(self, mark: object) -> bool:
        if not isinstance(mark, _SlidingMark):
            return False
        self._note_stored(mark.columns - self.columns)
        self._pending = None
        if mark.kept is None:
            self._window = None
        elif self._window is not None:
            self._window.truncate(self._window.tail_len)
            self._window.append(*mark.kept, mark.valid)
        return True

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float, softcap: float | None
    ) -> Partial:
        new = key.shape[2]
        if self._window is None:
            self._window = WindowCache(key, value, self.keep + new)
        window = self._window
        valid = self.batch.note_padding(spec.padding, self.columns, new)
        window.append(key, value, None if valid is None else valid.to(key.device))
        padded = self.batch.rows_alone and valid is not None and not bool(valid.all())
        padded_left = padded and bool((valid[:, 1:] >= valid[:, :-1]).all())  # type: ignore[index]
        if padded_left and window.tail_len > new:  # new tokens keep their columns, earlier ones move up to them
            window.align_right()
        self._note_stored(new)
        reach = min(self.sliding_window, spec.window or self.sliding_window)
        if new <= 2 * reach:
            part = window.attend(query, scale=scale, softcap=softcap, reach=reach)
        else:
            part = self._attend_band(window, query, reach, scale, softcap)
        if padded and not padded_left:
            window.align_right()
        if not self.record_past:
            self.spill()
        return part

    def take_window(self, key: Tensor, value: Tensor, unseen: int = 0) -> None:
        """Begin with the tokens of a saved window, (1, kv_heads, tokens, dim). unseen: as it was."""
        self.unseen = unseen
        self._window = WindowCache(key, value, max(self.keep, key.shape[2]) + 1)
        self._window.append(key, value, None)

    def end_pass(self, between: Callable[[], object] = lambda: None) -> None:
        super().end_pass(between)
        if not self.record_past:
            self.spill()

    def spill(self) -> None:
        """Evict tokens that no query or crop needs; release the slots of a prompt after its last chunk."""
        if self._window is None:
            return
        self._window.drop_oldest(max(0, self._window.tail_len - self.keep))
        if self._announced is None:
            self._window.shrink(self.keep + CROP_ROOM)

    def _attend_band(
        self, window: WindowCache, query: Tensor, reach: int, scale: float, softcap: float | None
    ) -> Partial:
        """A long chunk in blocks of `reach` queries, each against the at most 2 * reach keys it can see."""
        key, value = window.tail()
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
            if window.valid is not None:
                mask = mask & window.valid[:, None, None, low:high]
            span = slice(low, high)
            rows = query[:, :, start:stop]
            parts.append(attend(rows, key[:, :, span], value[:, :, span], scale=scale, mask=mask, softcap=softcap))
        return Partial(torch.cat([part.out for part in parts], dim=2), torch.cat([part.lse for part in parts], dim=2))

    def forget(self, span: Forgotten, turn: Callable[[Tensor, int], Tensor]) -> None:
        """Keep what the window has of the tokens before span.start, and those from span.stop on.

        turn(keys (batch, kv_heads, n, head_dim), first): the former, of the tokens from `first` on, are to stand
        directly before span.stop. The batch counts `span` as forgotten from then on. No row is padded.
        """
        window = self._window
        if window is None:
            return
        # what an earlier call left of the first tokens lies before those that it left behind what was forgotten
        earlier = self.batch.forgotten
        last = min(window.tail_len, self.columns - earlier.stop)
        first = earlier.start - (window.tail_len - last) if earlier.tokens else self.columns - last
        kept, after = max(0, span.start - first), min(self.columns - span.stop, last)
        key, value = (tensor.clone() for tensor in window.tail())
        window.truncate(window.tail_len)
        if kept:
            window.append(turn(key[:, :, :kept], first), value[:, :, :kept], None)
        if after:
            window.append(key[:, :, -after:], value[:, :, -after:], None)
        short = window.tail_len < self.sliding_window - 1
        self.unseen = self.columns - window.tail_len if short else span.tokens

    def select(self, rows: Items[int]) -> None:
        if self._window is not None:
            self._window.select(torch.tensor(list(rows), dtype=torch.int64))

    def fork(self, batch: Batch, *, copied: bool = True) -> SlidingLayer:
        """An independent copy (constant size)."""
        other = SlidingLayer(self.config, self.sliding_window)
        other.__dict__.update(self.__dict__)
        other.graph = None
        other.batch, other.stats = batch, LayerStats()
        other._window = self._window.clone() if copied and self._window is not None else self._window
        return other

    def drop_newest(self, count: int) -> None:
        if self._window is None or not count:
            return
        if count == self.columns:
            self._window, self.unseen = None, 0
            return
        left = self._window.tail_len - count
        needed = min(max(0, self.columns - count - self.unseen), self.sliding_window - 1)
        if left < needed:
            raise CacheMismatchError(
                f"Removing {count} tokens needs {needed} older ones of a sliding layer, {max(left, 0)} are kept: "
                f"at most {CROP_ROOM} tokens can be removed. Fork the cache before generating, or call "
                "cache.activate_past_recording() before the tokens you may remove."
            )
        padding = self.batch.padding(self.columns - count, self.columns) if self.batch.rows_alone else None
        if padding is None or bool(padding.all()):
            self._window.truncate(count)
        else:
            self._window.drop_newest_of(padding.sum(1).tolist(), count)
        self.spill()


class _SlidingMark(NamedTuple):
    """Columns stored, and the tail's keys and values with their padding; None before the first tokens."""

    columns: int
    kept: tuple[Tensor, Tensor] | None
    valid: Tensor | None
