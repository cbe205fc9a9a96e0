"""Products with what stands around them in one kernel against PyTorch's modules in float64.

Triton's own interpreter runs the kernels on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_products.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from retrieval_attn.gpu import products
from retrieval_attn.gpu.products import Attending, Gated, LinearWeights, Norm
from tests.gpu.places import place_of
from tests.gpu.test_decode_kernels import INTERPRETED

TRITON = pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]  # interpreted, bfloat16 is cut off
ROWS = [1, 2, 5, 16]
SUMS_IN_FLOAT32 = 1e-6
"""Of a sum of up to 1,280 terms, one after the other: each addition is off by up to 6e-8 of what it has so far."""


@pytest.fixture(params=["torch", TRITON])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where to compute, after the kernels were chosen."""
    return place_of(request.param, monkeypatch, products)


class Numbers:
    """Weights and inputs of one dtype, random."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape: int, size: float = 1.0, mean: float = 0.0) -> Tensor:
        numbers = torch.randn(*shape, generator=self._generator) * size + mean
        return numbers.to(self._device, self._dtype)

    def weights(self, out: int, dim: int, bias: bool = False) -> LinearWeights:
        return LinearWeights(self(out, dim, size=dim**-0.5), self(out, size=0.3) if bias else None)

    def norm(self, dim: int, from_one: bool = False) -> Norm:
        return Norm(self(dim, size=0.3, mean=0.0 if from_one else 1.0), 1e-5, from_one)


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, changed, or a tuple with all of its tensors changed, named ones of their own kind."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [changed(one, change) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def parts_of(found: Any) -> list[Tensor]:
    """The tensors that a call has given: one, or those of a tuple."""
    return [one for one in found if one is not None] if isinstance(found, tuple) else [found]


def require_no_noisier(call: Callable[..., Any], *given: Any) -> None:
    """What the kernels add to the exact answer is at most twice what rounding once at each module does.

    float32 is rounded nowhere but in sums, whose order is another one.
    """
    own = call(*given)
    modules, right = call(*changed(given, Tensor.cpu)), call(*changed(given, lambda one: one.double().cpu()))
    for a, b, c in zip(*(parts_of(one) for one in (own, modules, right)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape == c.shape
        noise = float((b.double() - c).norm() / c.norm())
        bound = SUMS_IN_FLOAT32 if a.dtype == torch.float32 else 2 * noise
        assert float((a.double().cpu() - c).norm() / c.norm()) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("head_dim", "heads", "bias", "normed"),
    [(64, (6, 2), False, False), (128, (8, 2), True, False), (128, (8, 2), False, True), (16, (3, 1), False, False)],
)
def test_project(
    device: str, dtype: torch.dtype, rows: int, head_dim: int, heads: tuple[int, int], bias: bool, normed: bool
) -> None:
    """Groups of 4, heads of 128 and 64, with biases (Qwen2) and norms of heads (Qwen3)."""
    numbers, dim = Numbers(device, dtype), 768
    sizes = [count * head_dim for count in (heads[0], heads[1], heads[1])]
    query, key, value = (numbers.weights(size, dim, bias) for size in sizes)
    norms = (numbers.norm(head_dim), numbers.norm(head_dim)) if normed else (None, None)
    into = Attending(numbers.norm(dim), query, key, value, head_dim, *norms)
    rotation = numbers(rows, head_dim), numbers(rows, head_dim)
    require_no_noisier(products.project, numbers(rows, dim, size=3.0), into, rotation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("head_dim", "turned", "gates"), [(256, 64, True), (64, 16, False), (32, 0, True)])
def test_project_as_qwen35(device: str, dtype: torch.dtype, rows: int, head_dim: int, turned: int, gates: bool) -> None:
    """Norms that count from one, a part of each head that is turned, gates between the heads of the query."""
    numbers, dim = Numbers(device, dtype), 512
    query = numbers.weights(3 * head_dim * (2 if gates else 1), dim)
    key, value = (numbers.weights(head_dim, dim) for _ in range(2))
    norms = numbers.norm(head_dim, True), numbers.norm(head_dim, True)
    into = Attending(numbers.norm(dim, True), query, key, value, head_dim, *norms, turned, gates)
    rotation = numbers(rows, into.rotary_dim), numbers(rows, into.rotary_dim)
    given = numbers(rows, dim, size=3.0), into, rotation
    found = products.project(*given)
    assert found.query.shape == (rows, 3, head_dim) and (found.gate is not None) == gates
    require_no_noisier(products.project, *given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out", "other", "bias"), [(640, 384, False), (48, 16, True)])
def test_two_products(device: str, dtype: torch.dtype, rows: int, out: int, other: int, bias: bool) -> None:
    """Projections of different sizes from one normed input."""
    numbers, dim = Numbers(device, dtype), 512
    weights = numbers.weights(out, dim, bias), numbers.weights(other, dim, bias)
    require_no_noisier(products.two_products, numbers(rows, dim, size=3.0), numbers.norm(dim, True), *weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dim", "inner", "bias"), [(512, 1280, False), (48, 72, True)])
def test_feed(device: str, dtype: torch.dtype, rows: int, dim: int, inner: int, bias: bool) -> None:
    numbers = Numbers(device, dtype)
    hidden = numbers(rows, dim, size=3.0)
    into = Gated(numbers.norm(dim, bias), numbers.weights(inner, dim, bias), numbers.weights(inner, dim, bias))
    require_no_noisier(products.gated, hidden, into)
    down = numbers.weights(dim, inner - inner % 16, bias)
    assert products.fits(down, rows)
    fed = numbers(rows, inner - inner % 16)
    before = hidden.clone()
    require_no_noisier(products.add_product, hidden, fed, down)
    assert torch.equal(hidden, before)


def test_what_does_not_fit() -> None:
    """Sizes that are no whole tiles, weights that are turned, too many rows."""
    weight = torch.zeros(64, 48)
    assert products.fits(LinearWeights(weight), 16) and not products.fits(LinearWeights(weight), 17)
    assert not products.fits(LinearWeights(torch.zeros(64, 40)), 1) and not products.fits(
        LinearWeights(torch.zeros(12, 48)), 1
    )
    assert not products.fits(LinearWeights(torch.zeros(48, 64).t()), 1)
    assert not products.fits(LinearWeights(weight, torch.zeros(64, dtype=torch.float16)), 1)
    assert not products.fits(LinearWeights(weight.double()), 1)
