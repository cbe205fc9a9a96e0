"""Every attention backend against the float64 reference; CUDA cases run where there is a device."""

from __future__ import annotations

import pytest
import torch

from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu import flash
from retrieval_attn.gpu.flash import attend
from retrieval_attn.gpu.reference import reference_attention

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


def tensors(
    device: str, dtype: torch.dtype, group: int, head_dim: int, queries: int, keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random (query, key, value) for 2 rows and 2 key heads."""
    generator = torch.Generator().manual_seed(group * 1000 + head_dim + keys)
    query = torch.randn(2, 2 * group, queries, head_dim, generator=generator)
    key, value = torch.randn(2, 2, 2, keys, head_dim, generator=generator)
    return query.to(device, dtype), key.to(device, dtype), value.to(device, dtype)


def plain_error(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    exact: torch.Tensor,
) -> float:
    """Largest error of ordinary attention written in the inputs' own dtype: the scale of honest rounding."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, dim=1).transpose(2, 3) * 0.2
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.softmax(scores, dim=-1) @ value.repeat_interleave(group, dim=1)
    return float((out.double() - exact).abs().max())


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(1, 1, False), (1, 1000, False), (65, 65, True), (63, 130, False)]
)
def test_backends_equal_the_reference(
    device: str, dtype: torch.dtype, group: int, head_dim: int, queries: int, keys: int, causal: bool
) -> None:
    """Output and natural-log lse, odd sizes, grouped heads."""
    query, key, value = tensors(device, dtype, group, head_dim, queries, keys)
    mask = torch.ones(queries, keys, device=device).tril().bool() if causal else None
    expected = reference_attention(query, key, value, scale=0.2, mask=mask)
    got = attend(query, key, value, scale=0.2, causal=causal)
    assert got.out.dtype == got.lse.dtype == torch.float32
    rounding = plain_error(query, key, value, mask, expected.out)
    assert (got.out - expected.out).abs().max() <= 2 * rounding + 1e-6
    assert (got.lse - expected.lse).abs().max() <= 2e-5 * max(1.0, float(expected.lse.abs().max()))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_mask_soft_cap_and_empty_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The math backend in several query blocks; a query without any key gives 0 and -inf, not NaN."""
    monkeypatch.setattr(flash, "MAX_SCORES", 5000)
    query, key, value = tensors(device, torch.float32, 4, 32, 37, 90)
    mask = torch.rand(2, 1, 37, 90, generator=torch.Generator().manual_seed(1)).to(device) < 0.4
    mask[0, :, 5] = False
    expected = reference_attention(query, key, value, scale=0.5, mask=mask, softcap=2.0)
    got = attend(query, key, value, scale=0.5, mask=mask, softcap=2.0)
    assert (got.out - expected.out).abs().max() <= 2e-6
    assert torch.equal(got.out[0, :, 5], torch.zeros_like(got.out[0, :, 5]))
    assert torch.isneginf(got.lse[0, :, 5]).all()
    finite = torch.isfinite(expected.lse)
    assert torch.equal(finite, torch.isfinite(got.lse))
    assert (got.lse - expected.lse)[finite].abs().max() <= 2e-6


def test_no_keys_is_an_empty_partial() -> None:
    query, key, value = tensors("cpu", torch.float32, 2, 16, 3, 1)
    got = attend(query, key[:, :, :0], value[:, :, :0], scale=1.0)
    assert torch.equal(got.out, torch.zeros(2, 4, 3, 16)) and torch.isneginf(got.lse).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    query, key, value = tensors("cpu", torch.float32, 2, 16, 3, 5)
    with pytest.raises(ShapeError, match="as many queries as keys"):
        attend(query, key, value, scale=1.0, causal=True)
    with pytest.raises(ShapeError, match="do not belong"):
        attend(query, key[..., :8], value, scale=1.0)
    with pytest.raises(ShapeError, match="share"):
        attend(query[:, :3], key, value, scale=1.0)
    with pytest.raises(ShapeError, match="batch, heads"):
        attend(query[0], key, value, scale=1.0)
