"""Rows of keys and their front in 16s: the layouts, the share of bits, and scans of them against plain arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.index.kernels.dots import TILE_QUERIES
from retrieval_attn.index.kernels.packed import EMPTY, keep_best, score_of
from retrieval_attn.index.sketch import front as F
from retrieval_attn.index.sketch import rows as B
from retrieval_attn.index.sketch import rows as R
from retrieval_attn.index.sketch.build import no_leaves
from retrieval_attn.index.sketch.rows import PARTS, spread_planes
from retrieval_attn.index.sketch.scan import (
    SAMPLED,
    WAITING_ROOM,
    choose_blocks,
    encode_block_queries,
    project_queries,
    sample_bounds,
    scan_front,
    value_of_rank,
)
from retrieval_attn.index.sketch.task import SketchArguments, scratch_floats, wanted_of

RANK = 28  # 12 numbers of 8 bits, 16 of 4
WIDE = 12


def decoded(keys: R.KeyRows, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The numbers (n, rank) that the keys in n places were coded from, but for rounding."""
    rows, middle = (
        keys.rows[places],
        np.where(np.arange(len(keys.step)) < keys.wide, B.WIDE_LEVELS, B.NARROW_LEVELS) / 2,
    )
    halves = rows[:, keys.wide : B.key_bytes(keys.wide, keys.narrow)]
    codes = np.concatenate([rows[:, : keys.wide], halves & 15, halves >> 4], axis=1)
    numbers = np.empty(codes.shape, np.float32)
    numbers[:, B.row_order(keys.wide, keys.narrow)] = codes
    return np.asarray(keys.mean + keys.step * (numbers - (middle - 0.5)), np.float32)


def coded(n: int, seed: int = 0, wide: int = WIDE, rank: int = RANK) -> tuple[R.KeyRows, npt.NDArray[np.float32]]:
    """Rows of n keys, and their codes, number by number."""
    rng = np.random.default_rng(seed)
    numbers = (rng.standard_normal((n, rank)) * np.geomspace(5, 0.1, rank) + 2).astype(np.float32)
    keys = R.empty_rows(numbers, wide, n)
    R.write_rows(numbers, keys.rows, 0, keys.mean, keys.step, wide)
    R.clear_places(keys, n)
    half = np.where(np.arange(rank) < wide, B.WIDE_LEVELS, B.NARROW_LEVELS) // 2
    step = np.where(keys.step > 0, keys.step, 1)  # equal numbers have no step: half the levels
    codes = np.clip(np.floor((numbers.astype("f8") - keys.mean) / step), -half, half - 1) + half
    return keys, codes.astype(np.float32)


