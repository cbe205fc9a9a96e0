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
from retrieval_attn.gpu.codes.named import STEP_BYTES, numbers_of
from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.gpu.shared.plan import PAGE_TOKENS, Ids, SharedNode, SharedPlan

SHARE_FROM_ROWS = 2
SHARE_FROM_TOKENS = 512
"""On an H100, 32 over 8 heads of 128: below, up to 32 rows gain nothing; from here on, none loses more than 2 %."""


PACKED_PAGES = 256
"""Pages of int8 rows that are turned into numbers at once, where no kernel reads them as they are."""


class PagedKeys(NamedTuple):
    """Keys and values of one layer in pages: key (kv_heads, pages, PAGE_TOKENS, head_dim), value (..., value_dim).

    int8: each row STEP_BYTES longer, a float32 step by which its numbers count. Which pages hold what is known
    elsewhere; of the others, and behind the last token of a page, anything may be there.
    """

    key: Tensor
    value: Tensor

    @property
    def dims(self) -> tuple[int, int]:
        """head_dim and value_dim."""
        extra = STEP_BYTES if self.key.dtype == torch.int8 else 0
        return self.key.shape[3] - extra, self.value.shape[3] - extra


def empty_pages(pages: int, key: Tensor, value: Tensor) -> PagedKeys:
    """Room for so many pages of tokens like key and value (batch, kv_heads, tokens, dim). Memory is not written to."""
    shapes = ((one.shape[1], pages, PAGE_TOKENS, one.shape[3]) for one in (key, value))
    return PagedKeys(key.new_empty(next(shapes)), value.new_empty(next(shapes)))


def write_pages(pool: PagedKeys, pages: Ids, key: Tensor, value: Tensor) -> None:
    """Put tokens key, value (kv_heads, tokens, dim) into these pages, in order. Raises ShapeError for too few pages."""
    tokens = key.shape[1]
    if len(pages) != -(-tokens // PAGE_TOKENS):
        raise ShapeError(f"{tokens} tokens take {-(-tokens // PAGE_TOKENS)} pages, got {len(pages)}.")
    start = 0
    for first, stop in runs(pages):
        count = min((stop - first) * PAGE_TOKENS, tokens - start)
        for target, source in zip(pool, (key, value), strict=True):
            target[:, first:stop].flatten(1, 2)[:, :count] = source[:, start : start + count]
        start += count


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
        raise ShapeError(f"the plan is for queries ({shape.rows}, {shape.q_heads}, 1, dim), got {tuple(query.shape)}.")
    dim, value_dim = pool.dims
    if (pool.key.shape[0], pool.key.shape[2], dim) != (shape.kv_heads, PAGE_TOKENS, query.shape[3]):
        raise ShapeError(
            f"the plan needs pages ({shape.kv_heads}, *, {PAGE_TOKENS}, {query.shape[3]}), got {tuple(pool.key.shape)}."
        )
    kernels = _kernels(pool)
    if kernels is not None:
        return Partial(*kernels.shared_partials(query, *pool, plan, scale, softcap))
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
        key, value = (_numbers(part[:, first:stop].flatten(1, 2)[None, :, :count], query.dtype) for part in pool)
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


def worth_sharing(rows: int, tokens: int) -> bool:
    """Whether rows attend to so many shared tokens faster together than each by itself.

    One row gains nothing, and a short node costs more to launch and to merge than its keys cost to read.
    """
    return rows >= SHARE_FROM_ROWS and tokens >= SHARE_FROM_TOKENS


def _pieces(pool: PagedKeys, pages: Ids) -> list[tuple[int, int]]:
    """`runs`, cut where they are to be turned into numbers."""
    if pool.key.dtype != torch.int8:
        return runs(pages)
    cut = [(range(first, stop, PACKED_PAGES), stop) for first, stop in runs(pages)]
    return [(begin, min(begin + PACKED_PAGES, stop)) for begins, stop in cut for begin in begins]


def _numbers(stored: Tensor, dtype: torch.dtype) -> Tensor:
    return stored if stored.dtype != torch.int8 else numbers_of(stored).to(dtype)


def _kernels(pool: PagedKeys) -> Any:
    if pool.key.dtype == torch.int8 and any(dim % STEP_BYTES for dim in pool.dims):
        return None  # no float32 can be loaded behind such a row
    return kernels_for(pool.key, "shared.shared_triton")
