"""Philox4x32-10, a random generator without state: numbers from a key and a counter, in integer operations of torch,
or in a compiled loop on a CPU, where some 250 small operations take longer than the step's attention.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011). Any number can be had at any time,
in any order, so that what a row draws does not depend on what other rows draw.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
TOGETHER = 256
"""Blocks whose state stays in the first cache: 8 KiB."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words for each counter.

    counter, key: int64 tensors that hold numbers of 32 bits, [0, 2^32), of shapes that broadcast. Returns the same
    kind of numbers. Recordable in a CUDA graph; the same bits on every device.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(ROUNDS):
        if turn:
            k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def uniforms(words: Tensor) -> Tensor:
    """float32 numbers in (0, 1), neither 0 nor 1, from words [0, 2^32) in int64: (word + 1/2) / 2^32, rounded.

    Small ones keep all 32 bits; the largest is the last float32 below 1.
    """
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbels(words: Tensor) -> Tensor:
    """float32 standard Gumbel noise, -log(-log(1 - u)) of `uniforms`: [-2.81, 22.88].

    Large noise, which decides a draw, comes from small u, where float32 is finest.
    """
    return -torch.log(-torch.log1p(-uniforms(words)))


def row_noise(key: tuple[Tensor, Tensor], positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise (rows, vocabulary) float32 for the tokens that rows draw at `positions`, int64 (rows,), >= 0.

    key: two int64 tensors (rows,) with the low and high 32 bits of a row's seed. Token v takes word v % 4 of the
    counter (v // 4, position low, position high, 0): its noise does not depend on the size of the vocabulary.
    """
    if positions.device.type == "cpu":
        return gumbels(_compiled_words(*key, positions, vocabulary))
    return gumbels(_row_words(key, positions, vocabulary))


# An operation of torch: who records operations, to run them again with other numbers, then records this one, too.
@torch.library.custom_op(
    "retrieval_attn::row_words", mutates_args=(), device_types="cpu",
    schema="(Tensor low, Tensor high, Tensor positions, int vocabulary) -> Tensor",
)  # fmt: skip
def _compiled_words(low: Tensor, high: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    drawn = np.empty((len(positions), (vocabulary + 3) // 4, 4), np.int64)
    _fill_words(low.numpy(), high.numpy(), positions.numpy(), drawn)
    return torch.from_numpy(drawn).flatten(1)[:, :vocabulary].contiguous()


def _row_words(key: tuple[Tensor, Tensor], positions: Tensor, vocabulary: int) -> Tensor:
    blocks = torch.arange((vocabulary + 3) // 4, dtype=torch.int64, device=positions.device)
    place = positions[:, None]
    counter = (blocks[None], place & WORD, (place >> 32) & WORD, torch.zeros_like(place))
    words = philox(counter, (key[0][:, None], key[1][:, None]))
    return torch.stack(words, dim=-1).flatten(1)[:, :vocabulary]


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of 64 bits, which an int64 has no room for: by halves of the factor."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & WORD


@njit(nogil=True, cache=True)
def _fill_words(
    key_low: npt.NDArray[Any], key_high: npt.NDArray[Any], positions: npt.NDArray[Any], out: npt.NDArray[Any]
) -> None:
    """out[row, block]: the words of `_row_words`; out (rows, blocks, 4) int64.

    A round is done for `TOGETHER` blocks before the next one, a loop that the compiler makes vector instructions of;
    the masks of factors tell it that their upper halves are 0.
    """
    word, half = np.uint64(WORD), np.uint64(32)
    first, second = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
    step_low, step_high = np.uint64(KEY_STEPS[0]), np.uint64(KEY_STEPS[1])
    c0, c1, c2, c3 = np.empty((4, TOGETHER), np.uint64)
    for row in range(len(positions)):
        place = np.uint64(positions[row])
        for start in range(0, out.shape[1], TOGETHER):
            count = min(TOGETHER, out.shape[1] - start)
            for i in range(count):
                c0[i], c1[i], c2[i], c3[i] = np.uint64(start + i), place & word, place >> half, np.uint64(0)
            k0, k1 = np.uint64(key_low[row]), np.uint64(key_high[row])
            for _ in range(ROUNDS):
                for i in range(count):
                    product0, product1 = (c0[i] & word) * first, (c2[i] & word) * second
                    c0[i] = (product1 >> half) ^ c1[i] ^ k0
                    c2[i] = (product0 >> half) ^ c3[i] ^ k1
                    c1[i], c3[i] = product1 & word, product0 & word
                k0, k1 = (k0 + step_low) & word, (k1 + step_high) & word
            for i in range(count):
                block = start + i
                out[row, block, 0], out[row, block, 1] = c0[i], c1[i]
                out[row, block, 2], out[row, block, 3] = c2[i], c3[i]