def _best_of_four(
    search: SketchArguments, stop: int, queries: npt.NDArray[np.float32], kept: int
) -> tuple[npt.NDArray[np.int64], int, npt.NDArray[np.bool_]]:
    """`best_of_blocks` of at most four queries, as a search task scans one part."""
    keys, front, leaves, count = search.keys, search.front, search.leaves, len(queries)
    padded = np.zeros((TILE_QUERIES, queries.shape[1]), np.float32)
    padded[:count] = queries
    projected = np.zeros((TILE_QUERIES, len(search.query_side)), np.float32)
    project_queries(padded, search.query_side, projected, np.empty((TILE_QUERIES, 32), np.float32))

    def encoded(step: npt.NDArray[np.float32], split: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
        planes, steps = np.zeros((TILE_QUERIES, len(step)), np.int8), np.zeros((2, TILE_QUERIES), np.float32)
        encode_block_queries(projected, count, step, split, planes, steps, np.empty(len(step), np.float64))
        return planes, steps

    row_numbers, row_steps = encoded(keys.step, keys.wide)
    row_planes = np.empty((TILE_QUERIES, PARTS * keys.rows.shape[1]), np.int8)
    spread_planes(row_numbers, count, keys.wide, row_planes)
    planes, steps = encoded(front.step, front.narrow)
    means = leaves.means
    leaf_planes, leaf_steps = encoded(means.step, len(means.step))
    chosen = np.empty(search.total + 1, np.int32)
    sample = np.empty((TILE_QUERIES, scratch_floats(len(means.blocks))), np.float32)
    bounds, scores = np.empty(TILE_QUERIES, np.float32), np.empty((8, B.BLOCK), np.float32)
    share = np.float32(leaves.share)  # as in a step: one specialisation for both
    looked_at = choose_blocks(
        means.blocks, leaves.ordered, search.total, share, leaf_planes, leaf_steps, count, chosen, sample,
        bounds, scores,
    )  # fmt: skip
    sample_bounds(
        front.blocks, search.ids, planes, front.narrow, steps, count, chosen, looked_at, 0, stop,
        wanted_of(search, kept), sample, bounds, scores,
    )  # fmt: skip
    lost = np.isnan(row_steps[0, :count])
    pool, counts = np.full((count, 2 * kept + 64), EMPTY, np.int64), np.zeros(count, np.int64)
    floors, waiting = np.empty(TILE_QUERIES, np.float32), np.empty(WAITING_ROOM, np.int64)
    scan_front(
        front.blocks, keys.rows, search.ids, planes, front.narrow, steps, row_planes, keys.wide, row_steps, count,
        chosen, 0, looked_at, search.whole if stop >= search.length else 0, 0, stop, kept, pool, counts, bounds,
        floors, waiting, scores,
    )  # fmt: skip
    for query in range(count):
        keep_best(pool[query], counts[query], min(kept, counts[query]))
        pool[query, counts[query] :] = EMPTY
    lost |= counts < kept
    leaves_scored = leaves.ordered if looked_at < search.total else 0
    return pool[:, :kept], count * (looked_at * B.BLOCK + leaves_scored), lost


def best_of_blocks(
    search: SketchArguments, stop: int, queries: npt.NDArray[np.float32], kept: int
) -> tuple[npt.NDArray[np.int64], int, npt.NDArray[np.bool_]]:
    """The `kept` keys below `stop` with the largest approximate scores per query: packed, scores computed, and which
    queries (n,) bool are lost: not finite, or with fewer keys.
    """
    groups = [queries[start : start + TILE_QUERIES] for start in range(0, len(queries), TILE_QUERIES)]
    found, scanned, lost = zip(*[_best_of_four(search, stop, some, kept) for some in groups], strict=True)
    return np.concatenate(found), sum(scanned), np.concatenate(lost)


def front_of(keys: R.KeyRows, n: int, size: int = 4) -> F.Front:
    """Their front, by steps of all of them."""
    numbers = decoded(keys, np.arange(n))
    front = F.empty_front(F.plan_front(numbers, keys.mean, [size])[size], len(keys.rows))
    F.write_front(front, keys, 0, n)
    return front


def search_of(
    keys: R.KeyRows, n: int, side: npt.NDArray[np.float32], passing: float = np.inf, size: int = 4
) -> SketchArguments:
    """All of the first n keys in the order of their ids, no leaves; passing: as many times what is kept."""
    ids = np.full(len(keys.rows), -1, np.int32)
    ids[:n] = np.arange(n)
    passing = float(min(passing, n))
    total = -(-n // B.BLOCK)
    return SketchArguments(keys, front_of(keys, n, size), ids, total, side, no_leaves(4), passing, n, n // B.BLOCK)


def projected(queries: npt.NDArray[np.float32], side: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    padded = np.zeros((-(-len(queries) // 4) * 4, queries.shape[1]), np.float32)
    padded[: len(queries)] = queries
    out = np.empty((len(padded), len(side)), np.float32)
    project_queries(padded, side, out, np.empty((4, 32), np.float32))
    np.testing.assert_allclose(out, padded @ side.T, rtol=1e-4, atol=1e-4)
    return out


def encoded(
    numbers: npt.NDArray[np.float32], count: int, step: npt.NDArray[np.float32], split: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    planes, steps = np.zeros((len(numbers), len(step)), np.int8), np.zeros((2, len(numbers)), np.float32)
    encode_block_queries(numbers, count, step, split, planes, steps, np.empty(len(step)))
    return planes, steps


def plain_scores(
    codes: npt.NDArray[np.float32], planes: npt.NDArray[np.int8], steps: npt.NDArray[np.float32], split: int
) -> npt.NDArray[np.float32]:
    """(queries, keys): of whole sums, as a kernel of 16 keys has them."""
    sums = [codes[:, part] @ planes[:, part].T.astype(np.float32) for part in (slice(0, split), slice(split, None))]
    return np.asarray((sums[0] * steps[0] + sums[1] * steps[1]).T, np.float32)


def ids_of(packed: npt.NDArray[np.int64]) -> list[list[int]]:
    return [sorted((0xFFFFFFFF - (row[row != EMPTY] & 0xFFFFFFFF)).tolist()) for row in packed]


def front_codes(front: F.Front, n: int) -> npt.NDArray[np.float32]:
    """Read back from the definition of the layout, number by number."""
    codes = np.zeros((n, len(front.step)), np.float32)
    bytes_ = (
        front.blocks.reshape(len(front.blocks), -1, 16, 4).transpose(0, 2, 1, 3).reshape(-1, front.key_bytes // 4, 4)
    )
    for j in range(len(front.step)):
        rest = j - front.narrow
        if rest < 0:
            codes[:, j] = bytes_[:n, j // 8, j % 4] >> (4 if j % 8 >= 4 else 0) & 15
        else:
            codes[:, j] = bytes_[:n, front.narrow // 8 + rest // 16, rest % 4] >> 2 * (rest % 16 // 4) & 3
    return codes


@pytest.mark.parametrize("shape", [(WIDE, RANK), (0, 16), (16, 16), (4, 12), (36, 100), (0, 136)])
@pytest.mark.parametrize("n", [1, 31, 33, 5000])
def test_rows_that_pass_are_ordered_by_their_codes(n: int, shape: tuple[int, int]) -> None:
    """Where all keys pass: for every kind of row, end and number of queries the best, each with its own score."""
    wide, rank = shape
    keys, codes = coded(n, 1, wide, rank)
    assert keys.rows.shape[1] % R.ROW_STEP == 0
    rng = np.random.default_rng(2)
    for num in (1, 4, 5):
        queries = rng.standard_normal((num, 20)).astype(np.float32)
        side = rng.standard_normal((rank, 20)).astype(np.float32)
        planes, steps = encoded(projected(queries, side), num, keys.step, wide)
        scores = plain_scores(codes, planes[:num], steps[:, :num], wide)
        for length in {n, max(1, n - 3)}:
            kept = min(length, 40)
            found, scanned, lost = best_of_blocks(search_of(keys, n, side), length, queries, kept)
            for own, right in zip(found, scores, strict=True):
                ids = 0xFFFFFFFF - (own & 0xFFFFFFFF)
                assert len(set(ids.tolist())) == kept and ids.max() < length
                told = [score_of(one) for one in own]
                np.testing.assert_allclose(told, right[ids], rtol=2e-5, atol=2e-5 * np.abs(right).max())
                best = np.sort(right[:length])[::-1][:kept]
                np.testing.assert_allclose(np.sort(told)[::-1], best, rtol=2e-5, atol=2e-5 * np.abs(right).max())
            assert not lost.any() and scanned == num * -(-n // B.BLOCK) * B.BLOCK


@pytest.mark.parametrize("shape", [(WIDE, RANK), (0, 64), (4, 12)])
@pytest.mark.parametrize("size", [4, 8, 12])
def test_a_front_has_the_nearest_code_of_fewer_bits(shape: tuple[int, int], size: int) -> None:
    """Every number against the definition; a key in the place of a forgotten one leaves nothing of it."""
    wide, rank = shape
    keys, codes = coded(100, 3, wide, rank)
    front = front_of(keys, 100, size)
    assert front.key_bytes == size and front.narrow % 8 == front.thin % 16 == 0
    numbers = decoded(keys, np.arange(100))
    own = min(rank, len(front.step))
    half = F.halves_of(F.FrontPlan(front.step, front.narrow))
    step = front.step[:own].astype(np.float64)
    # from a row's code, to a hundredth of a step: borders of both may fall together
    distance = (codes - np.where(np.arange(rank) < wide, 127.5, 7.5))[:, :own] * keys.step[:own].astype(np.float64)
    steps = np.divide(distance, step, out=np.zeros_like(distance), where=step > 0)
    right = np.clip(np.floor(steps), -half[:own], half[:own] - 1) + half[:own]
    got = front_codes(front, 100)
    np.testing.assert_array_equal(got[:, :own], np.where(step > 0, right, half[:own]))
    np.testing.assert_array_equal(got[:, own:], np.broadcast_to(half[own:], (100, len(half) - own)))
    assert np.abs(F.quantised(numbers[:, :own] - keys.mean[:own], front.step[:own], half[:own])).max() > 0
    F.write_front(front, keys, 50, 60)
    np.testing.assert_array_equal(front_codes(front, 100), got)
    keys.rows[50:60] = keys.rows[:10]
    F.write_front(front, keys, 50, 60)
    np.testing.assert_array_equal(front_codes(front, 100)[50:60], got[:10])


@pytest.mark.parametrize("num", [1, 3, 4])
def test_the_front_lets_pass_what_is_above_its_bound(num: int) -> None:
    """Exactly the keys whose score by the front is above for one of the queries get scored by their rows; hidden ones
    and places without keys do not.
    """
    n, kept = 1003, 30
    rng = np.random.default_rng(11)
    keys, codes = coded(n, 4, 4, 60)
    side = rng.standard_normal((60, 20)).astype(np.float32)
    search = search_of(keys, n, side, size=12)
    front = search.front
    numbers = projected(rng.standard_normal((num, 20)).astype(np.float32), side)
    planes, steps = encoded(numbers, num, front.step, front.narrow)
    scores = plain_scores(front_codes(front, n), planes, steps, front.narrow)
    row_numbers, row_steps = encoded(numbers, num, keys.step, keys.wide)
    by_row = plain_scores(codes, row_numbers, row_steps, keys.wide)
    row_planes = np.empty((4, R.PARTS * keys.rows.shape[1]), np.int8)
    R.spread_planes(row_numbers, num, keys.wide, row_planes)
    bounds = np.full(4, np.inf, np.float32)
    bounds[:num] = np.sort(scores[:num], axis=1)[:, -60]
    for whole, least, stop in ((n // 16, 0, n), (0, 0, n), (0, 100, 900)):
        chosen = np.append(np.arange(search.total), search.total - 1).astype(np.int32)
        pool, counts = np.empty((num, 2 * kept + 8), np.int64), np.zeros(num, np.int64)
        passed = np.asarray((scores > bounds[:, None]).any(axis=0))
        passed[:least] = passed[stop:] = False
        rows_scored = scan_front(
            front.blocks, keys.rows, search.ids, planes, front.narrow, steps, row_planes, keys.wide, row_steps, num,
            chosen, 0, search.total, whole, least, stop, kept, pool, counts, bounds.copy(), np.empty(4, np.float32),
            np.empty(WAITING_ROOM, np.int64), np.empty((8, 16), np.float32),
        )  # fmt: skip
        assert rows_scored == passed.sum() > kept
        for query in range(num):
            ids = np.array(ids_of(pool[query, : counts[query]][None])[0])
            assert passed[ids].all() and len(ids) == kept
            worst = np.sort(by_row[query, passed])[-kept]
            assert by_row[query, ids].min() >= worst - 1e-4 * np.abs(by_row).max()


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
    assert 0 < wide < 24 and R.key_bytes(wide, narrow) <= 24
    choices = [(w, n) for w in range(0, 25, 4) for n in range(0, 65 - w, 8) if R.key_bytes(w, n) <= 24 and w + n]
    assert error(wide, narrow) == min(error(*choice) for choice in choices)
    assert B.allocate(np.ones(64), 32) == (0, 64)
    assert B.allocate(np.ones(64), 64) == (64, 0)
    assert B.allocate(np.ones(1), 8) == (4, 0)


def test_steps_follow_the_data() -> None:
    """Even numbers use their whole range, ones with a long tail give some of it up; equal ones have none."""
    rng = np.random.default_rng(5)
    numbers = np.stack([rng.uniform(-1, 1, 4000), rng.standard_t(2, 4000), np.full(4000, 3.0)], axis=1).astype("f4")
    keys = B.BlockSteps.of(numbers, np.full(3, B.NARROW_LEVELS // 2))
    assert keys.step[0] == pytest.approx(keys.reach[0] / 8, rel=1e-5)
    assert keys.step[1] < keys.reach[1] / 8 / 2
    assert keys.step[2] == 0 and keys.mean[2] == 3


def test_more_keys_than_there_is_room_for() -> None:
    keys, _ = coded(70)
    written = keys.rows[:70].copy()
    front = front_of(keys, 70)
    assert R.with_room(keys, 96, 70) is keys and F.with_room(front, keys, 70) is front
    grown = R.with_room(keys, 97, 70)
    assert len(grown.rows) >= 97 and len(grown.rows) % B.PAIR == 0
    np.testing.assert_array_equal(grown.rows[:70], written)
    wider = F.with_room(front, grown, 70)
    assert len(wider.blocks) * B.BLOCK == len(grown.rows)
    np.testing.assert_array_equal(wider.blocks[:5], front.blocks[:5])
    assert R.out_of_reach(keys, keys.mean[None] + 3 * keys.reach) and not R.out_of_reach(keys, keys.mean[None])


@pytest.mark.parametrize("n", [20_000, 100_000])
def test_as_many_pass_as_are_wanted_about(n: int) -> None:
    """The bound is told from a sample: over many queries some more than are wanted are above it, of keys that count."""
    keys, _ = coded(n, 7, 0, 64)
    rng = np.random.default_rng(8)
    search = search_of(keys, n, rng.standard_normal((64, 20)).astype(np.float32), size=16)
    front = search.front
    codes = front_codes(front, n)
    chosen = np.append(np.arange(search.total), search.total - 1).astype(np.int32)
    for wanted, least in ((200, 0), (1600, 0), (400, n // 2)):
        each = []
        for _ in range(8):
            numbers = projected(rng.standard_normal((4, 20)).astype(np.float32), search.query_side)
            planes, steps = encoded(numbers, 4, front.step, front.narrow)
            bounds = np.empty(4, np.float32)
            sample_bounds(
                front.blocks, search.ids, planes, front.narrow, steps, 4, chosen, search.total, least, n, wanted,
                np.empty((4, SAMPLED + B.PAIR), np.float32), bounds, np.empty((8, 16), np.float32),
            )  # fmt: skip
            scores = plain_scores(codes, planes, steps, front.narrow)
            each.extend((scores[:, least:] > bounds[:, None]).sum(axis=1) / wanted)
        assert 0.95 < np.mean(each) < 1.7 and np.min(each) > 0.4, (wanted, np.mean(each), np.min(each))


def test_a_sample_that_misleads_is_told() -> None:
    """The best keys lie where the sample looks: where fewer pass than are kept a search says that it is lost."""
    n, kept = 40_000, 300
    rng = np.random.default_rng(7)
    numbers = rng.standard_normal((n, 8)).astype(np.float32)
    every = -(-n // (n // 16))
    numbers[np.arange(n) // B.PAIR % every == 0] += 5
    numbers[:5_000] = numbers[0]  # and thousands of equal ones
    keys = R.empty_rows(numbers, 0, n)
    R.write_rows(numbers, keys.rows, 0, keys.mean, keys.step, 0)
    queries, side = np.concatenate([np.ones((1, 8)), rng.standard_normal((2, 8))]).astype("f4"), np.eye(8, dtype="f4")
    found, _, lost = best_of_blocks(search_of(keys, n, side, 2.0), n, queries, kept)
    for own, gone in zip(found, lost.tolist(), strict=True):
        assert gone == (int((own != EMPTY).sum()) < kept)


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


@pytest.mark.parametrize("half", [2, 8, 128])
def test_what_rounding_takes(half: int) -> None:
    """By NumPy, number by number; numbers beyond the levels count as what they are from the last one."""
    numbers = np.random.default_rng(half).normal(size=(300, 5)).astype(np.float32)
    numbers[7] = 9
    step = np.array([0.1, 0.2, 0.5, 1, 2], np.float32)
    rounded = (np.clip(np.floor(numbers / step.astype(np.float64)), -half, half - 1) + 0.5) * step
    found = B.rounding_errors(numbers, step, np.full(5, half))
    np.testing.assert_allclose(found, np.square(rounded - numbers).mean(axis=0), rtol=1e-5)
    assert not np.allclose(found, np.square(np.round(numbers / step) * step - numbers).mean(axis=0), rtol=1e-2)
