"""Keys and values of one layer and one sequence on its device, in a buffer that grows to the right."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenBuffer:
    """Layout (1, kv_heads, tokens, dim).  `truncate` forgets the newest tokens without touching the others."""

    def __init__(self) -> None:
        self.length = 0
        self._key, self._value = torch.empty(1, 0, 0, 0), torch.empty(1, 0, 0, 0)

    @property
    def key(self) -> Tensor:
        """View of all keys, (1, kv_heads, length, head_dim)."""
        return self._key[:, :, : self.length]

    @property
    def value(self) -> Tensor:
        """View of all values, (1, kv_heads, length, value_dim)."""
        return self._value[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes reserved on the device."""
        return self._key.nbytes + self._value.nbytes

    def append(self, key: Tensor, value: Tensor, room: int = 0) -> None:
        """Add tokens (1, kv_heads, new, dim).  room: how many more are expected soon; memory grows in steps."""
        end = self.length + key.shape[2]
        held = self._key.shape[2]
        if end > held:
            capacity = max(end + room, held + held // 8) + 256
            self._key = self._grown(self._key, key, capacity)
            self._value = self._grown(self._value, value, capacity)
        self._key[:, :, self.length : end] = key
        self._value[:, :, self.length : end] = value
        self.length = end

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        assert 0 <= length <= self.length, (length, self.length)
        self.length = length

    def _grown(self, old: Tensor, like: Tensor, capacity: int) -> Tensor:
        new = torch.empty(1, like.shape[1], capacity, like.shape[3], dtype=like.dtype, device=like.device)
        if self.length:
            new[:, :, : self.length] = old[:, :, : self.length]
        return new


def pick(tokens: Tensor, ids: Tensor) -> Tensor:
    """tokens (1, kv_heads, n, dim) at ids (heads, k) int64 -> (1, heads, k, dim); heads: a multiple of kv_heads."""
    group = ids.shape[0] // tokens.shape[1]
    head = torch.arange(ids.shape[0], device=ids.device) // group
    return tokens[0][head[:, None], ids][None]
