"""Attention of a step's queries to named keys that lie in page-locked host memory: the device reads them over the bus.

What the host does for named keys (`cpu/step`), for rows in memory that the device can address: each query attends to
all keys that `CodeSearch` named for it. Where keys lie is read from a table in device memory, so one graph serves
whatever context is bound. Two kernels (`reach_triton.py`): one gathers and attends in parts, one merges the parts. The
host has nothing to do for these keys, so what bounds its part, the latency of its loads, is hidden by thousands of
loads under way.

Where Triton does not run, plain PyTorch does the same: what the kernels are tested against. Arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.gpu.attention.scoring import Scoring
from retrieval_attn.gpu.codes.named import STEP_BYTES, numbers_of
from retrieval_attn.gpu.codes.table import TableWriter
from retrieval_attn.gpu.decode.kernels import kernels_for

TABLE_WORDS = 4
"""Words of a row of the table: where keys and values begin, how many ids there are, how many are named at least.

Where something begins is counted from the table itself, in the bytes that `RowShape.unit` says: see `codes/search.py`.
"""
WORD = 4
"""Bytes that rows are read by, at least."""
WIDE = 16
"""Bytes that they are read by where all rows begin on multiples of it."""


class RowShape(NamedTuple):
    """Rows as they are stored: their numbers' dtype, numbers of a key and of a value.

    int8: each row ends with STEP_BYTES more, the float32 size of a step.
    """

    dtype: torch.dtype
    head_dim: int
    value_dim: int

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a stored key and of a stored value."""
        extra = STEP_BYTES if self.dtype == torch.int8 else 0
        return self.head_dim + extra, self.value_dim + extra

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a stored key and of a stored value."""
        return self.widths[0] * self.dtype.itemsize, self.widths[1] * self.dtype.itemsize

    @property
    def unit(self) -> int:
        """Bytes on whose multiples rows must begin; 0: there are rows that no kernel reads."""
        if any(dim * self.dtype.itemsize % WORD for dim in self[1:]):
            return 0
        return WORD if any(size % WIDE for size in self.row_bytes) else WIDE


class ReachEntry(NamedTuple):
    """Keys and values (tokens, width) of a key-value head, as stored, contiguous, where the device can read them.

    Token i has id i. ids: how many there are. least: how many of them a search names; it names fewer only of fewer, or
    for a query whose scores are not finite.
    """

    keys: Tensor
    values: Tensor
    ids: int
    least: int


class KeyReach:
    """One layer's attention to named keys: `bind` says where they lie, `run` is recorded, or called outside a capture.

    A query for which fewer than `least` keys are named gets exact attention to all of its head's: scores failed.
    """

    def __init__(self, entries: int, shape: RowShape, device: torch.device) -> None:
        """entries: key-value heads of all rows. Raises BackendError for rows that kernels cannot read by words."""
        if not shape.unit:
            raise BackendError(
                f"rows of {shape.head_dim} and {shape.value_dim} numbers in {shape.dtype} are no multiples of {WORD} "
                "bytes; the host must attend to such keys"
            )
        self.shape = shape
        self.entries: list[ReachEntry | None] = [None] * entries
        self.table = torch.zeros(entries, TABLE_WORDS, dtype=torch.int64, device=device)
        self._writer = TableWriter(self.table)

    def bind(self, entries: Sequence[ReachEntry | None]) -> None:
        """Keys and values of key-value head h of row b, at b * kv_heads + h; None: nothing is named for its queries.

        Raises BackendError for rows of another shape, or that begin elsewhere than kernels read.
        """
        rows = [[0] * TABLE_WORDS if entry is None else self._row(entry) for entry in entries]
        self.entries = list(entries)
        self._writer.write(rows)

    def _row(self, entry: ReachEntry) -> list[int]:
        tokens, unit = len(entry.keys), self.shape.unit
        for array, width in zip(entry[:2], self.shape.widths, strict=True):
            if array.dtype != self.shape.dtype or array.shape != (tokens, width) or not array.is_contiguous():
                raise BackendError(
                    f"rows must be contiguous, {tokens} of {width} numbers in {self.shape.dtype}, got "
                    f"{tuple(array.shape)} in {array.dtype}"
                )
        if not 0 <= entry.ids <= tokens:
            raise BackendError(f"there are {entry.ids} ids, but {tokens} rows")
        begins = [array.data_ptr() - self.table.data_ptr() for array in entry[:2]]
        if any(begin % unit for begin in begins):
            raise BackendError(f"keys and values must begin on multiples of {unit} bytes")
        return [*(begin // unit for begin in begins), entry.ids, entry.least]

    def forget(self) -> None:
        """Let keys and values go; `bind` names others before the next `run`."""
        self.entries = [None] * len(self.entries)

    def run(self, query: Tensor, ids: Tensor, scoring: Scoring, opaque: Callable[..., None]) -> Partial:
        """Attend query (batch, q_heads, 1, head_dim) to what ids (batch * q_heads, room) int32 name; -1: no key.

        Row b * q_heads + h of ids is query head h's of row b, as of the results, float32: out (batch * q_heads,
        value_dim) and lse (batch * q_heads,); 0 and -inf where no key is named. An id is named once at most. opaque:
        runs a function that finds its arguments anew at every replay.
        """
        count = query.shape[0] * query.shape[1]
        out = torch.empty(count, self.shape.value_dim, dtype=torch.float32, device=query.device)
        into = Partial(out, torch.empty(count, dtype=torch.float32, device=query.device))
        kernels = kernels_for(query, "codes.reach_triton")
        if kernels is not None:
            kernels.reach(self, query, ids, scoring, into)
        else:
            opaque(self._run_plainly, query, ids, scoring, into)
        return into

    def _run_plainly(self, query: Tensor, ids: Tensor, scoring: Scoring, into: Partial) -> None:
        into.out.zero_()
        into.lse.fill_(-torch.inf)
        group = len(ids) // len(self.entries)
        flat = query.reshape(len(ids), -1).float()
        for number, own in enumerate(ids):
            entry = self.entries[number // group]
            if entry is None or not entry.ids:
                continue
            named = own[(own >= 0) & (own < entry.ids)].long().cpu()
            if own[min(entry.least, entry.ids) - 1] < 0:
                named = torch.arange(entry.ids)
            if len(named):
                keys, values = (numbers_of(rows[named]).to(query.device) for rows in entry[:2])
                scores = keys @ flat[number] * scoring.scale
                if scoring.softcap is not None:
                    scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                into.lse[number] = scores.logsumexp(0)
                into.out[number] = scores.softmax(0) @ values
