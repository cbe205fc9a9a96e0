"""Products of tokens with 4-bit weights of their experts against float64, in plain PyTorch and in the kernel.

Triton's own interpreter runs the kernel on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_packed_experts.py
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from retrieval_attn.gpu import packed, packed_experts
from retrieval_attn.gpu.packed import PackedWeights, float_codes
from retrieval_attn.gpu.packed_experts import (
    ExpertShape,
    PackedExperts,
    can_pack,
    pack_experts,
    packed_bytes,
    packed_shapes,
)
from tests.gpu.places import place_of
from tests.gpu.test_decode_kernels import INTERPRETED
from tests.model.packed_weights import random_weights

TRITON = pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)
EXPERTS = 6
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
"""Values of four bits with a sign of +."""
SHAPES = [(48, 192), (64, 1024), (16, 80)]
"""out and in of an expert: two strips, whole turns of eight warps, a part of a strip."""


class Case(NamedTuple):
    """experts: on the device. exact: (experts, out, in) float64. dtype: of the inputs."""

    experts: PackedExperts
    exact: Tensor
    bias: Tensor
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.experts.device

    def numbers(self, rows: int, seed: int) -> Tensor:
        given = torch.randn(rows, self.experts.shape[2], generator=torch.Generator().manual_seed(seed))
        return given.to(torch.bfloat16).to(self.device, self.dtype)

    def wanted(self, numbers: Tensor, chosen: Tensor, *, biased: bool) -> Tensor:
        """Return the products in float64, pair by pair."""
        own, picked = numbers.double().cpu(), chosen.reshape(-1).cpu()
        own = own.repeat_interleave(len(picked) // len(own), dim=0)
        found = torch.einsum("poi,pi->po", self.exact[picked], own)
        return found + self.bias.double().cpu()[picked] if biased else found


@pytest.fixture(params=["torch", TRITON])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[(*shape, False) for shape in SHAPES] + [(64, 192, True)], ids=str)
def case(way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Random experts, whose numbers are those of one matrix; integers, or floating-point numbers as in MXFP4."""
    device = place_of(way, monkeypatch, packed, packed_experts)
    out, dim, floats = request.param
    generator = torch.Generator().manual_seed(out)
    if floats:
        there, exact = random_floats(out, dim, generator)
    else:
        own, exact = random_weights(EXPERTS * out, dim, generator)
        strips = -(-dim // 128)  # without the columns that torch's own product needs
        there = PackedWeights(own.words[:, :strips].contiguous(), own.scales[: 2 * strips].contiguous(), dim)
    experts = PackedExperts(there, EXPERTS).to(torch.device(device))
    dtype = torch.float32 if way == "torch" or INTERPRETED else torch.bfloat16
    bias = torch.randn(EXPERTS, out, generator=generator).to(torch.bfloat16).to(device, dtype)
    return Case(experts, exact.view(EXPERTS, out, dim), bias, dtype)


def random_floats(out: int, dim: int, generator: torch.Generator) -> tuple[PackedWeights, Tensor]:
    """Blocks of 32 numbers of E2M1 with a power of two, and what they are exactly, float64 (experts * out, dim)."""
    codes = torch.randint(0, 16, (EXPERTS, out, dim), generator=generator, dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-8, -4, (EXPERTS, out, dim // 32), generator=generator).float())
    values = torch.tensor(E2M1 + [-one for one in E2M1], dtype=torch.float64)[codes.int()]
    matrices = ((code, scale / 2, torch.zeros(())) for code, scale in zip(codes, scales, strict=True))
    found = pack_experts(matrices, ExpertShape(EXPERTS, out, dim), 32, torch.device("cpu"), floats=True)
    return found.weights, (values * scales.double().repeat_interleave(32, dim=2)).flatten(0, 1)


def choose(tokens: int, visited: int, device: torch.device) -> Tensor:
    """Experts of tokens, a token's all different."""
    order = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens)).argsort(dim=1)
    return order[:, :visited].contiguous().to(device)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 20])
