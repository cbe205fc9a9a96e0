"""Attention of many queries to the best of the keys that were named for them, where keys and values lie on the device.

What the host does for the few queries of a step: exact scores of the named keys, of the best k a softmax and the
weighted sum of their values. Newer keys, which nothing names because they have no codes, are scored all. Two kernels
(`named_triton.py`): one gathers and scores named keys, one picks the best and sums their values. Where Triton does not
run, plain PyTorch does the same: what the kernels are tested against.

The newest keys of a layer, which have no codes yet, are few: all get their scores, a query attends to the best of them
and to an estimate of the others, as the host does it in a step (`cpu/step/attend_task.py`).

Arithmetic is float32. Rows come as they are stored; int8 rows end with the four bytes of a float32 step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.decode.kernels import kernels_for

STEP_BYTES = 4
"""Of the step behind the numbers of an int8 row."""
MAX_SLOTS = 8192
"""Keys among which a program can pick the best of a query."""
NUMBERS_AT_ONCE = 1 << 24
"""Numbers of gathered rows, or scores, at once where no kernel gathers them."""


class StoredRows(NamedTuple):
    """keys (heads, tokens, head_dim) and values (heads, tokens, value_dim) of a floating dtype, contiguous.

    int8: each row STEP_BYTES longer.
    """

    keys: Tensor
    values: Tensor

    @property
    def extra(self) -> int:
        """Numbers of a row behind its own."""
        return STEP_BYTES if self.keys.dtype == torch.int8 else 0


class Candidates(NamedTuple):
    """Which keys the queries choose from: those with ids >= 0 in `ids`, and all from token `scanned_from` on.

    ids (queries, room) int32: token `first` has id 0; none beyond the tokens that there are, or from `scanned_from` on.
    k: best keys that a query attends to.
    """

    ids: Tensor
    first: int
    scanned_from: int
    k: int

    @property
    def slots(self) -> int:
        """Places for the keys that a query chooses from: those named, and the best of those scanned. A power of 2."""
        return slots_for(self.ids.shape[1], self.k)


def slots_for(room: int, k: int) -> int:
    """See `Candidates.slots`; the same whether keys are scanned or not, or kernels would be compiled for either."""
    return 1 << max(0, room + k - 1).bit_length()


class Found(NamedTuple):
    """The keys that queries choose from: tokens (queries, slots) int32 and their inner products, float32.

    The first `used` slots count; -1: no key.
    """

    tokens: Tensor
    products: Tensor
    used: int


def attend_candidates(
    queries: Tensor, rows: StoredRows, named: Candidates, scale: float, softcap: float | None
) -> Partial:
    """Attention of queries (heads, n, head_dim) float32, contiguous, each to its best `named.k` keys.

    out (heads, n, value_dim) and lse (heads, n), float32; 0 and -inf for a query without a key. Of equal scores the
    earlier token's counts, as far as ids rise within a row and among those named; scores are soft-capped if given.
    """
    kernels = kernels_for(queries, "codes.named_triton")
    heads, members, dim = queries.shape
    count = heads * members
    slots, room = named.slots, named.ids.shape[1]
    tokens = torch.empty(count, slots, dtype=torch.int32, device=queries.device)
    products = torch.empty(count, slots, dtype=torch.float32, device=queries.device)
    scanned = _scan(queries, rows, named, tokens[:, room:], products[:, room:])
    found = Found(tokens, products, room + scanned)
    value_dim = rows.values.shape[2] - rows.extra
    out = torch.empty(heads, members, value_dim, dtype=torch.float32, device=queries.device)
    lse = torch.empty(heads, members, dtype=torch.float32, device=queries.device)
    if kernels is not None:
        kernels.score(queries, rows, named, found)
        kernels.attend(rows, named.k, found, (scale, softcap), Partial(out, lse))
        return Partial(out, lse)
    _score_plainly(queries, rows, named, found)
    _attend_plainly(rows, named.k, found, (scale, softcap), Partial(out, lse))
    return Partial(out, lse)


def _scan(queries: Tensor, rows: StoredRows, named: Candidates, tokens: Tensor, products: Tensor) -> int:
    """Write the best k keys from token `named.scanned_from` on; how many, the same for every query."""
    later = rows.keys.shape[1] - named.scanned_from
    wanted = min(later, named.k)
    if wanted <= 0:
        return 0
    members = queries.shape[1]
    at_once = max(1, NUMBERS_AT_ONCE // later)
    for head, own in enumerate(queries):
        keys = numbers_of(rows.keys[head, named.scanned_from :]).T
        for start in range(0, members, at_once):
            scores = own[start : start + at_once] @ keys
            places = best_places(scores, wanted)
            here = slice(head * members + start, head * members + start + len(scores))
            tokens[here, :wanted] = (places + named.scanned_from).int()
            products[here, :wanted] = scores.gather(1, places)
    return wanted


def _score_plainly(queries: Tensor, rows: StoredRows, named: Candidates, found: Found) -> None:
    room, members, dim = named.ids.shape[1], queries.shape[1], queries.shape[2]
    found.tokens[:, :room] = torch.where(named.ids >= 0, named.ids + named.first, -1)
    at_once = max(1, NUMBERS_AT_ONCE // (room * dim))
    for head, own in enumerate(queries):
        for start in range(0, members, at_once):
            some = own[start : start + at_once]
            here = slice(head * members + start, head * members + start + len(some))
            keys = numbers_of(rows.keys[head][found.tokens[here, :room].clamp_min(0).long()])
            found.products[here, :room] = (keys @ some[:, :, None])[:, :, 0]


def _attend_plainly(rows: StoredRows, k: int, found: Found, scoring: tuple[float, float | None], into: Partial) -> None:
    heads, members, value_dim = into.out.shape
    k = min(k, found.used)
    at_once = max(1, NUMBERS_AT_ONCE // (k * value_dim))
    for head in range(heads):
        for start in range(0, members, at_once):
            stop = min(start + at_once, members)
            here = slice(head * members + start, head * members + stop)
            tokens, products = found.tokens[here, : found.used], found.products[here, : found.used]
            order = torch.where(tokens >= 0, _order(products), torch.iinfo(torch.int64).min)
            places = order.sort(dim=1, descending=True, stable=True).indices[:, :k]
            tokens, scores = tokens.gather(1, places), Scoring(*scoring).logits(products.gather(1, places))
            inside = tokens >= 0
            top = torch.where(inside & ~scores.isnan(), scores, -torch.inf).amax(dim=1, keepdim=True)
            shift = torch.where(top > -torch.inf, top, 0.0)  # no key: -inf - -inf would be NaN
            weights = torch.where(inside, torch.exp(scores - shift), 0.0)
            total = weights.sum(dim=1, keepdim=True)
            values = numbers_of(rows.values[head][tokens.clamp_min(0).long()])
            values = torch.where(inside[:, :, None], values, 0.0)
            mixed = (weights[:, None] @ values)[:, 0] / total
            into.out[head, start:stop] = torch.where(total == 0, 0.0, mixed)
            into.lse[head, start:stop] = (shift + torch.log(total))[:, 0]


class LateClusters(NamedTuple):
    """members (heads, tokens) int64: the cluster of each token. means (heads, head_dim, clusters) float32."""

    members: Tensor
    means: Tensor


def attend_late(queries: Tensor, rows: StoredRows, k: int, clusters: LateClusters | None, scoring: Scoring) -> Partial:
    """Attention of queries (heads, n, head_dim) float32 to the best k of `rows`, and to the others as to their means.

    clusters: of these rows; None: the others are left out. out (heads, n, value_dim), lse (heads, n), float32; without
    rows 0 and -inf. An estimated key has its own value: that is the mean value of those left in its cluster, summed.
    """
    heads, n, _ = queries.shape
    keys, values = numbers_of(rows.keys), numbers_of(rows.values)
    tokens = keys.shape[1]
    out = queries.new_zeros(heads, n, values.shape[2])
    lse = torch.full((heads, n), -torch.inf, dtype=torch.float32, device=queries.device)
    if not tokens:
        return Partial(out, lse)
    at_once = max(1, NUMBERS_AT_ONCE // (heads * tokens))
    for start in range(0, n, at_once):
        own = queries[:, start : start + at_once]
        scores = own @ keys.transpose(1, 2)
        logits = scoring.logits(scores)
        if k < tokens:
            places = best_places(scores.flatten(0, 1), k).view(heads, -1, k)
            kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, places, True)
            others = torch.full_like(logits, -torch.inf)
            if clusters is not None:
                means = scoring.logits(own @ clusters.means)
                others = means.gather(2, clusters.members[:, None].expand(-1, means.shape[1], -1))
            logits = torch.where(kept, logits, others)
        here = slice(start, start + own.shape[1])
        lse[:, here] = logits.logsumexp(dim=2)
        out[:, here] = logits.softmax(dim=2) @ values
    return Partial(out, lse)


def _order(scores: Tensor) -> Tensor:
    """int64 numbers in the order of float32 scores; NaN before all."""
    bits = (scores + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0: they are equal scores
    return torch.where(scores.isnan(), -(1 << 31), torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def best_places(scores: Tensor, k: int) -> Tensor:
    """Places (rows, k) of the highest of scores (rows, n), lowest place first."""
    if scores.is_cuda:  # a stable sort of all would take longer than everything else
        places = torch.where(scores.isnan(), -torch.inf, scores).topk(k, dim=1, sorted=False).indices
    else:
        places = _order(scores).sort(dim=1, descending=True, stable=True).indices[:, :k]
    return places.sort(dim=1).values


def numbers_of(stored: Tensor) -> Tensor:
    """float32 (..., dim) of rows as they are stored."""
    if stored.dtype != torch.int8:
        return stored.float()
    dim = stored.shape[-1] - STEP_BYTES
    steps = stored[..., dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return stored[..., :dim] * steps
