"""Leaves of near keys: every key in one, means that tell where the best are, and the share that queries need."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.index import FlatIndex, Format, SketchIndex
from retrieval_attn.index.formats import from_float32
from retrieval_attn.index.sketch import scan as leaves_module
from retrieval_attn.index.sketch.rows import BLOCK
from retrieval_attn.index.sketch.scan import code_means, leaf_order
from tests.cpu.reference import look_at_share, recall
from tests.index.building import built

N, DIM = 20_000, 32


def clustered(seed: int = 0, n: int = N) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Keys (n, DIM) around 200 centres, and queries (4, 64, DIM) near some of them."""
    rng = np.random.default_rng(seed)
    centres = 3 * rng.standard_normal((200, DIM))
    keys = centres[rng.integers(200, size=n)] + rng.standard_normal((n, DIM))
    queries = centres[rng.integers(200, size=(4, 64))] + rng.standard_normal((4, 64, DIM))
    return keys.astype(np.float32), queries.astype(np.float32)


@pytest.mark.parametrize("n", [0, 5, 16, 17, 1000, N])
def test_every_key_is_in_one_leaf_and_near_its_neighbours(n: int) -> None:
    keys, _ = clustered(1, n)
    codes, steps = np.round(keys[:, :16] * 10).astype(np.int8), np.full(16, 0.1, np.float32)
    order = leaf_order(codes, steps)
    assert sorted(order.tolist()) == list(range(n))
    np.testing.assert_array_equal(order, leaf_order(codes.copy(), steps))
    if n < 1000:
        return
    whole = n // BLOCK * BLOCK
    spread = keys[order[:whole]].reshape(-1, BLOCK, DIM)[..., :16].var(axis=1).sum(axis=1).mean()
    assert spread < 0.6 * keys[:, :16].var(axis=0).sum()


def test_equal_keys_make_leaves_too() -> None:
    order = leaf_order(np.zeros((1000, 4), np.int8), np.ones(4, np.float32))
    assert sorted(order.tolist()) == list(range(1000))


def test_means_survive_their_coding() -> None:
    means = np.random.default_rng(2).standard_normal((100, 40)).astype(np.float32)
    back = code_means(means).decoded(100)
    assert back.shape == (100, 32)
    assert np.abs(back - means[:, :32]).max() < 0.1


def test_few_leaves_find_nearly_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches look at little more than a share of the leaves, and find what the exact index finds; a wrong order does
    not.
    """
    keys, queries = clustered(3)
    stored = from_float32(keys, Format.BFLOAT16)
    train, held = queries[:, :32], np.ascontiguousarray(queries[:, 32:].transpose(1, 0, 2).reshape(-1, DIM))
    look_at_share(monkeypatch, 0.1)
    index = built(SketchIndex, stored, Format.BFLOAT16, np.ascontiguousarray(train))
    assert index.share == 0.1
    exact = FlatIndex(stored, Format.BFLOAT16).search(held, 50)

    def found_by(one: SketchIndex) -> float:
        return recall(one.search(held, 50).ids, exact.ids)

    found = index.search(held, 50)
    assert found.keys_scanned < 0.6 * len(held) * N
    assert found_by(index) >= 0.93
    monkeypatch.undo()
    monkeypatch.setattr("retrieval_attn.index.sketch.build.MIN_LEAVES", N)
    assert found_by(built(SketchIndex, stored, Format.BFLOAT16, np.ascontiguousarray(train))) >= 0.97
    means = index.search_arguments().leaves.means.blocks
    means[:] = means[::-1].copy()
    assert found_by(index) < 0.6


def test_keys_that_come_later_are_looked_at_until_all_are_ordered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_share(monkeypatch, 0.2)
    keys, queries = clustered(4)
    last = np.append(np.arange(16_332, N, 333), N - 1)
    keys[last] *= 1.5  # the best keys of their own directions
    stored = from_float32(keys, Format.BFLOAT16)
    index = built(SketchIndex, stored[:16_000], Format.BFLOAT16, queries)
    ordered = index.search_arguments().leaves.ordered
    held = np.ascontiguousarray(queries[:, 0])
    for start in range(16_000, N, 333):
        index.insert(stored[start : start + 333])
        search = index.search_arguments()
        assert np.array_equal(np.sort(search.ids[search.ids >= 0]), np.arange(len(index)))
        assert len(index) - 1 in index.search(keys[len(index) - 1 : len(index)], 20).ids[0]
    assert index.search_arguments().leaves.ordered > ordered
    index.truncate(17_000)
    index.insert(stored[:600])
    search = index.search_arguments()
    assert np.array_equal(np.sort(search.ids[search.ids >= 0]), np.arange(17_600))
    both = np.concatenate([stored[:17_000], stored[:600]])
    exact = FlatIndex(both, Format.BFLOAT16).search(held, 20)
    assert recall(index.search(held, 20).ids, exact.ids) >= 0.9
    assert index.search(held, 20, limit=9000).ids.max() < 9000


def test_blocks_are_chosen_as_plain_arithmetic_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks whose mean is among the best for one of the queries: the sample decides how many, not which. How many
    a query gets varies with the sample (a standard deviation of 0.016 was seen), so the mean over many is checked.
    """
    from retrieval_attn.index.sketch.scan import encode_block_queries

    keys, queries = clustered(5)
    look_at_share(monkeypatch, 0.05)
    index = built(SketchIndex, from_float32(keys, Format.BFLOAT16), Format.BFLOAT16, queries)
    search = index.search_arguments()
    means = search.leaves.means
    rank = len(means.step)
    codes = means.blocks.reshape(len(means.blocks), -1, BLOCK, 4).transpose(0, 2, 1, 3).reshape(-1, rank)
    chosen, sample = np.empty(search.total + 1, np.int32), np.empty((4, 4 * len(means.blocks)), np.float32)
    bounds, scratch = np.empty(4, np.float32), np.empty((8, BLOCK), np.float32)
    each = []
    for number in range(0, 64, 2):
        planes, steps = np.zeros((4, rank), np.int8), np.zeros((2, 4), np.float32)
        projected = (np.ascontiguousarray(queries[:, number]) @ search.query_side.T).astype(np.float32)
        encode_block_queries(projected, 4, means.step, rank, planes, steps, np.empty(rank))
        scores = (codes[: search.leaves.ordered].astype(np.int64) @ planes.T.astype(np.int64)).T * steps[0][:, None]
        count = leaves_module.choose_blocks(
            means.blocks, search.leaves.ordered, search.total, 0.05, planes, steps, 4, chosen, sample, bounds, scratch
        )
        np.testing.assert_array_equal(chosen[:count], np.flatnonzero((scores > bounds[:, None]).any(axis=0)))
        each.append((scores > bounds[:, None]).mean(axis=1))
    assert 0.045 < np.mean(each) < 0.06 and np.min(each) > 0.015 and np.max(each) < 0.13
