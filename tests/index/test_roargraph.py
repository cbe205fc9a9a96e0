"""The graph index as its users see it: recall, growth, saving, and bad input. The exact index is the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.index import FlatIndex, Format, create
from retrieval_attn.index.formats import from_float32
from retrieval_attn.index.roargraph import index as graph_module
from retrieval_attn.index.roargraph.graph import GraphOptions
from retrieval_attn.index.roargraph.index import RoarGraphIndex
from retrieval_attn_eval.bench.synthetic import synthetic_head
from tests.cpu.reference import at_every_thread_count, recall
from tests.index.building import built

FMT = Format.BFLOAT16
K = 50


class Head:
    """A small synthetic head: stored keys, training and decode queries."""

    def __init__(self, n: int = 12000) -> None:
        head = synthetic_head(n, head_dim=64, group=2, level="mid", train=1500, decode=24, seed=3)
        self.keys = from_float32(head.keys, FMT)
        self.train = np.ascontiguousarray(head.train_rotated)
        self.decode = np.ascontiguousarray(head.decode.reshape(-1, 64))  # rows of head 0, then of head 1


@pytest.fixture(scope="module")
def head() -> Head:
    return Head()


@pytest.fixture(scope="module")
def index(head: Head) -> RoarGraphIndex:
    return built(RoarGraphIndex, head.keys, FMT, head.train)


def exact(head: Head, keys: npt.NDArray[Any] | None = None, k: int = K) -> npt.NDArray[np.int32]:
    return FlatIndex(head.keys if keys is None else keys, FMT).search(head.decode, k).ids


def small(keys: npt.NDArray[np.float32], **options: Any) -> RoarGraphIndex:
    """A graph over few keys, trained on random queries."""
    queries = np.random.default_rng(5).standard_normal((2, 200, keys.shape[1]), dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_module, "EXACT_BELOW", 0)
        return built(RoarGraphIndex, keys, Format.FLOAT32, queries, **options)


def test_recall_with_few_keys_scored(head: Head, index: RoarGraphIndex) -> None:
    """.95 of the best 50 with a sixth of the keys scored; scores are the exact inner products, best first."""
    found = index.search(head.decode, K)
    assert recall(found.ids, exact(head)) >= 0.95
    assert found.keys_scanned <= len(head.decode) * len(head.keys) / 6
    flat = FlatIndex(head.keys, FMT).search(head.decode, len(head.keys))
    place = np.argsort(flat.ids, axis=1)
    same = np.take_along_axis(np.take_along_axis(flat.scores, place, axis=1), found.ids, axis=1)
    np.testing.assert_allclose(found.scores, same, rtol=1e-5, atol=1e-5)
    assert (np.diff(found.scores, axis=1) <= 0).all()
    assert all(len(set(row)) == K for row in found.ids.tolist())


def test_training_by_the_query_heads_pays(head: Head, index: RoarGraphIndex) -> None:
    """Lists of one query head only, or of keys as if they were queries, find less: breaks if training is ignored."""
    right = exact(head)
    full = recall(index.search(head.decode, K).ids, right)
    one = built(RoarGraphIndex, head.keys, FMT, head.train[:1])
    other_head = slice(len(head.decode) // 2, None)
    assert recall(one.search(head.decode, K).ids[other_head], right[other_head]) < full - 0.1


def test_the_same_at_every_thread_count(head: Head) -> None:
    """Graph, answers and counts with one and with two threads, bit for bit."""

    def answers() -> tuple[Any, ...]:
        made = built(RoarGraphIndex, head.keys, FMT, head.train)
        made.insert(head.keys[:300].copy())
        return *made.state().values(), *made.search(head.decode, K)

    at_every_thread_count(answers)


def test_insertion_keeps_recall(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third inserted in pieces, linked and waiting: recall within .03 of a graph made over all keys."""
    monkeypatch.setattr(graph_module, "TAIL", 300)
    start = 8000
    fresh = built(RoarGraphIndex, head.keys, FMT, head.train)
    grown = built(RoarGraphIndex, head.keys[:start], FMT, head.train)
    for at in range(start, len(head.keys), 170):
        grown.insert(head.keys[at : at + 170])
    linked, nodes = grown.state()["counts"][:2]
    assert len(grown) == len(head.keys) and linked < nodes
    right = exact(head)
    found = grown.search(head.decode, K).ids
    assert recall(found, right) >= recall(fresh.search(head.decode, K).ids, right) - 0.03
    new = right >= start
    assert np.mean([np.isin(a[n], b).mean() for a, b, n in zip(right, found, new, strict=True) if n.any()]) >= 0.8
    arguments = grown.search_arguments()
    assert arguments is not None and np.shares_memory(arguments.keys, head.keys)  # nothing was copied


