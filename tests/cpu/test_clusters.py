"""The estimate of what is not retrieved: clusters of a path, and the step that attends by them."""

from typing import Any

import numpy as np
import pytest

from retrieval_attn.cpu.cluster_sums import SampledKeys
from retrieval_attn.cpu.clusters import KeyClusters, PathClusters
from retrieval_attn.cpu.host_attend import HostPartial, attend_path
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import ShapeError
from retrieval_attn.index.formats import Format, from_float32, to_float32
from retrieval_attn.index.spec import IndexSpec
from tests.cpu.apart import attend_apart
from tests.pairs import pairwise

KV_HEADS, GROUP, DIM, VALUE_DIM, CLUSTERS = 2, 3, 32, 48, 16
SCALE = 0.2


def make_path(
    tokens: int,
    fmt: Format = Format.FLOAT32,
    *,
    seed: int = 0,
    clusters: int = CLUSTERS,
    index: str = "flat",
    sampled: int = 0,
) -> SequenceKV:
    rng = np.random.default_rng(seed)
    path = SequenceKV(KV_HEADS, DIM, VALUE_DIM, fmt, index=IndexSpec.of(index))
    centers = rng.normal(size=(KV_HEADS, clusters, DIM)).astype(np.float32)
    append(path, tokens, rng, centers)
    probes = centers
    samples = None
    if sampled:
        samples = np.repeat(centers.transpose(0, 2, 1), sampled, axis=2).astype(np.float32)
        samples = samples + 0.3 * rng.normal(size=samples.shape).astype(np.float32)
    kept = None if samples is None else SampledKeys.of(samples, clusters)
    shared = KeyClusters(probes, -0.5 * (centers**2).sum(axis=2), samples=kept)
    path.clusters = PathClusters.empty(shared, fmt, VALUE_DIM)
    return path


def append(path: SequenceKV, tokens: int, rng: np.random.Generator, centers: np.ndarray) -> None:
    chosen = rng.integers(centers.shape[1], size=(KV_HEADS, tokens))
    keys = np.take_along_axis(centers, chosen[:, :, None], axis=1) + 0.3 * rng.normal(size=(KV_HEADS, tokens, DIM))
    values = rng.normal(size=(KV_HEADS, tokens, VALUE_DIM))
    stored = [from_float32(array.astype(np.float32), path.fmt) for array in (keys, values)]
    path.append(stored[0], stored[1])


def make_queries(n: int = 1, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(KV_HEADS * GROUP, n, DIM)).astype(np.float32) * 2


