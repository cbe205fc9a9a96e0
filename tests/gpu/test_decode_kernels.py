"""Decode attention over fixed buffers: plain PyTorch against float64, Triton against both where it can run.

Triton's own interpreter runs the kernels on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_decode_kernels.py
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention.merge import Partial, merge, sink_logit_partial
from retrieval_attn.gpu.decode import kernels as decode_kernels
from retrieval_attn.gpu.decode.kernels import (
    HostResult,
    Parts,
    WindowBuffers,
    advance,
    merge_parts,
    split_count,
    stage_queries,
    window_partials,
)
from tests.reference import decode_kernels as reference
from tests.reference.attention import reference_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


@pytest.fixture(params=["torch", pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the tensors lie; "triton" means the kernels on a GPU, or interpreted."""
    if request.param == "torch":
        monkeypatch.setattr(decode_kernels, "step_kernels", lambda tensor: reference)
    elif INTERPRETED:
        from retrieval_attn.gpu.decode import kernels_triton as decode_triton

        monkeypatch.setattr(decode_kernels, "step_kernels", lambda tensor: decode_triton)
    yield "cuda" if request.param == "triton" and not INTERPRETED else "cpu"


class Case(NamedTuple):
    """One new token over a window: its tensors, and everything in float64 on the CPU."""

    query: Tensor
    key: Tensor
    value: Tensor
    window: WindowBuffers


def make_case(
    device: str,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 16,
    value_dim: int = 16,
    slots: int = 200,
    low: int = 5,
    high: int = 150,
    padded: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random; slots outside the span hold large numbers that would show."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    key, value = normal(batch, kv_heads, slots, dim), normal(batch, kv_heads, slots, value_dim)
    for buffer in (key, value):
        buffer[:, :, :low] = 1e4
        buffer[:, :, high:] = 1e4
    valid = None
    if padded:
        valid = torch.rand(batch, slots, generator=generator) > 0.4
        valid[0] = False  # a row that has nothing but its new token
    span = torch.tensor([[low, high]] * batch, dtype=torch.int32)
    # the layouts that models hand over: heads behind tokens in memory
    query = normal(batch, 1, kv_heads * group, dim).transpose(1, 2)
    new_key, new_value = normal(batch, 1, kv_heads, dim).transpose(1, 2), normal(batch, kv_heads, 1, value_dim)
    buffers = [None if item is None else item.to(device) for item in (key, value, span, valid)]
    return Case(query.to(device), new_key.to(device), new_value.to(device), WindowBuffers(*buffers))  # type: ignore[arg-type]


def expected(case: Case, scale: float, softcap: float | None = None, reach: int | None = None) -> Partial:
    """In float64, over the real tokens in reach and the new one."""
    low, high = case.window.span[0].tolist()
    if reach is not None:
        low = max(low, high + 1 - reach)
    key = torch.cat([case.window.key[:, :, low:high], case.key], dim=2).cpu()
    value = torch.cat([case.window.value[:, :, low:high], case.value], dim=2).cpu()
    mask = None
    if case.window.valid is not None:
        real = case.window.valid[:, low:high].cpu()
        mask = torch.cat([real, torch.ones(len(real), 1, dtype=torch.bool)], dim=1)[:, None, None]
    return Partial(*reference_attention(case.query.cpu(), key, value, scale=scale, softcap=softcap, mask=mask))


def joined(parts: Parts) -> Partial:
    """The partial of all splits."""
    pieces = [Partial(parts.out[:, :, [i]], parts.lse[:, :, [i]]) for i in range(parts.out.shape[2])]
    return merge(pieces)


def close(got: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got.double().cpu(), wanted.double().cpu(), rtol=tolerance, atol=tolerance)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-split-odd": {"low": 0, "high": 1, "slots": 7},
    "empty": {"low": 40, "high": 40},
    "full-but-one": {"low": 0, "high": 199, "slots": 200},
    "padded": {"padded": True},
    "padded-far": {"padded": True, "high": 63, "low": 60},
    "heads-alone": {"group": 1, "kv_heads": 3},
    "wide-group": {"group": 17, "kv_heads": 1, "batch": 1},
    "odd-dims": {"dim": 24, "value_dim": 40, "batch": 1},
    "softcap": {"softcap": 3.0},
    "reach": {"reach": 33},
    "reach-one": {"reach": 1},
    "reach-beyond": {"reach": 1000, "padded": True},
}