@pytest.mark.parametrize("biased", [False, True])
def test_each_token_is_multiplied_by_its_experts(case: Case, tokens: int, biased: bool) -> None:
    """From one row per token, then from one per pair; with other experts the result is another one."""
    bound = 5e-3 if case.dtype == torch.bfloat16 or not INTERPRETED else 2e-4
    for visited in (1, 3):
        chosen = choose(tokens, visited, case.device)
        for rows in {tokens, tokens * visited}:
            numbers = case.numbers(rows, seed=rows)
            found = case.experts.products(numbers, chosen, case.bias if biased else None)
            assert found.shape == (tokens * visited, case.experts.shape[1]) and found.dtype == case.dtype
            assert error(found, case.wanted(numbers, chosen, biased=biased)) <= bound
            swapped = (chosen + 1) % EXPERTS
            assert error(found, case.wanted(numbers, swapped, biased=biased)) > 0.1


def test_rows_do_not_depend_on_the_others(case: Case) -> None:
    """A token alone, and the same among others that visit its experts."""
    chosen = choose(9, 3, case.device)
    chosen[4:] = chosen[4]  # six tokens of the same experts
    numbers = case.numbers(9, seed=1)
    together = case.experts.products(numbers, chosen, None).view(9, 3, -1)
    for row in range(9):
        alone = case.experts.products(numbers[row : row + 1], chosen[row : row + 1], None)
        tolerance = 2e-2 if case.dtype == torch.bfloat16 else 2e-4
        torch.testing.assert_close(alone, together[row], rtol=tolerance, atol=tolerance)


def test_copies_are_the_experts(case: Case) -> None:
    """Of any range of them; weights are rounded to bfloat16 once."""
    for first, count in ((0, EXPERTS), (2, 3), (5, 1)):
        found = case.experts.matrices(first, count)
        assert found.shape == (count, *case.experts.shape[1:])
        exact = case.exact[first : first + count]
        assert torch.equal(found.cpu().double(), exact) if case.experts.weights.floats else error(found, exact) < 4e-3


def test_packing_is_what_unpacking_reads() -> None:
    """Numbers with scales and offsets, expert by expert; a row that ends within a strip and within a group."""
    shape, group = ExpertShape(3, 16, 144), 64
    generator = torch.Generator().manual_seed(0)
    parts = [
        (
            torch.randint(0, 16, shape[1:], generator=generator, dtype=torch.uint8),
            torch.rand(16, 3, generator=generator).to(torch.bfloat16).float(),
            torch.zeros(16, 3),
        )
        for _ in range(3)
    ]
    packed_ones = pack_experts(iter(parts), shape, group, torch.device("cpu"), floats=False)
    words, scales = packed_shapes(shape, group)
    assert packed_ones.weights.words.shape == words and packed_ones.weights.scales.shape == scales
    assert packed_bytes(shape, group) == sum(one.nbytes for one in packed_ones.tensors.values())
    assert packed_ones.weights.is_whole and packed_ones.shape == shape
    for number, (numbers, scale, _) in enumerate(parts):
        exact = numbers.float() * scale.repeat_interleave(group, dim=1)[:, :144]
        assert error(packed_ones.matrices(number, 1)[0], exact.double()) < 4e-3


def test_codes_of_floats() -> None:
    twice = torch.tensor([int(2 * one) for one in E2M1 + [-one for one in E2M1]], dtype=torch.int8)
    assert float_codes(twice).tolist() == [*range(8), 0, *range(9, 16)]


@pytest.mark.parametrize(
    ("out", "columns", "group", "fits"), [(32, 144, 64, True), (24, 64, 64, False), (32, 40, 64, False)]
)
def test_sizes_that_no_kernel_has(out: int, columns: int, group: int, fits: bool) -> None:
    assert can_pack(out, columns, group) is fits