def reference(
    path: SequenceKV, queries: np.ndarray, span: tuple[int, int], top_k: int, softcap: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same by float64 arithmetic over whole arrays, from the definition: out and lse."""
    start, stop = span
    keys, values = (to_float32(array, path.fmt).astype(np.float64) for array in path.read(start, stop))
    assert path.clusters is not None
    shared = path.clusters.shared
    parts = path.parts(start, stop)
    owners = np.concatenate([shared.members(one, low, high, path.fmt)[:, low:high] for one, low, high, _ in parts], 1)
    shifts = np.zeros((KV_HEADS, shared.clusters, VALUE_DIM)) if shared.value_shifts is None else shared.value_shifts
    outs, lses = [], []
    for head in range(KV_HEADS):
        for query in queries[head * GROUP : (head + 1) * GROUP].reshape(-1, DIM).astype(np.float64):
            scores = keys[head] @ query
            kept = np.argsort(-scores, kind="stable")[:top_k]
            rest = np.setdiff1d(np.arange(stop - start), kept)

            def logit(products: np.ndarray) -> np.ndarray:
                return products * SCALE if softcap is None else softcap * np.tanh(products * SCALE / softcap)

            logits = logit(scores)
            own = np.zeros(stop - start, int) + owners[head]
            table = path.clusters.shared
            estimated = []
            for c in own[rest]:
                weight, count = 4 * np.exp(logit(keys[head][own == c].mean(axis=0) @ query)), 4
                if table.samples is not None:
                    number = table.samples.number
                    sampled = logit(query @ table.samples.to_float32()[head][:, c * number : (c + 1) * number])
                    inside = np.clip((logits[kept].min() - sampled) * 10, 0, 1)
                    weight, count = weight + inside @ np.exp(sampled), count + inside.sum()
                estimated.append(weight / count)
            means = [
                (values[head][rest][own[rest] == c].sum(axis=0) + shifts[head][c] * (own == c).sum())
                / (own[rest] == c).sum()
                for c in own[rest]
            ]
            weights = np.concatenate([np.exp(logits[kept]), estimated])
            rows = np.concatenate([values[head][kept], np.reshape(means, (-1, VALUE_DIM))])
            outs.append(weights @ rows / weights.sum())
            lses.append(np.log(weights.sum()))
    shape = queries.shape[:2]
    return np.reshape(outs, (*shape, VALUE_DIM)), np.reshape(lses, shape)


def check(found: HostPartial, expected: tuple[np.ndarray, np.ndarray], tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(found.out, expected[0], atol=tolerance)
    np.testing.assert_allclose(found.lse, expected[1], atol=tolerance)


@pytest.mark.parametrize(("fmt", "sampled", "n"), pairwise(list(Format), [0, 5], [1, 3]))
def test_the_rest_is_estimated_as_defined(fmt: Format, sampled: int, n: int) -> None:
    path, queries = make_path(700, fmt, sampled=sampled), make_queries(n)
    expected = reference(path, queries, (4, 690), 20)
    check(attend_path(path, queries, 4, 690, 20, scale=SCALE), expected)
    check(attend_apart(path, queries, 4, 690, 20, SCALE), expected)


def test_soft_capped_scores() -> None:
    path, queries = make_path(300, sampled=3), make_queries()
    expected = reference(path, queries, (4, 290), 20, 1.5)
    check(attend_path(path, queries, 4, 290, 20, scale=SCALE, softcap=1.5), expected)
    check(attend_apart(path, queries, 4, 290, 20, SCALE, 1.5), expected)


def test_the_estimate_comes_nearer_to_full_attention() -> None:
    path, queries = make_path(2000), make_queries(4)
    exact = attend_path(path, queries, 0, 2000, None, scale=SCALE)
    near = attend_path(path, queries, 0, 2000, 10, scale=SCALE)
    path.clusters = None
    far = attend_path(path, queries, 0, 2000, 10, scale=SCALE)
    errors = [float(np.linalg.norm(one.out - exact.out) / np.linalg.norm(exact.out)) for one in (near, far)]
    assert errors[0] < 0.3 * errors[1]
    assert np.abs(near.lse - exact.lse).max() < 0.3 < np.abs(far.lse - exact.lse).max()


def test_equal_keys_give_the_mean_of_all_values() -> None:
    path = make_path(0)
    keys = np.tile(np.linspace(-1, 1, DIM, dtype=np.float32), (KV_HEADS, 500, 1))
    values = np.random.default_rng(2).normal(size=(KV_HEADS, 500, VALUE_DIM)).astype(np.float32)
    path.append(keys, values)
    found = attend_path(path, make_queries(), 0, 500, 7, scale=SCALE)
    expected = np.repeat(values.mean(axis=1), GROUP, axis=0)[:, None]
    np.testing.assert_allclose(found.out, expected, atol=1e-6)
    assert np.abs(attend_without(path, 500, 7).out - expected).max() > 0.1, "without the estimate it is not"


def attend_without(path: SequenceKV, stop: int, top_k: int) -> HostPartial:
    other = path.fork()
    other.clusters = None
    return attend_path(other, make_queries(), 0, stop, top_k, scale=SCALE)


def test_one_dominating_key_is_unchanged() -> None:
    path, queries = make_path(500), make_queries()
    queries[:] = queries[:1]
    keys, values = path.read(0, 500)
    for head in range(KV_HEADS):
        keys[head, 77] = 60 * queries[0, 0] / np.linalg.norm(queries[0, 0])
    found = attend_path(path, queries, 0, 500, 5, scale=SCALE)
    np.testing.assert_allclose(found.out[:, 0], np.repeat(values[:, 77], GROUP, axis=0), atol=1e-6)


def test_everything_retrieved_is_exact() -> None:
    path, queries = make_path(200, sampled=4), make_queries(2)
    found = attend_path(path, queries, 3, 190, 187, scale=SCALE)
    other = path.fork()
    other.clusters = None
    exact = attend_path(other, queries, 3, 190, 187, scale=SCALE)
    np.testing.assert_array_equal(found.out, exact.out)
    np.testing.assert_array_equal(found.lse, exact.lse)


def test_nothing_to_retrieve_gives_nothing() -> None:
    found = attend_path(make_path(50), make_queries(), 20, 20, 5, scale=SCALE)
    assert not found.out.any() and np.isneginf(found.lse).all()


def test_tokens_that_come_later_join_clusters() -> None:
    path, rng, queries = make_path(600), np.random.default_rng(5), make_queries()
    centers = path.clusters.shared.probes if path.clusters else np.empty(0)
    for stop in (500, 590, 600, 640, 700):
        if stop > len(path):
            append(path, stop - len(path), rng, centers)
        check(attend_path(path, queries, 4, stop, 10, scale=SCALE), reference(path, queries, (4, stop), 10))


@pytest.mark.parametrize("stop", [4, 500, 550])
def test_clusters_found_ahead_are_those_of_a_step(stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of none, of some tokens before, and of those that a step asks for meanwhile."""
    path, other = make_path(600), make_path(600)
    assert path.clusters is not None and other.clusters is not None
    shared, (segment,) = path.clusters.shared, path.segments
    wanted = other.clusters.shared.members(other.segments[0], 4, 600, path.fmt)[:, 4:600]
    shared.members(segment, 4, min(stop, 500), path.fmt)
    join, meanwhile = KeyClusters._join, [] if stop <= 500 else [(4, stop)]

    def joined(self: KeyClusters, *args: Any) -> None:
        join(self, *args)
        if meanwhile:
            shared.members(segment, *meanwhile.pop(), path.fmt)

    monkeypatch.setattr(KeyClusters, "_join", joined)
    shared.join_ahead(segment, 4, 600, path.fmt)
    assert shared.joined(segment) == (4, 600 if stop <= 500 else stop)
    monkeypatch.undo()
    assert np.array_equal(shared.members(segment, 4, 600, path.fmt)[:, 4:600], wanted)
    monkeypatch.setattr(KeyClusters, "_join", None)
    shared.join_ahead(segment, 4, 600, path.fmt)


def test_forks_share_clusters_and_keep_their_own_tokens() -> None:
    path, queries = make_path(600), make_queries()
    attend_path(path, queries, 4, 500, 10, scale=SCALE)
    forks = [path.fork(), path.fork()]
    centers = path.clusters.shared.probes if path.clusters else np.empty(0)
    for number, fork in enumerate(forks):
        append(fork, 50 + number, np.random.default_rng(10 + number), centers)
    for number, fork in [*enumerate(forks), (0, forks[0])]:
        stop = 630 + number
        check(attend_path(fork, queries, 4, stop, 10, scale=SCALE), reference(fork, queries, (4, stop), 10))
    check(attend_path(path, queries, 4, 500, 10, scale=SCALE), reference(path, queries, (4, 500), 10))


def test_a_copied_segment_keeps_its_clusters() -> None:
    """A fork copies a short segment before it appends: clusters of keys and values cannot be found again by keys."""
    path = make_path(200)
    assert path.clusters is not None
    members = np.random.default_rng(6).integers(CLUSTERS, size=(KV_HEADS, 200)).astype(np.uint8)
    path.clusters.shared.take(path.segments[0], 0, members)
    fork = path.fork()
    append(fork, 50, np.random.default_rng(5), path.clusters.shared.probes)
    (copy,) = fork.segments
    assert copy is not path.segments[0]
    assert np.array_equal(path.clusters.shared.members(copy, 0, 250, fork.fmt)[:, :200], members)


@pytest.mark.parametrize("length", [690, 500, 3])
def test_after_a_crop_other_tokens_take_the_place(length: int) -> None:
    path, queries = make_path(700), make_queries()
    attend_path(path, queries, 4, 700, 10, scale=SCALE)
    path.truncate(length)
    centers = path.clusters.shared.probes if path.clusters else np.empty(0)
    append(path, 720 - length, np.random.default_rng(8), centers)
    check(attend_path(path, queries, 4, 710, 10, scale=SCALE), reference(path, queries, (4, 710), 10))


def test_results_do_not_depend_on_threads() -> None:
    path, queries = make_path(3000), make_queries(3)
    found = []
    for path.threads in (1, 2):
        found.append(attend_path(path, queries, 0, 3000, 30, scale=SCALE))
    one, two = found
    np.testing.assert_array_equal(one.out, two.out)
    np.testing.assert_array_equal(one.lse, two.lse)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="256 clusters"):
        KeyClusters(np.zeros((2, 257, 8), np.float32), np.zeros((2, 257), np.float32))