def test_insertion_from_elsewhere_and_truncation(head: Head, index: RoarGraphIndex) -> None:
    """Keys that lie elsewhere are copied; after truncation other keys may take the ids, and old ones never return."""
    made = RoarGraphIndex.from_state(head.keys, FMT, index.state())
    bytes_before = made.memory.host
    made.insert(head.keys[:700].copy())
    made.insert(head.keys[700:1400].copy())
    assert made.memory.host > bytes_before + head.keys.nbytes
    everything = np.concatenate([head.keys, head.keys[:1400]])
    assert recall(made.search(head.decode, K).ids, exact(head, everything)) >= 0.85
    for length in (12500, 9000, 5000):
        assert made.truncate(length) and len(made) == length
        found = made.search(head.decode, K)
        assert found.ids.max() < length
        assert recall(found.ids, exact(head, everything[:length])) >= 0.85
    other = head.keys[::-13].copy()
    made.insert(other)
    everything = np.concatenate([everything[:5000], other])
    assert recall(made.search(head.decode, K).ids, exact(head, everything)) >= 0.85
    assert made.truncate(0) and len(made) == 0 and (made.search(head.decode, 3).ids == -1).all()
    with pytest.raises(ConfigError, match="length=-1"):
        made.truncate(-1)


def test_state_and_back(head: Head, index: RoarGraphIndex) -> None:
    """The same answers from what was saved, from read-only arrays too; arrays that do not fit are named errors."""
    state = index.state()
    for value in state.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    loaded = RoarGraphIndex.from_state(head.keys, FMT, state)
    for value in state.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = True
    assert loaded.options == index.options
    np.testing.assert_array_equal(loaded.search(head.decode, K).ids, index.search(head.decode, K).ids)
    loaded.insert(head.keys[:600].copy())
    assert len(index) == 12000
    wrong_row = np.array(state["adjacency"])
    wrong_row[5, 0] = 1 << 20
    for name, value in (
        ("adjacency", wrong_row),
        ("adjacency", state["adjacency"][1:]),
        ("ids", state["ids"] - 1),
        ("entries", np.array([-1], np.int32)),
        ("counts", np.array([5, 4, 12000], np.int64)),
        ("codes", state["codes"][:, :32]),
        ("mean", state["mean"].astype(np.float64)),
    ):
        with pytest.raises(InputDataError, match="does not fit"):
            RoarGraphIndex.from_state(head.keys, FMT, {**state, name: value})
    with pytest.raises(InputDataError, match="does not fit 11999 keys"):
        RoarGraphIndex.from_state(head.keys[1:], FMT, state)
    with pytest.raises(InputDataError, match="'codes'"):
        RoarGraphIndex.from_state(head.keys, FMT, {k: v for k, v in state.items() if k != "codes"})


@pytest.mark.parametrize("n", [0, 1, 2, 7, 130])
def test_few_keys(n: int) -> None:
    """All keys come back in order, more wanted than there are included, with and without a graph."""
    keys = np.random.default_rng(n).standard_normal((n, 16), dtype=np.float32)
    queries = np.random.default_rng(1).standard_normal((3, 16), dtype=np.float32)
    right = FlatIndex(keys, Format.FLOAT32).search(queries, 200)
    for made in (small(keys), built(RoarGraphIndex, keys, Format.FLOAT32, None)):
        found = made.search(queries, 200)
        np.testing.assert_array_equal(found.ids, right.ids)
        np.testing.assert_array_equal(found.scores, right.scores)
        assert made.search(queries[:0], 5).ids.shape == (0, 5)
        made.insert(keys[:0])
        made.insert(np.ones((3, 16), np.float32))
        assert (
            len(made) == n + 3 and (np.sort(made.search(queries, n + 5).ids, axis=1)[:, 2:] == np.arange(n + 3)).all()
        )


def test_equal_and_duplicate_keys() -> None:
    """k distinct ids, whatever the ties: breaks if equal codes loop, crowd out others or come back twice."""
    queries = np.random.default_rng(1).standard_normal((4, 16), dtype=np.float32)
    for keys in (
        np.ones((3000, 16), np.float32),
        np.zeros((3000, 16), np.float32),
        np.tile(np.random.default_rng(2).standard_normal((12, 16), dtype=np.float32), (250, 1)),
    ):
        made = small(keys)
        found = made.search(queries, 40)
        right = FlatIndex(keys, Format.FLOAT32).search(queries, 40)
        assert all(len(set(row)) == 40 and min(row) >= 0 for row in found.ids.tolist())
        np.testing.assert_allclose(found.scores[:, :20], right.scores[:, :20], rtol=1e-5)


