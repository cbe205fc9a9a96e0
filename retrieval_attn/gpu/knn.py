"""Exact nearest keys of many training queries on a device, by inner product, in bounded memory.

Scores come from blocks of one matrix product. Ordering all of them would cost more than the product, so keys are taken
in groups of 32 that follow each other: the best kk keys lie in the kk groups with the highest maxima (a group that is
left out has kk groups before it, each with a key that is better than all of its own). Only those groups are looked at.

Of equal scores the one with the lower id is better, at every step, so the result does not depend on block sizes.
Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor, nn

from retrieval_attn.errors import ConfigError, ShapeError

log = logging.getLogger(__name__)

MEMORY = 256 << 20
"""Bytes of scratch that `nearest_keys` may take, unless told otherwise."""
GROUP = 32
"""Keys per group: n / GROUP maxima and kk * GROUP scores are looked at per query, least near the root of n / kk."""
MAX_KEYS = 1 << 18
"""Keys per product at most: with more, a block within the memory has too few queries to fill a product."""
_LOW = 0xFFFFFFFF


def nearest_keys(queries: Tensor, keys: Tensor, kk: int, *, memory: int = MEMORY) -> Tensor:
    """The kk keys with the largest inner product for every query: (q_heads, m, kk) int32, best first.

    queries: (q_heads, m, head_dim) of any float dtype; keys: (kv_heads, n, head_dim) on the same device; query head h
    asks the keys of head h // (q_heads // kv_heads). Queries are rounded to the keys' dtype, products of 16-bit
    numbers are added in float32. Equal scores are ordered by lower id; -1 where there are fewer than kk keys, and for
    queries that are not finite. m and n may be 0. memory: bytes of scratch at most (beyond the result), as long as
    one query's share of a block fits. Raises ShapeError for other shapes, ConfigError for kk or memory below 1.
    """
    _check(queries, keys, kk, memory)
    q_heads, m, _ = queries.shape
    kv_heads, n = keys.shape[:2]
    lists = torch.full((q_heads, m, kk), -1, dtype=torch.int32, device=queries.device)
    if not lists.numel() or not n:
        return lists
    group = q_heads // kv_heads
    block_keys = min(MAX_KEYS, n)
    rows = _rows(block_keys, kk, memory)
    for head in range(kv_heads):
        query_rows = queries[head * group : (head + 1) * group].reshape(group * m, -1)
        hits = lists[head * group : (head + 1) * group].view(group * m, kk)
        best: list[Tensor] = []  # of each block, while there are further keys
        for first in range(0, n, block_keys):
            some = keys[head, first : first + block_keys]
            grouped = _by_place(some)
            # keys outside, queries inside: a block of keys is laid out again once, whatever the number of queries
            for number, start in enumerate(range(0, group * m, rows)):
                block = query_rows[start : start + rows]
                part = _best(block.to(keys.dtype), grouped, len(some), kk, first)
                if first:
                    # packed numbers have a total order, so blocks merge to what one pass over all keys would give
                    part = torch.cat([best[number], part], dim=1).sort(dim=1, descending=True).values[:, :kk]
                if first + block_keys < n:
                    best[number : number + 1] = [part]
                    continue
                # unpack: the low half counts ids downwards, so that of equal scores the lower id is the larger number
                ids = (_LOW - (part & _LOW)).to(torch.int32)
                finite = block.isfinite().all(dim=1, keepdim=True)
                hits[start : start + rows, : ids.shape[1]] = torch.where(finite, ids, -1)
            del grouped  # before the next block's is allocated
    return lists


def scratch_bytes(queries: int, keys: int, kk: int) -> int:
    """Bytes that a block of `queries` against `keys` keys takes at its peak, without a copy of these keys.

    4 for each score; 16 for each group's maximum and 20 for each of the kk * GROUP picked scores while the best are
    chosen (on the CPU: 32); 48 for each result while two are merged.
    """
    groups = -(-keys // GROUP)
    picked = min(kk, groups) * GROUP
    return queries * (4 * groups * GROUP + 16 * groups + 20 * picked + 48 * kk)


def _rows(keys: int, kk: int, memory: int) -> int:
    return max(1, memory // scratch_bytes(1, keys, kk))


def _best(queries: Tensor, grouped: Tensor, n: int, kk: int, first: int) -> Tensor:
    """The best min(kk, n) of n keys, ids from `first` on: (rows, kk) int64, packed with their scores, best first.

    grouped: (GROUP * groups, head_dim), see `_by_place`.
    """
    rows, groups = len(queries), len(grouped) // GROUP
    # (rows, place in the group, group): the maxima are then taken over runs of memory
    scores = _products(queries, grouped).view(rows, GROUP, groups)
    # zeros that fill the last group would beat keys with negative scores
    behind = n - (groups - 1) * GROUP
    scores[:, behind:, -1] = -torch.inf
    if groups > kk:
        # in order of id again: ties among the picked scores are then broken by place, as `_top` does it
        chosen = _top(scores.amax(dim=1), kk).sort().values
        picked = scores.gather(2, chosen[:, None, :].expand(-1, GROUP, -1))
    else:
        chosen, picked = torch.arange(groups, device=scores.device).expand(rows, -1), scores
    del scores
    in_order = picked.transpose(1, 2).reshape(rows, -1)  # by id
    del picked
    place = _top(in_order, min(kk, n))
    ids = chosen.gather(1, place // GROUP) * GROUP + place % GROUP + first
    return _packed(in_order.gather(1, place), ids).sort(dim=1, descending=True).values


def _by_place(keys: Tensor) -> Tensor:
    """Keys (n, head_dim): the first of each group, then the second of each, ...; what the last group lacks is 0."""
    groups = -(-len(keys) // GROUP)
    padded = nn.functional.pad(keys, (0, 0, 0, groups * GROUP - len(keys)))
    return padded.view(groups, GROUP, -1).transpose(0, 1).reshape(groups * GROUP, -1)


def _top(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` largest of each row, of equal ones those that come first; in any order: int64.

    torch.topk on CUDA goes through a row in order when it picks among equal ones (its documentation promises
    nothing: a test does); on the CPU it does not, so there places are compared as well.
    """
    if scores.is_cuda:
        return scores.topk(count, dim=1, sorted=False).indices
    places = torch.arange(scores.shape[1], device=scores.device)
    return _LOW - (_packed(scores, places).topk(count, dim=1, sorted=False).values & _LOW)


