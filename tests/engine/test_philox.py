"""Philox4x32-10 against the published answers, and the numbers that are made of its words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retrieval_attn.sampling.sampler import TOGETHER, WORD, Words, _row_words, gumbels, philox, row_noise, uniforms

# Random123's kat_vectors: counter, key, answer
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def tensors(numbers: tuple[int, ...]) -> Words:
    return tuple(torch.tensor([number]) for number in numbers)  # type: ignore[return-value]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    words = philox(tensors(counter), (torch.tensor([key[0]]), torch.tensor([key[1]])))
    assert tuple(int(word) for word in words) == expected


def test_it_equals_a_generator_in_plain_integers() -> None:
    """Python's integers have no overflow: counters and keys at random, and all that are near the ends."""

    def plain(counter: list[int], key: list[int]) -> list[int]:
        c, k = list(counter), list(key)
        for turn in range(10):
            if turn:
                k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
            first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [second >> 32 ^ c[1] ^ k[0], second % 2**32, first >> 32 ^ c[3] ^ k[1], first % 2**32]
        return c

    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 2**32, (300, 6), generator=generator)
    ends = torch.tensor([0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 1])
    numbers[:100] = ends[torch.randint(0, len(ends), (100, 6), generator=generator)]
    c0, c1, c2, c3, k0, k1 = numbers.unbind(1)
    found = torch.stack(philox((c0, c1, c2, c3), (k0, k1)), dim=1)
    assert found.tolist() == [plain(row[:4], row[4:]) for row in numbers.tolist()]


def test_uniforms_are_never_0_or_1() -> None:
    ends = torch.tensor([0, 1, 2, 2**31, 2**32 - 2**9, 2**32 - 2**8, 2**32 - 2, 2**32 - 1])
    found = uniforms(ends)
    assert found.dtype == torch.float32
    assert float(found.min()) == 2.0**-33 and float(found.max()) == 1 - 2.0**-24
    assert (found.diff() >= 0).all()
    noise = gumbels(ends)
    assert torch.isfinite(noise).all() and 22.8 < float(noise.max()) < 22.9 and -2.82 < float(noise.min()) < -2.8


def test_noise_is_gumbel() -> None:
    """Mean and deviation of a Gumbel variable: .5772 and 1.2825; of a million, to four of their own deviations."""
    noise = row_noise(one_key(5), torch.tensor([9]), 1_000_000)[0].double()
    assert abs(float(noise.mean()) - 0.57722) < 4 * 1.2825e-3
    assert abs(float(noise.std()) - 1.28255) < 4 * 1.35e-3
    uniform = torch.exp(-torch.exp(-noise))
    assert abs(float(torch.corrcoef(torch.stack([uniform[1:], uniform[:-1]]))[0, 1])) < 4e-3


def test_a_token_takes_its_word_of_its_counter() -> None:
    """The layout is a part of the contract: an answer with a seed is to be the same in a year."""
    seed, position = 0x1234_5678_9ABC_DEF0, 5 * 2**32 + 6
    key = (torch.tensor([seed & WORD]), torch.tensor([seed >> 32]))
    noise = row_noise(key, torch.tensor([position]), 11)
    assert noise.shape == (1, 11)
    for token in range(11):
        words = philox(tensors((token // 4, 6, 5, 0)), key)
        assert torch.equal(noise[0, token : token + 1], gumbels(words[token % 4]))


@pytest.mark.parametrize("vocabulary", [1, 4 * TOGETHER - 1, 4 * TOGETHER, 12 * TOGETHER + 5])
def test_the_compiled_loop_makes_the_words_of_torch(vocabulary: int) -> None:
    """Rows with keys and places up to their ends, each with its own noise, however many blocks are done together."""
    generator = torch.Generator().manual_seed(vocabulary)
    low, high = torch.randint(0, 2**32, (2, 5), generator=generator)
    places = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**62 + 3])
    low[1], high[2] = WORD, WORD
    found = row_noise((low, high), places, vocabulary)
    assert torch.equal(found, gumbels(_row_words((low, high), places, vocabulary)))
    assert len({tuple(row) for row in found.tolist()}) == 5


def one_key(seed: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([seed]), torch.tensor([0])
