"""The scan of codes inside a step: PyTorch against the host's reference, Triton against both where it can run.

Triton's own interpreter runs the kernels on a CPU: TRITON_INTERPRET=1 pytest tests/gpu/test_code_search.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retrieval_attn.gpu.codes import codes as device_codes
from retrieval_attn.gpu.codes import search as code_search
from retrieval_attn.gpu.codes.codes import MOST_VARIANCE, DeviceCodes, code_scores, estimated
from retrieval_attn.gpu.codes.search import (
    CodeSearch,
    CodeShape,
    EstimatedLogits,
    QueryTiles,
    QuestionSearch,
    SearchScratch,
    shared_scratch,
    size_class,
)
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.key_codes import CodeSpace, encode
from retrieval_attn.index.kernels.key_codes import code_scores as host_scores
from retrieval_attn.index.sketch.index import learn_projection, second_moment
from retrieval_attn.offload.codes import HeadCodes
from retrieval_attn.offload.managed import CodeMemory, host_rows
from retrieval_attn_eval.bench.synthetic import synthetic_head
from tests.gpu.test_decode_kernels import INTERPRETED
from tests.index.building import learn_spaces

SIZES = [(64, 32), (128, 64), (16, 8), (80, 40), (64, 64), (128, 48)]


@pytest.fixture(params=["torch", pytest.param("triton", marks=() if INTERPRETED else pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the tensors lie; "triton" means the kernels on a GPU, or interpreted."""
    if request.param == "torch":
        for module in (code_search, device_codes):
            monkeypatch.setattr(module, "kernels_for", lambda tensor, name: None)
    elif INTERPRETED:
        from retrieval_attn.gpu.codes import codes_triton as device_codes_triton
        from retrieval_attn.gpu.codes import search_triton as code_search_triton

        monkeypatch.setattr(code_search, "kernels_for", lambda tensor, name: code_search_triton)
        monkeypatch.setattr(device_codes, "kernels_for", lambda tensor, name: device_codes_triton)
    yield "cuda" if request.param == "triton" and not INTERPRETED else "cpu"


def made(dim: int, key_bytes: int, count: int, seed: int = 0) -> tuple[CodeSpace, np.ndarray[Any, Any]]:
    """A space for keys of uneven numbers, and the keys (count, dim)."""
    rng = np.random.default_rng(seed)
    keys = (rng.standard_normal((count, dim)) * np.linspace(3, 0.2, dim) + 1).astype(np.float32)
    queries = rng.standard_normal((200, dim)).astype(np.float32)
    return learn_spaces(learn_projection(second_moment(queries), keys, dim), keys, (key_bytes,))[0], keys


def on(
    device: str, space: CodeSpace, keys: np.ndarray[Any, Any], finer: CodeSpace | None = None, on_host: bool = False
) -> DeviceCodes:
    where = torch.device(device)
    rows = None if finer is None else host_rows(1, 7, finer.key_bytes, where)[0]
    if on_host:
        memory = CodeMemory(host_rows(1, 7, space.key_bytes, where)[0], rows, where)
    else:
        memory = CodeMemory(torch.empty(7, space.key_bytes, dtype=torch.uint8, device=where), rows)
    codes = HeadCodes.empty(space, Format.FLOAT32, memory, finer).device
    for some in torch.from_numpy(keys).to(device).split(300):
        assert codes.add(some)
    return codes


@pytest.mark.parametrize("dim,key_bytes", SIZES)
def test_codes_are_those_of_the_host(device: str, dim: int, key_bytes: int) -> None:
    """Bit for bit, but where a number lies on the edge of two steps; scores then agree as well as float32 does."""
    space, keys = made(dim, key_bytes, 1000)
    codes = on(device, space, keys)
    expected = encode(space, keys)
    assert (codes.codes[:1000].cpu().numpy() == expected).mean() > 0.999
    codes = on("cpu", space, keys)
    queries = np.random.default_rng(1).standard_normal((5, dim)).astype(np.float32)
    own = code_scores(codes.space, torch.from_numpy(expected), torch.from_numpy(queries)).numpy()
    np.testing.assert_allclose(own, host_scores(space, expected, queries), rtol=1e-4, atol=1e-3)
    exact = queries @ keys.T
    for i in range(5):  # what codes are for: they order keys as exact scores do
        assert np.corrcoef(own[i], exact[i])[0, 1] > (0.85 if 2 * key_bytes > dim or dim > 16 else 0.5)


