"""The Triton kernels behind `products.py`.

All read weights once, at the speed of the memory that they lie in: the rest is arranged around that. A program takes
some rows of a weight and walks along them. One row of numbers is multiplied on the ordinary units, more of them by
matrix instructions, on a tile of 16 rows of which some stay empty.

The norm's scale does not stand before the product but behind it, sum(w * n * x) / rms(x): the sum of squares is taken
on the way, so that no kernel and no pass over x comes first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.memory import DEEP_TILE_BYTES, shared_bytes
from retrieval_attn.gpu.products import MAX_ROWS, Attending, Gated, LinearWeights, Norm, Projected, Rotation

OVERLAP_FROM = 9, 0
"""Compute capability from which a kernel can start before the one ahead of it has ended."""


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Let the next kernel's programs start, and wait until the kernels before this one have written all they write."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Options of a launch that may begin before the kernel ahead has ended, where the device can."""
    overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device) >= OVERLAP_FROM
    return {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}


@triton.jit
def _norm_kernel(hidden, weight, out, eps, dim, FROM_ONE: tl.constexpr, D: tl.constexpr):
    """One program per row: out = weight * round(hidden / sqrt(mean(hidden ** 2) + eps)); FROM_ONE: 1 + weight times
    what is not rounded.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    inside = column < dim
    numbers = tl.load(hidden + row * dim + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / dim + eps)
    normal, own = numbers * scale, tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if FROM_ONE:
        own += 1
    else:  # rounded before the weight, as transformers' modules round: the answer is to be the one that they give
        normal = normal.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * dim + column, (own * normal).to(out.dtype.element_ty), mask=inside)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, from_one: bool) -> Tensor:
    """See `products.rms_norm`."""
    hidden = hidden.contiguous()
    out, dim = torch.empty_like(hidden), hidden.shape[-1]
    width = triton.next_power_of_2(dim)
    warps = max(1, min(16, width // 512))
    _norm_kernel[(hidden.numel() // dim,)](hidden, weight, out, eps, dim, FROM_ONE=from_one, D=width, num_warps=warps)
    return out


PAIRED = 128
"""Rows of a weight of `two_products` that count as a head, at most."""


@triton.jit
def _products(
    numbers, norm, first, second, rows, dim, eps,
    HAS_NORM: tl.constexpr, FROM_ONE: tl.constexpr, TWO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Products (M, N) of rows of numbers with N rows each of `first` and `second`, (N, 1) pointers.

    M == 1: of one row, normed on the way with HAS_NORM; else of `rows` of M. Without TWO the second is 0.
    """
    column, member = tl.arange(0, K), tl.arange(0, M)
    if M == 1:
        sum_first, sum_second = tl.zeros((N, K), tl.float32), tl.zeros((N, K), tl.float32)
        squares = tl.zeros((N, K), tl.float32)
        # x as a tile, N times the same: as one row it would lie in other threads than the weights that it meets, and
        # change places through shared memory at each turn
        every = tl.broadcast_to(column[None, :], (N, K))
        for start in range(0, dim, K):
            weights_first = tl.load(first + start + column[None, :])
            if TWO:
                weights_second = tl.load(second + start + column[None, :])
            x = tl.load(numbers + start + every).to(tl.float32)
            if HAS_NORM:
                squares += x * x
                factor = tl.load(norm + start + every).to(tl.float32)
                x *= factor + 1 if FROM_ONE else factor
            sum_first += weights_first.to(tl.float32) * x
            if TWO:
                sum_second += weights_second.to(tl.float32) * x
        out_first, out_second = tl.sum(sum_first, axis=1)[None, :], tl.sum(sum_second, axis=1)[None, :]
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(squares, axis=1) / dim + eps)[None, :]
            out_first, out_second = out_first * scale, out_second * scale
    else:
        out_first, out_second = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
        at = member[:, None].to(tl.int64) * dim + column[None, :]
        for start in range(0, dim, K):
            x = tl.load(numbers + at + start, mask=(member < rows)[:, None], other=0.0)
            weights = tl.load(first + start + column[None, :])
            out_first += tl.dot(x, tl.trans(weights), input_precision="ieee")
            if TWO:
                weights = tl.load(second + start + column[None, :])
                out_second += tl.dot(x, tl.trans(weights), input_precision="ieee")
    return out_first, out_second


