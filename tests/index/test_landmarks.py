"""Keys that lie far from all others are found, whether a training query named them or not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.index import Format
from retrieval_attn.index.flat import search_exact
from retrieval_attn.index.kernels.codes import encode_keys
from retrieval_attn.index.roargraph.build import channel_ratios
from retrieval_attn.index.roargraph.index import RoarGraphIndex
from retrieval_attn.index.roargraph.landmarks import choose_landmarks, make_cells, without_keys
from retrieval_attn.index.roargraph.search import CELL_KEYS, Cells
from tests.cpu.reference import at_every_thread_count
from tests.index.building import built

FMT = Format.FLOAT32
DIM = 64
COPIES, KINDS = 6000, 40
NEEDLES = 12


class Haystack:
    """Near copies of 40 keys in the first 32 numbers, and in the others 12 needles of three keys near each other.

    Training queries ask for the copies; each query asks for one needle.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        kinds = np.zeros((KINDS, DIM), np.float32)
        kinds[:, :32] = rng.standard_normal((KINDS, 32), dtype=np.float32)
        keys = kinds[rng.integers(0, KINDS, COPIES)] + 0.05 * rng.standard_normal((COPIES, DIM), dtype=np.float32)
        needles = np.zeros((NEEDLES, DIM), np.float32)
        needles[:, 32:] = rng.standard_normal((NEEDLES, 32), dtype=np.float32)
        self.places = np.sort(rng.choice(COPIES, 3 * NEEDLES, replace=False)).reshape(NEEDLES, 3)
        keys[self.places] = needles[:, None] + 0.02 * rng.standard_normal((NEEDLES, 3, DIM), dtype=np.float32)
        self.keys = keys
        train = kinds[rng.integers(0, KINDS, (2, 400))] + 0.1 * rng.standard_normal((2, 400, DIM), dtype=np.float32)
        train[:, :, 32:] = 0
        self.train = train
        self.queries = np.float32(2.0) * needles

    def lost(self, index: RoarGraphIndex) -> int:
        """How many of the needles' keys a search for the best ten does not find."""
        found = index.search(self.queries, 10).ids
        return sum(3 - int(np.isin(own, ids).sum()) for own, ids in zip(self.places, found, strict=True))


@pytest.fixture(scope="module")
def haystack() -> Haystack:
    return Haystack()


@pytest.fixture(scope="module")
def index(haystack: Haystack) -> RoarGraphIndex:
    # fewer landmarks than there are keys unlike each other: of each needle one becomes a landmark
    return built(RoarGraphIndex, haystack.keys, FMT, haystack.train, landmarks=60)


def rescaled(keys: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    coded = encode_keys(keys, FMT)
    return coded.codes, channel_ratios(coded.scale, coded.codes.shape[1])


def test_needles_that_no_training_query_names_are_found(haystack: Haystack, index: RoarGraphIndex) -> None:
    """Breaks if keys outside of the graph cannot be found, or if only the landmarks among them can."""
    outside = np.ones(COPIES, bool)
    arguments = index.search_arguments()
    assert arguments is not None
    outside[arguments.graph.ids] = False
    assert outside[haystack.places].sum() >= NEEDLES, "the case is one of keys outside of the graph"
    sizes = np.diff(arguments.graph.cell_starts)
    assert outside.sum() > np.maximum(0, sizes - CELL_KEYS).sum() and len(sizes) == 60
    assert haystack.lost(index) == 0
    exact = search_exact(haystack.keys, haystack.queries, 3, FMT)
    found = index.search(haystack.queries, 3)
    np.testing.assert_array_equal(found.ids, exact.ids)
    assert found.keys_scanned < NEEDLES * COPIES / 5


def test_needles_are_found_after_saving(haystack: Haystack, index: RoarGraphIndex) -> None:
    """The same answers and counts from its state."""
    loaded = RoarGraphIndex.from_state(haystack.keys, FMT, index.state())
    assert isinstance(loaded, RoarGraphIndex) and haystack.lost(loaded) == 0
    one, other = (each.search(haystack.queries, 10) for each in (index, loaded))
    np.testing.assert_array_equal(one.ids, other.ids)
    assert one.keys_scanned == other.keys_scanned


def test_needles_are_found_among_later_keys(haystack: Haystack) -> None:
    """Keys inserted and forgotten: none is lost, none comes back twice."""
    made = built(RoarGraphIndex, haystack.keys, FMT, haystack.train, landmarks=60)
    made.insert(haystack.keys[:700] + np.float32(0.01))
    assert haystack.lost(made) == 0
    assert made.truncate(COPIES) and haystack.lost(made) == 0
    assert all(len(set(row)) == 10 for row in made.search(haystack.queries, 10).ids.tolist())
    assert made.truncate(5000)
    found = made.search(haystack.queries, 10).ids
    for own, ids in zip(haystack.places, found, strict=True):
        assert np.isin(own[own < 5000], ids).all() and ids.max() < 5000


def test_landmarks_lie_apart_and_every_key_has_the_nearest(haystack: Haystack) -> None:
    """One of each kind and of each needle; homes as measured one by one; the same at every thread count."""
    codes, ratios = rescaled(haystack.keys)
    marks = at_every_thread_count(lambda: choose_landmarks(codes, ratios, 60))
    assert len(set(marks.ids.tolist())) == 60
    assert all(np.isin(own, marks.ids).any() for own in haystack.places)
    numbers = (codes.astype(np.float64) - 128) * ratios
    far = ((numbers[:, None] - numbers[marks.ids][None]) ** 2).sum(axis=2)
    chosen = far[np.arange(COPIES), marks.homes]
    assert (chosen <= far.min(axis=1) + 30).all()  # queries of whole numbers: some steps beside
    np.testing.assert_allclose(marks.gaps / 64, chosen, atol=30)


def test_no_more_landmarks_than_different_keys() -> None:
    """One for equal keys, at most one for 32 keys, none for none."""
    for keys, most in (
        (np.ones((3000, DIM), np.float32), 1),
        (np.tile(np.random.default_rng(2).standard_normal((12, DIM), dtype=np.float32), (250, 1)), 12),
        (np.random.default_rng(1).standard_normal((65, DIM), dtype=np.float32), 3),
        (np.zeros((0, DIM), np.float32), 0),
    ):
        marks = choose_landmarks(*rescaled(keys), 512)
        assert len(marks.ids) == most and (marks.homes >= 0).all()


def test_cells_hold_what_is_outside_farthest_first() -> None:
    """By landmark, farthest first, the lower id of equals; without a landmark its keys join those before."""
    homes = np.array([0, 2, 2, 0, 2, 1], np.int32)
    gaps = np.array([0, 5, 9, 4, 9, 0], np.int64)
    cells = make_cells(homes, gaps, np.array([1, 2, 3, 4], np.int32), 3)
    assert [part.tolist() for part in cells] == [[0, 1, 1, 4], [3, 2, 4, 1]]
    stays = np.array([True, True, False, True, True, True])
    assert parts(without_keys(cells, stays, np.ones(3, bool))) == [[3], [], [4, 1]]
    assert parts(without_keys(cells, stays, np.array([True, True, False]))) == [[3], [4, 1]]
    assert parts(without_keys(cells, stays, np.array([False, False, True]))) == [[3, 4, 1]]
    assert parts(without_keys(cells, stays, np.zeros(3, bool))) == []


def parts(cells: Cells) -> list[list[int]]:
    starts = cells.starts.tolist()
    return [cells.keys[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]
