"""Codes of 8, 4 and 2 bits: which numbers get how many, and what they tell of scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from retrieval_attn.errors import InputDataError
from retrieval_attn.index.base import QueryMoment
from retrieval_attn.index.device import DeviceIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.key_codes import CodeSpace, best_split, code_scores, encode, splits
from retrieval_attn.index.sketch.index import learn_projection, second_moment
from retrieval_attn.offload.queries import moments
from tests.index.building import built, learn_spaces


def head(dim: int, key_bytes: int, falls: float = 0.2, count: int = 3000) -> tuple[CodeSpace, np.ndarray[Any, Any]]:
    """A space for keys whose numbers' deviations fall from 3 to `falls`, and these."""
    rng = np.random.default_rng(dim + key_bytes)
    keys = (rng.standard_normal((count, dim)) * np.geomspace(3, falls, dim) + 1).astype(np.float32)
    queries = rng.standard_normal((500, dim)).astype(np.float32)
    return learn_spaces(learn_projection(second_moment(queries), keys, dim), keys, (key_bytes,))[0], keys


@pytest.mark.parametrize("dim,key_bytes", [(128, 64), (128, 48), (64, 32), (80, 24), (16, 8), (12, 5), (8, 8), (8, 20)])
def test_splits_take_the_bytes_that_there_are(dim: int, key_bytes: int) -> None:
    ways = splits(key_bytes, dim)
    assert len(set(ways)) == len(ways) > 0
    for wide, narrow, thin in ways:
        assert min(wide, narrow, thin) >= 0 and wide + narrow + thin <= dim
        assert wide + narrow / 2 + thin / 4 == min(key_bytes, dim)


def test_the_best_split_misses_least() -> None:
    """Against all of them, each summed up number by number."""
    rng = np.random.default_rng(0)
    for trial in range(20):
        variances = np.sort(rng.exponential(size=24))[::-1] ** (1 + trial % 3)
        errors = np.array([1e-4, 0.0115, 0.119, 1])[:, None] * variances

        def missed(split: tuple[int, int, int], errors: np.ndarray[Any, Any] = errors) -> float:
            classes = np.repeat(range(4), [*split, 24 - sum(split)])
            return float(sum(errors[kind, number] for number, kind in enumerate(classes)))

        found = best_split(errors, 9)
        assert found in splits(9, 24) and missed(found) <= min(map(missed, splits(9, 24))) * (1 + 1e-9)


def test_heads_are_split_by_how_their_numbers_fall() -> None:
    """Few numbers that matter get many bits; where all do alike, all are stored in few."""
    steep, flat = head(64, 16, falls=1e-3)[0], head(64, 16, falls=2.5)[0]
    assert steep.wide > flat.wide and steep.rank < flat.rank and flat.thin > steep.thin


@pytest.mark.parametrize("dim,key_bytes", [(128, 64), (128, 32), (64, 32), (80, 24), (16, 8), (64, 64)])
def test_scores_are_those_of_the_numbers_that_were_stored(dim: int, key_bytes: int) -> None:
    space, keys = head(dim, key_bytes)
    codes = encode(space, keys)
    assert codes.shape == (len(keys), min(key_bytes, dim)) and space.key_bytes == codes.shape[1]
    assert space.thin or key_bytes >= dim // 2 or dim == 16  # what this is a test of
    numbers = np.floor(keys @ space.key_side.T - space.shift)
    for number in range(space.rank):
        if number < space.wide:
            least, most, add = -128, 127, 0
        elif number < space.wide + space.narrow:
            least, most, add = -8, 7, 8
        else:
            least, most, add = -2, 1, 2
        has_sign = (
            number >= space.rank - space.thin // 4 or 0 <= number - space.wide - space.narrow // 2 < space.narrow // 2
        )
        numbers[:, number] = np.clip(numbers[:, number], least, most) + (0 if has_sign else add)
    queries = np.random.default_rng(1).standard_normal((5, dim)).astype(np.float32)
    expected = (queries @ space.query_side[: space.rank].T) @ numbers[:, : space.rank].T
    np.testing.assert_allclose(code_scores(space, codes, queries), expected, rtol=1e-4, atol=1e-3)
    exact = queries @ keys.T
    off = code_scores(space, codes, queries) + queries @ space.estimate[0][:, None] - exact
    variance = np.square(queries @ space.query_side.T) @ space.estimate[1]
    # as large as q . k, and off by as much as is said
    assert np.abs(off.mean(axis=1)).max() < 0.1 * exact.std()
    np.testing.assert_allclose(off.var(axis=1), variance, rtol=0.25)