@triton.jit
def turned(a, b, cosines, sines, at, half, inside):
    """Both halves of heads, turned by the cosines and sines at `at` and `half` behind it."""
    cos_a = tl.load(cosines + at, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sines + at, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cosines + at + half, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sines + at + half, mask=inside, other=0.0).to(tl.float32)
    return a * cos_a - b * sin_a, b * cos_b + a * sin_b


@triton.jit(do_not_specialize=["rows"])
def _project_kernel(
    numbers, norm, query, key, value, query_bias, key_bias, value_bias, cosines, sines, out_query, out_key, out_value,
    rows, dim, eps, q_heads, kv_heads, head_dim,
    FROM_ONE: tl.constexpr, HAS_BIAS: tl.constexpr, TURNS: tl.constexpr, OVERLAP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One program per N numbers of the first half of a head and those of the second half that they are turned with."""
    tiles = head_dim // 2 // N
    entry, place = tl.program_id(0) // tiles, tl.program_id(0) % tiles * N
    if entry < q_heads:
        head, heads, weight, bias, out = entry, q_heads, query, query_bias, out_query
    elif entry < q_heads + kv_heads:
        head, heads, weight, bias, out = entry - q_heads, kv_heads, key, key_bias, out_key
    else:
        head, heads, weight, bias, out = entry - q_heads - kv_heads, kv_heads, value, value_bias, out_value
    member, low = tl.arange(0, M), place + tl.arange(0, N)
    high = low + head_dim // 2
    first = weight + (head * head_dim + low)[:, None].to(tl.int64) * dim
    second = weight + (head * head_dim + high)[:, None].to(tl.int64) * dim
    begin(OVERLAP)
    a, b = _products(numbers, norm, first, second, rows, dim, eps, M == 1, FROM_ONE, True, M, N, K)
    if HAS_BIAS:
        a += tl.load(bias + head * head_dim + low).to(tl.float32)[None, :]
        b += tl.load(bias + head * head_dim + high).to(tl.float32)[None, :]
    inside = (member < rows)[:, None]
    if TURNS and entry < q_heads + kv_heads:
        turn = member[:, None] * head_dim + low[None, :]
        a, b = turned(a, b, cosines, sines, turn, head_dim // 2, inside)
    at = (member[:, None] * heads + head) * head_dim + low[None, :]
    tl.store(out + at, a.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + head_dim // 2, b.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn_kernel(
    query, key, turned_query, query_norm, key_norm, cosines, sines, query_eps, key_eps, q_heads, kv_heads, head_dim,
    apart, rotary_dim,
    HAS_QUERY: tl.constexpr, HAS_KEY: tl.constexpr, QUERY_FROM_ONE: tl.constexpr, KEY_FROM_ONE: tl.constexpr,
    OVERLAP: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """One program (one warp) per head of a row: norm it and turn its first `rotary_dim` numbers; keys in place.

    apart: from one head of query to the next.
    """
    heads = q_heads + kv_heads
    row, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    place = tl.arange(0, H)
    half, inside, turns = rotary_dim // 2, place < head_dim, place < rotary_dim
    other = tl.where(place < half, place + half, tl.where(turns, place - half, place))  # what a number is turned with
    begin(OVERLAP)
    if head < q_heads:
        source, norm, eps = query + (row * q_heads + head) * apart, query_norm, query_eps
        target = turned_query + (row * q_heads + head) * head_dim
    else:
        source, norm, eps = key + (row * kv_heads + head - q_heads) * head_dim, key_norm, key_eps
        target = source
    a = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + other, mask=inside, other=0.0).to(tl.float32)
    if (HAS_QUERY & (head < q_heads)) | (HAS_KEY & (head >= q_heads)):
        scale = tl.rsqrt(tl.sum(a * a, axis=0) / head_dim + eps)
        more = tl.where(head < q_heads, 1.0 if QUERY_FROM_ONE else 0.0, 1.0 if KEY_FROM_ONE else 0.0)
        a *= scale * (tl.load(norm + place, mask=inside, other=0.0).to(tl.float32) + more)
        b *= scale * (tl.load(norm + other, mask=inside, other=0.0).to(tl.float32) + more)
    cosine = tl.load(cosines + row * rotary_dim + place, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sines + row * rotary_dim + place, mask=turns, other=0.0).to(tl.float32)
    a = a * cosine + tl.where(place < half, -b, b) * sine
    tl.store(target + place, a.to(query.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    numbers, norm, gate, up, gate_bias, up_bias, out, rows, dim, inner, eps,
    FROM_ONE: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One program per N numbers of silu(gate) * up."""
    member, place = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    at = place[:, None].to(tl.int64) * dim
    begin(OVERLAP)
    a, b = _products(numbers, norm, gate + at, up + at, rows, dim, eps, M == 1, FROM_ONE, True, M, N, K)
    if HAS_GATE_BIAS:
        a += tl.load(gate_bias + place).to(tl.float32)[None, :]
    if HAS_UP_BIAS:
        b += tl.load(up_bias + place).to(tl.float32)[None, :]
    inside = (member < rows)[:, None]
    a = a / (1 + tl.exp(-a)) * b
    tl.store(out + member[:, None] * inner + place[None, :], a.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_kernel(
    residual, numbers, weight, bias, out, rows, dim, width,
    HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One program per N numbers of residual + product."""
    member, place = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    row = weight + place[:, None].to(tl.int64) * dim
    begin(OVERLAP)
    a, _ = _products(numbers, numbers, row, row, rows, dim, 0.0, False, False, False, M, N, K)
    if HAS_BIAS:
        a += tl.load(bias + place).to(tl.float32)[None, :]
    inside = (member < rows)[:, None]
    at = member[:, None] * width + place[None, :]
    a += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, a.to(out.dtype.element_ty), mask=inside)


def project(hidden: Tensor, into: Attending, rotation: Rotation) -> Projected:
    """See `products.project`."""
    return projected(hidden, into, rotation, _launch_project)


def two_products(hidden: Tensor, norm: Norm, first: LinearWeights, second: LinearWeights) -> tuple[Tensor, Tensor]:
    """See `products.two_products`."""
    return pair(hidden, norm, first, second, _launch_project)


def _launch_project(
    hidden: Tensor, norm: Norm, weights: Sequence[Any], heads: Sequence[int], head_dim: int, *rest: Any, **options: Any
) -> None:
    options |= _options(hidden, head_dim // 2, pairs=True)
    _project_kernel[(sum(heads) * (head_dim // 2 // options["N"]),)](
        hidden, norm.weight, *(one.weight for one in weights), *rest, *hidden.shape, norm.eps, heads[0], heads[1],
        head_dim, FROM_ONE=norm.from_one, **options,
    )  # fmt: skip


def projected(hidden: Tensor, into: Attending, rotation: Rotation, launch: Callable[..., None]) -> Projected:
    """See `products.project`: what does not depend on the kind of weights.

    launch: launches the kernel of a kind, given hidden, the norm, the weights, the heads of each, what a head is, and
    then biases, rotation, what is to be written, and constants.
    """
    hidden = normed(hidden, into.norm)
    cosines, sines = (one.contiguous() for one in rotation)
    weights = into.query, into.key, into.value
    heads = [one.shape[0] // into.head_dim for one in weights]
    query, key, value = (hidden.new_empty(len(hidden), count, into.head_dim) for count in heads)
    biases = [hidden if one.bias is None else one.bias for one in weights]
    whole = into.rotary_dim == into.head_dim and not into.gates
    turns = whole and into.query_norm is None and into.key_norm is None
    launch(
        hidden, into.norm, weights, heads, into.head_dim, *biases, cosines, sines, query, key, value,
        HAS_BIAS=into.query.bias is not None, TURNS=turns,
    )  # fmt: skip
    if turns:
        return Projected(query, key, value)
    turned_query = _turn_heads(query, key, into, (cosines, sines))
    return Projected(turned_query, key, value, query[:, 1::2] if into.gates else None)


def pair(hidden: Tensor, norm: Norm, first: Any, second: Any, launch: Callable[..., None]) -> tuple[Tensor, Tensor]:
    """See `products.two_products`: as queries and keys of heads that are turned by nothing. launch: see `projected`."""
    hidden = normed(hidden, norm)
    weights = first, second, second
    head_dim = min(largest(one.shape[0], PAIRED) for one in weights)
    out, other = (hidden.new_empty(len(hidden), one.shape[0]) for one in (first, second))
    biases = [hidden if one.bias is None else one.bias for one in weights]
    heads = first.shape[0] // head_dim, second.shape[0] // head_dim, 0
    launch(
        hidden, norm, weights, heads, head_dim, *biases, hidden, hidden, out, other, other,
        HAS_BIAS=first.bias is not None, TURNS=False,
    )  # fmt: skip
    return out, other


def _turn_heads(query: Tensor, key: Tensor, into: Attending, rotation: Rotation) -> Tensor:
    """Norm and turn query (rows, heads, head_dim), which is returned, and key (rows, kv_heads, head_dim), in place."""
    query_norm, key_norm = (one or Norm(query, 0.0) for one in (into.query_norm, into.key_norm))
    rows, kv_heads, head_dim = key.shape
    turned_query = query.new_empty(rows, into.q_heads, head_dim)
    _turn_kernel[(rows * (into.q_heads + kv_heads),)](
        query, key, turned_query, query_norm.weight, key_norm.weight, *rotation, query_norm.eps, key_norm.eps,
        into.q_heads, kv_heads, head_dim, 2 * head_dim if into.gates else head_dim, into.rotary_dim,
        HAS_QUERY=into.query_norm is not None, HAS_KEY=into.key_norm is not None,
        QUERY_FROM_ONE=query_norm.from_one, KEY_FROM_ONE=key_norm.from_one,
        H=triton.next_power_of_2(head_dim), num_warps=1, **overlap(query.device),
    )  # fmt: skip
    return turned_query


def gated(hidden: Tensor, into: Gated) -> Tensor:
    """See `products.gated`."""
    hidden = normed(hidden, into.norm)
    gate: Any = into.gate
    up: Any = into.up
    (rows, dim), inner = hidden.shape, gate.shape[0]
    out = hidden.new_empty(rows, inner)
    options = _options(hidden, inner, pairs=True)
    _gated_kernel[(inner // options["N"],)](
        hidden, into.norm.weight, gate.weight, up.weight, hidden if gate.bias is None else gate.bias,
        hidden if up.bias is None else up.bias, out, rows, dim, inner, into.norm.eps, FROM_ONE=into.norm.from_one,
        HAS_GATE_BIAS=gate.bias is not None, HAS_UP_BIAS=up.bias is not None, **options,
    )  # fmt: skip
    return out


def add_product(residual: Tensor, numbers: Tensor, weights: LinearWeights) -> Tensor:
    """See `products.add_product`."""
    residual, numbers = residual.contiguous(), numbers.contiguous()
    (rows, dim), width = numbers.shape, len(weights.weight)
    out = numbers.new_empty(rows, width)
    options = _options(numbers, width)
    _add_kernel[(width // options["N"],)](
        residual, numbers, weights.weight, numbers if weights.bias is None else weights.bias, out, rows, dim, width,
        HAS_BIAS=weights.bias is not None, **options,
    )  # fmt: skip
    return out


def normed(hidden: Tensor, norm: Norm) -> Tensor:
    """One row is normed by the kernel that multiplies it."""
    return hidden.contiguous() if len(hidden) == 1 else rms_norm(hidden, *norm)


def _options(numbers: Tensor, width: int, *, pairs: bool = False) -> dict[str, Any]:
    """How a product of numbers (rows, dim) with weights of `width` rows is cut: tiles that divide both sizes.

    pairs: two weights of that size are read side by side. The sizes were the fastest of some 50 on an H100, with the
    weights of Llama-3-8B; the smaller tile is for cards whose multiprocessors have less shared memory.
    """
    rows, dim = numbers.shape
    if rows == 1:
        tile = {"M": 1, "N": largest(width, 4 if pairs else 2), "K": largest(dim, 512 if pairs else 1024)}
        tile["num_warps"] = 2 if pairs else 4
    else:
        deep = not pairs and shared_bytes(numbers.device) >= DEEP_TILE_BYTES
        columns = (512 if deep else 128) * 2 // numbers.element_size()
        tile = {"M": MAX_ROWS, "N": largest(width, 16), "K": largest(dim, columns), "num_warps": 2}
        tile["num_stages"] = 4 if deep else 3
    return tile | overlap(numbers.device)


def largest(number: int, most: int) -> int:
    """The largest power of two that divides a number, up to `most`."""
    return min(number & -number, most)
