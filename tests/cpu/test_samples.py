"""Sampled keys in bfloat16 and their products with a query, against NumPy."""

import numpy as np
import pytest

from retrieval_attn.cpu.cluster_sums import SampledKeys, columns_for, score_samples
from retrieval_attn.errors import ShapeError
from retrieval_attn.index.formats import Format, from_float32, to_float32

HEADS = 2


def keys_of(dim: int, clusters: int, number: int) -> np.ndarray:
    """(HEADS, dim, clusters * number), cluster after cluster."""
    return np.random.default_rng(dim).normal(size=(HEADS, dim, clusters * number)).astype(np.float32)


@pytest.mark.parametrize("clusters,number", [(1, 16), (4, 16), (16, 5), (64, 16), (256, 4), (3, 43)])
@pytest.mark.parametrize("dim", [1, 40, 64, 256])
def test_products_are_those_of_rounded_keys(dim: int, clusters: int, number: int) -> None:
    """In the order of the i-th samples of all clusters; columns that are no sample's give 0."""
    keys = keys_of(dim, clusters, number)
    held = SampledKeys.of(keys, clusters)
    rounded = to_float32(from_float32(keys, Format.BFLOAT16), Format.BFLOAT16)
    np.testing.assert_array_equal(held.to_float32(), rounded)
    query = np.random.default_rng(5).normal(size=dim).astype(np.float32)
    for head in range(HEADS):
        out = np.full(columns_for(clusters * number), np.nan, np.float32)
        score_samples(query, held.packed.ctypes.data + head * held.packed.strides[0], out)
        found = out[: clusters * number].reshape(number, clusters).T
        right = query.astype(np.float64) @ rounded[head].astype(np.float64)
        np.testing.assert_allclose(found, right.reshape(clusters, number), rtol=0, atol=4e-6 * dim**0.5)
        assert not out[clusters * number :].any()


def test_bytes_are_half_of_float32() -> None:
    held = SampledKeys.of(keys_of(64, 64, 16), 64)
    assert held.nbytes == HEADS * 64 * 1024 * 2 and (held.clusters, held.number) == (64, 16)


@pytest.mark.parametrize("shape", [(2, 8, 0), (2, 8, 15), (8, 16)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="a multiple of 4 clusters"):
        SampledKeys.of(np.zeros(shape, np.float32), 4)