@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("name", list(CASES))
def test_window_partials_equal_float64(device: str, name: str, splits: int) -> None:
    """Also with fewer keys than splits, and rows whose window is all padding; then the new token is kept."""
    options = dict(CASES[name])
    softcap, reach = options.pop("softcap", None), options.pop("reach", None)
    case = make_case(device, **options)
    wanted = expected(case, 0.3, softcap, reach)
    parts = window_partials(*case, scale=0.3, softcap=softcap, reach=reach, splits=splits)
    got = joined(parts)
    close(got.out, wanted.out)
    close(got.lse, wanted.lse)
    low, high = case.window.span[0].tolist()
    assert torch.equal(case.window.key[:, :, high], case.key[:, :, 0])
    assert torch.equal(case.window.value[:, :, high], case.value[:, :, 0])
    others = [slot for slot in range(case.window.key.shape[2]) if not low <= slot <= high]
    assert (case.window.key[:, :, others] == 1e4).all() and (case.window.value[:, :, others] == 1e4).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_keep_the_precision_of_the_merge(device: str, dtype: torch.dtype) -> None:
    """16-bit keys and values, float32 answer: rounding probabilities once to 16 bits would give 1e-3 or 1e-4 here."""
    if dtype == torch.bfloat16 and INTERPRETED:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    case = make_case(device, dtype=dtype, dim=64, value_dim=64)
    wanted = expected(case, 0.1)
    got = joined(window_partials(*case, scale=0.1, splits=2))
    close(got.out, wanted.out, 2e-5)
    close(got.lse, wanted.lse, 1e-5)


def test_a_window_that_grows_needs_no_new_arguments(device: str) -> None:
    """As in a graph: the same calls on the same buffers, the span counted on the device."""
    case = make_case(device, low=0, high=3, slots=40)
    spans = case.window.span[None].clone()
    window = case.window._replace(span=spans[0])
    for step in range(20):
        fresh = make_case(device, seed=step + 1)
        now = Case(fresh.query, fresh.key, fresh.value, window)
        wanted = expected(now, 0.3)
        close(joined(window_partials(*now, scale=0.3, splits=2)).out, wanted.out)
        advance(spans, torch.ones(2, dtype=torch.int32, device=device))
    assert spans.tolist() == [[[0, 23]] * 2]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("reach", [None, 33])
@pytest.mark.parametrize("dim", [16, 64])
def test_rows_of_any_length_are_bit_for_bit_as_alone(
    device: str, dim: int, reach: int | None, softcap: float | None
) -> None:
    """Windows that begin and end anywhere, one row without any; only rows that there are grow."""
    case = make_case(device, batch=4, dim=dim, value_dim=dim, slots=200)
    spans = torch.tensor([[[5, 150], [0, 0], [60, 61], [0, 199]]], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "reach": reach, "splits": 3}
    window = case.window._replace(key=case.window.key.clone(), value=case.window.value.clone(), span=spans[0])
    found = window_partials(case.query, case.key, case.value, window, **options)
    for row in range(4):
        own = slice(row, row + 1)
        alone = WindowBuffers(*(buffer[own].clone() for buffer in (case.window.key, case.window.value, spans[0])))
        one = Case(case.query[own], case.key[own], case.value[own], alone)
        wanted = expected(one, 0.3, softcap, reach)
        parts = window_partials(*one, **options)
        assert torch.equal(parts.out, found.out[own]) and torch.equal(parts.lse, found.lse[own])
        assert torch.equal(alone.key, window.key[own]) and torch.equal(alone.value, window.value[own])
        close(joined(parts).out, wanted.out)
    advance(spans, torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=device))
    assert spans.tolist() == [[[5, 151], [0, 0], [60, 62], [0, 199]]]


