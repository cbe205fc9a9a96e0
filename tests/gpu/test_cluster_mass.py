"""Attention to what was not named, by clusters: PyTorch against exact sums, Triton against both where it can run.

Triton's own interpreter runs the kernels on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_cluster_mass.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.attention.merge import Scoring
from retrieval_attn.gpu.clusters import mass as cluster_mass
from retrieval_attn.gpu.clusters.cluster import make_clusters
from retrieval_attn.gpu.clusters.mass import ClusterEntry, ClusterMass, TailPartial
from retrieval_attn.gpu.codes import codes as device_codes
from retrieval_attn.gpu.codes import search as code_search
from retrieval_attn.gpu.codes.codes import DeviceCodes
from retrieval_attn.gpu.codes.search import CodeSearch, CodeShape, QuestionSearch, SearchScratch, size_class
from retrieval_attn.index.kernels.key_codes import CodeSpace
from retrieval_attn.index.sketch.index import learn_projection, second_moment
from tests.gpu.test_code_search import on
from tests.gpu.test_decode_kernels import INTERPRETED
from tests.index.building import learn_spaces


@pytest.fixture(params=["torch", pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the tensors lie; "triton" means the kernels on a GPU, or interpreted."""
    if request.param == "torch":
        for module in (code_search, device_codes, cluster_mass):
            monkeypatch.setattr(module, "kernels_for", lambda tensor, name: None)
    elif INTERPRETED:
        from retrieval_attn.gpu.clusters import mass_triton
        from retrieval_attn.gpu.codes import codes_triton, search_triton

        for module, kernels in (
            (code_search, search_triton),
            (device_codes, codes_triton),
            (cluster_mass, mass_triton),
        ):
            monkeypatch.setattr(module, "kernels_for", lambda tensor, name, kernels=kernels: kernels)
    yield "cuda" if request.param == "triton" and not INTERPRETED else "cpu"


def plainly(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)


@functools.cache
def head(dim: int, count: int, seed: int, key_bytes: int) -> tuple[CodeSpace, np.ndarray[Any, Any]]:
    """A space for keys (count, dim), and these. As many bytes as numbers tell scores nearly as they are."""
    rng = np.random.default_rng(seed)
    keys = (rng.standard_normal((count, dim)) * np.linspace(1.5, 0.2, dim) + 0.5).astype(np.float32)
    queries = rng.standard_normal((200, dim)).astype(np.float32)
    return learn_spaces(learn_projection(second_moment(queries), keys, dim), keys, (key_bytes,))[0], keys


