"""Checksums against published values and a bit at a time."""

from __future__ import annotations

import numpy as np
import pytest

from retrieval_attn.store import crc_kernels, record
from retrieval_attn.store.polynomial import BLOCK, POLYNOMIAL


def bit_by_bit(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (POLYNOMIAL if register & 1 else 0)
    return register ^ 0xFFFFFFFF


# RFC 3720, appendix B.4, and the check value of the catalogue of CRC algorithms.
KNOWN = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
    b"": 0,
}
WAYS = [False, pytest.param(True, marks=pytest.mark.skipif(not crc_kernels.has_instruction(), reason="no instruction"))]


@pytest.mark.parametrize("data", KNOWN)
def test_known_values(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without compiled kernels."""
    for loaded in (False, True):
        monkeypatch.setattr(record, "_loaded", loaded)
        assert record.crc32c(data) == KNOWN[data] == bit_by_bit(data)
    monkeypatch.setattr(record, "_loaded", False)
    longer = data * 9
    assert record.crc32c(longer) == bit_by_bit(longer) == crc_kernels.checksum(np.frombuffer(longer, np.uint8), 0)


@pytest.mark.parametrize("instruction", WAYS)
def test_kernels_agree_with_single_bits(instruction: bool) -> None:
    """All lengths around a word, beginnings off a word, continued sums."""
    draw = np.random.default_rng(0).integers(0, 256, 600, np.uint8)
    for first in (0, 1, 3):
        for size in (0, 1, 7, 8, 9, 63, 64, 65, 500):
            part = draw[first : first + size]
            wanted = bit_by_bit(part.tobytes())
            assert crc_kernels.checksum(part, 0, instruction=instruction) == wanted
            half = crc_kernels.checksum(part[: size // 3], 0, instruction=instruction)
            assert crc_kernels.checksum(part[size // 3 :], half, instruction=instruction) == wanted
            assert record.crc32c(part[size // 3 :], half) == wanted


@pytest.mark.parametrize("instruction", WAYS)
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, 3 * BLOCK, 7 * BLOCK + 13])
def test_blocks_are_the_sums_of_their_bytes(instruction: bool, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    sums = np.zeros(-(-size // BLOCK), np.uint32)
    crc_kernels.blocks(data, sums, instruction=instruction)
    wanted = [crc_kernels.checksum(data[at : at + BLOCK], 0) for at in range(0, size, BLOCK)]
    assert sums.tolist() == wanted


def test_sums_of_an_array_are_those_of_its_blocks() -> None:
    data = np.random.default_rng(1).integers(0, 256, 8 * BLOCK + 5, np.uint8)
    assert record.block_sums(data).tolist() == [
        record.crc32c(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)
    ]
