"""Exact lists on any device against a sort of all scores, and against the CPU's lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.gpu import knn
from retrieval_attn.gpu.knn import nearest_keys, scratch_bytes
from retrieval_attn.index.flat import search_exact
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.codes import encode_keys
from retrieval_attn.index.kernels.knn import training_lists

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def whole_numbers(seed: int, *shape: int, most: int = 3) -> torch.Tensor:
    """Small whole numbers: their products are exact in any order of summation, and many scores are equal."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def sorted_lists(queries: torch.Tensor, keys: torch.Tensor, kk: int) -> np.ndarray:
    """The definition: a stable sort of exact scores, equal ones by lower id."""
    group = queries.shape[0] // keys.shape[0]
    scores = queries.double() @ keys.double().repeat_interleave(group, dim=0).transpose(1, 2)
    order = np.argsort(-scores.numpy(), axis=2, kind="stable")[:, :, :kk]
    lists = np.full((*queries.shape[:2], kk), -1, np.int32)
    lists[:, :, : order.shape[2]] = order
    return lists


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("n", "kk"), [(1, 3), (31, 5), (700, 5), (1000, 40), (1024, 32), (4000, 1)], ids=lambda value: str(value)
)
def test_lists_are_exact_with_ties_by_lower_id(device: str, dtype: torch.dtype, n: int, kk: int) -> None:
    """Fails if a group is dropped that holds a key of the list, or if equal scores are ordered by chance."""
    queries, keys = whole_numbers(1, 4, 9, 6), whole_numbers(2, 2, n, 6)
    got = nearest_keys(queries.to(device), keys.to(device, dtype), kk)
    assert got.dtype == torch.int32
    np.testing.assert_array_equal(got.cpu().numpy(), sorted_lists(queries, keys, kk))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", [1, 200_000, 1 << 20])
def test_blocks_change_nothing(device: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries at once, and keys in several products whose results are merged."""
    queries, keys = whole_numbers(3, 2, 9, 5), whole_numbers(4, 1, 700, 5)
    expected = sorted_lists(queries, keys, 20)
    for most in (1 << 18, 300, 64):
        monkeypatch.setattr(knn, "MAX_KEYS", most)
        got = nearest_keys(queries.to(device), keys.to(device, torch.bfloat16), 20, memory=memory)
        np.testing.assert_array_equal(got.cpu().numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_best_key_in_every_kind_of_place(device: str) -> None:
    """All best keys in one group, all in different groups, and equal maxima at the border of what is looked at."""
    keys = torch.zeros(1, 2048, 4)
    keys[0, 320:352, 0] = torch.arange(32.0) + 5  # one whole group
    keys[0, ::64, 1] = 7.0  # one in every second group, all equal
    queries = torch.eye(4)[None, :3]
    got = nearest_keys(queries.to(device), keys.to(device), 8).cpu().numpy()[0]
    np.testing.assert_array_equal(got[0], np.arange(351, 343, -1))
    np.testing.assert_array_equal(got[1], 64 * np.arange(8))
    np.testing.assert_array_equal(got[2], np.arange(8), "all scores equal: the first keys")


@pytest.mark.parametrize("device", DEVICES)
def test_real_numbers_agree_with_the_exact_search_of_the_cpu(device: str) -> None:
    """Scores of the lists equal the CPU's to float32 rounding, and lists differ only where scores hardly do."""
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(1, 5000, 64, generator=generator).bfloat16()
    queries = torch.randn(3, 40, 64, generator=generator).bfloat16().float()
    got = nearest_keys(queries.to(device), keys.to(device), 50).cpu().numpy()
    stored = keys[0].view(torch.uint16).numpy()
    flat = queries.reshape(120, 64).numpy()
    exact = search_exact(stored, flat, 50, Format.BFLOAT16)
    scores = flat.astype(np.float64) @ keys[0].double().numpy().T
    mine = np.take_along_axis(scores, got.reshape(120, 50).astype(np.int64), axis=1)
    np.testing.assert_allclose(mine, exact.scores, rtol=0, atol=2e-5)
    assert (got.reshape(120, 50) == exact.ids).mean() > 0.999
    coded = training_lists(queries.numpy(), stored, Format.BFLOAT16, encode_keys(stored, Format.BFLOAT16), 50)
    shared = [len(set(a) & set(b)) for a, b in zip(got.reshape(120, 50), coded.reshape(120, 50), strict=True)]
    assert np.mean(shared) >= 0.97 * 50


@pytest.mark.parametrize("device", DEVICES)
def test_queries_are_rounded_to_what_keys_are_stored_in(device: str) -> None:
    """A list is exact for the query that 16-bit products see; without rounding the order below is another one."""
    query = torch.tensor([[[1.0 + 2**-9, -1.0]]])  # bf16: 1.0
    keys = torch.tensor([[[1.0, 1.0], [256.0, 256.0]]])
    assert nearest_keys(query.to(device), keys.to(device, torch.bfloat16), 2)[0, 0].tolist() == [0, 1]
    assert nearest_keys(query.to(device), keys.to(device), 2)[0, 0].tolist() == [1, 0]


def test_nothing_and_what_is_not_finite() -> None:
    queries, keys = whole_numbers(6, 2, 3, 4), whole_numbers(7, 1, 9, 4)
    assert nearest_keys(queries[:, :0], keys, 5).shape == (2, 0, 5)
    assert (nearest_keys(queries, keys[:, :0], 5) == -1).all()
    queries[1, 2, 0] = float("nan")
    got = nearest_keys(queries, keys, 5)
    assert (got[1, 2] == -1).all() and (got[0] >= 0).all() and (got[1, :2] >= 0).all()
    assert (nearest_keys(queries, keys, 12)[0, :, 9:] == -1).all()


def test_bad_input_is_refused() -> None:
    queries, keys = torch.zeros(3, 1, 4), torch.zeros(2, 5, 4)
    with pytest.raises(ShapeError, match="multiple of the 2 key heads, got 3"):
        nearest_keys(queries, keys, 2)
    with pytest.raises(ShapeError, match="head_dim"):
        nearest_keys(queries, keys[:1, :, :3], 2)
    for kk, memory in ((0, 1), (1, 0), (True, 1)):
        with pytest.raises(ConfigError, match="whole number"):
            nearest_keys(queries[:2], keys, kk, memory=memory)


@pytest.mark.cuda
@pytest.mark.parametrize(("n", "kk"), [(131_072, 100), (20_000, 100), (4_000, 500), (300_000, 10)])
def test_memory_is_bounded(n: int, kk: int) -> None:
    """The device's peak beyond inputs and result stays below `memory` (and 2 MiB of the product's own)."""
    keys = torch.randn(2, n, 128, device="cuda").bfloat16()
    queries = torch.randn(4, 700, 128, device="cuda")
    nearest_keys(queries[:, :8], keys, kk)  # workspaces
    memory = max(64 << 20, scratch_bytes(16, min(n, knn.MAX_KEYS), kk))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lists = nearest_keys(queries, keys, kk, memory=memory)
    torch.cuda.synchronize()
    padded = 128 * 2 * min(n, knn.MAX_KEYS)
    assert torch.cuda.max_memory_allocated() - before - lists.nbytes <= memory + padded + (2 << 20)
