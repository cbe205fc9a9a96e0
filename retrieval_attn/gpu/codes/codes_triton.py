"""Triton kernels that encode keys and copy streamed codes, for `codes.py` and `streamer.py`.

Imported only with Triton. One launch encodes all keys of a head: while a long kernel of prefill occupies every
multiprocessor, each further launch waits for the next gap between two of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (kernels get their types from Triton)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrieval_attn.gpu.codes.streamer import BRING_WORDS

BLOCK_KEYS = 64
"""Keys that a program codes."""
MIN_TILE = 16
"""Smallest tile of a matrix instruction, in every direction."""


@triton.jit(do_not_specialize=["count", "num_8bit", "halves", "quarters"])
def _encode_kernel(
    keys, key_projection, shift, codes, bad, count, stride, dim, num_8bit, halves, quarters,
    BYTES: tl.constexpr, N: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """codes[i] of keys[i]; bad becomes 1 if one is not finite. D: columns that are multiplied at once. halves,
    quarters: bytes with two and with four numbers.
    """
    key = tl.program_id(0) * N + tl.arange(0, N)
    inside = key < count
    rows = keys + key.to(tl.int64)[:, None] * stride
    wrong = tl.zeros((N,), tl.int32)
    for start in range(0, dim, D):
        column = start + tl.arange(0, D)
        some = tl.load(rows + column[None, :], mask=inside[:, None] & (column < dim)[None, :], other=0.0).to(tl.float32)
        # inf - inf and NaN - NaN are NaN
        wrong += tl.sum(tl.where(some - some == 0, 0, 1), axis=1)
    tl.store(bad, 1, mask=tl.sum(wrong, axis=0) > 0)  # no atomic: all who write, write 1
    # a byte's numbers are of different halves and quarters of a class, not neighbours: each is one product, and
    # nothing moves between threads
    byte = tl.arange(0, B)
    is_wide, is_thin = byte < num_8bit, byte >= num_8bit + halves
    number = tl.where(is_thin, byte + halves, byte)
    numbers = _numbers(rows, inside, key_projection, shift, number, byte < BYTES, dim, N, D, B)
    packed = tl.where(is_wide[None, :], numbers.to(tl.int32) & 255, _unsigned(numbers, is_thin))
    if halves + quarters > 0:
        number = tl.where(is_thin, byte + halves + 2 * quarters, byte + halves)
        numbers = _numbers(rows, inside, key_projection, shift, number, (byte < BYTES) & ~is_wide, dim, N, D, B)
        packed |= tl.where(is_wide[None, :], 0, _unsigned(numbers, is_thin) << 4)
    if quarters > 0:
        number, here = byte + halves + quarters, (byte < BYTES) & is_thin
        numbers = _numbers(rows, inside, key_projection, shift, number, here, dim, N, D, B)
        packed |= tl.where(is_thin[None, :], _unsigned(numbers, is_thin) << 2, 0)
        numbers = _numbers(rows, inside, key_projection, shift, number + 2 * quarters, here, dim, N, D, B)
        packed |= tl.where(is_thin[None, :], _unsigned(numbers, is_thin) << 6, 0)
    packed ^= tl.where(is_wide, 0, 128)[None, :]  # the number in the highest bits has a sign
    out = codes + key.to(tl.int64)[:, None] * BYTES + byte[None, :]
    tl.store(out, packed.to(tl.int8), mask=inside[:, None] & (byte < BYTES)[None, :])


@triton.jit
def _unsigned(numbers, is_thin):
    """Whole numbers as stored in 2 bits where `is_thin`, else in 4."""
    half = tl.where(is_thin, 2.0, 8.0)[None, :]
    return tl.minimum(tl.maximum(numbers + half, 0.0), 2 * half - 1).to(tl.int32)


@triton.jit
def _numbers(
    rows, inside, key_projection, shift, number, used, dim, N: tl.constexpr, D: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """floor(rows . key_projection - shift) of the M numbers named, within -128 .. 127.

    Few columns at once: a product in full float32 keeps both sides in registers, and what does not fit them goes to
    local memory, which the driver takes for every thread of the device (3.5 GiB for all 128 columns at once).
    """
    result = tl.zeros((N, M), tl.float32)
    for start in range(0, dim, D):
        column = start + tl.arange(0, D)
        here = column < dim
        some = tl.load(rows + column[None, :], mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32)
        at = key_projection + number[None, :] * dim + column[:, None]
        side = tl.load(at, mask=used[None, :] & here[:, None], other=0.0)
        # ieee: TF32 would move numbers over a step's border, and codes would differ from those the CPU writes
        result = tl.dot(some, side, result, input_precision="ieee")
    result = tl.floor(result - tl.load(shift + number, mask=used, other=0.0)[None, :])
    return tl.minimum(tl.maximum(result, -128.0), 127.0)


def encode(
    keys: Tensor, key_projection: Tensor, shift: Tensor, split: tuple[int, int, int], codes: Tensor, bad: Tensor
) -> None:
    """codes (n, key_bytes) of keys (n, head_dim) of a floating dtype, rows contiguous. split: how many numbers have 8,
    4 and 2 bits. bad: int32 (1,), see above.
    """
    count, dim = keys.shape
    key_bytes = codes.shape[1]
    _encode_kernel[(triton.cdiv(count, BLOCK_KEYS),)](
        keys, key_projection, shift, codes.view(torch.int8), bad, count, keys.stride(0), dim,
        split[0], split[1] // 2, split[2] // 4,
        BYTES=key_bytes, N=BLOCK_KEYS, D=MIN_TILE, B=max(MIN_TILE, triton.next_power_of_2(key_bytes)), num_warps=4,
    )  # fmt: skip


PROGRAMS = 16
"""Of all entries together. Eight keep a bus of 51 GB/s busy (H100; 41.7 with half as many words each); more than that
takes would stand in the way of what a step computes meanwhile."""
NUMBERS = 2048
"""Words that a program has on their way: eight loads of 16 bytes of each of its threads."""


@triton.jit
def _bring_kernel(table, WORDS: tl.constexpr, N: tl.constexpr):
    """Copy what the rows of a table name, see `BRING_WORDS`."""
    program, programs = tl.program_id(1), tl.num_programs(1)
    words = table + tl.program_id(0) * WORDS
    # multiples of 16 bytes from the table, which begins on one: then the compiler loads 16 bytes at once
    source = table + tl.multiple_of(tl.load(words), 2)
    target = table + tl.multiple_of(tl.load(words + 1), 2)
    count = tl.multiple_of(tl.load(words + 2), 2)
    for start in range(program * N, count, programs * N):
        at = start + tl.arange(0, N)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def bring(table: Tensor) -> None:
    """Copy what table (entries, BRING_WORDS) int64 names."""
    entries = len(table)
    _bring_kernel[(entries, max(1, PROGRAMS // entries))](table, WORDS=BRING_WORDS, N=NUMBERS, num_warps=4)
