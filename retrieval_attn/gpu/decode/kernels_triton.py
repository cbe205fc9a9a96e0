"""The Triton kernels behind `kernels.py`, which says what they compute. Imported only where there is Triton.

Sixteen-bit models: scores are exact products summed in float32; probabilities are rounded to two 16-bit terms, not to
one, before they meet the values, so that a part keeps the precision that its float32 merge promises.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.decode.kernels import BLOCK_TOKENS, HostResult, Parts, WindowBuffers
from retrieval_attn.gpu.memory import shared_bytes

MIN_ROWS = 16
"""Rows of the smallest tile that a matrix instruction takes; a group of query heads is padded to it."""
MAX_ROWS = 32
"""Rows of the largest tile of several tokens: more need registers and shared memory that other tiles would use."""
OTHER_SHARED = 1024
"""Bytes of shared memory that a block takes in addition to its tiles: reductions over tokens, the runtime's own."""


@triton.jit
def _stage_kernel(
    query, rows, target, batch_stride, head_stride, q_heads, dim, HAS_ROWS: tl.constexpr, D: tl.constexpr
):
    # float32, in the order in which the host's tasks read: they neither convert nor gather. The target may be mapped
    # host memory: a program writes one whole row of it, for scattered words would each cross the bus alone
    i = tl.program_id(0)
    at = i.to(tl.int64)
    if HAS_ROWS:
        at = tl.load(rows + i).to(tl.int64)
    column = tl.arange(0, D)
    inside = column < dim
    source = query + (i // q_heads).to(tl.int64) * batch_stride + (i % q_heads) * head_stride
    tl.store(target + at * dim + column, tl.load(source + column, mask=inside).to(tl.float32), mask=inside)


@triton.jit
def _capped(scores, softcap):
    """softcap * tanh(scores / softcap); the exponential may overflow to inf, which gives 1."""
    return softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))


