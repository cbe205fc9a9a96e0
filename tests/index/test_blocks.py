"""Keys in blocks of 16: the layout, the share of bits, and scans of it against plain arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.index import blocks as B
from retrieval_attn.index.block_scan import SAMPLE_STEP, best_of_blocks, encode_block_queries
from retrieval_attn.index.packed import EMPTY

RANK = 28  # 12 numbers of 8 bits, 16 of 4
WIDE = 12


def coded(n: int, seed: int = 0, wide: int = WIDE, rank: int = RANK) -> tuple[B.KeyBlocks, npt.NDArray[np.float32]]:
    """Blocks of n keys, and the numbers that their codes stand for."""
    rng = np.random.default_rng(seed)
    numbers = (rng.standard_normal((n, rank)) * np.geomspace(5, 0.1, rank) + 2).astype(np.float32)
    keys = B.empty_blocks(numbers, wide, n)
    B.write_blocks(numbers, keys.blocks, 0, keys.mean, keys.step, wide)
    half = np.where(np.arange(rank) < wide, B.WIDE_LEVELS, B.NARROW_LEVELS) // 2
    step = np.where(keys.step > 0, keys.step, 1)  # equal numbers have no step: half the levels
    codes = np.clip(np.floor((numbers.astype("f8") - keys.mean) / step), -half, half - 1) + half
    return keys, codes.astype(np.float32)


def ids_of(packed: npt.NDArray[np.int64]) -> list[list[int]]:
    return [sorted((0xFFFFFFFF - (row[row != EMPTY] & 0xFFFFFFFF)).tolist()) for row in packed]


@pytest.mark.parametrize("shape", [(WIDE, RANK), (0, 16), (16, 16), (4, 12)])
@pytest.mark.parametrize("n", [1, 31, 33, 5000])
def test_scan_finds_the_best_codes(n: int, shape: tuple[int, int]) -> None:
    """For every kind of layout, end and number of queries: exactly the keys with the best sums, ties by lower id."""
    wide, rank = shape
    keys, codes = coded(n, 1, wide, rank)
    rng = np.random.default_rng(2)
    for num in (1, 4, 5):
        queries = rng.standard_normal((num, 20)).astype(np.float32)
        side = rng.standard_normal((rank, 20)).astype(np.float32)
        planes, steps = np.zeros((num, rank), np.int8), np.zeros((2, num), np.float32)
        encode_block_queries(queries, side, keys.step, wide, planes, steps, np.empty(rank))
        sums = [
            (codes[:, part] @ planes[:, part].T.astype(np.float32)) * steps[i]
            for i, part in enumerate((slice(0, wide), slice(wide, rank)))
        ]
        scores = (sums[0] + sums[1]).T
        for length in {n, max(1, n - 3)}:
            kept = min(length, 40)
            found, lost = best_of_blocks(keys, length, queries, side, kept)
            order = [sorted(np.lexsort((np.arange(length), -row[:length]))[:kept].tolist()) for row in scores]
            assert ids_of(found) == order
            assert not lost.any()


def test_query_numbers_stand_for_the_query() -> None:
    """Sums times steps are the product with the projected query, but for a constant and a rounding below one step."""
    keys, codes = coded(300)
    rng = np.random.default_rng(3)
    queries, side = rng.standard_normal((6, 20)).astype(np.float32), rng.standard_normal((RANK, 20)).astype(np.float32)
    planes, steps = np.zeros((6, RANK), np.int8), np.zeros((2, 6), np.float32)
    encode_block_queries(queries, side, keys.step, WIDE, planes, steps, np.empty(RANK))
    exact = (codes * keys.step) @ (queries @ side.T).T
    own = (codes[:, :WIDE] @ planes[:, :WIDE].T) * steps[0] + (codes[:, WIDE:] @ planes[:, WIDE:].T) * steps[1]
    bound = 0.5 * (steps[0] * B.WIDE_LEVELS * WIDE + steps[1] * B.NARROW_LEVELS * (RANK - WIDE))
    assert (np.abs(own - exact) <= bound + 1e-3).all()
    assert np.abs(planes[:, :WIDE]).max() == np.abs(planes[:, WIDE:]).max() == 127


def test_queries_that_are_not_finite_are_lost() -> None:
    keys, _ = coded(100)
    queries = np.ones((4, 20), np.float32)
    queries[1, 2], queries[2, 0], queries[3] = np.nan, np.inf, 0
    _, lost = best_of_blocks(keys, 100, queries, np.ones((RANK, 20), np.float32), 10)
    assert lost.tolist() == [False, True, True, False]


def test_bits_go_where_the_variance_is() -> None:
    """Compared with every other choice, and at the ends: equal variances, one number, more bytes than numbers."""
    variances = np.geomspace(100, 1e-3, 64)

    def error(wide: int, narrow: int) -> float:
        split = np.split(variances, [wide, wide + narrow])
        return float(B.WIDE_ERROR * split[0].sum() + B.NARROW_ERROR * split[1].sum() + split[2].sum())

    wide, narrow = B.allocate(variances, 24)
    assert 0 < wide < 24 and B.key_bytes(wide, narrow) <= 24
    choices = [(w, n) for w in range(0, 25, 4) for n in range(0, 65 - w, 8) if B.key_bytes(w, n) <= 24 and w + n]
    assert error(wide, narrow) == min(error(*choice) for choice in choices)
    assert B.allocate(np.ones(64), 32) == (0, 64)
    assert B.allocate(np.ones(64), 64) == (64, 0)
    assert B.allocate(np.ones(1), 8) == (4, 0)


def test_steps_follow_the_data() -> None:
    """Even numbers use their whole range, ones with a long tail give some of it up; equal ones have none."""
    rng = np.random.default_rng(5)
    numbers = np.stack([rng.uniform(-1, 1, 4000), rng.standard_t(2, 4000), np.full(4000, 3.0)], axis=1).astype("f4")
    keys = B.empty_blocks(numbers, 0, 0)
    assert keys.step[0] == pytest.approx(keys.reach[0] / 8, rel=1e-5)
    assert keys.step[1] < keys.reach[1] / 8 / 2
    assert keys.step[2] == 0 and keys.mean[2] == 3


def test_more_keys_than_there_is_room_for() -> None:
    keys, _ = coded(70)
    written = keys.blocks[:5].copy()
    assert B.with_room(keys, 96, 70) is keys
    grown = B.with_room(keys, 97, 70)
    assert len(grown.blocks) * B.BLOCK >= 97 and len(grown.blocks) % 2 == 0
    np.testing.assert_array_equal(grown.blocks[:5], written)
    assert B.out_of_reach(keys, keys.mean[None] + 3 * keys.reach) and not B.out_of_reach(keys, keys.mean[None])


def test_a_sample_that_misleads_costs_time_only() -> None:
    """The best keys lie where the sample looks: too few others pass its bound, and the scan starts again."""
    n, kept = 40_000, 300
    rng = np.random.default_rng(7)
    numbers = rng.standard_normal((n, 8)).astype(np.float32)
    numbers[np.arange(n) // B.PAIR % SAMPLE_STEP == 0] += 3
    numbers[:5_000] = numbers[0]  # and thousands of equal ones
    keys = B.empty_blocks(numbers, 8, n)
    B.write_blocks(numbers, keys.blocks, 0, keys.mean, keys.step, 8)
    queries, side = np.concatenate([np.ones((1, 8)), rng.standard_normal((2, 8))]).astype("f4"), np.eye(8, dtype="f4")
    found, _ = best_of_blocks(keys, n, queries, side, kept)
    planes, steps = np.zeros((3, 8), np.int8), np.zeros((2, 3), np.float32)
    encode_block_queries(queries, side, keys.step, 8, planes, steps, np.empty(8))
    codes = np.clip(np.floor((numbers.astype("f8") - keys.mean) / keys.step), -128, 127).astype(np.float32)
    sums = codes @ planes.T.astype(np.float32)
    assert ids_of(found) == [sorted(np.lexsort((np.arange(n), -row))[:kept].tolist()) for row in sums.T]
