"""Experts in blocks, some in host memory, against the same experts in one tensor: products, copies and moves.

Triton's own interpreter runs the kernel on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_expert_blocks.py
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from retrieval_attn.errors import InputDataError
from retrieval_attn.gpu import expert_blocks, packed, packed_experts
from retrieval_attn.gpu.expert_blocks import BlockLayout, ExpertBlocks, LayerBuffer, PlacedExperts
from retrieval_attn.gpu.packed import PackedWeights
from retrieval_attn.gpu.packed_experts import ExpertShape, PackedExperts
from retrieval_attn.model.placed_experts import empty_blocks
from tests.gpu.places import place_of
from tests.gpu.test_packed_experts import EXPERTS, TRITON, choose, random_floats
from tests.model.packed_weights import random_weights

ON_HOST = 4
SHAPES = [(48, 192, False), (16, 80, False), (64, 192, True)]
"""out and in of an expert, and whether numbers are E2M1."""


def place_packed(experts: PackedExperts, on_host: int) -> PlacedExperts:
    """Return a copy of packed experts in blocks, the last `on_host` of them in host memory."""
    weights, shape = experts.weights, experts.shape
    blocks = empty_blocks(BlockLayout(shape, weights.group, weights.floats), experts.device, on_host)
    for expert in range(shape.experts):
        blocks.store(expert, blocks.layout.block(experts.weights_of(expert, 1)))
    return PlacedExperts(blocks, shape.experts)


class Pair(NamedTuple):
    """The same experts in one tensor and in blocks, the first two of them on the device."""

    whole: PackedExperts
    placed: PlacedExperts

    @property
    def blocks(self) -> ExpertBlocks:
        return self.placed.weights

    @property
    def tolerance(self) -> float:
        return 1e-2 if self.whole.device.type == "cuda" else 1e-5

    def settle(self) -> None:
        """Wait until the device has executed all launches."""
        if self.whole.device.type == "cuda":
            torch.cuda.synchronize()

    def numbers(self, rows: int, seed: int = 0) -> Tensor:
        given = torch.randn(rows, self.whole.shape.columns, generator=torch.Generator().manual_seed(seed))
        dtype = torch.bfloat16 if self.whole.device.type == "cuda" else torch.float32
        return given.to(torch.bfloat16).to(self.whole.device, dtype)


@pytest.fixture(params=["torch", TRITON])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SHAPES, ids=str)
def pair(way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    device = torch.device(place_of(way, monkeypatch, packed, packed_experts, expert_blocks))
    return made_pair(device, *request.param)


def made_pair(device: torch.device, out: int, dim: int, floats: bool) -> Pair:
    generator = torch.Generator().manual_seed(out)
    if floats:
        there, _ = random_floats(out, dim, generator)
    else:
        own, _ = random_weights(EXPERTS * out, dim, generator)
        strips = -(-dim // 128)
        there = PackedWeights(own.words[:, :strips].contiguous(), own.scales[: 2 * strips].contiguous(), dim)
    whole = PackedExperts(there, EXPERTS).to(device)
    return Pair(whole, place_packed(whole, ON_HOST))


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_products_are_those_of_one_tensor(pair: Pair, tokens: int) -> None:
    """For rows of tokens and of pairs, with a bias and without; visits are counted."""
    chosen = choose(tokens, 3, pair.whole.device)
    bias = torch.randn(EXPERTS, pair.whole.shape.out).to(pair.numbers(1))
    for rows in {tokens, 3 * tokens}:
        numbers = pair.numbers(rows, seed=rows)
        for own in (None, bias):
            expected = pair.whole.products(numbers, chosen, own)
            torch.testing.assert_close(
                pair.placed.products(numbers, chosen, own), expected, rtol=pair.tolerance, atol=pair.tolerance
            )
    assert not pair.blocks.counts.any()
    pair.placed.products(pair.numbers(tokens), chosen, None, counted=True)
    assert pair.blocks.counts.tolist() == torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()


def test_copies_are_those_of_one_tensor(pair: Pair) -> None:
    """Read where blocks are stored, and from the buffer of a layer."""
    layer = (pair.blocks,)
    for first, count in ((0, EXPERTS), (1, 3), (5, 1)):
        expected = pair.whole.matrices(first, count)
        assert torch.equal(pair.placed.matrices(first, count), expected)
        with LayerBuffer([layer]).filled(layer, range(first, first + count)) as buffer:
            assert buffer is not None
            for expert in range(first, first + count):
                assert (buffer.block(pair.blocks, expert) is not None) == (expert >= EXPERTS - ON_HOST)
            pair.settle()
            pair.blocks.host.zero_()
            assert torch.equal(pair.placed.matrices(first, count, buffer), expected)
        pair = pair._replace(placed=place_packed(pair.whole, ON_HOST))
        layer = (pair.blocks,)


@pytest.mark.parametrize("way", [TRITON])
def test_a_wrong_address_gives_other_products(pair: Pair) -> None:
    """The kernel reads the table and nothing else: an expert with another's address has its products."""
    chosen = torch.tensor([[1, 4]], device=pair.whole.device)
    numbers = pair.numbers(1)
    expected = pair.whole.products(numbers, chosen, None)
    pair.blocks.redirect(4, pair.blocks.block(5))
    found = pair.placed.products(numbers, chosen, None)
    torch.testing.assert_close(found[0], expected[0])
    other = pair.whole.products(numbers, torch.full_like(chosen, 5), None)[1]
    torch.testing.assert_close(found[1], other)
    assert float((found[1] - expected[1]).abs().max()) > 0.01


