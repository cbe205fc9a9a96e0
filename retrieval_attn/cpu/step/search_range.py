"""What a step searches: ranges of tokens in host memory, and the indexes over them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ShapeError
from retrieval_attn.index.formats import Format
from retrieval_attn.index.task.search import SearchedInSteps


class SearchRange(NamedTuple):
    """Tokens [low, high) of arrays of one sequence, which are its tokens first + low, ... .

    keys (kv_heads, tokens, head_dim) and values (kv_heads, tokens, value_dim) as stored in one format, C-contiguous.
    indexes: one per head, whose first keys are those of token index_first <= low, covering all tokens; or None: the
    tokens are scanned exactly. version: another number after the indexes have changed. members: the cluster of each
    token (kv_heads, tokens) uint8, where what is not attended to is estimated.
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    low: int
    high: int
    first: int
    indexes: tuple[SearchedInSteps, ...] | None = None
    index_first: int = 0
    version: int = 0
    members: npt.NDArray[np.uint8] | None = None

    @property
    def most(self) -> int:
        """Largest `high` that the arrays and indexes allow."""
        covered = self.keys.shape[1] if not self.indexes else self.index_first + len(self.indexes[-1])
        return min(int(self.keys.shape[1]), covered)

    def check(self, fmt: Format, dims: tuple[int, int, int]) -> None:
        """Raise ShapeError unless arrays and ranges fit `fmt` and dims (heads, head_dim, value_dim)."""
        heads, dim, value_dim = dims
        keys, values = self.keys, self.values
        tokens = keys.shape[1]
        if keys.shape != (heads, tokens, fmt.width(dim)) or values.shape != (heads, tokens, fmt.width(value_dim)):
            raise ShapeError(
                f"pieces must be {heads} heads of {dim} and {value_dim}, got {keys.shape} and {values.shape}"
            )
        for array in (keys, values):
            if array.dtype != fmt.dtype or not array.flags.c_contiguous or not array.flags.aligned:
                raise ShapeError(
                    f"pieces must be C-contiguous {fmt.dtype}, got {array.dtype} of strides {array.strides}"
                )
        members = self.members
        if members is not None and (members.shape != (heads, tokens) or not members.flags.c_contiguous):
            raise ShapeError(
                f"clusters of ({heads}, {tokens}) keys must be so many and contiguous, got {members.shape}"
            )
        if self.indexes is not None and (len(self.indexes) != heads or not 0 <= self.index_first <= self.low):
            raise ShapeError(f"a piece of {heads} heads needs as many indexes, from token {self.low} on or earlier")
        if not 0 <= self.low <= self.high <= self.most or self.first + tokens >= 2**32 - 1 or self.first + self.low < 0:
            raise ShapeError(f"tokens [{self.low}, {self.high}) must lie in 0 .. {tokens}, all ids below 2**32 - 1")