class Case:
    """Entries of `sizes` keys, None for no codes, searched by `group` queries each."""

    def __init__(
        self,
        device: str,
        sizes: list[int | None],
        *,
        group: int,
        dim: int = 64,
        clusters: int = 64,
        value_dim: int = 64,
        key_bytes: int | None = None,
        finer_bytes: int = 0,
    ) -> None:
        self.sizes, self.group, self.dim = sizes, group, dim
        rng = torch.Generator().manual_seed(5)
        heads = [head(dim, max(size or 0, 300), i, key_bytes or dim) for i, size in enumerate(sizes)]
        self.keys = [torch.from_numpy(keys) for _, keys in heads]
        spaces = [space._replace(estimate=space.estimate.copy()) for space, _ in heads]
        finer = [
            head(dim, max(size or 0, 300), i, finer_bytes)[0] if finer_bytes else None for i, size in enumerate(sizes)
        ]
        self.values = [torch.randn(len(keys), value_dim, generator=rng) for keys in self.keys]
        ranges: list[tuple[DeviceCodes, int] | None] = []
        entries: list[ClusterEntry | None] = []
        for i, (size, keys, values) in enumerate(zip(sizes, self.keys, self.values, strict=True)):
            ranges.append(None if size is None else (on(device, spaces[i], keys.numpy(), finer[i]), size))
            found = make_clusters(keys[None], values[None], None, clusters)
            means = found.value_sums[0] / found.counts[0].clamp_min(1)[:, None]
            entries.append(ClusterEntry(found.members[0].to(device), means.to(device)))
        self.entries, self.ranges = entries, ranges
        self.shape = CodeShape(heads[0][0].key_bytes, 20)
        if finer_bytes:
            self.shape = CodeShape(self.shape.key_bytes, 80, finer_bytes, 20)
        where = torch.device(device)
        self.search = CodeSearch(len(sizes), group, 1, self.shape, where)
        self.search.bind(ranges)
        self.mass = ClusterMass(len(sizes), clusters, value_dim, torch.float32, where)
        self.mass.bind(entries)
        self.query = torch.randn(len(sizes), group, 1, dim, generator=rng).to(device)
        self.ids = torch.full((len(sizes) * group, self.shape.room), 77, dtype=torch.int32, device=device)
        self.scratch = SearchScratch(
            len(sizes) * group, size_class(self.search.max_keys), self.shape.picked_room, where
        )

    def run(self, scoring: Scoring, places: Tensor | None = None) -> TailPartial:
        self.search.run(self.query, self.ids, places, self.scratch, plainly, scale=scoring.scale)
        return self.mass.run(self.search, self.query, self.ids, places, self.scratch, scoring, plainly)

    def expected(self, scoring: Scoring, places: Tensor | None = None) -> TailPartial:
        """In float64 and by exact scores: clusters' masses, mean values weighted with them."""
        count = len(self.sizes) * self.group
        out = torch.zeros(count, self.values[0].shape[1], dtype=torch.float64)
        lse = torch.full((count,), -torch.inf, dtype=torch.float64)
        for i in range(count):
            entry, member = divmod(i, self.group)
            clusters = self.entries[entry]
            size = self.sizes[entry]
            if clusters is None or not size:
                continue
            logits = self.keys[entry][:size].double() @ self.query[entry, member, 0].cpu().double() * scoring.scale
            if scoring.softcap is not None:
                logits = torch.tanh(logits / scoring.softcap) * scoring.softcap
            row = self.ids[i if places is None else int(places[i])]
            logits[row[row >= 0].long().cpu()] = -torch.inf
            lse[i] = torch.logsumexp(logits, 0)
            if lse[i] > -torch.inf:
                weights = torch.exp(logits - lse[i])
                out[i] = weights @ clusters.mean_values.cpu().double()[clusters.members[:size].long().cpu()]
        return TailPartial(out, lse)


def close(part: TailPartial, expected: TailPartial, by: float = 0.01) -> None:
    torch.testing.assert_close(part.lse.cpu().double(), expected.lse, rtol=0, atol=by)
    torch.testing.assert_close(part.out.cpu().double(), expected.out, rtol=0, atol=by)


@pytest.mark.parametrize(
    "group,dim,clusters,value_dim",
    [(1, 64, 16, 64), (4, 128, 64, 128), (8, 64, 256, 40), (3, 64, 32, 64), (4, 256, 128, 256)],
)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_masses_are_those_of_what_was_not_named(
    device: str, group: int, dim: int, clusters: int, value_dim: int, softcap: float | None
) -> None:
    """Of lengths that end within a tile, with keys that are not counted behind them."""
    case = Case(device, [1500, 129, 4096], group=group, dim=dim, clusters=clusters, value_dim=value_dim)
    scoring = Scoring(dim**-0.5 * 2, softcap)
    part = case.run(scoring)
    close(part, case.expected(scoring))
    again = case.run(scoring)
    assert torch.equal(again.out, part.out) and torch.equal(again.lse, part.lse)


