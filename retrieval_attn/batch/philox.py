"""Philox4x32-10, a random generator without state: numbers from a key and a counter, in integer operations of torch.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011). Any number can be had at any time,
in any order, so that what a row draws does not depend on what other rows draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF

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
    blocks = torch.arange((vocabulary + 3) // 4, dtype=torch.int64, device=positions.device)
    place = positions[:, None]
    counter = (blocks[None], place & WORD, (place >> 32) & WORD, torch.zeros_like(place))
    words = philox(counter, (key[0][:, None], key[1][:, None]))
    return gumbels(torch.stack(words, dim=-1).flatten(1)[:, :vocabulary])


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of 64 bits, which an int64 has no room for: by halves of the factor."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & WORD
