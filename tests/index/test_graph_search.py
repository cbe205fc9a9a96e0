"""The beam search against one written with Python lists, and what it must never return."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.codes import CodedQueries, Codes, encode_keys, encode_query
from retrieval_attn.index.roargraph.search import CELL_KEYS, MAX_OUTSIDE, Graph, fill_pool, make_scratch, search_graph
from tests.cpu.reference import strided

DIM = 20


class Case:
    """Random keys, a random graph over some of them in another order, and coded queries."""

    def __init__(self, nodes: int, degree: int, *, linked: int | None = None, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        # with gaps, as an index gives them to the kernel: it is compiled once more for an array without
        self.keys = strided(rng.standard_normal((nodes + 50, DIM), dtype=np.float32))
        self.queries = rng.standard_normal((6, DIM), dtype=np.float32)
        ids = rng.permutation(nodes + 50)[:nodes].astype(np.int32)
        coded: Codes = encode_keys(self.keys[ids], Format.FLOAT32)
        self.coded: CodedQueries = encode_query(self.queries, coded)
        linked = nodes if linked is None else linked
        adjacency = np.full((nodes, degree), -1, np.int32)
        for node in range(linked):
            others = rng.permutation(nodes)[: rng.integers(0, degree + 1)]
            adjacency[node, : len(others)] = others
        counts = np.array([linked, nodes, nodes + 50], np.int64)
        nothing = (np.zeros(1, np.int32), np.empty(0, np.int32))
        self.graph = Graph(coded.codes, adjacency, ids, np.array([0, 3], np.int32), counts, *nothing)
        exact = coded.codes.astype(np.int64) @ self.coded.planes[:, 0].astype(np.int64).T
        self.scores = exact.T  # (queries, nodes)


def beam_search(case: Case, query: int, start: int, room: int, beam: int) -> tuple[list[int], int, int]:
    """Pool (nodes, best first), nodes scored, hops: the same rules with sorted lists."""
    linked, total, _ = case.graph.counts.tolist()
    scores = case.scores[query]

    def rank(node: int) -> tuple[int, int]:
        return (-int(scores[node]), -node)  # of equal scores the higher node, as packed numbers order

    seen: set[int] = set()
    pool: list[int] = []
    for node in [*case.graph.entries.tolist(), start]:
        if 0 <= node < linked and node not in seen:
            seen.add(node)
            pool.append(node)
    expanded = set(range(linked, total))
    pool = sorted(pool + list(expanded), key=rank)[:room]
    scored = len(seen) + len(expanded)
    hops = 0
    while True:
        waiting = [place for place, node in enumerate(pool) if node not in expanded]
        if not waiting or waiting[0] >= beam:
            break
        node = pool[waiting[0]]
        expanded.add(node)
        hops += 1
        new = [one for one in case.graph.adjacency[node].tolist() if 0 <= one < linked and one not in seen]
        seen.update(new)
        scored += len(new)
        pool = sorted(pool + new, key=rank)[:room]
    return pool, scored, hops


def filled(case: Case, query: int, start: int, room: int, beam: int) -> tuple[list[int], int, int]:
    scratch = make_scratch(room, case.graph.adjacency.shape[1], len(case.graph.ids))
    for array in scratch:
        array[:] = 77  # what an earlier search left must not matter
    count, scored, hops = fill_pool(case.graph, None, case.coded.planes, query, start, room, beam, scratch)
    return ((scratch.pool[:count] & 0xFFFFFFFF) >> 1).tolist(), scored, hops


@pytest.mark.parametrize("degree", [4, 12, 90])
def test_pool_equals_the_plain_search(degree: int) -> None:
    """Same nodes, order, count of scored keys and hops: breaks on a lost merge, a wrong cursor or visited bit."""
    for seed, (nodes, linked) in enumerate([(300, 300), (300, 250), (64, 64), (65, 1)]):
        case = Case(nodes, degree, linked=linked, seed=seed)
        for room, beam in ((50, 50), (50, 20), (400, 400), (40, 40), (1, 1)):
            for query in range(3):
                for start in (-1, 3, 7, 5000, linked):
                    given = (case, query, start, room, beam)
                    assert filled(*given) == beam_search(*given)


def search(
    case: Case, query: int, k: int, **changed: Any
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], int]:
    given: dict[str, Any] = {"room": 60, "beam": 40, "least": 0, "limit": 10**6}
    given.update(changed)
    ids, scores = np.full(k, 99, np.int32), np.full(k, 99, np.float32)
    scratch = make_scratch(given["room"], case.graph.adjacency.shape[1], len(case.graph.ids))
    found, _, _ = search_graph(
        case.graph,
        case.keys,
        case.queries,
        case.coded.planes,
        case.coded.step,
        query,
        k,
        given["room"],
        given["beam"],
        given["least"],
        given["limit"],
        scratch,
        ids,
        scores,
    )
    return ids, scores, found


def test_results_are_exact_scores_of_the_best_of_the_pool() -> None:
    """Ids are keys, not nodes; scores are inner products in the stored precision, best first."""
    case = Case(300, 12)
    for query in range(6):
        nodes, _, _ = beam_search(case, query, -1, 60, 40)
        exact = case.queries[query].astype(np.float64) @ case.keys.astype(np.float64).T
        pool = case.graph.ids[nodes[:18]]  # what is scored exactly: k and 8 more
        best = pool[np.argsort(-exact[pool])][:10]
        ids, scores, found = search(case, query, 10)
        assert found == 10
        np.testing.assert_array_equal(ids, best)
        np.testing.assert_allclose(scores, exact[best], rtol=1e-5)


def test_keys_outside_come_with_the_landmarks_that_are_found() -> None:
    """So many of each cell and of all, only of landmarks in the pool; they take their places by exact scores."""
    case = Case(300, 12)
    rest = np.setdiff1d(np.arange(350), case.graph.ids).astype(np.int32)
    sizes = np.zeros(40, np.int64)
    sizes[[0, 3, 17, 39]] = 20, 5, 20, 5
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    for query in range(6):
        plain = case.graph._replace(cell_starts=np.zeros(1, np.int32), cell_keys=rest[:0])
        case.graph = plain
        before, _, _ = search(case, query, 10)
        case.graph = plain._replace(cell_starts=starts, cell_keys=rest)
        nodes, _, _ = beam_search(case, query, -1, 60, 40)
        looked_at = [rest[starts[node] : starts[node + 1]][:CELL_KEYS] for node in nodes if node < 40]
        outside = np.concatenate([rest[:0], *looked_at])[:MAX_OUTSIDE]
        exact = case.queries[query].astype(np.float64) @ case.keys.astype(np.float64).T
        every = np.concatenate([case.graph.ids[nodes[:18]], outside])
        ids, scores, found = search(case, query, 10)
        np.testing.assert_array_equal(ids, every[np.argsort(-exact[every])][:10])
        np.testing.assert_allclose(scores, exact[ids], rtol=1e-5)
        few, _, found = search(case, query, 10, limit=200)
        assert (few[:found] < 200).all() and np.isin(outside, ids).any() == (not np.array_equal(before, ids))
    assert len(outside)


def test_limit_holds_and_places_stay_empty() -> None:
    """No id at or beyond the limit; what is missing is -1 and -inf."""
    case = Case(300, 12)
    for limit in (0, 1, 40, 200):
        ids, scores, found = search(case, 0, 30, limit=limit)
        assert (ids[:found] < limit).all() and (ids[:found] >= 0).all()
        assert (ids[found:] == -1).all() and np.isneginf(scores[found:]).all()
    assert found > 0