@pytest.mark.parametrize("tokens", [2, 4, 16])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("one-split-odd", "full-but-one")])
def test_tokens_of_a_block_are_as_one_after_the_other(device: str, name: str, tokens: int) -> None:
    """Several new tokens of each row: each sees those before it, and the window as single steps leave it."""
    options = {**CASES[name], "batch": 2}
    asked: dict[str, Any] = {"scale": 0.3, "softcap": options.pop("softcap", None), "reach": options.pop("reach", None)}
    cases = [make_case(device, **options, seed=seed) for seed in range(tokens)]
    window = cases[0].window._replace(span=cases[0].window.span + torch.tensor([0, 1], device=device)[:, None] * 2)
    alone = window._replace(key=window.key.clone(), value=window.value.clone(), span=window.span.clone())
    if window.valid is not None:  # new tokens are real
        valid = window.valid.clone()
        for row, (_, high) in enumerate(alone.span.tolist()):
            valid[row, high : high + tokens] = True
        alone = alone._replace(valid=valid)
    query, key, value = (torch.stack(one, dim=1).flatten(0, 1) for one in list(zip(*cases, strict=True))[:3])
    found = joined(window_partials(query, key, value, window, splits=3, **asked))
    for number, case in enumerate(cases):
        wanted = joined(window_partials(case.query, case.key, case.value, alone, splits=3, **asked))
        close(found.out[number::tokens], wanted.out, 1e-5)
        close(found.lse[number::tokens], wanted.lse, 1e-5)
        alone.span[:, 1] += 1
    for mine, yours in ((window.key, alone.key), (window.value, alone.value)):
        assert torch.equal(mine, yours)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_host", ["none", "in order", "by rows", "empty"])
@pytest.mark.parametrize("with_pages", [False, True])
def test_merged_parts_equal_the_merge_of_partials(
    device: str, with_host: str, with_sinks: bool, with_pages: bool
) -> None:
    """Splits, the host's part in its own order, tokens in pages, learned sinks; rounded once to the model's dtype."""
    batch, q_heads, splits, value_dim = 2, 6, 5, 24
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(batch, q_heads, splits, value_dim, generator=generator)
    lse = torch.randn(batch, q_heads, splits, generator=generator) * 30
    lse[:, :, 2], out[:, :, 2] = -torch.inf, 0
    pieces = [Partial(out[:, :, [i]], lse[:, :, [i]]) for i in range(splits)]
    host = None
    if with_host != "none":
        rows = torch.randperm(batch * q_heads, generator=generator) if with_host == "by rows" else None
        host_out = torch.randn(batch * q_heads, value_dim, generator=generator)
        host_lse = torch.randn(batch * q_heads, generator=generator) * 30
        if with_host == "empty":
            host_out, host_lse = torch.zeros_like(host_out), torch.full_like(host_lse, -torch.inf)
        order = torch.arange(batch * q_heads) if rows is None else rows
        shape = batch, q_heads, 1
        pieces.append(Partial(host_out[order].view(*shape, -1), host_lse[order].view(shape)))
        host = HostResult(host_out.to(device), host_lse.to(device), None if rows is None else rows.to(device))
    sinks, paged = None, None
    if with_pages:
        own = torch.randn(batch, q_heads, 1, value_dim, generator=generator)
        own_lse = torch.randn(batch, q_heads, 1, generator=generator) * 30
        own[0], own_lse[0] = 0, -torch.inf  # a row that has none
        pieces.append(Partial(own, own_lse))
        paged = own.to(device), own_lse.to(device)
    if with_sinks:
        sinks = torch.randn(q_heads, generator=generator) * 30
        pieces.append(sink_logit_partial(sinks, out[:, :, :1], value_dim))
        sinks = sinks.to(device)
    wanted = merge(pieces).out
    parts = Parts(out.to(device), lse.to(device))
    close(merge_parts(parts, host, sinks, torch.float32, paged=paged), wanted, 1e-5)
    got = merge_parts(parts, host, sinks, torch.bfloat16, paged=paged)
    assert got.dtype == torch.bfloat16 and got.shape == (batch, q_heads, 1, value_dim)
    close(got.float(), wanted, 2**-7 if INTERPRETED else 2**-8)  # the interpreter truncates


