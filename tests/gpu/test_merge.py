"""Partials and their merge, against float64 softmax over the union of the parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrieval_attn.errors import ShapeError
from retrieval_attn.gpu.attention import merge as merge_module
from retrieval_attn.gpu.attention.merge import Partial, empty_partial, merge, sink_logit_partial
from tests.gpu.test_decode_kernels import INTERPRETED
from tests.reference.attention import reference_attention


def parts_of(query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> list[Partial]:
    """Float32 partials over consecutive key ranges; equal bounds give empty parts."""
    parts = []
    for start, stop in zip([0, *bounds], [*bounds, key.shape[2]], strict=True):
        found = reference_attention(query, key[:, :, start:stop], value[:, :, start:stop], scale=0.3)
        parts.append(Partial(found.out.float(), found.lse.float()))
    return parts


@settings(max_examples=60, deadline=None)
@given(
    bounds=st.lists(st.integers(0, 65), max_size=4).map(sorted),
    group=st.sampled_from([1, 4]),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_any_partition_merges_to_the_whole(bounds: list[int], group: int, spread: float, seed: int) -> None:
    """Equal to attention over all keys, however they are split; scores up to +-1000."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 2 * group, 3, 16, generator=generator) * spread
    key, value = torch.randn(2, 1, 2, 65, 16, generator=generator)
    whole = reference_attention(query, key, value, scale=0.3)
    merged = merge(parts_of(query, key, value, bounds))
    # A float32 lse of magnitude L is known to L * 2**-24; a weight exp(lse - top), and with it the output, no better.
    known = float(whole.lse.abs().max()) * 2.0**-24 * float(value.abs().max())
    assert (merged.out - whole.out).abs().max() <= 1e-6 + 2 * known
    assert (merged.lse - whole.lse).abs().max() <= 1e-6 * max(1.0, float(whole.lse.abs().max()))


def test_all_parts_empty_is_zero_and_minus_infinity_not_nan() -> None:
    """The plain formula gives NaN here (0 / 0), and one NaN row would poison every later layer."""
    query = torch.randn(2, 4, 3, 8)
    merged = merge([empty_partial(query, 5), empty_partial(query, 5)])
    assert torch.equal(merged.out, torch.zeros(2, 4, 3, 5))
    assert torch.isneginf(merged.lse).all()


def test_an_empty_part_changes_nothing() -> None:
    query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    part = parts_of(query, key, value, [])[0]
    merged = merge([empty_partial(query, 8), part, empty_partial(query, 8)])
    torch.testing.assert_close(merged.out, part.out, rtol=0, atol=1e-7)
    torch.testing.assert_close(merged.lse, part.lse, rtol=0, atol=1e-6)


def test_sink_logits_equal_an_extra_key_of_value_zero() -> None:
    query, key, value = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    logits = torch.randn(4)
    expected = reference_attention(query, key, value, scale=0.3, sink_logits=logits)
    part = Partial(*(item.float() for item in reference_attention(query, key, value, scale=0.3)))
    merged = merge([part, sink_logit_partial(logits, query, 8)])
    torch.testing.assert_close(merged.out.double(), expected.out, rtol=0, atol=1e-6)
    torch.testing.assert_close(merged.lse.double(), expected.lse, rtol=0, atol=1e-6)


def test_bad_parts_are_refused() -> None:
    query = torch.randn(1, 2, 3, 8)
    part = empty_partial(query, 8)
    with pytest.raises(ShapeError, match="at least one"):
        merge([])
    with pytest.raises(ShapeError, match="float32"):
        merge([part, Partial(part.out.bfloat16(), part.lse)])
    with pytest.raises(ShapeError, match="share one shape"):
        merge([part, empty_partial(query[:, :, :2], 8)])