@pytest.mark.parametrize("dim,key_bytes,off", [(64, 32, 0.03), (128, 64, 0.03), (80, 40, 0.03), (128, 128, 0.01)])
@pytest.mark.parametrize("level", ["mid", "hard"])
def test_scores_are_as_large_as_exact_ones(device: str, dim: int, key_bytes: int, off: float, level: str) -> None:
    """Of keys that are not among the best, codes tell the sum of exponentials within `off` of its logarithm.

    Without the variance of what they do not store it is too small by .1 to .3.
    """
    head = synthetic_head(4000, head_dim=dim, group=2, level=level, train=1000, decode=16)
    sides = learn_projection(second_moment(head.train_rotated.reshape(-1, dim)), head.keys, dim)
    [space] = learn_spaces(sides, head.keys, (key_bytes,))
    codes, rows = on(device, space, head.keys), torch.from_numpy(head.decode.reshape(-1, dim)).to(device)
    exact = rows @ torch.from_numpy(head.keys).to(device).T
    scores = code_scores(codes.space, codes.codes[:4000], rows)
    bases, variances = estimated(codes.space, rows)
    best = scores.topk(100, dim=1).indices
    if code_search.kernels_for(rows, "codes.search_triton") is not None:
        search = CodeSearch(1, 32, 1, CodeShape(space.key_bytes, 10), torch.device(device))
        search.bind([(codes, 4000)])
        scratch = SearchScratch(32, size_class(4000), search.shape.room, torch.device(device))
        ids = torch.empty(32, search.shape.room, dtype=torch.int32, device=device)
        search.run(rows[None, :, None], ids, None, scratch, lambda function, *given: function(*given))
        left = scratch.scores[:, :4000].float() * search.units[:, None] + (search.bases - bases)[:, None]
        left = torch.where(left > -torch.inf, left, scores)  # those that were named are gone
        torch.testing.assert_close(left, scores, rtol=1e-3, atol=2e-3 * float(scores.abs().max()))
        scores = left

    def logarithms(of: Tensor) -> Tensor:
        return torch.logsumexp((of / dim**0.5).scatter(1, best, -torch.inf), dim=1)

    difference = logarithms(scores + bases[:, None]) + variances / (2 * dim) - logarithms(exact)
    assert abs(float(difference.mean())) < off and float(difference.abs().max()) < 10 * off


def search_of(
    device: str, sizes: list[int], *, group: int, dim: int, key_bytes: int, wanted: int
) -> tuple[CodeSearch, list[DeviceCodes]]:
    """One entry for each of `sizes` keys."""
    spaces = [made(dim, key_bytes, max(size, 300), seed) for seed, size in enumerate(sizes)]
    codes = [on(device, space, keys) for space, keys in spaces]
    shape = CodeShape(spaces[0][0].key_bytes, wanted)
    return CodeSearch(len(sizes), group, 1, shape, torch.device(device)), codes


def named(search: CodeSearch, query: Tensor, places: Tensor | None = None, room: int = 0) -> list[list[int]]:
    """The ids that are named for each query, by row of `ids`; those behind the last must be -1.

    room: keys at least that scratch memory is made for.
    """
    count = query.shape[0] * query.shape[1]
    ids = torch.full((count, search.shape.room), 77, dtype=torch.int32, device=query.device)
    scratch = shared_scratch({}, count, size_class(max(room, search.max_keys)), search.shape.picked_room, query.device)

    def opaque(function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)

    search.run(query, ids, places, scratch, opaque)
    rows = []
    for row in ids.tolist():
        found = [number for number in row if number >= 0]
        assert row == found + [-1] * (len(row) - len(found)) and len(set(found)) == len(found)
        rows.append(found)
    return rows