@pytest.mark.parametrize("by_rows", [False, True])
def test_the_share_that_is_estimated_is_tallied(device: str, by_rows: bool) -> None:
    """The host's share of all keys' weights, without learned sinks; added to what was there, 0 where it is empty."""
    batch, q_heads, splits, value_dim = 2, 6, 5, 24
    count, generator = batch * q_heads, torch.Generator().manual_seed(1)
    parts = Parts(
        torch.randn(batch, q_heads, splits, value_dim, generator=generator),
        torch.randn(batch, q_heads, splits, generator=generator),
    )
    parts.lse[1, 5] = -torch.inf
    rows = torch.randperm(count, generator=generator) if by_rows else torch.arange(count)
    host_lse, share, tally = (torch.rand(*shape, generator=generator) for shape in ((count,), (count,), (count, 2)))
    host_lse[rows[-1]] = -torch.inf
    order = rows.to(device) if by_rows else None
    counted = tally.clone().to(device)
    estimated = share.to(device), counted
    host = HostResult(torch.zeros(count, value_dim, device=device), host_lse.to(device), order, estimated)
    given = Parts(*(part.to(device) for part in parts))
    sinks = torch.ones(q_heads, device=device)
    plain = merge_parts(given, host._replace(estimated=None), sinks, torch.float32)
    for _ in range(2):
        assert torch.equal(merge_parts(given, host, sinks, torch.float32), plain)
    own = host_lse[rows].double().exp()
    whole = own + parts.lse.double().exp().sum(dim=2).flatten()
    expected = torch.where(whole > 0, share[rows] * own / torch.where(whole > 0, whole, 1), 0)
    close(counted[:, 0], tally[:, 0] + 2 * expected, 1e-5)
    close(counted[:, 1], tally[:, 1] + 2, 1e-5)
    paged = torch.zeros(batch, q_heads, 1, value_dim), torch.rand(batch, q_heads, 1, generator=generator)
    merge_parts(given, host, sinks, torch.float32, paged=(paged[0].to(device), paged[1].to(device)))
    expected = 2 * expected + share[rows] * own / (whole + paged[1].double().exp().flatten())
    close(counted[:, 0], tally[:, 0] + expected, 1e-5)  # what lies in pages is known


def test_nothing_but_empty_parts_is_zero_not_nan(device: str) -> None:
    out = torch.zeros(1, 2, 3, 16, device=device)
    empty = Parts(out, torch.full((1, 2, 3), -torch.inf, device=device))
    host = HostResult(torch.zeros(2, 16, device=device), torch.full((2,), -torch.inf, device=device))
    for given in (None, host):
        assert torch.equal(merge_parts(empty, given, None, torch.float32).cpu(), torch.zeros(1, 2, 1, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staged_queries_lie_where_the_host_wants_them(device: str, dtype: torch.dtype) -> None:
    query = torch.randn(3, 1, 4, 24).to(dtype).transpose(1, 2).to(device)
    rows = torch.randperm(12).to(device)
    for given in (None, rows):
        target = torch.full((12, 24), torch.nan, device=device)
        stage_queries(query, target, given)
        found = target if given is None else target[given]
        assert torch.equal(found.cpu(), query.reshape(12, 24).float().cpu())


def test_without_triton_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernels, "_replacements", [])
    with pytest.raises(BackendError, match="need Triton.* on cpu.*graph=False"):
        stage_queries(torch.ones(1, 2, 1, 4), torch.empty(2, 4), None)


def test_splits_follow_the_device() -> None:
    """Enough programs for the processors, no split without a block of keys, at least one."""
    assert split_count(1, 8, 768, 132) == 12
    assert split_count(1, 8, 100_000, 132) == decode_kernels.MAX_SPLITS
    assert split_count(64, 8, 768, 132) == 1
    assert split_count(1, 1, 1, 132) == 1


def test_the_modules_of_kernels_that_are_named_exist() -> None:
    """They are imported by name, on a GPU only: one that had moved would leave decoding to PyTorch's operations."""
    folder = Path(decode_kernels.__file__).parents[2]
    texts = [file.read_text() for file in folder.rglob("*.py")]
    named = r'(?:kernels_for\([\w.]+, |step_kernels\([\w.]+, |module: str = )"([\w.]+_triton)"\)'
    names = [name for text in texts for name in re.findall(named, text)]
    # which kernels multiply is said by the weights
    chosen = [name for text in texts for name in re.findall(r'return "(\w+_triton)"', text)]
    assert len(names) == 24 and sorted(chosen) == ["packed_triton", "products_triton"]
    names += chosen
    for name in names:
        assert importlib.util.find_spec(f"retrieval_attn.gpu.{name}") is not None, name
