"""Attention to named keys in host memory: PyTorch against float64, Triton against it where it can run.

Triton's own interpreter runs the kernels on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_reach.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention.merge import Partial, Scoring
from retrieval_attn.gpu.codes import host_row_gather as reaching
from retrieval_attn.gpu.codes.host_row_gather import GatherEntry, HostRowGather, RowShape
from retrieval_attn.offload.managed import as_device, host_rows
from tests.gpu.test_decode_kernels import INTERPRETED

ROOM = 64
LEAST = 20


@pytest.fixture(params=["torch", pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where queries and tables lie; "triton" means the kernels on a GPU, or interpreted."""
    if request.param == "torch":
        monkeypatch.setattr(reaching, "kernels_for", lambda tensor, name: None)
    elif INTERPRETED:
        from retrieval_attn.gpu.codes import reach_triton

        monkeypatch.setattr(reaching, "kernels_for", lambda tensor, name: reach_triton)
    yield "cuda" if request.param == "triton" and not INTERPRETED else "cpu"


class Case(NamedTuple):
    """Queries (batch, q_heads, 1, dim), of each key-value head its entry and float32 numbers, and ids. told: of these,
    as `Told.products`; None: all keys are read.
    """

    query: Tensor
    shape: RowShape
    entries: list[GatherEntry | None]
    numbers: list[tuple[Tensor, Tensor]]
    ids: Tensor
    told: Tensor | None = None


def made(*, dims: tuple[int, int] = (64, 64), rows: int = 2, group: int = 4, tokens: int = 300) -> Case:
    """rows of two key-value heads each. The first query has as many keys named as there is room for."""
    rng = np.random.default_rng(5)
    numbers: list[tuple[Tensor, Tensor]] = []
    entries: list[GatherEntry | None] = []
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for _ in range(rows * 2):
        stored = host_rows(1, tokens, sum(dims), where)[0].view(torch.int8)
        stored.copy_(torch.from_numpy(rng.integers(-127, 128, (tokens, sum(dims)), dtype=np.int8)))
        steps = torch.from_numpy(rng.uniform(0.001, 0.03, (tokens, 2)).astype(np.float32))
        keys, values = stored.float().split(list(dims), dim=1)
        numbers.append((keys * steps[:, :1], values * steps[:, 1:]))
        entries.append(GatherEntry(stored, steps, tokens, LEAST))
    ids = np.full((rows * 2 * group, ROOM), -1, np.int32)
    for number, row in enumerate(ids):
        count = ROOM if number == 0 else rng.integers(LEAST, ROOM)
        row[: min(count, tokens)] = rng.choice(tokens, min(count, tokens), replace=False)
    query = torch.from_numpy(rng.standard_normal((rows, 2 * group, 1, dims[0])).astype(np.float32))
    return Case(query, RowShape(*dims), entries, numbers, torch.from_numpy(ids))


