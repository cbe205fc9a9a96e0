"""The graph builder against the rules written out in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.index.roargraph import build as graph_build
from retrieval_attn.index.roargraph.build import Shape, channel_ratios, hot_first, list_counts, make_edges, near_of
from tests.cpu.reference import at_every_thread_count

SHAPE = Shape(degree=6, targets=3, fill=3, candidates=40)


def random_codes(nodes: int, width: int = 64, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (nodes, width)).astype(np.uint8)


def random_lists(count: int, length: int, nodes: int, seed: int = 1) -> npt.NDArray[np.int32]:
    rng = np.random.default_rng(seed)
    lists = np.stack([rng.permutation(nodes)[:length] for _ in range(count)]).astype(np.int32)
    lists[0, length // 2 :] = -1
    return lists


def near_numbers(codes: npt.NDArray[np.uint8], ratios: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    return np.rint((codes.astype(np.float32) - 128) * ratios).astype(np.int64)


def distances(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    products = numbers @ numbers.T
    norms = np.diag(products)
    return norms[:, None] + norms[None] - 2 * products


def pruned(far: npt.NDArray[np.int64], node: int, candidates: list[int], degree: int, fill: int) -> list[int]:
    """Nearest first, without those nearer to one already chosen than to the node; then the nearest left out."""
    chosen: list[int] = []
    left: list[int] = []
    # equal distances in the order given
    for other in sorted(candidates, key=lambda one: far[node, one]):
        if len(chosen) == degree:
            break
        (left if any(far[other, one] <= far[node, other] for one in chosen) else chosen).append(other)
    return chosen + left[: max(0, min(fill, degree) - len(chosen))]


def reference(far: Any, lists: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], shape: Shape) -> list[list[int]]:
    """What make_edges promises, with lists and sets."""
    nodes = len(ids)
    forward: list[list[int]] = []
    for node in range(nodes):
        mine = [one for one in lists if node in one[: shape.targets].tolist()]
        found: list[int] = []
        for rank in range(lists.shape[1]):
            for one in mine:
                if one[rank] >= 0 and one[rank] != node and one[rank] not in found and len(found) < shape.candidates:
                    found.append(int(one[rank]))
        forward.append(pruned(far, node, found, shape.degree, shape.fill) if mine else [])
    rows: list[list[int]] = []
    for node in range(nodes):
        both = forward[node] + [other for other in range(nodes) if node in forward[other]]
        both = list(dict.fromkeys(both))
        rows.append(both if len(both) <= shape.degree else pruned(far, node, both, shape.degree, shape.fill))
    order = np.argsort(ids)
    for a, b in zip(order, order[1:], strict=False):
        for one, other in ((a, b), (b, a)):
            if other not in rows[one] and len(rows[one]) < shape.degree:
                rows[one].append(int(other))
    return rows


def test_edges_follow_the_rules() -> None:
    """Equal to the plain rules, edge by edge: breaks on a wrong distance, order, cap, fill or reverse edge."""
    nodes, width = 90, 64
    codes = random_codes(nodes, width)
    scale = np.random.default_rng(2).random(60).astype(np.float32)
    ratios = channel_ratios(scale, width)
    assert ratios.max() == 1 and (ratios[60:] == 0).all()
    far = distances(near_numbers(codes, ratios))
    lists = random_lists(50, 20, nodes)
    ids = np.random.default_rng(3).permutation(nodes).astype(np.int32)
    adjacency = make_edges(near_of(codes, ratios), lists, ids, SHAPE)
    expected = reference(far, lists, ids, SHAPE)
    for row, right in zip(adjacency.tolist(), expected, strict=True):
        assert row == right + [-1] * (SHAPE.degree - len(right))


def test_rows_are_well_formed_and_equal_at_every_thread_count() -> None:
    """No self edge, no double edge, -1 only at the end; bit for bit the same with one and with two threads."""
    nodes = 3000
    codes = random_codes(nodes, 128)
    codes[1000:1400] = codes[0]  # duplicates
    lists = random_lists(400, 50, nodes)
    ids = np.arange(nodes, dtype=np.int32)
    shape = Shape(degree=16, targets=8, fill=4, candidates=64)
    ones = np.ones(128, np.float32)
    adjacency = at_every_thread_count(lambda: make_edges(near_of(codes, ones), lists, ids, shape))
    for node, row in enumerate(adjacency.tolist()):
        real = [other for other in row if other >= 0]
        assert row == real + [-1] * (16 - len(real))
        assert len(set(real)) == len(real) and node not in real and max(real, default=0) < nodes


def test_hot_keys_come_first() -> None:
    """Most lists first, equal ones by id; ids outside of the keys and -1 count nowhere."""
    lists = np.array([[5, 3, -1], [5, 2, 9], [3, 5, 7]], np.int32)
    counts = list_counts(lists, 8)
    np.testing.assert_array_equal(counts, [0, 0, 1, 2, 0, 3, 0, 1])
    ids = hot_first(counts)
    np.testing.assert_array_equal(ids, [5, 3, 2, 7])
    np.testing.assert_array_equal(graph_build.relabelled(lists, ids, 8), [[0, 1, -1], [0, 2, -1], [1, 0, 3]])


def test_no_nodes_and_one_node() -> None:
    """Empty shapes must not read outside."""
    for nodes in (0, 1):
        near = near_of(random_codes(nodes), np.ones(64, np.float32))
        adjacency = make_edges(near, np.zeros((nodes, 3), np.int32), np.arange(nodes, dtype=np.int32), SHAPE)
        assert adjacency.shape == (nodes, 6) and (adjacency == -1).all()


def test_entries_reach_every_part() -> None:
    """The hottest node of each connected part is an entry, then the hottest of all; all are nodes, none twice."""
    adjacency = np.full((100, 4), -1, np.int32)
    adjacency[1:40, 0] = np.arange(39)  # 0 .. 39 hang together, and 40 .. 99
    adjacency[41:, 0] = np.arange(40, 99)
    assert graph_build.choose_entries(adjacency, 8).tolist() == [0, 1, 2, 3, 4, 5, 6, 40]
    assert graph_build.choose_entries(adjacency, 1).tolist() == [40]
    assert graph_build.choose_entries(adjacency[:1], 8).tolist() == [0]
    assert graph_build.choose_entries(adjacency[:0], 8).tolist() == []
