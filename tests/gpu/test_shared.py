"""Attention of many rows to prefixes that they share, against float64 over each row's whole path.

Triton's own interpreter runs the kernels on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_shared.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.gpu.shared import partials
from retrieval_attn.gpu.shared.partials import (
    PagedKeys,
    empty_pages,
    numbers_in,
    path_partial,
    runs,
    shared_partials,
    write_pages,
)
from retrieval_attn.gpu.shared.plan import LEVELS, PAGE_TOKENS, PlanShape, SharedNode, SharedPlan
from retrieval_attn.index.formats import Format
from retrieval_attn.offload.staging import pack, unpack
from tests.gpu.test_decode_kernels import INTERPRETED
from tests.reference.attention import reference_attention

SCALE = 0.125
TREES = [
    [[1], [10]],
    [[10], [1]],
    [[0], [5]],
    [[128], [1]],
    [[64], [64, 65, 63]],
    [[700], [1, 128, 256]],
    [[300], [130, 0], [1, 70, 0, 64]],
    [[65], [1], [200], [3, 4]],
]
"""Tokens of the nodes, level by level, as Hydragen's tests write them. The nodes of a level share the next evenly."""
LONG = [[16384], [1, 128, 256]]


@pytest.fixture(params=["torch", pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the tensors lie; "triton" means the kernels on a GPU, or interpreted."""
    if request.param == "triton" and INTERPRETED:
        from retrieval_attn.gpu.shared import shared_triton

        monkeypatch.setattr(partials, "kernels_for", lambda tensor, module: shared_triton)
    yield "cuda" if request.param == "triton" and not INTERPRETED else "cpu"


class Span(NamedTuple):
    """A node's tokens and rows, with its own keys and values (kv_heads, tokens, dim)."""

    rows: list[int]
    key: Tensor
    value: Tensor


class Forest:
    """Nodes over rows, in pages that lie in any order in a pool; whatever nobody wrote is NaN."""

    def __init__(
        self,
        rows: int,
        heads: tuple[int, int],
        dim: int,
        dtype: torch.dtype,
        device: str,
        *,
        seed: int = 0,
        pages: int = 0,
        int8: bool = False,
    ) -> None:
        """pages: of the pool; 0: 64. heads: of queries, of keys. int8: the pool's rows are."""
        self.rows, self.heads, self.dim, self.dtype, self.device = rows, heads, dim, dtype, device
        self.generator = torch.Generator().manual_seed(seed)
        like = torch.empty(1, heads[1], 1, dim, dtype=dtype, device=device)
        self.fmt = Format.INT8 if int8 else Format.FLOAT32
        like = pack(like, self.fmt) if int8 else like
        self.pool = empty_pages(pages or 64, like, like)
        for part in self.pool:
            if part is not None:
                part.fill_(torch.nan if part.is_floating_point() else -1)
        self.free = torch.randperm(pages or 64, generator=self.generator).tolist()
        self.spans: list[Span] = []
        self.nodes: list[SharedNode] = []
        self.query = self.random(rows, heads[0], 1, dim)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(self.device)

    def add(self, rows: list[int], tokens: int) -> None:
        self.put(Span(rows, self.random(self.heads[1], tokens, self.dim), self.random(self.heads[1], tokens, self.dim)))

    def put(self, span: Span) -> None:
        tokens = span.key.shape[1]
        pages = [self.free.pop() for _ in range(-(-tokens // PAGE_TOKENS))]
        if self.fmt is Format.INT8:  # what is attended to is what they are rounded to; plain operations round that, too
            packed = pack(span.key, self.fmt), pack(span.value, self.fmt)
            dtype = torch.float32 if partials.follows_its_plan(self.pool) else self.dtype
            span = Span(span.rows, *(unpack(one, self.fmt, dtype) for one in packed))
            write_pages(self.pool, pages, *packed)
        else:
            write_pages(self.pool, pages, span.key, span.value)
        self.spans.append(span)
        self.nodes.append(SharedNode(pages, tokens, span.rows))

    def plan(self, levels: int = LEVELS) -> SharedPlan:
        plan = SharedPlan(self.shape(levels), self.device)
        plan.write(self.nodes)
        return plan

    def shape(self, levels: int = LEVELS) -> PlanShape:
        exact = self.dtype == torch.float32
        return PlanShape.of(self.rows, *self.heads, self.pool.key.shape[1], levels=levels, processors=132, exact=exact)

    def partials(self, plan: SharedPlan | None = None, softcap: float | None = None) -> Partial:
        return shared_partials(self.query, self.pool, plan or self.plan(), scale=SCALE, softcap=softcap)

    def require(self, found: Partial, softcap: float | None = None) -> None:
        """That each row got attention over its path, nearest nodes last; nothing where that is empty."""
        assert found.out.dtype == found.lse.dtype == torch.float32
        assert found.out.shape == (self.rows, self.heads[0], 1, self.dim) and found.lse.shape == found.out.shape[:3]
        # of 16-bit models, other kernels round weights and results to the model's dtype
        tolerance = 2e-5 if self.dtype == torch.float32 else 2 * torch.finfo(self.dtype).eps
        seen: dict[tuple[int, ...], list[int]] = {}
        for row in range(self.rows):
            seen.setdefault(tuple(i for i, one in enumerate(self.spans) if row in one.rows), []).append(row)
        for path, rows in seen.items():
            key, value = (
                torch.cat(
                    [one[1:][which].cpu() for one in (self.spans[i] for i in path)]
                    + [torch.empty(self.heads[1], 0, self.dim)],
                    1,
                )
                for which in (0, 1)
            )
            query = self.query[rows].cpu().transpose(0, 2)
            right = reference_attention(query, key[None].double(), value[None].double(), scale=SCALE, softcap=softcap)
            own = found.out[rows].cpu().double().transpose(0, 2), found.lse[rows].cpu().double().transpose(0, 2)
            torch.testing.assert_close(own[0], right.out, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(own[1], right.lse, rtol=1e-5, atol=2e-5)


def hydragen(forest: Forest, tree: list[list[int]]) -> None:
    """Add the tree's nodes: as many rows as there are, spread evenly over the nodes of every level."""
    for level in tree:
        edges = [forest.rows * i // len(level) for i in range(len(level) + 1)]
        for tokens, start, stop in zip(level, edges, edges[1:], strict=False):
            forest.add(list(range(start, stop)), tokens)


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_hydragens_trees(tree: list[list[int]], kv_heads: int, dim: int, device: str) -> None:
    forest = Forest(12, (16, kv_heads), dim, torch.float32, device)
    hydragen(forest, tree)
    forest.require(forest.partials())


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [((14, 2), 64), ((4, 4), 96), ((8, 1), 256)])
def test_dtypes_groups_and_caps(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, softcap: float | None, device: str
) -> None:
    """Groups that are no power of two, no groups, odd head sizes; every row alone on one level, none on another."""
    if dtype == torch.bfloat16 and INTERPRETED:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    forest = Forest(5, heads, dim, dtype, device)
    for rows, tokens in (([0, 1, 2, 4], 700), ([1], 3), ([2], 64), ([4], 129)):
        forest.add(rows, tokens)
    forest.require(forest.partials(softcap=softcap), softcap)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [((14, 2), 64), ((4, 4), 96), ((8, 1), 256)])
def test_rows_of_int8(heads: tuple[int, int], dim: int, dtype: torch.dtype, softcap: float | None, device: str) -> None:
    """Within the same bounds of what their numbers and steps say; tokens of zeros, and of numbers that are tiny."""
    if dtype == torch.bfloat16 and INTERPRETED:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    forest = Forest(5, heads, dim, dtype, device, int8=True)
    for rows, tokens in (([0, 1, 2, 4], 700), ([1], 3), ([2], 64), ([4], 129)):
        key, value = (forest.random(heads[1], tokens, dim) for _ in range(2))
        value[:, ::7] = 0
        value[:, 1::7] *= 1e-3
        forest.put(Span(rows, key, value))
    forest.require(forest.partials(softcap=softcap), softcap)


@pytest.mark.parametrize(("rows", "tile", "side_by_side"), [(4, 16, 2), (16, 64, 2), (32, 128, 1), (64, 128, 1)])
def test_parts_of_a_long_text_fill_a_device(rows: int, tile: int, side_by_side: int) -> None:
    """132 multiprocessors, 32 heads over 8; small programs share one."""
    shape = PlanShape.of(rows, 32, 8, 2048, processors=132)
    programs = shape.splits * 8 * -(-rows * 4 // tile)
    assert shape.tile == tile and 0.95 * 132 * side_by_side < programs <= 132 * side_by_side


def test_numbers_that_are_tiny_stay_numbers(device: str) -> None:
    """Of float16: a weight times a step below its smallest number would be 0."""
    forest = Forest(3, (4, 2), 64, torch.float16, device, int8=True)
    key, value = (forest.random(2, 500, 64).float() for _ in range(2))
    forest.put(Span([0, 1, 2], key, 1e-3 * value))
    found, right = forest.partials(), Forest(3, (4, 2), 64, torch.float16, device, int8=True)
    right.query = forest.query
    right.put(Span([0, 1, 2], key, value))
    wanted = right.partials().out
    assert float((1e3 * found.out - wanted).abs().max()) < 2e-3 * float(wanted.abs().max())


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_no_number_is_none_in_int8(where: str, dtype: torch.dtype, device: str) -> None:
    """As in other pages: of the heads and rows that have something to do with it, and of no others."""
    forest = Forest(2, (4, 2), 64, dtype, device, int8=True)
    for rows in ([0], [1]):
        key, value = forest.random(2, 200, 64), forest.random(2, 200, 64)
        if rows == [0] and where != "query":
            (key if where == "key" else value)[1, 77, 5] = torch.nan
        forest.put(Span(rows, key, value))
    if where == "query":
        forest.query[0, 2, 0, 5] = torch.nan
    found = forest.partials()
    odd = [2] if where == "query" else [2, 3]
    numbers = found.out.isfinite().all(dim=3)[..., 0]
    assert numbers[0].tolist() == [head not in odd for head in range(4)] and bool(numbers[1].all())
    assert not bool(found.out[0, odd].isfinite().any())


def test_pages_of_int8_have_half_the_bytes_and_int8s_error() -> None:
    """Against what was rounded, in float64: below the bound of a row's half step, and not 0."""
    forest, packed = (Forest(3, (4, 2), 128, torch.bfloat16, "cpu", int8=int8) for int8 in (False, True))
    key, value = forest.random(2, 900, 128), forest.random(2, 900, 128)
    for one in (forest, packed):
        one.put(Span([0, 1, 2], key, value))
    assert packed.pool.nbytes == forest.pool.nbytes * 132 // 256
    query = forest.query.transpose(0, 2)
    right = reference_attention(query, key[None].double(), value[None].double(), scale=SCALE)
    found = shared_partials(forest.query, packed.pool, packed.plan(), scale=SCALE).out.double().transpose(0, 2)
    error = float((found - right.out).abs().max() / right.out.abs().max())
    assert 1e-4 < error < 0.02, error


def test_long_nodes_of_int8_are_turned_into_numbers_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partials, "PACKED_PAGES", 3)
    forest = Forest(4, (4, 2), 64, torch.float32, "cpu", int8=True)
    forest.free = list(range(63, -1, -1))  # pages follow each other
    forest.add([0, 1, 2, 3], 1000)
    assert runs(forest.nodes[0].pages) == [(0, 16)]
    most: list[int] = []
    plain = partials.attend

    def counted(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        most.append(key.shape[2])
        return plain(query, key, value, **options)

    monkeypatch.setattr(partials, "attend", counted)
    forest.require(forest.partials())
    assert most == [192] * 5 + [40]


def test_a_long_prefix(device: str) -> None:
    """Thousands of keys, in as many parts as a merge holds, over more rows than one tile has."""
    forest = Forest(40, (8, 2), 64, torch.float32, device, pages=300)
    hydragen(forest, LONG)
    plan = forest.plan()
    assert forest.rows * plan.shape.group > plan.shape.tile and plan.shape.splits > 4
    assert int(plan.levels[0, 0]) == plan.shape.splits
    forest.require(forest.partials(plan))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_any_partition_gives_the_same(rows: int, seed: int, device: str) -> None:
    """The keys of a row's path, cut into other nodes and other pages, give what they gave."""
    numbers = np.random.default_rng(seed)
    forest = Forest(rows, (4, 2), 64, torch.float32, device, seed=seed)
    forest.add(list(range(rows)), int(numbers.integers(1, 900)))
    cuts = sorted({0, forest.nodes[0].tokens, *numbers.integers(0, forest.nodes[0].tokens + 1, LEVELS - 1).tolist()})
    whole = forest.partials()
    forest.require(whole)
    (span,) = forest.spans
    forest.spans, forest.nodes = [], []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        forest.put(Span(span.rows, span.key[:, start:stop], span.value[:, start:stop]))
    for mine, other in zip(whole, forest.partials(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_one_plan_serves_forest_after_forest(seed: int, device: str) -> None:
    """What was written before, more nodes or fewer, leaves nothing behind; no nodes give empty partials."""
    numbers = np.random.default_rng(seed)
    forest = Forest(7, (4, 2), 64, torch.float32, device, seed=seed, pages=200)
    plan = SharedPlan(forest.shape(), device)
    places = [part.data_ptr() for part in (plan.count, plan.work, plan.rows, plan.pages, plan.levels)]
    forest.require(forest.partials(plan))
    for _ in range(5):
        forest.spans, forest.nodes = [], []
        for _ in range(int(numbers.integers(0, LEVELS + 1))):
            members = sorted(numbers.permutation(7)[: numbers.integers(0, 8)].tolist())
            forest.add(members, int(numbers.integers(0, 400)))
        plan.write(forest.nodes)
        forest.require(forest.partials(plan))
    assert places == [part.data_ptr() for part in (plan.count, plan.work, plan.rows, plan.pages, plan.levels)]


def test_every_row_may_have_nodes_of_its_own(device: str) -> None:
    """The longest work list that a plan is made for."""
    forest = Forest(6, (4, 2), 64, torch.float32, device, pages=300)
    for _ in range(LEVELS):
        for row in range(6):
            forest.add([row], 600)
    plan = forest.plan()
    assert 0 < int(plan.count) <= len(plan.work)
    forest.require(forest.partials(plan))


def test_a_row_does_not_see_who_is_beside_it(device: str) -> None:
    """Not in its last bit, where the kernels run: parts are cut by the batch's size and the node's length alone."""
    forest = Forest(20, (8, 2), 64, torch.float32, device, pages=300)
    forest.add([3, 7], 1500)
    forest.add([3], 70)
    alone = forest.partials()
    forest.add([row for row in range(20) if row not in (3, 7)], 5000)
    forest.add([0, 1, 7], 100)
    beside = forest.partials()
    for mine, other in zip(alone, beside, strict=True):
        if device == "cuda" or INTERPRETED:
            assert torch.equal(mine[3], other[3])
        torch.testing.assert_close(mine[3], other[3], rtol=0, atol=1e-6)


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    forest = Forest(3, (4, 2), 64, torch.float32, "cpu")
    forest.add([0, 2], 100)
    plan = forest.plan(levels=1)
    before = plan.work.clone(), plan.levels.clone(), list(plan.nodes)
    node = forest.nodes[0]
    for wrong, reason in (
        ([node, node], "more than 1 nodes"),
        ([SharedNode([1], 64, [3])], "from 0 to 2"),
        ([SharedNode([1], 64, [1, 1])], "distinct"),
        ([SharedNode([1], 65, [1])], "need 2 pages"),
        ([SharedNode(list(range(65)), 65 * 64, [1])], "the plan has 64"),
    ):
        with pytest.raises(ShapeError, match=reason):
            plan.write(wrong)
    assert torch.equal(before[0], plan.work) and torch.equal(before[1], plan.levels) and before[2] == plan.nodes
    with pytest.raises(ShapeError, match="the plan needs queries"):
        shared_partials(forest.query[:2], forest.pool, plan, scale=SCALE)
    with pytest.raises(ShapeError, match="needs pages"):
        shared_partials(forest.query, PagedKeys(forest.pool.key[:1], forest.pool.value[:1]), plan, scale=SCALE)
    with pytest.raises(ShapeError, match="need 2 pages"):
        write_pages(forest.pool, [0], forest.spans[0].key, forest.spans[0].value)
    for rows, heads in ((0, (4, 2)), (1, (3, 2)), (1, (2, 0))):
        with pytest.raises(ConfigError, match="a plan needs"):
            PlanShape.of(rows, *heads, 1)


def test_prompts_of_several_rows_in_one_call() -> None:
    """All new tokens of all rows over one past, which precedes every one of them."""
    forest = Forest(3, (6, 2), 64, torch.float32, "cpu")
    forest.add([0, 1, 2], 150)
    forest.add([0, 1, 2], 90)
    query = forest.random(3, 6, 11, 64)
    found = path_partial(query, forest.pool, forest.nodes, scale=SCALE, softcap=None)
    key, value = (
        torch.cat([one[1:][which] for one in forest.spans], 1)[None].expand(3, -1, -1, -1) for which in (0, 1)
    )
    right = reference_attention(query, key, value, scale=SCALE)
    torch.testing.assert_close(found.out.double(), right.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.lse.double(), right.lse, rtol=0, atol=1e-5)
    nothing = path_partial(query, forest.pool, [], scale=SCALE)
    assert not nothing.out.any() and bool(torch.isneginf(nothing.lse).all())


@pytest.mark.parametrize("int8", [False, True])
def test_tokens_come_piece_by_piece(int8: bool) -> None:
    """Into pages that follow each other and that do not, from the middle of a page to that of another: as at once."""
    forest = Forest(1, (4, 2), 64, torch.float32, "cpu", int8=int8)
    pages, (key, value) = [7, 8, 9, 3, 20, 21], (forest.random(2, 330, 64) for _ in range(2))
    if int8:
        key, value = pack(key, forest.fmt), pack(value, forest.fmt)
    pieces = empty_pages(64, key[None], value[None])
    write_pages(forest.pool, pages, key, value)
    for start, stop in ((0, 50), (50, 64), (64, 100), (100, 301), (301, 330)):
        own = pages[start // PAGE_TOKENS : -(-stop // PAGE_TOKENS)]
        write_pages(pieces, own, key[:, start:stop], value[:, start:stop], start % PAGE_TOKENS)
    for number, page in enumerate(pages):
        there = slice(0, 330 - number * PAGE_TOKENS)
        both = (numbers_in(pool, slice(page, page + 1), torch.float32) for pool in (forest.pool, pieces))
        for right, found in zip(*both, strict=True):
            assert torch.equal(right[:, there], found[:, there])


def test_runs_of_pages() -> None:
    assert runs([]) == [] and runs([4]) == [(4, 5)]
    assert runs([4, 5, 6, 2, 3, 9, 8]) == [(4, 7), (2, 4), (9, 10), (8, 9)]


@pytest.mark.cuda
def test_a_graph_serves_every_forest() -> None:
    """Captured over one forest, replayed over others."""
    forest = Forest(12, (16, 4), 128, torch.bfloat16, "cuda", pages=200)
    hydragen(forest, [[700], [128, 256]])
    plan = forest.plan()
    forest.partials(plan)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forest.partials(plan)
    for tree in ([[700], [128, 256]], [[65], [1], [200], [3, 4]], [[0]], [[2000]]):
        forest.spans, forest.nodes = [], []
        hydragen(forest, tree)
        plan.write(forest.nodes)
        forest.query.copy_(forest.random(*forest.query.shape))
        graph.replay()
        torch.cuda.synchronize()
        forest.require(found)