def test_moved_experts_give_the_same_products(pair: Pair) -> None:
    """The most visited ones move to the device, in exchange for those least visited; both matrices of a layer."""
    second = made_pair(pair.whole.device, 16, 80, False)
    layer = pair.blocks, second.blocks
    buffer = LayerBuffer([layer])
    chosen = choose(5, EXPERTS, pair.whole.device)
    numbers = pair.numbers(5)
    expected = pair.whole.products(numbers, chosen, None)
    pair.blocks.counts.copy_(torch.tensor([300, 100, 900, 200, 60, 800]))
    addresses = pair.blocks.table.tolist()
    assert buffer.move_hottest(1, pair.settle) == 1
    assert [expert for expert in range(EXPERTS) if not pair.blocks.is_on_host(expert)] == [0, 2]
    assert pair.blocks.counts.tolist() == [150, 50, 450, 100, 30, 400]
    assert buffer.move_hottest(8, pair.settle) == 1 and buffer.move_hottest(8, pair.settle) == 0
    assert [expert for expert in range(EXPERTS) if not pair.blocks.is_on_host(expert)] == [2, 5]
    assert pair.blocks.table.tolist() != addresses and sorted(pair.blocks.table.tolist()) == sorted(addresses)
    for one in (pair, second):
        assert one.blocks.places == pair.blocks.places
        assert [one.blocks.address(one.blocks.block(own)) for own in range(EXPERTS)] == one.blocks.table.tolist()
        assert torch.equal(one.placed.matrices(0, EXPERTS), one.whole.matrices(0, EXPERTS))
    torch.testing.assert_close(
        pair.placed.products(numbers, chosen, None), expected, rtol=pair.tolerance, atol=pair.tolerance
    )


def test_a_buffer_has_one_layer_at_a_time() -> None:
    """Experts of another layer replace them, and moves forget them."""
    first, second = (made_pair(torch.device("cpu"), 16, 80, False) for _ in range(2))
    layers = [(first.blocks,), (second.blocks,)]
    buffer = LayerBuffer(layers)
    with buffer.filled(layers[0], [0, 3, 4]):
        assert buffer.block(first.blocks, 0) is None and buffer.block(second.blocks, 3) is None
        copied = buffer.block(first.blocks, 4)
        assert copied is not None and torch.equal(copied, first.blocks.block(4))
    with buffer.filled(layers[1], [4]):
        assert buffer.block(first.blocks, 4) is None and buffer.block(second.blocks, 4) is not None
    second.blocks.counts[5] = 37
    assert buffer.move_hottest(9, int) == 1 and buffer.block(second.blocks, 4) is None


def test_blocks_of_bytes() -> None:
    """A byte has the exponent of an MXFP4 scale: GPT-OSS-120B's expert takes 13.5 MB, 15 % less than with pairs."""
    up, down = (BlockLayout(ExpertShape(128, *own), 32, True) for own in ((5760, 2880), (2880, 2880)))
    assert up.nbytes + down.nbytes == 13_512_960


def test_scales_between_powers_of_two_have_no_byte() -> None:
    layout = BlockLayout(ExpertShape(1, 16, 128), 32, True)
    words = torch.zeros(2, 1, 32, 4, dtype=torch.int32)
    with pytest.raises(InputDataError, match="powers of two"):
        layout.block(PackedWeights(words, torch.full((4, 16, 2), 0.75, dtype=torch.bfloat16), 128, floats=True))