def test_limit(head: Head, index: RoarGraphIndex) -> None:
    """Only ids below it, as many as there are; near the end by the graph, far below by a scan."""
    for limit in (0, 1, 30, 5000, 7000, 11990, 12000, 20000):
        found = index.search(head.decode, K, limit=limit)
        right = FlatIndex(head.keys, FMT).search(head.decode, K, limit=limit)
        assert found.ids.max() < limit or limit == 0
        assert ((found.ids >= 0).sum(axis=1) == min(K, limit, 12000)).all()
        assert recall(found.ids, right.ids) >= 0.85
        if limit <= 5000:
            np.testing.assert_array_equal(found.ids, right.ids)


def test_queries_that_are_not_finite(head: Head, index: RoarGraphIndex) -> None:
    """Answered as the exact index answers them, beside others that are not touched."""
    queries = head.decode[:4].copy()
    queries[1, 3], queries[2, 0] = np.nan, np.inf
    found, right = index.search(queries, K), FlatIndex(head.keys, FMT).search(queries, K)
    np.testing.assert_array_equal(found.ids[1:3], right.ids[1:3])
    np.testing.assert_array_equal(found.scores[1:3], right.scores[1:3])
    np.testing.assert_array_equal(found.ids[[0, 3]], index.search(head.decode[[0, 3]], K).ids)


def test_given_lists(head: Head, index: RoarGraphIndex) -> None:
    """Lists from elsewhere make the graph that queries make."""
    lists = np.stack([FlatIndex(head.keys, FMT).search(queries, 100).ids for queries in head.train])
    made = built(RoarGraphIndex, head.keys, FMT, None, lists=lists)
    nodes, others = (len(one.state()["ids"]) for one in (made, index))
    assert abs(nodes - others) < 20 and nodes < 12000


def test_bad_keys_options_and_training(head: Head) -> None:
    """Named errors that say what was given."""
    keys = np.random.default_rng(0).standard_normal((50, 16), dtype=np.float32)
    for bad in (np.nan, np.inf):
        broken = keys.copy()
        broken[31, 2] = bad
        with pytest.raises(ShapeError, match="1 with NaN or infinity, the first at id 31"):
            small(broken)
        made = small(keys)
        with pytest.raises(ShapeError, match="first at id 81"):
            made.insert(broken)
        assert len(made) == 50
    for options, message in (
        ({"beam": 0}, "beam=0"),
        ({"degree": 1}, "degree=1"),
        ({"degree": True}, "degree=True"),
        ({"landmarks": 0}, "landmarks=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            create("roargraph", keys, fmt=Format.FLOAT32, queries=None, **options)
    with pytest.raises(ConfigError, match="no option breadth; its options: beam, degree, landmarks"):
        create("roargraph", keys, fmt=Format.FLOAT32, queries=None, breadth=3)
    with pytest.raises(ConfigError, match="needs training queries or their lists for 12000 keys"):
        create("roargraph", head.keys, fmt=FMT)
    with pytest.raises(ShapeError, match="name keys 0 .. 49"):
        small(keys, lists=np.full((2, 200, 4), 50, np.int32))


@pytest.mark.parametrize("fmt", list(Format))
def test_formats_and_strides(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every storage format, and keys whose rows lie apart."""
    rng = np.random.default_rng(4)
    values = rng.standard_normal((2000, 2, 20), dtype=np.float32)
    stored = from_float32(values, fmt)[:, 1]
    queries = rng.standard_normal((2, 400, 20), dtype=np.float32)
    monkeypatch.setattr(graph_module, "EXACT_BELOW", 0)
    made = built(RoarGraphIndex, stored, fmt, queries)
    asked = queries[:, :5].reshape(10, 20)
    right = FlatIndex(stored, fmt).search(asked, 10)
    found = made.search(asked, 10)
    assert recall(found.ids, right.ids) >= 0.95
    same = found.ids == right.ids
    np.testing.assert_allclose(found.scores[same], right.scores[same], rtol=1e-5)


def test_options_survive_saving() -> None:
    """Every option comes back as it was, those that are None included."""
    for options in (GraphOptions(), GraphOptions(beam=9, degree=12, landmarks=7)):
        assert GraphOptions.from_plain(options.plain()) == options
    with pytest.raises(ConfigError, match="that this release does not have"):
        GraphOptions.from_plain({"breadth": 3})