def test_more_bytes_miss_less() -> None:
    """Few bytes have numbers of 2 bits."""
    rng = np.random.default_rng(3)
    keys = (rng.standard_normal((4000, 64)) * np.geomspace(3, 0.5, 64)).astype(np.float32)
    queries = rng.standard_normal((500, 64)).astype(np.float32)
    sides = learn_projection(second_moment(queries), keys, 64)
    missed = []
    for key_bytes in (8, 16, 24, 32, 64):
        [space] = learn_spaces(sides, keys, (key_bytes,))
        missed.append(float((np.square(queries @ space.query_side.T) @ space.estimate[1]).mean()))
    assert missed == sorted(missed, reverse=True) and missed[-1] < 0.01 * missed[0]
    assert learn_spaces(sides, keys, (16,))[0].thin


@pytest.mark.parametrize("bad", [None, np.nan])
def test_heads_learn_together_what_they_learn_alone(bad: float | None) -> None:
    rng = np.random.default_rng(7)
    keys = (rng.standard_normal((3, 5000, 64)) * np.geomspace(3, 0.3, 64)).astype(np.float32)
    queries = rng.standard_normal((3, 2, 200, 64)).astype(np.float32)
    if bad is not None:
        queries[1, 0, :40] = bad
    options = DeviceIndex.Options(key_bytes=24)
    together = DeviceIndex.learn(keys, Format.FLOAT32, options, queries)
    for head, (space, finer) in enumerate(together):
        [(alone, _)] = DeviceIndex.learn(keys[head : head + 1], Format.FLOAT32, options, queries[head : head + 1])
        assert finer is None and alone[4:] == space[4:]
        for mine, own in zip(space[:4], alone[:4], strict=True):
            np.testing.assert_array_equal(mine, own)
    assert not np.array_equal(together[0][0].key_side, together[2][0].key_side)


@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_a_moment_teaches_what_its_queries_do(scale: float) -> None:
    """Queries of a device are known by their moment; some are not finite, and squares of large ones exceed float32."""
    rng = np.random.default_rng(8)
    keys = (rng.standard_normal((3, 3000, 32)) * np.geomspace(3, 0.3, 32)).astype(np.float32)
    queries = (rng.standard_normal((6, 100, 32)) * np.geomspace(0.5, 2, 32) * scale).astype(np.float32)
    queries[2, :7, 3], queries[5, 9] = np.inf, np.nan
    options = DeviceIndex.Options(key_bytes=16)
    product, count = (part.numpy() for part in moments(torch.from_numpy(queries), 3))
    assert count.tolist() == [200, 193, 199]
    by_moment = DeviceIndex.learn(keys, Format.FLOAT32, options, QueryMoment(product, count))
    by_rows = DeviceIndex.learn(keys, Format.FLOAT32, options, queries.reshape(3, 2, 100, 32))
    for (space, _), (other, _) in zip(by_moment, by_rows, strict=True):
        assert space[4:] == other[4:]
        for mine, own in ((space.query_side, other.query_side), (space.key_side, other.key_side)):
            np.testing.assert_allclose(
                np.abs(mine), np.abs(own), rtol=0, atol=1e-3 * np.abs(own).max()
            )  # signs are free
    assert np.abs(by_moment[0][0].key_side - by_moment[2][0].key_side).max() > 0.05 * np.abs(space.key_side).max()


@pytest.mark.parametrize("name,value", [("thin", 6), ("narrow", 3), ("wide", -1), ("thin", 400), ("shift", None)])
def test_a_state_that_does_not_fit_is_refused(name: str, value: Any) -> None:
    rng = np.random.default_rng(6)
    keys = rng.standard_normal((500, 32)).astype(np.float32)
    index = built(DeviceIndex, keys, Format.FLOAT32, rng.standard_normal((1, 300, 32)).astype(np.float32), key_bytes=16)
    with pytest.raises(InputDataError):
        DeviceIndex.from_state(keys, Format.FLOAT32, {**index.state(), name: value})
