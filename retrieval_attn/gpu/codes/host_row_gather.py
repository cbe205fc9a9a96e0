"""Attention of a step's queries to named keys that lie in host memory: the device reads them over the bus, in place.

What the host does for named keys (`cpu/step`), for int8 rows of a key and its value side by side, which one request or
two of the bus bring; their steps lie on the device. Each query attends to all keys that `CodeSearch` named for it.
Where rows lie is read from a table in device memory, so one graph serves whatever context is bound. Two kernels
(`reach_triton.py`): one gathers and attends in parts, one merges the parts. The host has nothing to do for these keys:
what bounds its part, the latency of its loads, is hidden by thousands of loads under way.

The bus bounds the device's part. For candidates whose logits are estimated from codes (`search.EstimatedLogits`) only
values are read: half the bytes.

Where Triton does not run, plain PyTorch does the same: what the kernels are tested against. Arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.codes.table import BoundEntries, SharedTables, new_table
from retrieval_attn.gpu.decode.kernels import kernels_for

TABLE_WORDS = 4
"""Words of a row of the table: where rows and steps begin, how many ids there are, how many are named at least.

Where something begins is counted from the table itself, rows in units of WIDE bytes, steps in those of STEP_BYTES.
"""
WIDE = 16
"""Bytes that rows are read by: they begin on multiples of it, and so do values within them."""
STEP_BYTES = 8
"""Of a key's step and its value's, float32."""


class RowShape(NamedTuple):
    """Numbers of a key and of a value, int8."""

    head_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.head_dim + self.value_dim

    @property
    def readable(self) -> bool:
        """Whether the kernels read such rows."""
        return self.head_dim % WIDE == self.value_dim % WIDE == 0


class GatherEntry(NamedTuple):
    """Rows (tokens, width) int8 of a key-value head where the device can read them, and steps (tokens, 2) float32 on
    it, contiguous: token i, whose id is i, has the key rows[i, :head_dim] * steps[i, 0], and behind it its value.

    ids: how many there are. least: how many of them a search names; it names fewer only of fewer, or for a query whose
    scores are not finite.
    """

    rows: Tensor
    steps: Tensor
    ids: int
    least: int


class HostRowGather(BoundEntries[GatherEntry]):
    """One layer's attention to named keys: `bind` says where they lie, `run` is recorded, or called outside a capture.

    A query for which fewer than `least` keys are named gets exact attention to all of its head's: scores failed.
    """

    def __init__(self, entries: int, shape: RowShape, device: torch.device, tables: SharedTables | None = None) -> None:
        """entries: key-value heads of all rows. tables: where its table lies, which are then uploaded before `run`;
        None: in memory of its own. Raises BackendError for rows that kernels do not read.
        """
        if not shape.readable:
            raise BackendError(
                f"int8 rows must be multiples of {WIDE} bytes, got {shape.head_dim} and {shape.value_dim} bytes; use "
                "int8_rows=False, which lets the CPU attend"
            )
        super().__init__(entries)
        self.shape = shape
        self._written: list[list[int]] = [[0] * TABLE_WORDS for _ in range(entries)]
        self.table, self._writer = new_table(entries, TABLE_WORDS, device, tables)

    def bind(self, entries: Sequence[GatherEntry | None]) -> None:
        """Rows of key-value head h of row b, at b * kv_heads + h; None: nothing is named for its queries.

        Raises BackendError for rows of another shape, or that begin elsewhere than kernels read.
        """
        for number, (entry, before) in enumerate(zip(entries, self.entries, strict=True)):
            if entry is None:
                self._written[number] = [0] * TABLE_WORDS
            elif entry is not before:  # to look at tensors takes longer than all the rest
                self._written[number] = self._row(entry)
        self.entries = list(entries)
        self._writer.write(self._written)

    def _row(self, entry: GatherEntry) -> list[int]:
        tokens, begins = len(entry.rows), []
        for array, dtype, width, unit in (
            (entry.rows, torch.int8, self.shape.width, WIDE),
            (entry.steps, torch.float32, 2, STEP_BYTES),
        ):
            if array.dtype != dtype or array.shape != (tokens, width) or not array.is_contiguous():
                raise BackendError(
                    f"rows must be a contiguous array ({tokens}, {width}) of {dtype}, got {tuple(array.shape)} of "
                    f"{array.dtype}"
                )
            offset = array.data_ptr() - self.table.data_ptr()
            if offset % unit:
                raise BackendError(
                    f"rows and steps must start at multiples of {WIDE} and {STEP_BYTES} bytes, got an offset of "
                    f"{offset} bytes"
                )
            begins.append(offset // unit)
        if not 0 <= entry.ids <= tokens:
            raise BackendError(f"ids must be at most {tokens}, the number of rows, got {entry.ids}")
        return [*begins, entry.ids, entry.least]

    def run(
        self, query: Tensor, ids: Tensor, scoring: Scoring, opaque: Callable[..., None], told: Tensor | None = None
    ) -> Partial:
        """Attend query (batch, q_heads, 1, head_dim) to what ids (batch * q_heads, room) int32 name; -1: no key.

        Row b * q_heads + h of ids is query head h's of row b, as of the results, float32: out (batch * q_heads,
        value_dim) and lse (batch * q_heads,); 0 and -inf where no key is named. An id is named once at most. opaque:
        runs a function that finds its arguments at every replay. told: `EstimatedLogits.products` of these ids; None:
        all keys are read.
        """
        count = query.shape[0] * query.shape[1]
        out = torch.empty(count, self.shape.value_dim, dtype=torch.float32, device=query.device)
        into = Partial(out, torch.empty(count, dtype=torch.float32, device=query.device))
        kernels = kernels_for(query, "codes.reach_triton")
        if kernels is not None:
            kernels.reach(self, query, ids, scoring, into, told)
        else:
            opaque(self._run_plainly, query, ids, scoring, into, told)
        return into

    def _run_plainly(self, query: Tensor, ids: Tensor, scoring: Scoring, into: Partial, told: Tensor | None) -> None:
        into.out.zero_()
        into.lse.fill_(-torch.inf)
        group = len(ids) // len(self.entries)
        flat = query.reshape(len(ids), -1).float()
        for number, own in enumerate(ids):
            entry = self.entries[number // group]
            if entry is None or not entry.ids:
                continue
            here = (own >= 0) & (own < entry.ids)
            named = own[here].long()
            products = None if told is None else told[number, here]
            if own[min(entry.least, entry.ids) - 1] < 0:
                named, products = torch.arange(entry.ids, device=own.device), None
            if len(named):
                rows = entry.rows[named.to(entry.rows.device)].to(query.device).float()
                keys, values = rows.split(list(self.shape), dim=1)
                steps = entry.steps[named]
                scores = keys @ flat[number] * steps[:, 0]
                if products is not None:
                    scores = torch.where(products == torch.inf, scores, products)
                scores = scoring.logits(scores)
                into.lse[number] = scores.logsumexp(0)
                into.out[number] = scores.softmax(0) * steps[:, 1] @ values
