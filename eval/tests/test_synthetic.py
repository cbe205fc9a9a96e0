"""The synthetic heads have the statistics that make attention keys hard to index, and are reproducible."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.errors import ConfigError
from retrieval_attn.index.base import train_positions
from retrieval_attn_eval.bench.synthetic import rotate, synthetic_head, synthetic_heads

Array = npt.NDArray[np.float64]


def weights(queries: npt.NDArray[np.float32], keys: npt.NDArray[np.float32]) -> Array:
    """Attention weights (queries, keys) in float64."""
    logits = queries.astype(np.float64) @ keys.T.astype(np.float64) / np.sqrt(keys.shape[1])
    found: Array = np.exp(logits - logits.max(1, keepdims=True))
    return found / found.sum(1, keepdims=True)


def mahalanobis(vectors: npt.NDArray[np.float32], keys: npt.NDArray[np.float32]) -> float:
    """Mean distance of vectors from the distribution of the keys."""
    centred = (vectors - keys.mean(0)).astype(np.float64)
    precision = np.linalg.inv(np.cov(keys.T.astype(np.float64)))
    return float(np.sqrt(np.einsum("ij,jk,ik->i", centred, precision, centred)).mean())


@pytest.mark.parametrize("dim", [64, 128])
def test_heads_are_as_hard_as_they_say(dim: int) -> None:
    """Queries far outside the keys' distribution, heavy-tailed attention, and "hard" changes faster than "mid".

    The paper's heads: Mahalanobis ratio above 10, top-1000 mass .89, static top-1000 .71 (of 100K keys).
    """
    share = 250  # of 16,384 keys: the same share as 2,000 of 131,072
    static: dict[str, list[float]] = {}
    for level in ("mid", "hard"):
        head = synthetic_head(16384, head_dim=dim, group=2, level=level, train=64, decode=24)
        inside = mahalanobis(head.keys[::16], head.keys)
        assert abs(inside - np.sqrt(dim)) < 0.3
        for queries in head.decode:
            assert mahalanobis(queries, head.keys) > 10 * inside
            attention = weights(queries, head.keys)
            best = -np.sort(-attention, axis=1)[:, :share].sum(1).mean()
            assert 0.6 < best < 0.97
            first = np.argsort(-attention[0])[:share]
            static.setdefault(level, []).append(float(attention[1:, first].sum(1).mean() / best))
    assert np.mean(static["hard"]) < 0.45 < np.mean(static["mid"]) < 0.9


def test_rotating_training_queries_helps() -> None:
    """Lists of queries that stand where decoding happens name more of what decoding wants, with fewer keys."""
    head = synthetic_head(8192, head_dim=64, group=1, train=512, decode=32)
    wanted = np.argpartition(head.decode[0] @ head.keys.T, -50, axis=1)[:, -50:]
    cover, listed = {}, {}
    for name, queries in (("own", head.train[0]), ("rotated", head.train_rotated[0])):
        named = np.zeros(len(head.keys), bool)
        named[np.argpartition(queries @ head.keys.T, -50, axis=1)[:, -50:]] = True
        cover[name], listed[name] = named[wanted].mean(), named.mean()
    assert cover["rotated"] > cover["own"]
    assert listed["rotated"] < listed["own"]


def test_training_queries_are_re_rotated_by_what_is_missing() -> None:
    """train_rotated is train turned on by n - t; decode queries continue the same heads."""
    head = synthetic_head(1000, head_dim=64, group=3, train=100, decode=5)
    assert head.keys.shape == (1000, 64) and head.train.shape == (3, 100, 64) and head.decode.shape == (3, 5, 64)
    assert {part.dtype for part in (head.keys, head.train, head.train_rotated, head.decode)} == {np.dtype(np.float32)}
    again = rotate(head.train, 1000 - head.train_positions, head.theta)
    np.testing.assert_allclose(again, head.train_rotated, rtol=0, atol=2e-3 * np.abs(again).max())


def test_the_same_arguments_give_the_same_bits() -> None:
    """Benchmarks in different processes compare the same keys; another seed gives others."""
    first, second = (synthetic_head(500, head_dim=32, train=20, decode=3, seed=4) for _ in range(2))
    for one, other in zip(first[:5], second[:5], strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(first.keys, synthetic_head(500, head_dim=32, train=20, decode=3, seed=5).keys)


def test_small_and_empty_heads() -> None:
    """Sizes at which nothing can be sampled."""
    for n in (0, 1, 2, 63):
        head = synthetic_head(n, head_dim=16, group=2, train=10, decode=2)
        assert head.keys.shape == (n, 16) and head.train.shape == (2, min(n, 10), 16)
        assert np.isfinite(head.decode).all()
    assert synthetic_head(9, head_dim=16, train=0, decode=0).decode.shape == (4, 0, 16)


def test_training_positions_favour_the_tail() -> None:
    """Late tokens see late keys: half of the queries come from the last eighth, none twice."""
    for n, count in ((8000, 400), (100, 100), (10, 50), (3, 2), (0, 5)):
        positions = train_positions(n, count, seed=1)
        assert len(positions) == len(set(positions.tolist())) == min(n, count)
        assert (np.diff(positions) > 0).all()
    assert (train_positions(8000, 400) >= 7000).sum() >= 200


@pytest.mark.parametrize("wrong", [{"level": "easy"}, {"head_dim": 63}, {"n": -1}, {"group": 0}, {"train": -1}])
def test_wrong_arguments(wrong: dict[str, object]) -> None:
    """Named errors, not an empty result."""
    options: dict[str, object] = {"n": 100, **wrong}
    with pytest.raises(ConfigError):
        synthetic_head(**options)  # type: ignore[arg-type]


def test_heads_of_one_text_are_single_heads_with_wishes_of_their_own() -> None:
    """The first is the lone head bit for bit; others differ; threads change nothing."""
    options: dict[str, Any] = {"head_dim": 32, "group": 2, "train": 20, "decode": 3, "seed": 4}
    alone = synthetic_head(500, **options)
    one, two = synthetic_heads(500, 2, **options)
    for name in ("keys", "train", "decode"):
        assert np.array_equal(getattr(one, name), getattr(alone, name))
        assert not np.array_equal(getattr(two, name), getattr(one, name))
    assert np.array_equal(one.train_positions, two.train_positions)
    threaded = list(synthetic_heads(500, 2, threads=2, **options))
    assert np.array_equal(threaded[1].decode, two.decode)
