"""Keys in blocks of 16: the layout, the share of bits, and scans of it against plain arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.index.kernels.packed import EMPTY
from retrieval_attn.index.sketch import blocks as B
from retrieval_attn.index.sketch.index import SketchArguments
from retrieval_attn.index.sketch.leaves import Leaves, code_means
from retrieval_attn.index.sketch.scan import SAMPLED, encode_block_queries, project_queries, value_of_rank
from retrieval_attn.index.sketch.search import best_of_blocks

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


def search_of(keys: B.KeyBlocks, n: int, side: npt.NDArray[np.float32]) -> SketchArguments:
    """All of the first n keys in the order of their ids, no leaves."""
    ids = np.full(len(keys.blocks) * B.BLOCK, -1, np.int32)
    ids[:n] = np.arange(n)
    none = Leaves(code_means(np.zeros((0, len(side)), np.float32)), 0, 1.0)
    return SketchArguments(keys, ids, -(-n // B.BLOCK), side, none)


def projected(queries: npt.NDArray[np.float32], side: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    padded = np.zeros((-(-len(queries) // 4) * 4, queries.shape[1]), np.float32)
    padded[: len(queries)] = queries
    out = np.empty((len(padded), len(side)), np.float32)
    project_queries(padded, side, out, np.empty((4, 32), np.float32))
    np.testing.assert_allclose(out, padded @ side.T, rtol=1e-4, atol=1e-4)
    return out


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
        encode_block_queries(projected(queries, side), num, keys.step, wide, planes, steps, np.empty(rank))
        sums = [
            (codes[:, part] @ planes[:, part].T.astype(np.float32)) * steps[i]
            for i, part in enumerate((slice(0, wide), slice(wide, rank)))
        ]
        scores = (sums[0] + sums[1]).T
        for length in {n, max(1, n - 3)}:
            kept = min(length, 40)
            found, scanned, lost = best_of_blocks(search_of(keys, n, side), length, queries, kept)
            order = [sorted(np.lexsort((np.arange(length), -row[:length]))[:kept].tolist()) for row in scores]
            assert ids_of(found) == order
            assert not lost.any() and scanned == num * -(-n // B.BLOCK) * B.BLOCK


def test_query_numbers_stand_for_the_query() -> None:
    """Sums times steps are the product with the projected query, but for a constant and a rounding below one step."""
    keys, codes = coded(300)
    rng = np.random.default_rng(3)
    queries, side = rng.standard_normal((6, 20)).astype(np.float32), rng.standard_normal((RANK, 20)).astype(np.float32)
    planes, steps = np.zeros((6, RANK), np.int8), np.zeros((2, 6), np.float32)
    encode_block_queries(projected(queries, side), 6, keys.step, WIDE, planes, steps, np.empty(RANK))
    exact = (codes * keys.step) @ (queries @ side.T).T
    own = (codes[:, :WIDE] @ planes[:, :WIDE].T) * steps[0] + (codes[:, WIDE:] @ planes[:, WIDE:].T) * steps[1]
    bound = 0.5 * (steps[0] * B.WIDE_LEVELS * WIDE + steps[1] * B.NARROW_LEVELS * (RANK - WIDE))
    assert (np.abs(own - exact) <= bound + 1e-3).all()
    assert np.abs(planes[:, :WIDE]).max() == np.abs(planes[:, WIDE:]).max() == 127


def test_queries_that_are_not_finite_are_lost() -> None:
    keys, _ = coded(100)
    queries = np.ones((4, 20), np.float32)
    queries[1, 2], queries[2, 0], queries[3] = np.nan, np.inf, 0
    _, _, lost = best_of_blocks(search_of(keys, 100, np.ones((RANK, 20), np.float32)), 100, queries, 10)
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


def test_a_sample_that_misleads_is_told() -> None:
    """The best keys lie where the sample looks: too few others pass its bound. Others find theirs, equal ones by id."""
    n, kept = 40_000, 300
    rng = np.random.default_rng(7)
    numbers = rng.standard_normal((n, 8)).astype(np.float32)
    numbers[np.arange(n) // B.PAIR % (n // SAMPLED) == 0] += 5
    numbers[:5_000] = numbers[0]  # and thousands of equal ones
    keys = B.empty_blocks(numbers, 8, n)
    B.write_blocks(numbers, keys.blocks, 0, keys.mean, keys.step, 8)
    queries, side = np.concatenate([np.ones((1, 8)), rng.standard_normal((2, 8))]).astype("f4"), np.eye(8, dtype="f4")
    found, _, lost = best_of_blocks(search_of(keys, n, side), n, queries, kept)
    planes, steps = np.zeros((3, 8), np.int8), np.zeros((2, 3), np.float32)
    encode_block_queries(projected(queries, side), 3, keys.step, 8, planes, steps, np.empty(8))
    codes = np.clip(np.floor((numbers.astype("f8") - keys.mean) / keys.step), -128, 127).astype(np.float32)
    sums = codes @ planes.T.astype(np.float32)
    expected = [sorted(np.lexsort((np.arange(n), -row))[:kept].tolist()) for row in sums.T]
    right = [one == other for one, other in zip(ids_of(found), expected, strict=True)]
    assert all(ok or gone for ok, gone in zip(right, lost.tolist(), strict=True)), (right, lost)


def test_a_value_of_a_rank() -> None:
    """About so many numbers are above it; none where that cannot be said."""
    rng = np.random.default_rng(9)
    numbers = rng.standard_normal(2000).astype(np.float32)
    for rank in (1, 40, 1000):
        above = int((numbers > value_of_rank(numbers, 2000, rank)).sum())
        assert rank <= above <= rank + max(2, rank // 20)
    numbers[::2] = -np.inf
    assert int((numbers > value_of_rank(numbers, 2000, 100)).sum()) in range(100, 108)
    for few in (np.ones(50, np.float32), np.full(50, -np.inf, np.float32), numbers[:0]):
        assert value_of_rank(few, len(few), 5) == -np.inf
    assert value_of_rank(numbers, 2000, 2000) == -np.inf
