"""Weights of 4 bits: their layout, and products with what stands around them against float64.

Triton's own interpreter runs the kernels on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_packed_weights.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retrieval_attn.gpu import packed, products
from retrieval_attn.gpu.packed import PackedWeights, unpacked
from retrieval_attn.gpu.products import Attending, Gated, LinearWeights, Norm
from tests.gpu.places import place_of
from tests.gpu.test_decode_kernels import INTERPRETED
from tests.gpu.test_products import parts_of
from tests.model.packed_weights import pack, random_weights

TRITON = pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)
ROWS = [1, 2, 8, 16]
SUMS_IN_FLOAT32 = 4e-5
"""A sum of up to 1,280 numbers in another order is off by 1e-6 of it; of numbers (128 + q) it is 136 / 4 times that."""


@pytest.fixture(params=["torch", TRITON])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where to compute, after the kernels were chosen."""
    return place_of(request.param, monkeypatch, products, packed)


class Case:
    """Weights and inputs, random, packed on a device and exact in float64 on the CPU.

    Interpreted, inputs are float32: the interpreter has no products of bfloat16. The weights are the same.
    """

    def __init__(self, device: str, request: pytest.FixtureRequest) -> None:
        self._device = device
        whole = INTERPRETED and "triton" in request.node.callspec.id
        self.dtype = torch.float32 if whole else torch.bfloat16
        self._generator = torch.Generator().manual_seed(3)

    def numbers(self, *shape: int, size: float = 1.0, mean: float = 0.0) -> Tensor:
        given = torch.randn(*shape, generator=self._generator) * size + mean
        return given.to(torch.bfloat16).to(self._device, self.dtype)

    def norm(self, dim: int, from_one: bool = False) -> Norm:
        return Norm(self.numbers(dim, size=0.3, mean=0.0 if from_one else 1.0), 1e-5, from_one)

    def weights(self, out: int, dim: int, **options: Any) -> tuple[PackedWeights, LinearWeights]:
        own, exact = random_weights(out, dim, self._generator, **options)
        bias = None if own.bias is None else own.bias.to(self._device, self.dtype)
        there = PackedWeights(own.words.to(self._device), own.scales.to(self._device), dim, bias)
        assert own.is_whole
        return there, LinearWeights(exact, None if own.bias is None else own.bias.double())

    def require(self, call: Any, given: tuple[Any, ...], exact: tuple[Any, ...]) -> None:
        """What kernels add to the exact answer is at most twice what rounding at each module and weight does."""
        own, right = call(*given), call(*exact)
        modules = call(*_on_cpu(given)) if self._device == "cuda" else own
        for a, b, c in zip(*(parts_of(one) for one in (own, modules, right)), strict=True):
            assert a.dtype == self.dtype and a.shape == b.shape == c.shape
            noise = float((b.double() - c).norm() / c.norm())
            assert noise < 0.02  # of the modules themselves: exact weights are those that were packed
            bound = SUMS_IN_FLOAT32 if self.dtype == torch.float32 else 2 * noise
            assert float((a.double().cpu() - c).norm() / c.norm()) <= bound


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        parts = [_on_cpu(one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _exact(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double().cpu()
    return tuple(_exact(one) for one in value) if type(value) is tuple else value


@pytest.fixture
def case(device: str, request: pytest.FixtureRequest) -> Case:
    return Case(device, request)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("head_dim", "heads", "dim", "bias", "normed"),
    [(64, (6, 2), 1024, False, False), (128, (4, 1), 768, True, False), (128, (2, 1), 1280, False, True)],
)
def test_project(
    case: Case, rows: int, head_dim: int, heads: tuple[int, int], dim: int, bias: bool, normed: bool
) -> None:
    """Columns that are and are not filled up, biases (Qwen2), norms of heads (Qwen3)."""
    sizes = [count * head_dim for count in (heads[0], heads[1], heads[1])]
    (query, query_exact), (key, key_exact), (value, value_exact) = (
        case.weights(size, dim, bias=bias) for size in sizes
    )
    norms = [case.norm(dim), case.norm(head_dim), case.norm(head_dim)]
    exact_norms = [Norm(one.weight.double().cpu(), one.eps) for one in norms]
    into = Attending(norms[0], query, key, value, head_dim, *(norms[1:] if normed else ()))
    exact = Attending(
        exact_norms[0], query_exact, key_exact, value_exact, head_dim, *(exact_norms[1:] if normed else ())
    )
    given = case.numbers(rows, dim, size=3.0), (case.numbers(rows, head_dim), case.numbers(rows, head_dim))
    case.require(products.project, (given[0], into, given[1]), (_exact(given[0]), exact, _exact(given[1])))


@pytest.mark.parametrize("rows", ROWS)
def test_project_as_qwen35(case: Case, rows: int) -> None:
    """Norms that count from one, a part of each head that is turned, gates between the heads of the query."""
    head_dim, dim, turned = 64, 768, 16
    (query, query_exact), (key, key_exact), (value, value_exact) = (
        case.weights(count * head_dim, dim) for count in (6, 1, 1)
    )
    norm, query_norm, key_norm = (case.norm(one, True) for one in (dim, head_dim, head_dim))
    into = Attending(norm, query, key, value, head_dim, query_norm, key_norm, turned, True)
    exact_norms = [one._replace(weight=one.weight.double().cpu()) for one in (norm, query_norm, key_norm)]
    exact = into._replace(
        norm=exact_norms[0], query=query_exact, key=key_exact, value=value_exact, query_norm=exact_norms[1],
        key_norm=exact_norms[2],
    )  # fmt: skip
    given = case.numbers(rows, dim, size=3.0), (case.numbers(rows, turned), case.numbers(rows, turned))
    case.require(products.project, (given[0], into, given[1]), (_exact(given[0]), exact, _exact(given[1])))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out", "other", "bias"), [(320, 128, False), (48, 16, True)])
def test_two_products(case: Case, rows: int, out: int, other: int, bias: bool) -> None:
    """Projections of different sizes from one normed input."""
    norm, hidden = case.norm(768, True), case.numbers(rows, 768, size=3.0)
    (first, first_exact), (second, second_exact) = (case.weights(size, 768, bias=bias) for size in (out, other))
    exact = norm._replace(weight=norm.weight.double().cpu()), first_exact, second_exact
    case.require(products.two_products, (hidden, norm, first, second), (_exact(hidden), *exact))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("dim", "inner", "bias", "group"),
    [
        (1024, 1040, False, 64),
        (528, 96, True, 64),
        (2048, 64, False, 128),
        (256, 32, False, 32),
        (1024, 32, False, 256),
    ],
)
def test_feed(case: Case, rows: int, dim: int, inner: int, bias: bool, group: int) -> None:
    norm, hidden = case.norm(dim, bias), case.numbers(rows, dim, size=3.0)
    (gate, gate_exact), (up, up_exact) = (case.weights(inner, dim, bias=bias, group=group) for _ in range(2))
    assert products.alike(gate, up) and not products.alike(gate, up_exact)
    exact = Gated(norm._replace(weight=norm.weight.double().cpu()), gate_exact, up_exact)
    case.require(products.gated, (hidden, Gated(norm, gate, up)), (_exact(hidden), exact))
    down, down_exact = case.weights(dim, inner, bias=bias, group=group)
    fed, before = case.numbers(rows, inner), hidden.clone()
    case.require(products.add_product, (hidden, fed, down), (_exact(hidden), _exact(fed), down_exact))
    assert torch.equal(hidden, before)


def multiplied(numbers: Tensor, weights: PackedWeights | LinearWeights) -> Tensor:
    if isinstance(weights, PackedWeights):
        return weights.product(numbers)
    return torch.nn.functional.linear(numbers, weights.weight, weights.bias)


@pytest.mark.parametrize("rows", [*ROWS, 17, 40, 64])
@pytest.mark.parametrize(
    ("out", "dim", "bias", "group"), [(96, 1024, False, 64), (48, 528, True, 64), (32, 256, False, 32)]
)
def test_product(case: Case, rows: int, out: int, dim: int, bias: bool, group: int) -> None:
    """Blocks of 16 rows, the last one whole or not; nothing is written behind the last row."""
    own, exact = case.weights(out, dim, bias=bias, group=group)
    numbers = case.numbers(rows, dim)
    case.require(multiplied, (numbers, own), (_exact(numbers), exact))
    whole = multiplied(case.numbers(80, dim), own)
    assert multiplied(numbers[:0], own).shape == (0, out) and whole.shape == (80, out)


@pytest.mark.parametrize("rows", [1, 3])
def test_parts_of_one_matrix(case: Case, rows: int) -> None:
    """Gate and up that lie in one matrix (Phi-3), read where they lie."""
    norm, hidden = case.norm(256), case.numbers(rows, 256)
    merged, exact = case.weights(96, 256, bias=True)
    gate, up = merged.split([48, 48])
    assert up._replace(bias=None).is_whole
    assert gate.words.data_ptr() == merged.words.data_ptr() and not up.scales.is_contiguous()
    exact_gated = Gated(Norm(norm.weight.double().cpu(), norm.eps), *exact.split([48, 48]))
    case.require(products.gated, (hidden, Gated(norm, gate, up)), (_exact(hidden), exact_gated))


@pytest.mark.parametrize(
    ("out", "dim", "group"), [(32, 1024, 64), (48, 208, 64), (16, 2048, 128), (16, 1024, 32), (16, 512, 256)]
)
def test_matrix(device: str, out: int, dim: int, group: int) -> None:
    """Unpacked, each weight is the exact one, rounded once."""
    own, exact = random_weights(out, dim, torch.Generator().manual_seed(1), group=group)
    there = PackedWeights(own.words.to(device), own.scales.to(device), dim)
    assert there.group == group and there.shape == (out, dim)
    found = there.matrix.cpu()
    assert found.dtype == torch.bfloat16 and found.shape == (out, dim) and found.is_contiguous()
    if INTERPRETED and packed.kernels_for(there.words, "packed_triton") is not None:  # bfloat16 is cut off there
        assert float((found.double() - exact).abs().div(exact.abs()).nan_to_num().max()) <= 2**-7
    else:
        # in float32 a sum may be rounded to where two bfloat16 numbers are equally near
        assert torch.equal(found, exact.float().to(torch.bfloat16))


def test_each_number_is_in_its_place() -> None:
    """What is packed comes out, for every place of a strip; one that is changed changes there alone."""
    q = torch.randint(0, 16, (16, 256), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    words = pack(q)
    assert torch.equal(unpacked(words), q)
    for column in range(128, 256):
        other = q.clone()
        other[9, column] ^= 5
        assert (pack(other) != words).sum() == 1
        assert torch.equal(unpacked(pack(other)), other)


def test_what_does_not_fit() -> None:
    own, _ = random_weights(32, 1024, torch.Generator())
    assert products.fits(own, 16) and not products.fits(own, 17)
    assert not own._replace(words=own.words[:1]).is_whole and not own._replace(columns=1000).is_whole
    assert not own._replace(columns=1040).is_whole and not own._replace(words=own.words.transpose(0, 1)).is_whole
    assert not own._replace(scales=own.scales.float()).is_whole and not own._replace(scales=own.scales[:, :16]).is_whole
    assert not own._replace(bias=torch.zeros(32)).is_whole and not own._replace(words=own.words[..., :2]).is_whole
    assert not own.split([8, 24])[0].is_whole


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_torch_packs_and_multiplies_alike(rows: int) -> None:
    """The copy of the layout is torch's own, and its product that of the matrix that is unpacked."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randint(0, 16, (64, 1024), generator=generator, dtype=torch.int32)
    pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8).cuda()
    assert torch.equal(torch.ops.aten._convert_weight_to_int4pack(pairs, 8).cpu(), pack(q))
    own, _ = random_weights(64, 1024, generator)
    there = PackedWeights(own.words.cuda(), own.scales.cuda(), 1024)
    assert torch.equal(there.matrix.cpu(), own.matrix)
    numbers = torch.randn(rows, 1024, generator=generator).to(torch.bfloat16).cuda()
    found = torch.ops.aten._weight_int4pack_mm(numbers, there.words, 64, there.scales)
    right = numbers.double() @ there.matrix.double().t()
    assert float((found.double() - right).norm() / right.norm()) < 2**-8