def test_a_plan_is_for_a_path_as_it_is() -> None:
    """Its stamp changes with all that pieces and clusters depend on, and with nothing that attention does."""
    rng = np.random.default_rng(4)
    path, centers = make_path(600), rng.normal(size=(KV_HEADS, CLUSTERS, DIM)).astype(np.float32)
    span = 0, 600
    attend_path(path, make_queries(), *span, 20, scale=SCALE)
    seen = [path.plan_stamp()]

    def is_new() -> bool:
        seen.append(path.plan_stamp())
        return seen[-1] not in seen[:-1]

    attend_path(path, make_queries(), *span, 20, scale=SCALE)
    assert path.plan_stamp() == seen[0]
    append(path, 50, rng, centers)
    assert is_new()
    attend_path(path, make_queries(), 0, 640, 20, scale=SCALE)  # clusters cover other tokens
    assert is_new()
    path.truncate(600)
    assert is_new()
    append(path, 50, rng, centers)  # as long as before, other tokens
    assert is_new()
    path.build_index(0, 600)
    assert is_new()
    path.tail_tokens = 16
    assert is_new()
    other = path.fork()
    assert other.clusters is not None and path.clusters is not None
    path.forget(*span)
    assert is_new()
    path.set_spans(path.spans[:1])
    assert is_new()
    path.release_before(len(path))
    assert is_new()


def test_members_of_others_tokens_are_others() -> None:
    """Clusters are shared with forks, whose own tokens join them, too."""
    shared = KeyClusters(np.zeros((2, 4, 8), np.float32), np.zeros((2, 4), np.float32))
    own, forks = (Segment(2, 100, 8, 8, Format.FLOAT32) for _ in range(2))
    for segment, tokens in ((own, 10), (forks, 7)):
        segment.append(*np.zeros((2, 2, tokens, 8), np.float32))
        shared.take(segment, 0, np.zeros((2, tokens), np.uint8))
    held = [shared.memory(segments).host for segments in ([], [own], [own, forks])]
    assert (held[1] - held[0], held[2] - held[1]) == (2 * 10, 2 * 7)
