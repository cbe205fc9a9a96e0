"""Compiled sums of clusters against NumPy, and what is not done again when windows move."""

from __future__ import annotations

import numpy as np
import pytest

from retrieval_attn.cpu.cluster_sums import count_tokens, fill_table, nearest_clusters
from retrieval_attn.cpu.clusters import ClusterSums, KeyClusters, PathClusters, _table_of
from retrieval_attn.cpu.store import SequenceKV, cluster_table, take_clusters
from retrieval_attn.index.formats import Format, from_float32, to_float32

HEADS, TOKENS, DIM, VALUE_DIM = 3, 300, 40, 24


def rows(fmt: Format, dim: int, seed: int, tokens: int = TOKENS) -> np.ndarray:
    return from_float32(np.random.default_rng(seed).standard_normal((HEADS, tokens, dim), np.float32), fmt)


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("clusters", [4, 16, 64])
def test_tokens_join_the_nearest_cluster(fmt: Format, clusters: int) -> None:
    """None but those in the span, those of equal distance the first. Breaks if a head reads another's keys."""
    keys, rng = rows(fmt, DIM, 0), np.random.default_rng(1)
    probes, offsets = (rng.standard_normal(shape, np.float32) for shape in ((HEADS, clusters, DIM), (HEADS, clusters)))
    probes[:, 3], offsets[:, 3] = probes[:, 1], offsets[:, 1]
    found = np.full((HEADS, TOKENS), 255, np.uint8)
    nearest_clusters(keys, (7, 290), fmt, probes, offsets, found)
    wanted = (to_float32(keys, fmt) @ probes.transpose(0, 2, 1) + offsets[:, None]).argmax(axis=2)
    np.testing.assert_array_equal(found[:, 7:290], wanted[:, 7:290])
    assert (found[:, :7] == 255).all() and (found[:, 290:] == 255).all() and not (found == 3).any()


@pytest.mark.parametrize("fmt", list(Format))
def test_sums_are_those_of_the_tokens(fmt: Format) -> None:
    """In one go or two, and only the clusters that changed are written to the table."""
    keys, values, clusters = rows(fmt, DIM, 0), rows(fmt, VALUE_DIM, 1), 16
    members = np.random.default_rng(2).integers(0, clusters - 1, (HEADS, TOKENS)).astype(np.uint8)

    def sums() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shapes = (HEADS, clusters), (HEADS, clusters, DIM), (HEADS, clusters, VALUE_DIM)
        return tuple(np.zeros(shape, np.float32) for shape in shapes)  # type: ignore[return-value]

    own, other = sums(), sums()
    changed = count_tokens(keys, values, members, (5, 280), 1, fmt, own)
    for span in ((5, 100), (100, 280)):
        count_tokens(keys, values, members, span, 1, fmt, other)
    for one, two in zip(own, other, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)
    chosen = (members[:, None, 5:280] == np.arange(clusters)[:, None]).astype(np.float32)
    np.testing.assert_array_equal(own[0], chosen.sum(axis=2))
    np.testing.assert_allclose(own[1], chosen @ to_float32(keys, fmt)[:, 5:280], atol=1e-4)
    np.testing.assert_allclose(own[2], chosen @ to_float32(values, fmt)[:, 5:280], atol=1e-4)
    assert changed[:, :-1].all() and not changed[:, -1].any()
    table = tuple(np.full(shape, 7, np.float32) for shape in ((HEADS, 16), (HEADS, DIM, 16), (HEADS, 16, VALUE_DIM)))
    shifts = np.arange(16, dtype=np.float32)[:, None] * np.ones((HEADS, 1, VALUE_DIM), np.float32)
    fill_table(changed, own, shifts, table)  # type: ignore[arg-type]
    means = (own[1] / own[0].clip(1)[:, :, None]).transpose(0, 2, 1)
    np.testing.assert_array_equal(table[1][:, :, :-1], means[:, :, :-1])
    shifted = own[2] + own[0][:, :, None] * np.arange(16)[:, None]
    np.testing.assert_allclose(table[2][:, :-1], shifted[:, :-1], rtol=1e-6)
    assert (table[0][:, -1] == 7).all() and (table[1][:, :, -1] == 7).all() and (table[2][:, -1] == 7).all()
    count_tokens(keys, values, members, (5, 280), -1, fmt, own)
    assert not own[0].any() and np.abs(own[1]).max() < 1e-4


@pytest.mark.parametrize("steps", [(100, 200, 300), (300, 180, 300), (40, 300, 250)])
def test_a_table_that_follows_the_window_is_one_made_at_once(steps: tuple[int, ...]) -> None:
    path = SequenceKV(HEADS, DIM, VALUE_DIM, Format.FLOAT32)
    path.append(rows(Format.FLOAT32, DIM, 0), rows(Format.FLOAT32, VALUE_DIM, 1))
    rng = np.random.default_rng(3)
    probes = rng.standard_normal((HEADS, 16, DIM), np.float32)

    def table(stops: tuple[int, ...]) -> list[np.ndarray]:
        shared = KeyClusters(probes, np.zeros((HEADS, 16), np.float32))
        none = np.zeros((HEADS, 0), np.uint8)
        empty = [np.zeros(shape, np.float32) for shape in ((HEADS, 16), (HEADS, 16, DIM), (HEADS, 16, VALUE_DIM))]
        take_clusters(path, shared, (4, 4), none, ClusterSums(*empty))
        for stop in stops:
            found = cluster_table(path, 4, stop)
        assert found is not None
        return [found.counts.copy(), found.means.copy(), found.value_sums.copy()]

    for one, two in zip(table(steps), table(steps[-1:]), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("fmt", list(Format))
def test_the_table_of_a_fork_has_the_bits_of_its_sums(fmt: Format, shifted: bool) -> None:
    """Forks copy the table of their parent and change the clusters of their own tokens; the parent keeps its own."""
    path = SequenceKV(HEADS, DIM, VALUE_DIM, fmt)
    path.append(rows(fmt, DIM, 0), rows(fmt, VALUE_DIM, 1))
    rng = np.random.default_rng(3)
    probes = rng.standard_normal((HEADS, 16, DIM), np.float32)
    shifts = rng.standard_normal((HEADS, 16, VALUE_DIM), np.float32) if shifted else None
    shared = KeyClusters(probes, np.zeros((HEADS, 16), np.float32), value_shifts=shifts)
    empty = [np.zeros(shape, np.float32) for shape in ((HEADS, 16), (HEADS, 16, DIM), (HEADS, 16, VALUE_DIM))]
    take_clusters(path, shared, (4, 4), np.zeros((HEADS, 0), np.uint8), ClusterSums(*empty))
    parent = cluster_table(path, 4, 200)
    assert parent is not None
    before = [array.copy() for array in parent[:3]]
    for stops in ((212,), (190, 230), (200, 201)):
        fork = path.fork()
        for stop in stops:
            found = cluster_table(fork, 4, stop)
        assert found is not None and isinstance(fork.clusters, PathClusters)
        for one, two in zip(found[:3], _table_of(fork.clusters._sums, shared)[:3], strict=True):
            assert one.tobytes() == two.tobytes()
        for one, two in zip(parent[:3], before, strict=True):
            assert one.tobytes() == two.tobytes()