@triton.jit
def _window_kernel(
    query, new_key, new_value, key, value, valid, span, out, lse, scale, softcap, reach,
    query_b, query_h, new_key_b, new_key_h, new_value_b, new_value_h,
    key_b, key_h, key_t, value_b, value_h, value_t, valid_b, span_b, kv_heads, group, dim, value_dim, splits,
    HAS_VALID: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_REACH: tl.constexpr, EXACT: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr, G: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
    """One part of the attention of one key-value head's queries of TILE of the TOKENS new tokens.

    The first part of the first tile stores all new tokens as well.

    Strides end in _b (row), _h (head) and _t (token).
    """
    # one program for all query heads and tokens of a key-value head: each key and value is read once
    entry, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = (entry // kv_heads).to(tl.int64), entry % kv_heads
    # from memory: a graph is replayed while windows grow, and for other rows than it was captured for
    low, high = tl.load(span + row * span_b), tl.load(span + row * span_b + 1)
    member, column, value_column = tl.arange(0, G), tl.arange(0, D), tl.arange(0, V)
    in_group, in_dim, in_value = member < TILE * group, column < dim, value_column < value_dim
    token, own_head = tl.zeros((G,), tl.int32), member
    if TOKENS > 1:
        token, own_head = tile * TILE + member // group, member % group
    asking = row * TOKENS + token
    at = asking[:, None] * query_b + (head * group + own_head)[:, None] * query_h + column[None, :]
    queries = tl.load(query + at, mask=in_group[:, None] & in_dim[None, :], other=0.0)
    key_at, value_at = key + row * key_b + head * key_h, value + row * value_b + head * value_h

    # New tokens are stored, and attended to, by the first program, from registers. No program reads their slots:
    # programs of one launch run in any order, so another one could read one before it is written.
    first = split == 0
    if TOKENS == 1:
        fresh_key = tl.load(new_key + row * new_key_b + head * new_key_h + column, mask=in_dim, other=0.0)
        fresh_value = tl.load(
            new_value + row * new_value_b + head * new_value_h + value_column, mask=in_value, other=0.0
        )
        tl.store(key_at + high.to(tl.int64) * key_t + column, fresh_key, mask=in_dim & first)
        tl.store(value_at + high.to(tl.int64) * value_t + value_column, fresh_value, mask=in_value & first)
        own = tl.sum(queries.to(tl.float32) * fresh_key.to(tl.float32)[None, :], axis=1) * scale
        if HAS_SOFTCAP:
            own = _capped(own, softcap)
        top = tl.where(first, own, -float("inf"))
        total = tl.where(first, tl.full((G,), 1.0, tl.float32), tl.zeros((G,), tl.float32))
        mixed = tl.where(first, fresh_value.to(tl.float32)[None, :] + tl.zeros((G, V), tl.float32), 0.0)
    else:
        fresh = tl.arange(0, F)
        is_new, new_row = fresh < TOKENS, row * TOKENS + fresh
        fresh_keys = tl.load(
            new_key + new_row[:, None] * new_key_b + head * new_key_h + column[None, :],
            mask=is_new[:, None] & in_dim[None, :],
            other=0.0,
        )
        fresh_values = tl.load(
            new_value + new_row[:, None] * new_value_b + head * new_value_h + value_column[None, :],
            mask=is_new[:, None] & in_value[None, :],
            other=0.0,
        )
        is_stored = (is_new & first & (tile == 0))[:, None]
        fresh_slot = high.to(tl.int64) + fresh[:, None]
        tl.store(key_at + fresh_slot * key_t + column[None, :], fresh_keys, mask=is_stored & in_dim[None, :])
        tl.store(
            value_at + fresh_slot * value_t + value_column[None, :], fresh_values, mask=is_stored & in_value[None, :]
        )
        own = tl.dot(queries, tl.trans(fresh_keys), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            own = _capped(own, softcap)
        before = (is_new & first)[None, :] & (fresh[None, :] <= token[:, None])
        if HAS_REACH:
            before = before & (fresh[None, :] > token[:, None] - reach)
        own = tl.where(before, own, -float("inf"))
        top = tl.max(own, axis=1)
        own = tl.exp(own - tl.where(top == -float("inf"), 0.0, top)[:, None])
        total = tl.sum(own, axis=1)
        if EXACT:
            mixed = tl.dot(own, fresh_values, input_precision="ieee")
        else:
            own_coarse = own.to(fresh_values.dtype)
            own_fine = (own - own_coarse.to(tl.float32)).to(fresh_values.dtype)
            mixed = tl.dot(own_coarse, fresh_values) + tl.dot(own_fine, fresh_values)

    if HAS_REACH:
        low = tl.maximum(low, high + 1 - reach)
    # The grid was captured with its splits. Shares are whole blocks, so that only the last has a masked one; with fewer
    # keys than splits some programs get none and write an empty part.
    share = tl.cdiv(tl.cdiv(high - low, splits), N) * N
    begin = low + split * share
    end = tl.minimum(begin + share, high)
    for start in range(begin, end, N):
        slot = start + tl.arange(0, N)
        inside = slot < end
        if HAS_VALID:
            inside = inside & (tl.load(valid + row * valid_b + slot, mask=inside, other=0) != 0)
        keys = tl.load(
            key_at + slot[None, :].to(tl.int64) * key_t + column[:, None],
            mask=inside[None, :] & in_dim[:, None],
            other=0.0,
        )
        # the products of 16-bit numbers are exact in float32; for float32 itself TF32 would keep 10 bits only
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = _capped(scores, softcap)
        seen = inside[None, :]
        if HAS_REACH and TOKENS > 1:  # later tokens see fewer
            seen = seen & (slot[None, :] > high + token[:, None] - reach)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # no key yet: -inf - -inf would be NaN
        decay = tl.exp(top - shift)
        weights = tl.exp(scores - shift[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        values = tl.load(
            value_at + slot[:, None].to(tl.int64) * value_t + value_column[None, :],
            mask=inside[:, None] & in_value[None, :],
            other=0.0,
        )
        if EXACT:
            mixed = mixed * decay[:, None] + tl.dot(weights, values, input_precision="ieee")
        else:
            # two terms hold 16 bits of a weight in bfloat16, 22 in float16: one would round away what lse promises
            coarse = weights.to(values.dtype)
            fine = (weights - coarse.to(tl.float32)).to(values.dtype)
            mixed = mixed * decay[:, None] + tl.dot(coarse, values) + tl.dot(fine, values)
        top = higher

    some = total > 0
    mixed = mixed / tl.where(some, total, 1.0)[:, None]
    # the parts of one query head lie together: a program of the merge reads them as one tile
    place = ((asking * kv_heads + head) * group + own_head) * splits + split
    tl.store(
        out + place[:, None] * value_dim + value_column[None, :], mixed, mask=in_group[:, None] & in_value[None, :]
    )
    tl.store(lse + place, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), -float("inf")), mask=in_group)


@triton.jit
def _merge_kernel(
    out, lse, host_out, host_lse, rows, sinks, shares, tally, rest_out, rest_lse, paged_out, paged_lse, target,
    q_heads, splits, value_dim,
    HAS_HOST: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_TALLY: tl.constexpr,
    HAS_REST: tl.constexpr, HAS_PAGED: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    at = i.to(tl.int64)
    part, column = tl.arange(0, S), tl.arange(0, V)
    is_part, in_value = part < splits, column < value_dim
    scores = tl.load(lse + at * splits + part, mask=is_part, other=-float("inf"))
    top = tl.max(scores, axis=0)
    row = at
    if HAS_ROWS:
        row = tl.load(rows + i).to(tl.int64)
    if HAS_HOST:
        host_score = tl.load(host_lse + row)
        if HAS_TALLY:  # asked for first, so that nothing waits for them at the end
            share, summed, count = tl.load(shares + row), tl.load(tally + 2 * at), tl.load(tally + 2 * at + 1)
        top = tl.maximum(top, host_score)
    if HAS_REST:
        rest_score = tl.load(rest_lse + at)
        top = tl.maximum(top, rest_score)
    if HAS_PAGED:
        paged_score = tl.load(paged_lse + at)
        top = tl.maximum(top, paged_score)
    if HAS_SINKS:
        sink_score = tl.load(sinks + i % q_heads).to(tl.float32)
        top = tl.maximum(top, sink_score)
    top = tl.where(top == -float("inf"), 0.0, top)  # all parts are empty: the weights below are 0, not NaN
    weights = tl.exp(scores - top)
    total = tl.sum(weights, axis=0)
    tile = tl.load(
        out + (at * splits + part)[:, None] * value_dim + column[None, :],
        mask=is_part[:, None] & in_value[None, :],
        other=0.0,
    )
    mixed = tl.sum(weights[:, None] * tile, axis=0)
    if HAS_HOST:
        weight = tl.exp(host_score - top)
        total += weight
        mixed += weight * tl.load(host_out + row * value_dim + column, mask=in_value, other=0.0)
        if HAS_TALLY:
            estimated = share * weight
    if HAS_REST:
        weight = tl.exp(rest_score - top)
        total += weight
        mixed += weight * tl.load(rest_out + at * value_dim + column, mask=in_value, other=0.0)
        if HAS_TALLY:
            estimated += weight
    if HAS_PAGED:
        weight = tl.exp(paged_score - top)
        total += weight
        mixed += weight * tl.load(paged_out + at * value_dim + column, mask=in_value, other=0.0)
    if HAS_TALLY:
        tl.store(tally + 2 * at, summed + estimated / tl.where(total > 0, total, 1.0))
        tl.store(tally + 2 * at + 1, count + 1.0)
    if HAS_SINKS:
        total += tl.exp(sink_score - top)
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(target + at * value_dim + column, mixed.to(target.dtype.element_ty), mask=in_value)


def stage_queries(query: Tensor, target: Tensor, rows: Tensor | None) -> None:
    """See `kernels.stage_queries`."""
    query = _dense_rows(query)
    batch, q_heads, _, dim = query.shape
    _stage_kernel[(batch * q_heads,)](
        query, target if rows is None else rows, target, query.stride(0), query.stride(1), q_heads, dim,
        HAS_ROWS=rows is not None, D=triton.next_power_of_2(dim),
    )  # fmt: skip


def window_partials(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: WindowBuffers,
    scale: float,
    softcap: float | None,
    reach: int | None,
    splits: int,
) -> Parts:
    """See `kernels.window_partials`."""
    query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
    batch, q_heads, _, dim = query.shape
    rows, kv_heads, value_dim = len(window.key), window.key.shape[1], window.value.shape[3]
    group, tokens = q_heads // kv_heads, batch // rows
    tile = _tile_tokens(query, value_dim, group, tokens)
    queries = max(MIN_ROWS, triton.next_power_of_2(tile * group))
    out = torch.empty(batch, q_heads, splits, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, q_heads, splits, dtype=torch.float32, device=query.device)
    valid = None if window.valid is None else window.valid.view(torch.uint8)
    # where a tensor is absent another one stands for its pointer: HAS_... compiles the loads away
    _window_kernel[(rows * kv_heads, splits, tokens // tile)](
        query, key, value, window.key, window.value, window.span if valid is None else valid, window.span, out, lse,
        scale, 0.0 if softcap is None else softcap, 0 if reach is None else reach,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        *window.key.stride()[:3], *window.value.stride()[:3], 0 if valid is None else valid.stride(0),
        window.span.stride(0), kv_heads, group, dim, value_dim, splits,
        HAS_VALID=valid is not None, HAS_SOFTCAP=softcap is not None, HAS_REACH=reach is not None,
        EXACT=query.dtype == torch.float32, TOKENS=tokens, TILE=tile, G=queries,
        N=_block_tokens(query, value_dim, queries), D=max(MIN_ROWS, triton.next_power_of_2(dim)),
        V=max(MIN_ROWS, triton.next_power_of_2(value_dim)), F=max(MIN_ROWS, tokens), num_warps=4, num_stages=2,
    )  # fmt: skip
    return Parts(out, lse)


def _block_tokens(query: Tensor, value_dim: int, rows: int) -> int:
    """Return the tokens of a block: as many as the shared memory holds, 16 to BLOCK_TOKENS.

    rows: queries of a tile.
    """
    tokens = BLOCK_TOKENS
    while tokens > MIN_ROWS and not _fits(query, value_dim, rows, tokens):
        tokens //= 2
    return tokens


def _tile_tokens(query: Tensor, value_dim: int, group: int, tokens: int) -> int:
    """Return the new tokens of a row, a power of 2, whose queries are one tile."""
    tile = tokens
    while tile > 1 and (
        triton.next_power_of_2(tile * group) > MAX_ROWS
        or not _fits(query, value_dim, triton.next_power_of_2(tile * group), MIN_ROWS)
    ):
        tile //= 2
    return tile


def _fits(query: Tensor, value_dim: int, rows: int, tokens: int) -> bool:
    """Return whether the shared memory holds a tile of `rows` queries and a block of `tokens` tokens."""
    size, room = query.element_size(), shared_bytes(query.device)
    dim, value_dim = (max(MIN_ROWS, triton.next_power_of_2(one)) for one in (query.shape[3], value_dim))
    # keys, values and queries, and the weights of float32
    needed = size * (tokens * (dim + value_dim) + rows * dim) + 4 * rows * tokens
    return not room or needed <= room - OTHER_SHARED


def merge_parts(
    parts: Parts,
    host: HostResult | None,
    sink_logits: Tensor | None,
    dtype: torch.dtype,
    rest: tuple[Tensor, Tensor] | None,
    paged: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """See `kernels.merge_parts`."""
    batch, q_heads, splits, value_dim = parts.out.shape
    target = torch.empty(batch, q_heads, 1, value_dim, dtype=dtype, device=parts.out.device)
    rows, estimated = (None, None) if host is None else (host.rows, host.estimated)
    share, tally = (parts.lse, parts.lse) if estimated is None else estimated
    _merge_kernel[(batch * q_heads,)](
        parts.out, parts.lse, parts.out if host is None else host.out, parts.lse if host is None else host.lse,
        parts.lse if rows is None else rows, parts.lse if sink_logits is None else sink_logits.contiguous(), share,
        tally, *(rest or parts), *(paged or parts), target, q_heads, splits, value_dim,
        HAS_HOST=host is not None, HAS_ROWS=rows is not None, HAS_SINKS=sink_logits is not None,
        HAS_TALLY=estimated is not None, HAS_REST=rest is not None, HAS_PAGED=paged is not None,
        S=triton.next_power_of_2(splits), V=triton.next_power_of_2(value_dim), num_warps=4,
    )  # fmt: skip
    return target


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit
def _count_kernel(number):
    tl.store(number, tl.load(number) + 1)


def launch(device: torch.device) -> None:
    """Compile the kernel, or load it, and launch it. Raises whatever Triton raises."""
    with torch.cuda.device(device):
        _count_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device=device), num_warps=1)
