"""Triton kernels compiled for GPUs that are not there: each fits the shared memory of a consumer card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import retrieval_attn.gpu
from retrieval_attn.gpu.shared import partials
from retrieval_attn.gpu.shared.partials import PagedKeys, plan_shape
from retrieval_attn.gpu.shared.plan import PAGE_TOKENS
from tools.compile_kernels import CARDS, KIB, MODULES, Card, all_kernels, compiled, has_triton

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton: pip install triton==3.6.0")


def test_all_modules_with_kernels_are_compiled() -> None:
    folder = Path(str(retrieval_attn.gpu.__file__)).parent
    found = [".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*_triton.py")]
    assert sorted(found) == sorted(MODULES)


@pytest.mark.parametrize(
    ("shared", "head_dim", "tile"),
    [(99, 512, 16), (99, 256, 32), (99, 128, 128), (227, 512, 128), (227, 256, 128), (0, 256, 128)],
)
def test_a_tile_of_wide_heads_follows_the_shared_memory(
    shared: int, head_dim: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partials, "shared_bytes", lambda device: shared * KIB)
    key = torch.empty(8, 4, PAGE_TOKENS, head_dim, dtype=torch.bfloat16)
    assert plan_shape(PagedKeys(key, key), 16, 64, exact=False).tile == tile
    assert plan_shape(PagedKeys(key, key), 1, 64, exact=False).tile == 16


@needs_triton
@pytest.mark.parametrize(
    ("shared", "dim", "dtype", "tokens"),
    [
        (227, 512, torch.float32, 32), (227, 512, torch.bfloat16, 64), (99, 512, torch.float32, 16),
        (99, 512, torch.bfloat16, 32), (99, 256, torch.bfloat16, 64), (99, 128, torch.float32, 64),
    ],
)  # fmt: skip
def test_a_block_of_the_window_follows_the_shared_memory(
    shared: int, dim: int, dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retrieval_attn.gpu.decode import kernels_triton

    monkeypatch.setattr(kernels_triton, "shared_bytes", lambda device: shared * KIB)
    query = torch.empty(1, 8, 1, dim, dtype=dtype)
    assert kernels_triton._block_tokens(query, dim, rows=16) == tokens


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS, ids=lambda card: f"sm_{card.capability}")
def test_every_kernel_compiles_and_fits(card: Card) -> None:
    found = compiled(card)
    assert found.failed == []
    assert found.names == all_kernels()
    assert {name: one for name, one in found.most().items() if one.shared > card.shared} == {}
