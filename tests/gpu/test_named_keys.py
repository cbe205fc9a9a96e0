"""Attention to the best of named keys on the device: PyTorch against float64, Triton against it where it can run.

Triton's own interpreter runs the kernels on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_named_keys.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.gpu.codes import candidates as named_keys
from retrieval_attn.gpu.codes.candidates import Candidates, Found, StoredRows, attend_candidates, slots_for
from retrieval_attn.index.formats import Format
from retrieval_attn.offload.staging import pack, unpack
from tests.gpu.test_decode_kernels import INTERPRETED

SCALE = 0.11


@pytest.fixture(params=["torch", pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the tensors lie; "triton" means the kernels on a GPU, or interpreted."""
    if request.param == "torch":
        monkeypatch.setattr(named_keys, "kernels_for", lambda tensor, name: None)
    elif INTERPRETED:
        from retrieval_attn.gpu.codes import named_triton

        monkeypatch.setattr(named_keys, "kernels_for", lambda tensor, name: named_triton)
    yield "cuda" if request.param == "triton" and not INTERPRETED else "cpu"


class Case(NamedTuple):
    """Queries (heads, n, dim), rows as stored, their numbers, and ids that rise within each row, -1 behind the last."""

    queries: Tensor
    stored: tuple[Tensor, Tensor]
    numbers: tuple[Tensor, Tensor]
    ids: Tensor


def made(
    fmt: Format = Format.FLOAT32,
    *,
    heads: int = 2,
    queries: int = 9,
    tokens: int = 300,
    dims: tuple[int, int] = (64, 64),
    room: int = 32,
    ends: tuple[int, int] = (10, 250),
) -> Case:
    """ends: first and last token that ids may name; the first has id 0. One query is named no key, one a single one."""
    rng = np.random.default_rng(3)
    rows = [torch.from_numpy(rng.standard_normal((heads, tokens, dim)).astype(np.float32)) for dim in dims]
    stored = [pack(row, fmt) for row in rows]
    numbers = [unpack(row, fmt, torch.float32) for row in stored]
    ids = np.full((heads * queries, room), -1, np.int32)
    for number, row in enumerate(ids):
        count = (0, 1, room, *rng.integers(2, room, len(ids)))[number]
        row[:count] = np.sort(rng.choice(ends[1] - ends[0], count, replace=False))
    asked = torch.from_numpy(rng.standard_normal((heads, queries, dims[0])).astype(np.float32))
    return Case(asked, (stored[0], stored[1]), (numbers[0], numbers[1]), torch.from_numpy(ids))