def _packed(scores: Tensor, ids: Tensor) -> Tensor:
    """Scores (float32) above their ids as one int64 whose order is: higher score first, then lower id."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equal scores
    # negative floats order backwards as integers: flip all but their sign
    packed = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    del bits
    packed <<= 32
    packed += _LOW - ids
    return packed


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """queries @ keys.T in float32 from operands of the keys' dtype."""
    if keys.dtype == torch.float32 or not keys.is_cuda or not _wide_products(keys.device, keys.dtype):
        return queries.float() @ keys.float().T
    return torch.mm(queries, keys.T, out_dtype=torch.float32)


@functools.cache
def _wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of 16-bit matrices can be had in float32 without widening the operands first."""
    try:
        torch.mm(
            torch.ones(8, 8, dtype=dtype, device=device),
            torch.ones(8, 8, dtype=dtype, device=device),
            out_dtype=torch.float32,
        )
    except (RuntimeError, TypeError, NotImplementedError) as error:
        log.warning(
            "products of %s with float32 results are not available (%s): training lists take longer", dtype, error
        )
        return False
    return True


def _check(queries: Tensor, keys: Tensor, kk: int, memory: int) -> None:
    for name, value in (("kk", kk), ("memory", memory)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number >= 1")
    if queries.ndim != 3 or keys.ndim != 3 or queries.shape[2] != keys.shape[2]:
        raise ShapeError(
            f"queries must be (q_heads, m, head_dim) and keys (kv_heads, n, head_dim), got {tuple(queries.shape)} and "
            f"{tuple(keys.shape)}"
        )
    if not keys.shape[0] or queries.shape[0] % keys.shape[0]:
        raise ShapeError(
            f"the number of query heads must be a multiple of the {keys.shape[0]} key heads, got {queries.shape[0]}"
        )
    if queries.device != keys.device:
        raise ShapeError(f"queries and keys must be on one device, got {queries.device} and {keys.device}")