@pytest.mark.parametrize("dim,key_bytes", [(64, 24), (80, 24), (128, 48), (128, 24)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_short_codes_lack_is_counted_in(device: str, dim: int, key_bytes: int, softcap: float | None) -> None:
    """Kernels count it as plain PyTorch does, which is near the exact masses; without it they are too small."""
    case = Case(device, [3000, 2000], group=4, dim=dim, key_bytes=key_bytes)
    scoring = Scoring(dim**-0.5 * 1.5, softcap)
    part = case.run(scoring)
    plain = case.mass.room(8)
    case.mass.run_plainly(case.search, case.query, case.ids, None, scoring, plain)
    close(part, TailPartial(plain.out.cpu().double(), plain.lse.cpu().double()), by=5e-3)
    difference = float((part.lse.cpu() - case.expected(scoring).lse).mean())
    for codes in case.ranges:
        assert codes is not None
        codes[0].space.estimate[1:] = 0
    without = float((case.run(scoring).lse.cpu() - case.expected(scoring).lse).mean())
    assert abs(difference) < 0.03 and without < min(difference, 0) - 0.01


@pytest.mark.parametrize("dim,key_bytes,finer_bytes", [(64, 16, 40), (128, 24, 64), (128, 16, 128)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_finer_codes_say_is_counted_in(
    device: str, dim: int, key_bytes: int, finer_bytes: int, softcap: float | None
) -> None:
    """Of keys that were picked by short codes, not named by finer ones: by kernels as plainly, near exact masses."""
    case = Case(device, [3000, 2000, None, 60], group=4, dim=dim, key_bytes=key_bytes, finer_bytes=finer_bytes)
    scoring = Scoring(dim**-0.5 * 1.5, softcap)
    part = case.run(scoring)
    plain = case.mass.room(16)
    case.mass.run_plainly(case.search, case.query, case.ids, None, scoring, plain)
    close(part, TailPartial(plain.out.cpu().double(), plain.lse.cpu().double()), by=5e-3)
    difference = (part.lse.cpu() - case.expected(scoring).lse)[:8]
    assert abs(float(difference.mean())) < 0.03
    for i, row in enumerate(case.ids[:8].tolist()):
        entry, member = divmod(i, 4)
        own, codes = case.query[entry, member, 0].float()[None], case.ranges[entry]
        assert codes is not None and codes[0].finer is not None
        picked = codes[0].find(own, 80, codes[1])
        said = codes[0].finer.scores_of(own, torch.arange(codes[1], device=own.device, dtype=torch.int32)[None])[0]
        named = torch.tensor([number for number in row if number >= 0], device=own.device)
        best = codes[0].finer.best_of(own, picked, 20)[0].long()
        assert 20 <= len(named) <= case.shape.room and len(set(named.tolist())) == len(named)
        # kernels pick a few keys more: what they name is no worse, but for what 16 bits of a query lose
        ranked = (said[some].sort(descending=True).values[:20] for some in (named, best))
        assert float((next(ranked) - next(ranked)).min()) > -1e-3
    straight, places = case.ids.clone(), torch.arange(15, -1, -1, device=case.ids.device)
    case.run(scoring, places)
    assert torch.equal(case.ids[places], straight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mean_values_in_halves(device: str, dtype: torch.dtype) -> None:
    case = Case(device, [700], group=2)
    mass = ClusterMass(1, 64, 64, dtype, case.mass.table.device)
    exact = case.entries[0]
    assert exact is not None
    rounded = ClusterEntry(exact.members, exact.mean_values.to(dtype))
    mass.bind([rounded])
    case.mass = mass
    part = case.run(Scoring(0.125))
    case.entries[0] = ClusterEntry(exact.members, rounded.mean_values.float())
    close(part, case.expected(Scoring(0.125)))


def test_nothing_left_no_codes_no_clusters_and_broken_queries(device: str) -> None:
    """out 0 and lse -inf, whatever else is in the batch."""
    case = Case(device, [700, None, 12, 700, 0], group=2)
    clusters = [*case.entries]
    clusters[3] = None
    case.mass.bind(clusters)
    case.entries = clusters
    case.query[0, 1, 0, 3] = torch.nan
    part = case.run(Scoring(0.125))
    assert torch.isfinite(part.lse).tolist() == [True] + [False] * 9
    assert bool((part.out[1:] == 0).all()) and bool((part.lse[1:] == -torch.inf).all())
    expected = case.expected(Scoring(0.125))
    close(TailPartial(part.out[:1], part.lse[:1]), TailPartial(expected.out[:1], expected.lse[:1]))


def test_equal_keys_and_far_keys(device: str) -> None:
    """Equal values give their mean. A few keys far above all others: what is left is as nothing, or right."""
    case = Case(device, [900], group=2)
    entry = case.entries[0]
    assert entry is not None
    entry.mean_values.copy_(torch.arange(64.0).expand(64, -1))
    part = case.run(Scoring(0.125))
    torch.testing.assert_close(part.out.cpu(), torch.arange(64.0).expand(2, -1), rtol=1e-6, atol=1e-5)
    case.query *= 60  # logits up to hundreds: what is left lies far below the best that was named
    close(case.run(Scoring(0.125)), case.expected(Scoring(0.125)), by=1.0)


def test_places(device: str) -> None:
    """Keys are named where `places` says; estimates stay in the order of the queries."""
    case = Case(device, [700, 900], group=2)
    straight = case.run(Scoring(0.125))
    places = torch.tensor([2, 0, 3, 1], device=case.query.device)
    turned = case.run(Scoring(0.125), places)
    torch.testing.assert_close(turned, straight, rtol=0, atol=0)
    close(turned, case.expected(Scoring(0.125), places))


@pytest.mark.parametrize("rows", [100, 20, 7])
def test_a_question_in_turns(device: str, rows: int) -> None:
    """Each query's estimate is what it is alone, however few have room at once."""
    case = Case(device, [650, 640], group=19)
    where = case.query.device
    search: QuestionSearch = QuestionSearch(2, 19, case.shape, where)
    search.bind(case.ranges)
    into = case.mass.room(38)
    flat = case.query.reshape(1, 38, 1, 64)
    scratch = SearchScratch(min(rows, 38), size_class(650), case.shape.room, where)
    after = case.mass.after(search, flat, Scoring(0.125), into)
    search.run(flat, case.ids, None, scratch, plainly, after)
    if cluster_mass.kernels_for(flat, "clusters.mass_triton") is None:
        case.mass.run_plainly(search, flat, case.ids, None, Scoring(0.125), into)
    elif rows < 38:
        with pytest.raises(BackendError, match="are needed, but scratch memory holds"):
            case.mass.run(search, flat, case.ids, None, scratch, Scoring(0.125), plainly)
    close(into, case.expected(Scoring(0.125)))


def test_refused(device: str) -> None:
    where = torch.device(device)
    for clusters in (8, 48, 512):
        with pytest.raises(BackendError, match="power of 2 from 16 to 256"):
            ClusterMass(1, clusters, 64, torch.float32, where)
    mass = ClusterMass(1, 16, 64, torch.float32, where)
    members = torch.zeros(5, dtype=torch.uint8, device=where)
    for means in (torch.zeros(16, 32), torch.zeros(16, 64).half(), torch.zeros(64, 16).T):
        with pytest.raises(BackendError, match="contiguous members in uint8 and mean values"):
            mass.bind([ClusterEntry(members, means.to(where))])


@pytest.mark.parametrize("keys", [1000, 4096, 5003])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_of_many_keys_a_part_counts_for_all(
    device: str, keys: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels sum the keys that plain PyTorch sums, and these are nearly as good as all of them."""
    scoring = Scoring(0.125, softcap)
    case = Case(device, [keys, None, keys // 2], group=4)
    whole = case.run(scoring)
    monkeypatch.setattr(cluster_mass, "SAMPLED", 512)
    summed, every = cluster_mass.is_sampled(keys, torch.device("cpu"))
    assert every == {1000: 1, 4096: 8, 5003: 8}[keys] and abs(int(summed.sum()) * every - keys) <= 16 * every
    assert every == 1 or len(summed.view(-1)[: 16 * every * 8].view(-1, 16 * every).unique(dim=0)) > 1
    part, plain = case.run(scoring), case.mass.room(12)
    case.mass.run_plainly(case.search, case.query, case.ids, None, scoring, plain)
    close(part, TailPartial(plain.out.cpu().double(), plain.lse.cpu().double()), by=5e-3)
    apart = (part.lse - whole.lse)[whole.lse.isfinite()].abs()
    assert len(apart) == 8 and float(apart.max()) < 0.2 and (float(apart.max()) > 0) == (every > 1)
