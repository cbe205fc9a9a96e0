"""A path that was saved and comes back: the same bits, now and after everything that may happen to a path next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.cluster_sums import SampledKeys
from retrieval_attn.cpu.clusters import KeyClusters, PathClusters, largest_clusters, mean_values
from retrieval_attn.cpu.host_attend import attend_paths
from retrieval_attn.cpu.segment import HeadCoders
from retrieval_attn.cpu.store import SequenceKV, cluster_table, held_memory
from retrieval_attn.errors import InputDataError
from retrieval_attn.index.formats import Format, from_float32
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.codes import DeviceCoder
from retrieval_attn.saving.sequence import State, path_from_states, path_mark, path_state, spans_since

HEADS, GROUP = 2, 2
SPECS: dict[str, dict[str, Any]] = {
    "flat": {},
    "flat-int8": {"codes": "int8"},
    "sketch": {},
    "roargraph": {},
    "device": {},
    "device-cpu": {},
    "auto": {},
}


@pytest.fixture(autouse=True)
def _small_graphs(small_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval_attn.index.roargraph.index.TAIL", 64)


def spec_of(name: str) -> IndexSpec:
    return IndexSpec.of(name.split("-")[0], SPECS[name])


def coder_of(name: str) -> HeadCoders | None:
    return DeviceCoder(torch.device("cpu"), HEADS) if name == "device-cpu" else None


def new_path(name: str, fmt: Format, dim: int) -> SequenceKV:
    return SequenceKV(HEADS, dim, dim, fmt, index=spec_of(name)).reserve(1 << 14)


def rows(rng: np.random.Generator, n: int, dim: int, fmt: Format) -> tuple[Any, Any]:
    """Keys whose channels differ in size, so that kinds which learn find something; values."""
    keys = rng.standard_normal((HEADS, n, dim), dtype=np.float32) * np.linspace(2, 0.1, dim, dtype=np.float32)
    return from_float32(keys, fmt), from_float32(rng.standard_normal((HEADS, n, dim), dtype=np.float32), fmt)


def filled(name: str, fmt: Format, dim: int, tokens: int, clusters: int = 0) -> SequenceKV:
    """A path with an index over all tokens but the last 200, clusters if any are asked for."""
    rng = np.random.default_rng(7)
    path = new_path(name, fmt, dim)
    path.append(*rows(rng, tokens, dim, fmt))
    train = rng.standard_normal((HEADS * GROUP, 96, dim), dtype=np.float32)
    path.build_index(4, tokens - 200, train if path.spec.trains else None, coder=coder_of(name))
    if clusters:
        take_some_clusters(path, rng, clusters)
    return path


def take_some_clusters(path: SequenceKV, rng: np.random.Generator, clusters: int) -> None:
    shape = (HEADS, clusters, path.head_dim)
    probes = rng.standard_normal(shape, dtype=np.float32)
    samples = SampledKeys.of(rng.standard_normal((HEADS, path.head_dim, clusters * 3), dtype=np.float32), clusters)
    offsets = rng.standard_normal(shape[:2], dtype=np.float32)
    late = largest_clusters(probes, offsets, rng.random(shape[:2], dtype=np.float32))
    distances = rng.random(HEADS, dtype=np.float32)
    shared = KeyClusters(probes, offsets, None, late, distances, samples)
    path.clusters = PathClusters.empty(shared, path.fmt, path.value_dim)
    table = cluster_table(path, 4, len(path) - 150)
    assert table is not None
    shared.mean_values = mean_values(table)
    cover_late(path, 130)


def cover_late(path: SequenceKV, least: int) -> None:
    """Tokens that a device has no codes of: all but the last `least`, from 150 before the end on."""
    assert path.clusters is not None and path.clusters.late is not None
    path.clusters.late.cover(path.clusters.late.start or len(path) - 150, len(path) - least, path.parts)


def through_file(state: State, folder: Path) -> State:
    """As a store gives it back: JSON, and arrays that are maps of a file, copied on write."""
    plain, arrays = state
    places, name = {}, folder / f"{len(list(folder.iterdir()))}.bin"
    with open(name, "wb") as file:
        for key, array in arrays.items():
            assert array.dtype.kind in "buif" and array.dtype.itemsize <= 8
            file.write(b"\0" * (-file.tell() % 64))
            places[key] = file.tell(), array.dtype, array.shape
            file.write(np.ascontiguousarray(array).tobytes())
        file.write(b"\0" * 64)
    raw = np.memmap(name, np.uint8, "c")
    back = {}
    for key, (at, dtype, shape) in places.items():
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        back[key] = raw[at : at + size].view(dtype).reshape(shape)
    return json.loads(json.dumps(plain)), back


def loaded(states: Sequence[State], like: SequenceKV, name: str) -> SequenceKV:
    path = SequenceKV(HEADS, like.head_dim, like.value_dim, like.fmt, index=like.spec)
    path.tail_tokens = like.tail_tokens
    path_from_states(states, path, coder_of(name))
    return path


def assert_same(one: SequenceKV, other: SequenceKV, seed: int = 0, top_k: Any = 25) -> None:
    """Bit-equal partials over what a step reads, for one query and for several."""
    assert len(one) == len(other)
    assert (one.clusters is None) == (other.clusters is None)
    if one.clusters is not None and other.clusters is not None:
        for mine, theirs in zip(one.clusters.arrays, other.clusters.arrays, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    rng = np.random.default_rng(seed)
    for n in (1, 3):
        queries = rng.standard_normal((HEADS * GROUP, n, one.head_dim), dtype=np.float32)
        for span in ((4, len(one) - 40), (4, len(one))):
            found, wanted = (attend_paths([path], [queries], [span], top_k, scale=0.2)[0] for path in (other, one))
            np.testing.assert_array_equal(found.out, wanted.out)
            np.testing.assert_array_equal(found.lse, wanted.lse)
            assert found.cost[2:] == wanted.cost[2:]  # without seconds
            assert (found.rest is None) == (wanted.rest is None)
            if found.rest is not None and wanted.rest is not None:
                np.testing.assert_array_equal(found.rest, wanted.rest)


def reachable(thing: Any) -> Iterator[np.ndarray[Any, Any]]:
    """The arrays, and the tensors on the CPU, that something holds."""
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | str | int | float | None):
            continue
        seen.add(id(one))
        if isinstance(one, np.ndarray):
            yield one
        elif isinstance(one, torch.Tensor):
            yield one.numpy()
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif hasattr(one, "__dict__"):
            waiting += vars(one).values()


def grow(paths: Sequence[SequenceKV], work: Callable[[SequenceKV, np.random.Generator], None], seed: int = 1) -> None:
    """The same for all of them."""
    for path in paths:
        work(path, np.random.default_rng(seed))


def append(n: int) -> Callable[[SequenceKV, np.random.Generator], None]:
    return lambda path, rng: path.append(*rows(rng, n, path.head_dim, path.fmt))


CASES = [(name, Format.BFLOAT16, 64) for name in SPECS]
CASES += [("flat-int8", fmt, 128) for fmt in Format] + [("device-cpu", fmt, 128) for fmt in Format]
CASES += [("roargraph", Format.INT8, 64), ("sketch", Format.INT8, 64), ("sketch", Format.FLOAT32, 128)]


@pytest.mark.parametrize(("name", "fmt", "dim"), CASES)
def test_a_loaded_path_is_the_one_that_was_saved(name: str, fmt: Format, dim: int, tmp_path: Path) -> None:
    """At once, and after appended tokens, insertions into the loaded index, a crop and forks of both."""
    path = filled(name, fmt, dim, 9000 if name == "sketch" else 2600, clusters=8)
    state = through_file(path_state(path, 0), tmp_path)
    other = loaded([state], path, name)
    assert other.index_kinds == path.index_kinds and other.index_notes == path.index_notes
    assert [(s.length, s.capacity, s.frozen) for s in other.segments] == [(len(path), len(path), True)]
    assert_same(path, other)
    assert_same(path, other, top_k=None)
    grow((path, other), append(300))
    assert_same(path, other)
    assert path.segments[1].capacity == other.segments[1].capacity
    stop = len(path) - 320  # within the first segment: into the index that was loaded
    grow((path, other), lambda one, rng: one.extend_index(stop))
    assert_same(path, other)
    grow((path, other), lambda one, rng: one.extend_index(len(one)))
    grow((path, other), lambda one, rng: one.truncate(len(one) - 500))
    assert_same(path, other)
    forks = path.fork(), other.fork()
    grow(forks, append(700))
    grow((path, other), append(100), seed=2)
    assert_same(*forks)
    assert_same(path, other)
    for one, same in ((path, other), forks):
        assert [segment.capacity for segment in one.segments[1:]] == [s.capacity for s in same.segments[1:]]


@pytest.mark.parametrize("name", ["flat-int8", "roargraph", "device-cpu", "sketch"])
def test_a_chain_of_states_is_one_path(name: str, tmp_path: Path) -> None:
    """Turns tell what is theirs alone: new tokens, what was inserted into indexes before, clusters that were joined.

    Turns of 400 tokens stay what they are; one of 100 is copied into what follows it.
    """
    path = filled(name, Format.BFLOAT16, 64, 2600, clusters=8)
    states: list[State] = []
    sizes, marks = [], []
    for turn, tokens in enumerate((400, 400, 100, 100, 0)):
        marks.append(path_mark(path))
        since = spans_since(path, marks[-2]) if turn else 0
        states.append(through_file(path_state(path, since, marks[-2] if turn else None), tmp_path))
        assert [len(states[-1][0][part]) for part in ("before", "spans")] == [min(turn, 3), 1]
        sizes.append(sum(array.nbytes for array in states[-1][1].values()))
        other = loaded(states, path, name)
        assert [len(segment.indexes) for segment in other.segments] == [len(s.indexes) for s in path.segments]
        assert [segment.indexed for segment in other.segments] == [segment.indexed for segment in path.segments]
        assert_same(path.fork(), other.fork())
        path = path.fork()
        rng = np.random.default_rng(turn)
        path.append(*rows(rng, tokens, 64, path.fmt))
        if turn == 1:
            train = rng.standard_normal((HEADS * GROUP, 96, 64), dtype=np.float32)
            path.build_index(len(path) - 400, len(path) - 50, train, coder=coder_of(name))
        path.extend_index(len(path) - 150)
        cluster_table(path, 4, len(path) - 30)
        cover_late(path, 20)
    assert max(sizes[1:]) < 0.35 * sizes[0]


def test_paths_that_shared_segments_share_them_again(tmp_path: Path) -> None:
    """Two forks of one saved path, each with a state of its own: the second load adds its own tokens only."""
    root = filled("flat-int8", Format.BFLOAT16, 64, 2600, clusters=8)
    mark, base = path_mark(root), through_file(path_state(root, 0), tmp_path)
    forks = [root.fork(), root.fork()]
    own = []
    for seed, fork in enumerate(forks):
        fork.append(*rows(np.random.default_rng(seed), 300, 64, fork.fmt))
        cluster_table(fork, 4, len(fork) - 20)
        own.append(through_file(path_state(fork, spans_since(fork, mark), mark), tmp_path))
    back = loaded([base], root, "flat-int8")
    others = [back.fork(), back.fork()]
    for state, other, fork in zip(own, others, forks, strict=True):
        path_from_states([state], other, None)
        assert other.segments[0] is back.segments[0]
        assert other.clusters is not None and back.clusters is not None
        assert other.clusters.shared is back.clusters.shared
        assert_same(fork, other)
    assert held_memory([back, *others]).host < held_memory([back]).host * 1.4


def test_clusters_and_indexes_that_were_made_anew_are_told_anew(tmp_path: Path) -> None:
    """A later state replaces what the one before it said of clusters, or of the index of the first span."""
    path = filled("flat-int8", Format.BFLOAT16, 64, 2600, clusters=8)
    mark, base = path_mark(path), through_file(path_state(path, 0), tmp_path)
    path.append(*rows(np.random.default_rng(3), 300, 64, path.fmt))
    take_some_clusters(path, np.random.default_rng(4), 16)
    path.build_index(9, len(path) - 100)
    path.budgets = HeadBudgets((25, 50, 100, 25))
    state = through_file(path_state(path, spans_since(path, mark), mark), tmp_path)
    other = loaded([base, state], path, "flat-int8")
    assert other.budgets == path.budgets
    assert_same(path, other)
    assert_same(path, other, top_k=path.budgets)
    # a later state without a mark of the earlier one says the same, in more bytes
    again = through_file(path_state(path, 1), tmp_path)
    assert_same(path, loaded([base, again], path, "flat-int8"))


def test_a_cropped_path_is_told_by_how_much_it_sees(tmp_path: Path) -> None:
    """Neither keys nor index of a segment are told again because a path sees less of it; nothing is known of more."""
    path = filled("roargraph", Format.BFLOAT16, 64, 2600, clusters=8)
    mark, base = path_mark(path), through_file(path_state(path, 0), tmp_path)
    path.truncate(1700)
    path.append(*rows(np.random.default_rng(3), 100, 64, path.fmt))
    assert spans_since(path, mark) == 1
    state = through_file(path_state(path, 1, mark), tmp_path)
    assert_same(path, loaded([base, state], path, "roargraph"))
    alone = through_file(path_state(path, 0), tmp_path)  # its index knows keys that the path does not see
    assert_same(path, loaded([alone], path, "roargraph"))


@pytest.mark.parametrize("name", SPECS)
def test_a_state_stays_what_it_was_while_the_path_goes_on(name: str) -> None:
    """It is written in the background: what later tokens change is no part of it."""
    path = filled(name, Format.BFLOAT16, 64, 9000 if name == "sketch" else 2600, clusters=8)
    path.extend_index(len(path) - 190)  # there is room for more beside what the index has now
    _, arrays = path_state(path, 0)
    before = {key: array.copy() for key, array in arrays.items()}
    cluster_table(path, 4, len(path) - 120)
    cover_late(path, 110)
    grown = path.fork()
    grown.append(*rows(np.random.default_rng(1), 400, 64, path.fmt))
    for stop in (len(path) - 150, len(path), len(grown)):
        grown.extend_index(stop)
        for one in (path, grown):
            cluster_table(one, 4, min(stop, len(one)))
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, before[key], err_msg=key)


def test_maps_are_taken_as_they_are(tmp_path: Path) -> None:
    """Keys, values, codes, links, members: nothing that grows with the text is copied."""
    copied = {}
    for name in ("flat-int8", "sketch", "roargraph", "device", "device-cpu"):
        path = filled(name, Format.BFLOAT16, 64, 9000, clusters=8)
        state = through_file(path_state(path, 0), tmp_path)
        other = loaded([state], path, name)
        held = list(reachable(other))
        copied[name] = [
            key
            for key, array in state[1].items()
            if array.nbytes > 1 << 14 and not any(np.shares_memory(array, one) for one in held)
        ]
    to_the_device = [f"0/index/{head}/codes" for head in range(HEADS)]
    assert copied == {"flat-int8": [], "sketch": [], "roargraph": [], "device": [], "device-cpu": to_the_device}


@pytest.mark.parametrize("change", ["shape", "span", "missing", "keys", "order"])
def test_states_that_do_not_fit_are_refused(change: str) -> None:
    path = filled("flat-int8", Format.BFLOAT16, 64, 2600, clusters=8)
    plain, arrays = path_state(path, 0)
    states: list[State] = [(json.loads(json.dumps(plain)), {name: array.copy() for name, array in arrays.items()})]
    told, own = states[0][0], dict(states[0][1])
    if change == "shape":
        told["shape"][1] = 128
    elif change == "span":
        told["spans"][0]["length"] = 2601
    elif change == "missing":
        del own["clusters/counts"]
    elif change == "keys":
        own["0/keys"] = own["0/keys"][:, :-1].copy()
    else:
        told["before"] = [{"length": 5, "grown": []}]
    with pytest.raises(InputDataError, match="save"):
        loaded([(told, own)], path, "flat-int8")