def expected(case: Case, named: Candidates, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Query by query, in float64."""
    (heads, count, _), (keys, values) = case.queries.shape, case.numbers
    out, lse = torch.zeros(heads, count, values.shape[2], dtype=torch.float64), torch.zeros(heads, count).double()
    for head in range(heads):
        for i in range(count):
            row = case.ids[head * count + i]
            tokens = torch.cat([row[row >= 0] + named.first, torch.arange(named.scanned_from, keys.shape[1])]).long()
            products = keys[head, tokens].double() @ case.queries[head, i].double()
            best = products.sort(descending=True, stable=True).indices[: named.k]
            scores = products[best] * SCALE
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            lse[head, i] = scores.logsumexp(0)
            out[head, i] = scores.softmax(0) @ values[head, tokens[best]].double()
    return out, lse


def found(device: str, case: Case, named: Candidates, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    rows = StoredRows(*(row.to(device) for row in case.stored))
    named = named._replace(ids=case.ids.to(device))
    out, lse = attend_candidates(case.queries.to(device), rows, named, SCALE, softcap)
    assert out.dtype == lse.dtype == torch.float32
    return out.cpu().double(), lse.cpu().double()


def check(device: str, case: Case, named: Candidates, softcap: float | None = None) -> None:
    for mine, right in zip(found(device, case, named, softcap), expected(case, named, softcap), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=5e-6)


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (80, 40), (3, 5)])
def test_the_best_named_keys_are_attended_to(device: str, fmt: Format, dims: tuple[int, int]) -> None:
    """Rows of any format and width; queries with all, with some, with one and with no key."""
    case = made(fmt, dims=dims)
    check(device, case, Candidates(case.ids, 10, 300, 12))


@pytest.mark.parametrize("scanned_from", [300, 299, 290, 250])
@pytest.mark.parametrize("k", [1, 20, 33, 500])
def test_what_has_no_codes_is_chosen_from_as_well(device: str, scanned_from: int, k: int) -> None:
    """Fewer of those than wanted, and more; more wanted than there are of both."""
    case = made(ends=(10, 250))
    check(device, case, Candidates(case.ids, 10, scanned_from, k))


@pytest.mark.parametrize("softcap", [5.0, 0.3])
def test_scores_are_capped(device: str, softcap: float) -> None:
    case = made(Format.BFLOAT16, dims=(32, 16))
    check(device, case, Candidates(case.ids, 10, 280, 12), softcap)


def test_many_queries_of_one_head_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel gathers, rows are gathered for some queries at a time."""
    monkeypatch.setattr(named_keys, "NUMBERS_AT_ONCE", 5000)
    case = made(heads=1, queries=70)
    check(device, case, Candidates(case.ids, 10, 260, 12))


def test_of_equal_scores_the_first_token_counts(device: str) -> None:
    """Whatever the sign of a zero. What is attended to is told by the values."""
    case = made(heads=1, queries=4, dims=(4, 4), ends=(0, 300))
    keys, values = case.numbers
    keys[:] = 0.0
    values[0, :, 0] = torch.arange(300)
    ids = torch.arange(32, dtype=torch.int32).repeat(4, 1)
    case = case._replace(stored=(keys, values), ids=ids)
    out, lse = found(device, case, Candidates(ids, 0, 300, 12))
    assert torch.allclose(out[0, :, 0], torch.full((4,), 5.5).double())  # the mean of 0 .. 11
    assert torch.allclose(lse, torch.full((1, 4), 12.0).log().double())
    rows = StoredRows(*(row.to(device) for row in case.stored))
    tokens, products = torch.arange(32, dtype=torch.int32).repeat(4, 1), torch.zeros(4, 32)
    products[:, 3] = -0.0
    chosen = Found(tokens.to(device), products.to(device), 32)
    into = Partial(torch.empty(1, 4, 4, device=device), torch.empty(1, 4, device=device))
    kernels: Any = named_keys.kernels_for(rows.keys, "codes.named_triton")
    (named_keys._attend_plainly if kernels is None else kernels.attend)(rows, 12, chosen, (SCALE, None), into)
    assert torch.allclose(into.out[0, :, 0].cpu(), torch.full((4,), 5.5))


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in Triton's interpreter
def test_numbers_that_are_not_finite(device: str) -> None:
    """NaN loses against every score and spreads where it is taken all the same; what is not chosen does no harm."""
    case = made(heads=1, queries=3, dims=(4, 4), ends=(0, 300))
    keys, values = case.numbers
    keys[0, :, 0], keys[0, 3, 0], keys[0, 5, 0] = 1.0, torch.nan, -torch.inf
    values[0, 3], values[0, 5] = torch.nan, torch.inf
    queries = torch.zeros_like(case.queries)
    queries[..., 0] = 1.0
    ids = torch.arange(32, dtype=torch.int32).repeat(3, 1)
    ids[1, 4:] = -1  # the NaN is needed
    ids[2] = torch.tensor([5] + [-1] * 31)  # a score of -inf only
    case = case._replace(queries=queries, stored=(keys, values), ids=ids)
    out, lse = found(device, case, Candidates(ids, 0, 300, 12))
    assert out[0, 0].isfinite().all() and lse[0, 0].isfinite()
    assert out[0, 1].isnan().all() and lse[0, 1].isnan()
    assert (out[0, 2] == 0).all() and lse[0, 2] == -torch.inf


def test_slots_do_not_depend_on_what_is_scanned() -> None:
    """Kernels are compiled for a number of slots."""
    assert [slots_for(*given) for given in ((240, 100), (256, 256), (32, 1), (6, 2))] == [512, 512, 64, 8]
    case = made()
    assert Candidates(case.ids, 0, 300, 12).slots == Candidates(case.ids, 0, 250, 12).slots


@pytest.mark.cuda
@pytest.mark.parametrize("fmt", [Format.BFLOAT16, Format.INT8])
def test_kernels_at_full_size(fmt: Format) -> None:
    """head_dim 128, group 4, 100 of 256 named keys of 60,000, of which a few hundred have no codes."""
    case = made(fmt, heads=2, queries=4 * 300, tokens=60_000, dims=(128, 128), room=256, ends=(4, 59_500))
    named = Candidates(case.ids, 4, 59_600, 100)
    kernels: Any = found("cuda", case, named)
    plain: Any = found("cpu", case, named)
    for mine, right in zip(kernels, plain, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=2e-5)
