"""Exact attention of new tokens over one layer: prefill, and turns that are appended exactly.

A pass holds one layer's new keys on the device. Chunk by chunk, the queries attend to the past (all visible, see
`attention/prior_kv.py`) and to the new keys up to their own (causal); the two parts merge by log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_attn.attention.prior_kv import PriorKV
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial, empty_partial, merge
from retrieval_attn.model.padding import join


class ExactPass:
    """New tokens of one layer attending exactly to the layer's past and to themselves, chunk by chunk."""

    def __init__(self, total: int, past: PriorKV) -> None:
        self.total = total
        self.filled = 0
        self.valid: Tensor | None = None  # (batch, filled) CPU bool, None = all real
        self.past = past
        self._new: tuple[Tensor, Tensor] | None = None

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the pass, (batch, kv_heads, total, dim). Raises CacheMismatchError before the first."""
        if self._new is None:
            raise CacheMismatchError(f"A pass announced {self.total} tokens and brought none.")
        return self._new

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, scale: float, softcap: float | None
    ) -> Partial:
        """Attend one chunk; key and value are the chunk's own, valid (batch, chunk) its real tokens."""
        start = self.filled
        self.take(key, value, valid)
        return self.answer(query, start, scale, softcap)

    def take(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Store one chunk; see `step`."""
        batch, count = key.shape[0], key.shape[2]
        start = self.filled
        self._store(key, value, start)
        self.valid = join(self.valid, start, valid, count, batch)
        self.filled += count

    def answer(self, query: Tensor, start: int, scale: float, softcap: float | None) -> Partial:
        """Attend with the queries of the newest chunk, which began at token `start` of the pass and is stored."""
        key, value = (tensor[:, :, : self.filled] for tensor in self.new)
        own = self._own(query, key, value, start, scale, softcap)
        if self.past.empty:
            return own
        past = self.past.attend(query, value.shape[3], scale, softcap, last=self.filled == self.total)
        if self.valid is not None:  # a query that is no token sees nothing
            here = self.valid[:, None, start : self.filled].to(query.device)
            past = Partial(past.out.where(here[..., None], 0.0), past.lse.where(here, -torch.inf))
        return merge([past, own])

    def _own(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float, softcap: float | None
    ) -> Partial:
        """A chunk's queries over the pass's keys up to their own (batch, kv_heads, filled, dim)."""
        if self.valid is None:
            return attend(query, key, value, scale=scale, causal=True, softcap=softcap)
        whole = empty_partial(query, value.shape[3])
        for row in range(len(query)):
            here, real = self._real(row, start, self.filled), self._real(row, 0, self.filled)
            one = slice(row, row + 1)
            own = (key[one][:, :, real], value[one][:, :, real])
            part = attend(query[one][:, :, here], *own, scale=scale, causal=True, softcap=softcap)
            whole.out[one, :, here] = part.out
            whole.lse[one, :, here] = part.lse
        return whole

    def keys_of(self, row: int) -> Tensor:
        """All real keys of a row, past and new: (kv_heads, tokens, head_dim) on the device. May be a view."""
        return self._of(row, 0)

    def values_of(self, row: int) -> Tensor:
        """The same of values."""
        return self._of(row, 1)

    def new_of(self, row: int, which: int) -> Tensor:
        """The real new keys (which 0) or values (1) of a row (kv_heads, tokens, dim)."""
        return self.new[which][row][:, self._real(row, 0, self.filled)]

    def _of(self, row: int, which: int) -> Tensor:
        new = self.new_of(row, which)
        past = self.past.rows_of(row, which)
        return new if past is None else torch.cat([past.to(new.dtype), new], dim=1)

    def first_of(self, row: int, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` real new tokens of a row: keys and values (kv_heads, count, dim)."""
        key, value = self.new
        if self.valid is None:
            return key[row, :, :count], value[row, :, :count]
        first = self.valid[row].nonzero().squeeze(1)[:count].to(key.device)
        return key[row][:, first], value[row][:, first]

    def mark(self) -> tuple[int, Tensor | None]:
        """Return the state that `restore` needs to undo later chunks."""
        return self.filled, self.valid

    def restore(self, mark: tuple[int, Tensor | None]) -> None:
        """Restore the state of `mark`; the next chunk overwrites the rows after it."""
        self.filled, self.valid = mark

    def _store(self, key: Tensor, value: Tensor, start: int) -> None:
        count = key.shape[2]
        if start == 0 and count == self.total:
            self._new = key, value
            return
        if start + count > self.total:
            raise CacheMismatchError(f"A pass announced {self.total} tokens and brought {start + count}.")
        if self._new is None:
            shapes = ((*tensor.shape[:2], self.total, tensor.shape[3]) for tensor in (key, value))
            self._new = key.new_empty(next(shapes)), value.new_empty(next(shapes))
        for held, tensor in zip(self._new, (key, value), strict=True):
            held[:, :, start : start + count] = tensor

    def _real(self, row: int, start: int, stop: int) -> Tensor | slice:
        """Index of a row's real tokens among new columns [start, stop), relative to `start`."""
        if self.valid is None:
            return slice(None)
        return self.valid[row, start:stop].nonzero().squeeze(1).to(self.new[0].device)