def test_a_merge_is_the_definition_in_few_launches() -> None:
    """To the last bits, with rows without keys and scores near the ends of float32.

    Every layer waits for its launches.
    """
    torch.manual_seed(3)
    parts = [Partial(torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5) * 40) for _ in range(3)]
    for row, part in enumerate(parts):
        part.lse[0, row], part.out[0, row] = -torch.inf, 0
        part.lse[1, 0], part.out[1, 0] = -torch.inf, 0
    parts[0].lse[1, 1], parts[1].lse[1, 1] = 3e38, -3e38

    class Count(TorchDispatchMode):
        """How many operations write."""

        def __init__(self) -> None:
            super().__init__()
            self.launches = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.launches += not func.is_view
            return func(*args, **(kwargs or {}))

    lse = torch.stack([part.lse for part in parts]).double()
    whole = torch.logsumexp(lse, dim=0)
    weight = torch.where(torch.isneginf(lse), 0.0, torch.exp(lse - whole))
    out = sum(part.out.double() * own.unsqueeze(-1) for part, own in zip(parts, weight, strict=True))
    with Count() as count:
        merged = merge(parts)
    # two roundings of numbers that are no larger than the largest of the parts, and the weight's
    bound = 4 * torch.finfo(torch.float32).eps * torch.stack([part.out.abs() for part in parts]).amax(dim=0)
    assert ((merged.out - out).abs() <= bound).all()
    torch.testing.assert_close(merged.lse.double(), whole, rtol=3e-7, atol=0.0)
    assert torch.isneginf(merged.lse[1, 0]).all() and not torch.isnan(merged.out).any()
    assert torch.equal(merged.out[1, 0], torch.zeros(5, 7)) and torch.equal(merged.out[1, 1], parts[0].out[1, 1])
    assert count.launches == 2 * 6, "six for each part but the first"


def test_what_is_not_finite_stays_so() -> None:
    """A broken query is not hidden by a part that knows nothing of it."""
    broken = Partial(torch.full((1, 1, 1, 4), torch.nan), torch.full((1, 1, 1), torch.nan))
    whole = Partial(torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 1))
    for parts in ([broken, whole], [whole, broken]):
        merged = merge(parts)
        assert merged.out.isnan().all() and merged.lse.isnan().all()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the kernel runs: on a GPU, or interpreted: TRITON_INTERPRET=1 pytest tests/gpu/test_merge.py"""
    if not INTERPRETED:
        return "cuda"
    from retrieval_attn.gpu.attention import merge_triton

    monkeypatch.setattr(merge_module, "kernels_for", lambda tensor, module: merge_triton)
    return "cpu"


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dim", [64, 99, 128, 256])
@pytest.mark.parametrize("queries", [1, 15, 33])
@pytest.mark.parametrize("seed", [pytest.param(1, marks=() if INTERPRETED else pytest.mark.cuda)])
def test_the_kernel_is_the_definition(seed: int, queries: int, dim: int, count: int, place: str) -> None:
    """Token-major parts, an lse that is expanded, rows without keys, scores near the ends of float32."""
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(2, queries, 6, dim, generator=generator).transpose(1, 2) for _ in range(count)]
    lses = [torch.randn(2, 6, queries, generator=generator) * 20 for _ in range(count)]
    lses[0] = lses[0][:, :1].expand(2, 6, queries)
    outs[1], lses[1][1, 2] = outs[1].contiguous(), 3e38
    parts = [
        Partial(out, lse.clone() if number else lse) for number, (out, lse) in enumerate(zip(outs, lses, strict=True))
    ]
    for part in parts[1:]:
        part.out[0, 3], part.lse[0, 3] = 0, -torch.inf
    emptied = parts[0].lse.clone()
    emptied[0, 3] = -torch.inf
    parts[0].out[0, 3] = 0
    weights = torch.stack([emptied, *(part.lse for part in parts[1:])]).double()
    lse = torch.logsumexp(weights, dim=0)
    share = torch.exp(weights - torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse))
    out = (share[..., None] * torch.stack([part.out for part in parts]).double()).sum(0)
    for own in (parts[0].lse, emptied):
        given = [Partial(parts[0].out, own), *parts[1:]]
        merged = merge([Partial(part.out.to(place), part.lse.to(place)) for part in given])
        if own is emptied:
            assert torch.isneginf(merged.lse[0, 3]).all() and not merged.out[0, 3].any()
        keep = torch.arange(6) != 3
        found = merged.out.cpu()[:, keep], merged.lse.cpu()[:, keep]
        torch.testing.assert_close(found[0].double(), out[:, keep], rtol=0, atol=5e-6)
        torch.testing.assert_close(found[1].double(), lse[:, keep], rtol=1e-6, atol=5e-6)
    assert merged.out.shape == parts[0].out.shape and merged.lse.is_contiguous()
