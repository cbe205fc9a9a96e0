"""The sample of prompt queries that indexes train on, kept while a layer reads.

Queries come after RoPE, at their own positions; decoding asks from the end of the context on. So each sampled
query is moved there (queries left where they were cost recall), to a place of its own among
the positions where decoding will happen: all of them at one position would train positional heads for the
first few answered tokens only.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retrieval_attn.errors import UnsupportedModelError
from retrieval_attn.index.base import train_positions
from retrieval_attn.model.rope import counted_length, length_rope
from retrieval_attn.model.rotation import Rotation, RotationTables

log = logging.getLogger(__name__)

HEADS_AT_ONCE = 8
SPAN = 1024
"""Positions after the end of the context that the sample is spread over: a question and its answer."""


class TrainingQueries:
    """Queries of up to `count` of `total` new columns, for every row and query head of one layer.

    turn: what moved them, where the pass's other layers can have it, too: as long as it is referenced.
    """

    turn: RotationTables | None = None

    def __init__(self, total: int, count: int) -> None:
        self._columns, self._offsets = _drawn(total, count)
        self._drawn_by = total, count
        self._total = total
        self._length = counted_length()
        self._taken: list[Tensor] = []

    def take(self, query: Tensor, start: int) -> None:
        """Keep the sampled ones of query (batch, q_heads, new, head_dim), the columns from `start` on."""
        low, high = np.searchsorted(self._columns, (start, start + query.shape[2]))
        if low < high:
            columns, _ = _drawn_on(*self._drawn_by, query.device)
            self._taken.append(query.detach()[:, :, columns[low:high] - start])

    def mark(self) -> int:
        """Return the state that `restore` needs to undo later chunks."""
        return len(self._taken)

    def restore(self, mark: int) -> None:
        """Forget what was taken since `mark`."""
        del self._taken[mark:]

    def on_device(self, model: nn.Module | None, module: nn.Module, row: int, valid: Tensor | None) -> Tensor:
        """The sample of one row, moved to where decoding happens: (q_heads, m, head_dim) float32.

        valid: (columns,) CPU bool, real tokens of the row, or None. A model without rotary embedding, or with one
        that cannot be undone, gives its queries as they are. `take` must have seen all columns.
        """
        queries = torch.cat([piece[row] for piece in self._taken], dim=1)
        columns, offsets = _drawn_on(*self._drawn_by, queries.device)
        if valid is not None:
            real = torch.from_numpy(np.flatnonzero(valid.numpy()[self._columns])).to(queries.device)
            columns, offsets, queries = columns[real], offsets[real], queries[:, real]
        if model is None or not queries.shape[1]:
            return queries.float()
        try:
            rotation = Rotation.of(model, module)
            # rotations add: only the distance counts, so padded columns may stand for positions
            turn = self._turn(model, rotation, columns, offsets, queries.shape[2], whole=valid is None)
            checked = _checked.setdefault(model, set())
            moved = torch.empty(queries.shape, dtype=torch.float32, device=queries.device)
            # of many queries some heads at a time: moving takes several float32 copies
            heads = HEADS_AT_ONCE if queries.shape[1] > SHARED_QUERIES else len(queries)
            heads = 1 if queries.device.type == "cpu" else heads  # no launches to save
            for some, into in zip(queries.split(heads), moved.split(heads), strict=True):
                into.copy_(rotation.moved(some.float(), turn, check=type(module) not in checked))
                checked.add(type(module))
            return moved
        except UnsupportedModelError as error:
            _say_unmoved(type(module).__name__, str(error))
            return queries.float()

    def _turn(
        self, model: nn.Module, rotation: Rotation, columns: Tensor, offsets: Tensor, head_dim: int, *, whole: bool
    ) -> RotationTables:
        """whole: all of the sample is there: the pass's other layers have the same columns, and share its tables. On a
        GPU they took as long as turning the queries.
        """
        targets = self._total + offsets
        if self._length and length_rope(model) is not None:  # the longest position decides the factors: the text's last
            shift = targets.max() + 1 - self._length
            columns, targets = columns - shift, targets - shift
        if not whole or len(columns) > SHARED_QUERIES:
            return rotation.turn(columns, targets, head_dim)
        key = (*self._drawn_by, self._length, columns.device, head_dim, *rotation.kind)
        turns = _turns.setdefault(model, weakref.WeakValueDictionary())
        turn = turns.get(key)
        if turn is None:
            turn = rotation.turn(columns, targets, head_dim)
            if len(turns) >= SHARED_TURNS:
                return turn
            turns[key] = turn
        self.turn = turn
        return turn


def moments(queries: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """`QueryMoment` of queries (q_heads, m, head_dim) float32, on their device: product and count, float64.

    Head by head in float64, so that no square overflows: a head's rows take twice what they take in float32.
    """
    rows = queries.reshape(kv_heads, -1, queries.shape[2])
    finite = rows.isfinite().all(dim=2, keepdim=True)
    count = finite.sum(dim=(1, 2)).double()
    product = torch.empty(kv_heads, rows.shape[2], rows.shape[2], dtype=torch.float64, device=queries.device)
    for own, known, out in zip(rows, finite, product, strict=True):
        wide = own.double().masked_fill(~known, 0.0)
        torch.mm(wide.T, wide, out=out)
    return product / count.clamp(min=1)[:, None, None], count


SHARED_TURNS, SHARED_QUERIES = 4, 2048
"""Of a pass's two samples, and of models with two kinds of layers; at most 25 MB with heads of 128."""
_turns: weakref.WeakKeyDictionary[nn.Module, weakref.WeakValueDictionary[tuple[object, ...], RotationTables]]
_turns = weakref.WeakKeyDictionary()
"""Those that passes under way keep: once a text is read, nothing of it stays on the device but its windows."""
_checked: weakref.WeakKeyDictionary[nn.Module, set[type]] = weakref.WeakKeyDictionary()
"""Attention classes of a model whose rotation was seen to be one: looking again would wait for the device."""


@functools.lru_cache(maxsize=2)
def _drawn(total: int, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Columns of the sample, ascending, and how far behind the context's end each query is to stand; int64."""
    columns = train_positions(total, count)
    rng = np.random.default_rng(0)
    # evenly in the logarithm: recall at 2 % of the keys scored was .817, against .778 for evenly in the offset
    return columns, np.exp(rng.uniform(0, np.log(SPAN), len(columns))).astype(np.int64)


@functools.lru_cache(maxsize=4)
def _drawn_on(total: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same on a device: a copy per pass, not one per chunk that waits for the device."""
    columns, offsets = _drawn(total, count)
    return torch.from_numpy(columns).to(device), torch.from_numpy(offsets).to(device)


@functools.cache
def _say_unmoved(attention: str, reason: str) -> None:
    """Once per kind of layer and reason: the index still works, with less recall for its size."""
    log.warning("%s: indexes train on queries at their own positions: %s", attention, reason)
