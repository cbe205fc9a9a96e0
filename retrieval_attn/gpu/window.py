"""The static part of a sequence on the device: attention sinks and the recent window (section 3.3).

One buffer per layer, `[sinks | tail]` along the token axis, batched over the rows of a cache. The tail
grows to the right; when it is full the owner moves its oldest tokens to the host and calls `drop_oldest`.
A per-row validity mask exists only when some row is padded; without padding no mask is ever built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu.flash import attend
from retrieval_attn.gpu.merge import Partial


class WindowCache:
    """Sink and tail keys and values of one layer on one device.

    Layout (batch, kv_heads, tokens, dim) in the model's dtype. `valid` is (batch, tokens) bool or None when
    every token of every row is real. Memory is constant: sinks + tail capacity, whatever the context length.
    """

    def __init__(self, key: Tensor, value: Tensor, capacity: int) -> None:
        """Empty cache shaped after `key` (batch, kv_heads, *, head_dim) and `value`, for `capacity` tail tokens."""
        self.sink_len = 0
        self.tail_len = 0
        self.valid: Tensor | None = None
        self._capacity = capacity
        self._key = self._allocate(key, capacity)
        self._value = self._allocate(value, capacity)

    @staticmethod
    def _allocate(like: Tensor, tokens: int) -> Tensor:
        shape = (like.shape[0], like.shape[1], tokens, like.shape[3])
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    @property
    def batch(self) -> int:
        return self._key.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory reserved."""
        return self._key.nbytes + self._value.nbytes

    @property
    def room(self) -> int:
        """Tokens that can still be appended."""
        return self._capacity - self.tail_len

    @property
    def _end(self) -> int:
        return self.sink_len + self.tail_len

    def tail(self) -> tuple[Tensor, Tensor]:
        """Views of the tail's keys and values, (batch, kv_heads, tail_len, dim)."""
        span = slice(self.sink_len, self._end)
        return self._key[:, :, span], self._value[:, :, span]

    def append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Append tokens to the tail. valid: (batch, tokens) bool or None for all real."""
        count = key.shape[2]
        if count > self.room:
            self._grow(count - self.room)
        span = slice(self._end, self._end + count)
        self._key[:, :, span] = key
        self._value[:, :, span] = value
        if valid is not None or self.valid is not None:
            new = valid if valid is not None else self._all_valid(count)
            old = self.valid if self.valid is not None else self._all_valid(self._end)
            self.valid = torch.cat([old, new], dim=1)
        self.tail_len += count

    def drop_oldest(self, count: int) -> None:
        """Forget the `count` oldest tokens of the tail (they are on the host by now)."""
        if count < 0 or count > self.tail_len:
            raise ShapeError(f"cannot drop {count} of {self.tail_len} tail tokens.")
        keep = slice(self.sink_len + count, self._end)
        target = slice(self.sink_len, self._end - count)
        # clone: source and target overlap
        self._key[:, :, target] = self._key[:, :, keep].clone()
        self._value[:, :, target] = self._value[:, :, keep].clone()
        if self.valid is not None:
            self.valid = torch.cat([self.valid[:, : self.sink_len], self.valid[:, keep]], dim=1)
        self.tail_len -= count

    def truncate(self, count: int) -> None:
        """Forget the `count` newest tokens of the tail."""
        if count < 0 or count > self.tail_len:
            raise ShapeError(f"cannot remove {count} of {self.tail_len} tail tokens.")
        self.tail_len -= count
        if self.valid is not None:
            self.valid = self.valid[:, : self._end]

    def set_sinks(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Replace the sinks by (batch, kv_heads, sinks, dim) tensors; the tail stays."""
        tail_key, tail_value = (part.clone() for part in self.tail())
        tail_valid = None if self.valid is None else self.valid[:, self.sink_len :]
        self.sink_len = key.shape[2]
        self._key = self._allocate(key, self.sink_len + self._capacity)
        self._value = self._allocate(value, self.sink_len + self._capacity)
        self._key[:, :, : self.sink_len] = key
        self._value[:, :, : self.sink_len] = value
        span = slice(self.sink_len, self._end)
        self._key[:, :, span] = tail_key
        self._value[:, :, span] = tail_value
        if valid is None and tail_valid is None:
            self.valid = None
            return
        sink_valid = valid if valid is not None else self._all_valid(self.sink_len)
        rest = tail_valid if tail_valid is not None else self._all_valid(self.tail_len)
        self.valid = torch.cat([sink_valid, rest], dim=1)

    def select(self, rows: Tensor) -> None:
        """Keep `rows` (int64 indices, repeats allowed) of the batch, in that order."""
        rows = rows.to(self._key.device)
        self._key = self._key.index_select(0, rows)
        self._value = self._value.index_select(0, rows)
        if self.valid is not None:
            self.valid = self.valid.index_select(0, rows)

    def attend(self, query: Tensor, *, scale: float, softcap: float | None, reach: int | None = None) -> Partial:
        """Attention over sinks and tail. The last query.shape[2] tail tokens are the queries' own, causally.

        query: (batch, q_heads, queries, head_dim). reach: a query sees only keys less than `reach` tokens
        behind it (sliding-window layers, which have no sinks). No valid key for a query: out 0, lse -inf.
        """
        key, value = self._key[:, :, : self._end], self._value[:, :, : self._end]
        mask = self._mask(query.shape[2], reach)
        return attend(query, key, value, scale=scale, mask=mask, softcap=softcap)

    def _mask(self, queries: int, reach: int | None) -> Tensor | None:
        """(1 or batch, 1, queries, tokens) bool, or None when every query sees every token."""
        mask: Tensor | None = None
        if queries > 1 or (reach is not None and self._end > reach):
            # Token t is visible to query i when t <= position of i; sinks lie before every query.
            position = torch.arange(self._end - queries, self._end, device=self._key.device)[:, None]
            token = torch.arange(self._end, device=self._key.device)
            mask = token <= position
            if reach is not None:
                mask = mask & (token > position - reach)
            mask = mask[None, None]
        if self.valid is not None:
            row = self.valid[:, None, None, :]
            mask = row if mask is None else mask & row
        return mask

    def clone(self) -> WindowCache:
        """An independent copy; used by forks."""
        other = object.__new__(WindowCache)
        other.__dict__.update(self.__dict__)
        other._key = self._key.clone()
        other._value = self._value.clone()
        return other

    def _all_valid(self, tokens: int) -> Tensor:
        return torch.ones(self.batch, tokens, dtype=torch.bool, device=self._key.device)

    def _grow(self, tokens: int) -> None:
        extra_key = self._allocate(self._key, tokens)
        self._key = torch.cat([self._key, extra_key], dim=2)
        self._value = torch.cat([self._value, self._allocate(self._value, tokens)], dim=2)
        self._capacity += tokens