def expected(case: Case, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Query by query, in float64."""
    batch, q_heads, _, dim = case.query.shape
    out = torch.zeros(batch * q_heads, case.shape.value_dim, dtype=torch.float64)
    lse = torch.full((batch * q_heads,), -torch.inf, dtype=torch.float64)
    for number, own in enumerate(case.query.reshape(-1, dim).double()):
        head = number // (len(case.ids) // len(case.entries))
        entry = case.entries[head]
        if entry is None:
            continue
        ids = case.ids[number]
        enough = ids[min(entry.least, entry.ids) - 1] >= 0
        here = (ids >= 0) & (ids < entry.ids)
        ids = ids[here].long() if enough else torch.arange(entry.ids)
        keys, values = (one.double()[ids] for one in case.numbers[head])
        if len(keys):
            products = keys @ own
            if case.told is not None and enough:
                told = case.told[number, here].double()
                products = torch.where(told == torch.inf, products, told)
            scores = products * scoring.scale
            scores = scores if scoring.softcap is None else scoring.softcap * torch.tanh(scores / scoring.softcap)
            out[number], lse[number] = scores.softmax(0) @ values, scores.logsumexp(0)
    return out, lse


def there(entry: GatherEntry, device: str) -> GatherEntry:
    """Steps on the device, and rows as it sees them."""
    rows = entry.rows if device == "cpu" else as_device(entry.rows, torch.device(device, 0))
    return entry._replace(rows=rows.view(torch.int8), steps=entry.steps.to(device))


def found(device: str, case: Case, scoring: Scoring) -> Partial:
    reach = HostRowGather(len(case.entries), case.shape, torch.device(device))
    reach.bind([None if one is None else there(one, device) for one in case.entries])

    def at_once(function: Any, *arguments: Any) -> None:
        function(*arguments)

    told = None if case.told is None else case.told.to(device)
    return reach.run(case.query.to(device), case.ids.to(device), scoring, at_once, told)


def check(device: str, case: Case, softcap: float | None = None) -> None:
    scoring = Scoring(0.11, softcap)
    for mine, right in zip(found(device, case, scoring), expected(case, scoring), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.cpu().double(), right, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 48), (16, 256)])
@pytest.mark.parametrize("group", [4, 8])
def test_named_keys_are_attended_to(device: str, dims: tuple[int, int], group: int) -> None:
    """Rows of any width that a wide load divides."""
    check(device, made(dims=dims, group=group))


@pytest.mark.parametrize("softcap", [5.0, 0.3])
def test_scores_are_capped(device: str, softcap: float) -> None:
    check(device, made(), softcap)


def test_holes_among_ids_and_ids_that_do_not_count(device: str) -> None:
    """Of fewer keys than there are rows, behind others without an id; what is beyond the end is not attended to."""
    case = made()
    case.ids[:, 3:9] = -1
    entries: list[GatherEntry | None] = [one._replace(ids=270) for one in case.entries if one is not None]
    check(device, case._replace(entries=entries))


def test_a_query_that_codes_say_nothing_of_gets_all_keys(device: str) -> None:
    """The host does the like: a search names too few keys where scores of codes are not finite."""
    case = made(rows=3, tokens=700)
    case.ids[0] = -1
    case.ids[5, LEAST - 1 :] = -1
    check(device, case)


def test_fewer_keys_than_a_search_names(device: str) -> None:
    """All of them are named then, and nothing is missing."""
    case = made(tokens=8)
    case.ids[:] = -1
    case.ids[:, :8] = torch.arange(8)
    check(device, case)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_keys_that_are_told_of_are_not_read(device: str, softcap: float | None) -> None:
    """Only their values are: their keys may be anything. A query with too few keys has all of them read."""
    rng = torch.Generator().manual_seed(6)
    case = made(rows=3, tokens=700)
    told = 30 * torch.randn(case.ids.shape, generator=rng)
    told[torch.rand(case.ids.shape, generator=rng) < 0.3] = torch.inf
    case = case._replace(told=told)
    cut = case._replace(ids=case.ids.clone())
    cut.ids[5, LEAST - 1 :] = -1
    check(device, cut, softcap)
    for entry, ids, products in zip(case.entries, case.ids.view(6, -1), told.view(6, -1), strict=True):
        assert entry is not None
        unread = set(ids.tolist()) - set(ids[products == torch.inf].tolist()) - {-1}
        assert unread
        entry.steps[sorted(unread), 0] = torch.nan
    check(device, case, softcap)


def test_rows_without_keys_are_empty(device: str) -> None:
    case = made()
    case.ids[:8] = -1
    case = case._replace(entries=[None, None, *case.entries[2:]])
    check(device, case)
    out, lse = found(device, case, Scoring(0.11))
    assert (out[:8] == 0).all() and (lse[:8] == -torch.inf).all() and lse[8:].isfinite().all()


def test_queries_of_a_model_in_bfloat16(device: str) -> None:
    """Query heads that do not lie one behind the other, as a projection leaves them."""
    case = made(dims=(128, 128))
    wide = torch.zeros(2, 1, 8, 160, dtype=torch.bfloat16)
    wide[..., :128] = case.query.transpose(1, 2)
    query = wide[..., :128].transpose(1, 2)
    check(device, case._replace(query=query))


def test_a_row_that_is_not_finite_is_seen(device: str) -> None:
    """As everywhere: NaN comes out, not a number that hides it."""
    case = made()
    entry = case.entries[0]
    assert entry is not None
    entry.steps[int(case.ids[1][0]) % len(entry.rows), 0] = torch.nan
    case.ids[1, 0] = int(case.ids[1][0]) % len(entry.rows)
    out, lse = found(device, case, Scoring(0.11))
    assert out[1].isnan().all() and lse[1].isnan()


def test_what_cannot_be_read_is_refused() -> None:
    """Rows of other widths or dtypes, begun where no load begins, ids without rows, widths that no load divides."""
    case = made(rows=1)
    reach, given = HostRowGather(2, case.shape, torch.device("cpu")), case.entries[0]
    assert given is not None
    entry = given._replace(rows=given.rows.clone())
    shifted = torch.zeros(300 * 128 + 4, dtype=torch.int8)[4:].view(300, 128)
    for wrong in (
        entry._replace(rows=entry.rows[:, :-1]),
        entry._replace(rows=entry.rows.view(torch.uint8)),
        entry._replace(rows=shifted),
        entry._replace(ids=301),
        entry._replace(steps=entry.steps[1:]),
        entry._replace(steps=entry.steps.double()),
    ):
        with pytest.raises(BackendError):
            reach.bind([wrong, None])
    with pytest.raises(BackendError, match="multiples of 16 bytes"):
        HostRowGather(2, RowShape(72, 64), torch.device("cpu"))
