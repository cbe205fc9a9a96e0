"""Attention of many rows to prefixes that they share: `shared_partials`.

Hydragen (arXiv 2402.05099, section 3) splits attention into the part over a shared prefix and the part over each row's
own tokens, and makes the queries of all rows over the prefix one matrix: its keys are read once and not once per row.
The two parts merge by their lse, as partials everywhere do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial, empty_partial, merge
from retrieval_attn.gpu.codes.candidates import STEP_BYTES
from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.gpu.memory import DEEP_TILE_BYTES, shared_bytes
from retrieval_attn.gpu.shared.plan import (
    LARGEST_TILE,
    LEVELS,
    NARROW_DIM,
    NARROW_TILE,
    PAGE_TOKENS,
    SMALLEST_TILE,
    WIDE_DIM,
    Ids,
    PlanShape,
    SharedNode,
    SharedPlan,
    pages_for,
    processors,
)

PACKED_PAGES = 256
"""Pages of int8 rows that are turned into numbers at once, where no kernel reads them as they are."""
MAX_PACKED_DIM = 512
"""Largest head_dim of int8 rows that the kernel takes: sums of more products than that leave int32."""


class PagedKeys(NamedTuple):
    """Keys and values of one layer in pages: key (kv_heads, pages, PAGE_TOKENS, head_dim), value (..., value_dim).

    int8: steps float32 (2, kv_heads, pages, PAGE_TOKENS), by which the numbers of a token's key, and of its value,
    count; value (kv_heads, pages, value_dim, PAGE_TOKENS) then, as matrix instructions read it. Which pages hold what
    is known elsewhere; of the others, and behind the last token of a page, anything may be there.
    """

    key: Tensor
    value: Tensor
    steps: Tensor | None = None

    @property
    def dims(self) -> tuple[int, int]:
        """head_dim and value_dim."""
        return self.key.shape[3], self.value.shape[3 if self.steps is None else 2]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.key.nbytes + self.value.nbytes + (0 if self.steps is None else self.steps.nbytes)


def empty_pages(pages: int, key: Tensor, value: Tensor) -> PagedKeys:
    """Room for `pages` pages of tokens like key and value (batch, kv_heads, tokens, dim), int8 rows with their steps
    behind them. Memory is not written to.
    """
    (heads, dim), value_dim = (key.shape[1], key.shape[3]), value.shape[3]
    if key.dtype != torch.int8:
        shapes = ((heads, pages, PAGE_TOKENS, width) for width in (dim, value_dim))
        return PagedKeys(key.new_empty(next(shapes)), value.new_empty(next(shapes)))
    return PagedKeys(
        key.new_empty(heads, pages, PAGE_TOKENS, dim - STEP_BYTES),
        value.new_empty(heads, pages, value_dim - STEP_BYTES, PAGE_TOKENS),
        key.new_empty(2, heads, pages, PAGE_TOKENS, dtype=torch.float32),
    )


def write_pages(pool: PagedKeys, pages: Ids, key: Tensor, value: Tensor, first: int = 0) -> None:
    """Put tokens key, value (kv_heads, tokens, dim) into these pages, in order, int8 rows with their steps behind them.

    first: slot of the first page that the first token goes to. Raises ShapeError for too few pages, or too many.
    """
    tokens = first + key.shape[1]
    if len(pages) != pages_for(tokens):
        raise ShapeError(f"{tokens} tokens need {pages_for(tokens)} pages, got {len(pages)} pages.")
    start = 0
    for begin, stop in runs(pages):
        count = min((stop - begin) * PAGE_TOKENS - first, key.shape[1] - start)
        slots, source = slice(first, first + count), slice(start, start + count)
        _write_run(pool, slice(begin, stop), slots, key[:, source], value[:, source])
        first, start = 0, start + count


def _write_run(pool: PagedKeys, pages: slice, slots: slice, key: Tensor, value: Tensor) -> None:
    """Into pages that follow each other: key, value (kv_heads, tokens, dim) to these slots of them, counted through."""
    if pool.steps is None:
        for target, rows in zip(pool[:2], (key, value), strict=True):
            target[:, pages].flatten(1, 2)[:, slots] = rows
        return
    pool.key[:, pages].flatten(1, 2)[:, slots] = key[..., :-STEP_BYTES]
    for target, rows in zip(pool.steps, (key, value), strict=True):
        steps = rows[..., -STEP_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        target[:, pages].flatten(1, 2)[:, slots] = steps[..., 0]
    numbers, (start, stop) = value[..., :-STEP_BYTES], (slots.start, slots.stop)
    target, at = pool.value[:, pages], 0
    while start < stop:  # columns of a page are apart: its first part, whole pages, its last part
        page, slot = divmod(start, PAGE_TOKENS)
        whole = (stop - start) // PAGE_TOKENS if slot == 0 else 0
        count = whole * PAGE_TOKENS or min(PAGE_TOKENS - slot, stop - start)
        here = numbers[:, at : at + count]
        if whole:
            target[:, page : page + whole] = here.unflatten(1, (whole, PAGE_TOKENS)).transpose(2, 3)
        else:
            target[:, page, :, slot : slot + count] = here.transpose(1, 2)
        start, at = start + count, at + count


def runs(pages: Ids) -> list[tuple[int, int]]:
    """[first, stop) of pages that follow each other, in order."""
    ids = np.asarray(pages, np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(ids, breaks) if run.size]


def shared_partials(
    query: Tensor, pool: PagedKeys, plan: SharedPlan, *, scale: float, softcap: float | None = None
) -> Partial:
    """query (rows, q_heads, 1, head_dim) over all nodes of the plan that a row lies over.

    out (rows, q_heads, 1, value_dim) and lse, float32; rows over no node get the empty partial. On a GPU one launch
    serves every plan of a shape, and nothing here waits for the device or looks at a number there: a graph can capture
    it, and reads the plan that was written last. Raises ShapeError for a query, or a pool, that the plan is not for.
    """
    shape = plan.shape
    if query.ndim != 4 or query.shape[:3] != (shape.rows, shape.q_heads, 1):
        raise ShapeError(f"the plan needs queries ({shape.rows}, {shape.q_heads}, 1, dim), got {tuple(query.shape)}.")
    dim, value_dim = pool.dims
    if (pool.key.shape[0], pool.key.shape[2], dim) != (shape.kv_heads, PAGE_TOKENS, query.shape[3]):
        raise ShapeError(
            f"the plan needs pages ({shape.kv_heads}, *, {PAGE_TOKENS}, {query.shape[3]}), got {tuple(pool.key.shape)}."
        )
    kernels = _kernels(pool)
    if kernels is not None:
        return Partial(*kernels.shared_partials(query, pool, plan, scale, softcap))
    whole = empty_partial(query, value_dim)
    reached = torch.zeros(shape.rows, dtype=torch.bool)
    for node in plan.nodes:
        rows = torch.as_tensor(np.asarray(node.rows, np.int64))
        everyone = len(rows) == shape.rows
        own = query if everyone else query[rows]
        part = node_partial(own.transpose(0, 2), pool, node.pages, node.tokens, scale=scale, softcap=softcap)
        part = Partial(part.out.transpose(0, 2), part.lse.transpose(0, 2))
        if bool(reached[rows].any()):
            part = merge([Partial(whole.out[rows], whole.lse[rows]), part])
        if everyone and len(plan.nodes) == 1:
            return part
        whole.out[rows], whole.lse[rows] = part.out, part.lse
        reached[rows] = True
    return whole


def plan_shape(pool: PagedKeys, rows: int, q_heads: int, *, exact: bool, levels: int = LEVELS) -> PlanShape:
    """Return the shape of plans for a batch over these pages. exact: its queries are of float32."""
    (heads, pages), device = pool.key.shape[:2], pool.key.device
    narrow = max(pool.dims) > NARROW_DIM and 0 < shared_bytes(device) < DEEP_TILE_BYTES
    smallest = SMALLEST_TILE if max(pool.dims) > WIDE_DIM else NARROW_TILE
    return PlanShape.of(
        rows, q_heads, heads, pages, levels=levels, processors=processors(device), exact=exact,
        packed=pool.steps is not None, largest=smallest if narrow else LARGEST_TILE,
    )  # fmt: skip


def follows_its_plan(pool: PagedKeys) -> bool:
    """Whether `shared_partials` over these pages reads its plan on the device, as a captured call must."""
    return _kernels(pool) is not None


def node_partial(
    query: Tensor, pool: PagedKeys, pages: Ids, tokens: int, *, scale: float, softcap: float | None = None
) -> Partial:
    """query (1, q_heads, queries, head_dim) over all tokens of one node: any queries of any rows over it side by side.

    The query heads of a key-value head are folded into one matrix with the queries, and the call is not causal: the
    keys come before all of them. Pages that follow each other are read where they lie; int8 rows are turned into the
    query's dtype, PACKED_PAGES at once.
    """
    kv_heads, queries = pool.key.shape[0], query.shape[2]
    folded = query[0].unflatten(0, (kv_heads, -1)).flatten(1, 2)[None]  # (1, kv_heads, group * queries, head_dim)
    found: list[Partial] = []
    start = 0
    for first, stop in _pieces(pool, pages):
        count = min((stop - first) * PAGE_TOKENS, tokens - start)
        key, value = (one[None, :, :count] for one in numbers_in(pool, slice(first, stop), query.dtype))
        found.append(attend(folded, key, value, scale=scale, softcap=softcap))
        start += count
    if not found:
        return empty_partial(query, pool.dims[1])
    part = merge(found)
    shape = query.shape[1], queries
    return Partial(part.out.reshape(1, *shape, -1), part.lse.reshape(1, *shape))


def path_partial(
    query: Tensor, pool: PagedKeys, nodes: Sequence[SharedNode], *, scale: float, softcap: float | None = None
) -> Partial:
    """query (batch, q_heads, queries, head_dim) of rows that all lie over these nodes, as when they read a prompt.

    `rows` of the nodes does not count.
    """
    batch, _, queries, _ = query.shape
    side_by_side = query.transpose(0, 1).flatten(1, 2)[None]
    parts = [node_partial(side_by_side, pool, one.pages, one.tokens, scale=scale, softcap=softcap) for one in nodes]
    if not parts:
        return empty_partial(query, pool.dims[1])
    part = merge(parts)
    by_row = (one[0].unflatten(1, (batch, queries)).transpose(0, 1) for one in part)
    return Partial(*by_row)


def _pieces(pool: PagedKeys, pages: Ids) -> list[tuple[int, int]]:
    """`runs`, cut where they are to be turned into numbers."""
    if pool.steps is None:
        return runs(pages)
    cut = [(range(first, stop, PACKED_PAGES), stop) for first, stop in runs(pages)]
    return [(begin, min(begin + PACKED_PAGES, stop)) for begins, stop in cut for begin in begins]


def numbers_in(pool: PagedKeys, pages: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values (kv_heads, tokens, dim) of pages that follow each other, views but of int8, in `dtype` then."""
    key, value = pool.key[:, pages], pool.value[:, pages]
    if pool.steps is None:
        return key.flatten(1, 2), value.flatten(1, 2)
    steps = pool.steps[:, :, pages, :, None]
    key, value = torch.mul(key, steps[0]).to(dtype), torch.mul(value.transpose(2, 3), steps[1]).to(dtype)
    return key.flatten(1, 2), value.flatten(1, 2)


def _kernels(pool: PagedKeys) -> Any:
    if pool.steps is not None and pool.dims[0] > MAX_PACKED_DIM:
        return None
    return kernels_for(pool.key, "shared.shared_triton")