@pytest.mark.parametrize("dim,key_bytes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_are_named(device: str, dim: int, key_bytes: int, dtype: torch.dtype) -> None:
    """At least as many as wanted, all of the best of them but near ties, none beyond the keys that count."""
    sizes, wanted, group = [5000, 700, 4097], 40, 3
    search, codes = search_of(device, sizes, group=group, dim=dim, key_bytes=key_bytes, wanted=wanted)
    search.bind([(one, size) for one, size in zip(codes, sizes, strict=True)])
    query = torch.randn(3, group, 1, dim, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    for i, found in enumerate(named(search, query)):
        row, head = divmod(i, group)
        check_named(found, search, codes[row], sizes[row], query[row, head])


def check_named(found: list[int], search: CodeSearch, codes: DeviceCodes, size: int, query: Tensor) -> None:
    scores = code_scores(codes.space, codes.codes[:size], query.float())[0]
    wanted = min(search.shape.k, size)
    ranked = scores.sort(descending=True)
    assert wanted <= len(found) <= search.shape.room and max(found) < size
    slack = 2e-3 * float(scores.abs().max())
    sure = ranked.indices[:wanted][ranked.values[:wanted] > ranked.values[wanted - 1] + slack]
    assert len(sure) > wanted // 3 and set(sure.tolist()) <= set(found)


@pytest.mark.cuda
@pytest.mark.parametrize("wanted", [157, 200, 300, 600, 1000])
@pytest.mark.parametrize("keys", [1 << 17, 1 << 19, 1 << 20])
def test_sizes_of_long_contexts(keys: int, wanted: int) -> None:
    """Each has kernels of its own: threads share numbers otherwise. A replay over few keys has those of many."""
    sizes = [keys - 5, 5000, 40]
    space, _ = made(128, 32, 1000)
    search = CodeSearch(3, 4, 1, CodeShape(space.key_bytes, wanted), torch.device("cuda"))
    generator = torch.Generator(device="cuda").manual_seed(wanted)
    codes = []
    for size in sizes:
        memory = torch.empty(size, space.key_bytes, dtype=torch.uint8, device="cuda")
        codes.append(HeadCodes.empty(space, Format.FLOAT32, CodeMemory(memory)).device)
        assert codes[-1].add(torch.randn(size, 128, generator=generator, device="cuda"))
    search.bind(list(zip(codes, sizes, strict=True)))
    query = torch.randn(3, 4, 1, 128, generator=generator, device="cuda")
    rows = named(search, query, room=keys)
    assert rows == named(search, query, room=keys)
    for i, found in enumerate(rows):
        check_named(found, search, codes[i // 4], sizes[i // 4], query[i // 4, i % 4])


@pytest.mark.parametrize("finer", [None, 32])
@pytest.mark.parametrize("count", [1000, 700])
def test_codes_on_the_host_are_scanned_there(device: str, count: int, finer: int | None) -> None:
    """They are the same bytes, and so are the keys that are named."""
    space, keys = made(64, 16, count)
    more = None if finer is None else made(64, finer, count)[0]
    codes = [on(device, space, keys, more, on_host) for on_host in (False, True)]
    assert [one.codes.device.type for one in codes] == [device, "cpu"]
    assert torch.equal(codes[0].codes[:count].cpu(), codes[1].codes[:count])
    query = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(3)).to(device)
    rows = []
    for one in codes:
        shape = CodeShape(16, 100) if finer is None else CodeShape(16, 100, finer, 40)
        search = CodeSearch(1, 4, 1, shape, torch.device(device))
        search.bind([(one, count)])
        rows.append(named(search, query))
    assert rows[0] == rows[1] and all(len(row) >= 40 for row in rows[0])


@pytest.mark.parametrize("finer", [None, 64])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_codes_tell_of_those_that_are_named(device: str, rows: int, finer: int | None) -> None:
    """What codes say by which they were named, and what these lack; of the best of them that they are to be read."""
    space, keys = made(64, 32, 1000)
    codes = on(device, space, keys, None if finer is None else made(64, finer, 1000)[0])
    shape = CodeShape(32, 50) if finer is None else CodeShape(32, 100, finer, 50)
    search = CodeSearch(rows, 4, 1, shape, torch.device(device))
    search.bind([(codes, 1000)] * rows)
    query = torch.randn(rows, 4, 1, 64, generator=torch.Generator().manual_seed(3)).to(device)
    places = torch.arange(4 * rows, device=device).flip(0)
    plain = named(search, query, places)
    search.told = EstimatedLogits(torch.full((4 * rows, shape.room), torch.nan, device=device), 12)
    assert named(search, query, places) == plain, "the same keys"
    known = codes if codes.finer is None else codes.finer
    for place, ids in enumerate(plain):
        own = query.view(-1, 64)[len(plain) - 1 - place][None]
        scores = known.scores_of(own, torch.tensor([ids], device=device))[0]
        lacking = estimated(known.space, own)[1].clamp_max(MOST_VARIANCE)
        told = search.told.products[place, : len(ids)]
        read = told == torch.inf
        assert 12 <= int(read.sum()) <= 15
        slack = 2e-3 * float(scores.abs().max())  # what is left of a score are 11 bits
        assert scores[read].min() >= scores[~read].max() - slack
        torch.testing.assert_close(told[~read], (scores + lacking / 2)[~read], rtol=0, atol=slack)


@pytest.mark.parametrize("finer", [False, True])
@pytest.mark.parametrize("rows", [1000, 10, 3])
def test_many_queries_in_blocks_and_turns(device: str, rows: int, finer: bool) -> None:
    """Each gets what it gets alone, however many there are and however few have room at once."""
    heads, members, wanted = 2, 37, 20
    search, codes = search_of(device, [650, 649], group=1, dim=16, key_bytes=8, wanted=wanted)
    shape, where = search.shape, torch.device(device)
    if finer:
        shape = CodeShape(8, 60, 16, wanted)
        search = CodeSearch(2, 1, 1, shape, where)
        for seed, size in enumerate((650, 649)):
            space, keys = made(16, 8, size, seed)
            codes[seed] = on(device, space, keys, made(16, 16, size, seed)[0])
    ranges: list[tuple[DeviceCodes, int] | None] = [(codes[0], 650), (codes[1], 649)]
    query = torch.randn(heads, members, 1, 16, generator=torch.Generator().manual_seed(2)).to(device)
    many = QuestionSearch(heads, members + 3, shape, where)
    many.bind(ranges)
    ids = torch.full((heads * members, shape.room), 77, dtype=torch.int32, device=device)
    scratch = SearchScratch(min(rows, heads * members), size_class(650), shape.picked_room, where)
    many.run(query.view(1, -1, 1, 16), ids, None, scratch, lambda function, *given: function(*given))
    search.bind(ranges)
    for member in (0, 9, 10, 31, 32, 36):
        alone = named(search, query[:, member : member + 1])
        for head in range(heads):
            found = [number for number in ids[head * members + member].tolist() if number >= 0]
            assert found == alone[head]


def test_rows_without_codes_and_places(device: str) -> None:
    """Nothing is named where no codes are bound; results go where `places` says."""
    search, codes = search_of(device, [600, 600, 600], group=2, dim=16, key_bytes=16, wanted=10)
    search.bind([(codes[0], 600), None, (codes[2], 500)])
    query = torch.randn(3, 2, 1, 16, generator=torch.Generator().manual_seed(2)).to(device)
    straight = named(search, query)
    assert [bool(found) for found in straight] == [True, True, False, False, True, True]
    assert max(straight[4] + straight[5]) < 500
    places = torch.tensor([5, 3, 1, 0, 2, 4], device=device)
    turned = named(search, query, places)
    assert [turned[place] for place in places.tolist()] == straight


@pytest.mark.parametrize("shape", [CodeShape(16, 60), CodeShape(16, 60, 32, 20)])
def test_nothing_is_named_where_nothing_is_bound(device: str, shape: CodeShape) -> None:
    """By the kernels of a search that has no memory yet: they are compiled ahead so."""
    where = torch.device(device)
    search, query = CodeSearch(2, 4, 2, shape, where), torch.randn(2, 4, 1, 32, device=where)
    scratch = SearchScratch(8, size_class(1), shape.picked_room, where, has_memory=False)
    ids = torch.full((8, shape.room), 77, dtype=torch.int32, device=where)
    search.run(query, ids, None, scratch, lambda function, *given: function(*given))
    assert bool((ids == -1).all())


@pytest.mark.parametrize(
    "group,key_bytes,members",
    [(4, 16, [0, 0, 1, 0, None, 0]), (3, 16, [0] * 12), (37, 8, [0, 1, 0]), (4, 256, [0, 0, 0])],
)
def test_rows_over_the_same_codes(device: str, group: int, key_bytes: int, members: list[int | None]) -> None:
    """Each row gets what it gets alone, whoever shares its codes, and also when that changes."""
    dim = 16 if key_bytes < 256 else 256
    search, codes = search_of(device, [700, 650], group=group, dim=dim, key_bytes=key_bytes, wanted=10)
    search = CodeSearch(len(members), group, 1, search.shape, search.table.device)
    alone = CodeSearch(1, group, 1, search.shape, search.table.device)
    query = torch.randn(len(members), group, 1, dim, generator=torch.Generator().manual_seed(2)).to(device)
    for turned in (members, members[::-1]):
        ranges = [None if member is None else (codes[member], 600 + 20 * member) for member in turned]
        search.bind(ranges)
        together = named(search, query)
        for row, one in enumerate(ranges):
            alone.bind([one])
            assert together[row * group : (row + 1) * group] == named(alone, query[row : row + 1])


def test_tiles_hold_each_query_once() -> None:
    """In the widest tiles that they fill, with no two texts in one."""
    tiles = QueryTiles(11, 4, (8, 32), torch.device("cpu"))
    groups = [[0, 2, 3, 4, 5, 6, 7, 8, 9], [1], [10]]
    for some in (groups, groups[1:], []):
        tiles.write(some)
        found: dict[frozenset[int], int] = {}
        for table in tiles.tables:
            for row in table[1 : 1 + int(table[0, 0])].tolist():
                assert row[0] >= 0
                found[frozenset(number for number in row if number >= 0)] = len(row)
        assert sorted(number for tile in found for number in tile) == sorted(
            entry * 4 + i for group in some for entry in group for i in range(4)
        )
        owners = [
            {next(n for n, group in enumerate(some) if number // 4 in group) for number in tile} for tile in found
        ]
        assert all(len(owner) == 1 for owner in owners)
        assert all(len(tile) > 8 for tile, width in found.items() if width == 32)


def test_a_query_that_is_not_finite_gets_nothing(device: str) -> None:
    """The host then looks itself."""
    search, codes = search_of(device, [600], group=4, dim=16, key_bytes=16, wanted=10)
    search.bind([(codes[0], 600)])
    query = torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(2)).to(device)
    query[0, 0, 0, 3], query[0, 2, 0, 0] = torch.nan, torch.inf
    assert [bool(found) for found in named(search, query)] == [False, True, False, True]


def test_equal_scores(device: str) -> None:
    """Keys that are all alike: no more than there is room for, and no endless halving."""
    space, keys = made(16, 16, 400)
    codes = on(device, space, np.repeat(keys[:1], 5000, axis=0))
    search = CodeSearch(1, 1, 1, CodeShape(space.key_bytes, 10), torch.device(device))
    search.bind([(codes, 5000)])
    (found,) = named(search, torch.ones(1, 1, 1, 16, device=device))
    assert 10 <= len(found) <= search.shape.room


def test_codes_grow_and_shrink(device: str) -> None:
    """Memory moves when keys outgrow it; a cut forgets; keys that are not finite are refused and nothing changes."""
    space, keys = made(16, 8, 900)
    codes = on(device, space, keys)
    before = codes.codes[:900].clone()
    assert not codes.add(torch.full((2, 16), torch.nan, device=device)) and codes.length == 900
    codes.length = 500
    assert codes.add(torch.from_numpy(keys[500:]).to(device)) and codes.length == 900
    assert torch.equal(codes.codes[:900], before)
