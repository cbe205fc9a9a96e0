"""Continued segments: other paths keep their tokens, whatever the continuing path appends, drops or restores."""

from __future__ import annotations

import gc

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrieval_attn.attention.coded_clusters import _SegmentClusters
from retrieval_attn.cpu.segment import LEARNED_SHARE
from retrieval_attn.cpu.store import PathSnapshot, SequenceKV, cluster_table, join_newest, outgrows_codes
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.offload.clusters import cluster_stored, nearest_on_device
from retrieval_attn.saving.sequence import path_from_states, path_state
from tests.cpu.reference import whole_numbers
from tests.cpu.test_store import HEADS, VALUE_DIM, Model, assert_attend, tokens

DIM = 8
FIRST = 40
SCANNED = 100
"""Keys that are few enough to be searched exactly."""


def path_of(rng: np.random.Generator, count: int = FIRST, room: int = 400) -> tuple[SequenceKV, Model]:
    """A sealed path of random tokens with codes."""
    path = SequenceKV(HEADS, DIM, VALUE_DIM, Format.FLOAT32, index=IndexSpec.of("device")).reserve(room)
    model = Model()
    append(path, model, count, rng)
    path.build_index(0, count)
    path.seal()
    return path, model


def append(path: SequenceKV, model: Model, count: int, rng: np.random.Generator) -> None:
    new = tokens(rng, count)
    path.append(*new)
    model.append(*new)


def check(path: SequenceKV, model: Model, rng: np.random.Generator) -> None:
    keys, values = path.read(0, len(path))
    np.testing.assert_array_equal(keys, model.keys)
    np.testing.assert_array_equal(values, model.values)
    stop = min(len(path), SCANNED)
    if stop:
        assert_attend(path, model.keys, model.values, whole_numbers(rng, (2 * HEADS, 1, DIM)), 0, stop, 5)


def codes_of(path: SequenceKV) -> list[npt.NDArray[np.uint8]]:
    """Codes of the path's own tokens in its first segment, of each head."""
    span = path.spans[0]
    return [index.codes.rows().codes[: span.length] for index in span.segment.indexes]  # type: ignore[attr-defined]


operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "truncate", "fork", "drop", "seal", "continue", "continue", "undo", "fork and undo"]
        ),
        st.integers(0, 3),
        st.integers(0, 30),
    ),
    max_size=25,
)


@given(operations=operations)
def test_any_sequence_of_operations(operations: list[tuple[str, int, int]]) -> None:
    """Breaks if two paths go on behind the same token, if a crop or an undone turn drops what others see, or if codes
    of tokens that are gone stay.
    """
    rng = np.random.default_rng(0)
    paths = [path_of(rng)]
    for name, which, count in operations:
        path, model = paths[which % len(paths)]
        if name == "append":
            append(path, model, count, rng)
        elif name == "truncate":
            path.truncate(len(path) - count % (len(path) + 1))
            model.truncate(len(path))
        elif name == "fork" and len(paths) < 4:
            paths.append((path.fork(), model.fork()))
        elif name == "drop" and len(paths) > 1:
            paths.pop(which % len(paths))
        elif name == "seal":
            path.seal()
        elif name in ("continue", "undo", "fork and undo") and path.spans:
            before: tuple[PathSnapshot, int] = path.snapshot(), len(path)
            path.continue_first(count)
            if name == "fork and undo" and len(paths) < 4:
                append(path, model, 3, rng)
                paths.append((path.fork(), model.fork()))
            append(path, model, count, rng)
            path.extend_index(len(path))
            if name != "continue":
                path.restore(before[0])
                model.truncate(before[1])
        del path, model
        for one in paths:
            check(*one, rng)


def test_a_turn_lies_behind_what_it_continues() -> None:
    """One segment with codes of all tokens, the same as if they had come at once; the first path sees its own."""
    rng = np.random.default_rng(1)
    path, model = path_of(rng)
    codes = codes_of(path)
    turn, longer = path.fork(), model.fork()
    append(turn, longer, 5, rng)  # an answer, in a segment of its own
    assert len(turn.segments) == 2 and turn.continue_first(30) and len(turn.segments) == 1
    append(turn, longer, 30, rng)
    turn.extend_index(len(turn))
    assert turn.segments == path.segments and turn.segments[0].indexed == (0, FIRST + 35)
    check(path, model, rng)
    check(turn, longer, rng)
    for before, after in zip(codes, codes_of(path), strict=True):
        np.testing.assert_array_equal(before, after)
    assert not path.fork().continue_first(1), "another path has tokens there"
    turn.seal()
    assert turn.fork().continue_first(1)


def test_one_path_goes_on_before_it_has_appended() -> None:
    """Rows that are read together all ask before any of their tokens is copied."""
    rng = np.random.default_rng(12)
    path, model = path_of(rng)
    turn, longer, other, wider = path.fork(), model.fork(), path.fork(), model.fork()
    assert turn.continue_first(20) and not other.continue_first(20)
    for _ in range(2):
        append(turn, longer, 10, rng)
        append(other, wider, 10, rng)
    check(turn, longer, rng)
    check(other, wider, rng)


def test_tokens_count_until_no_path_has_them() -> None:
    rng = np.random.default_rng(2)
    path, model = path_of(rng)
    turn = path.fork()
    assert turn.continue_first(20)
    append(turn, model.fork(), 20, rng)
    turn.seal()
    other = turn.fork()
    del turn
    gc.collect()
    assert not path.fork().continue_first(1), "a fork has them"
    del other
    gc.collect()
    again, longer = path.fork(), model.fork()
    assert again.continue_first(7)
    assert path.segments[0].length == FIRST, "what nobody has is gone"
    append(again, longer, 7, rng)
    again.extend_index(len(again))
    check(again, longer, rng)
    check(path, model, rng)


def test_a_cropped_path_has_no_part_of_what_it_dropped() -> None:
    rng = np.random.default_rng(3)
    path, model = path_of(rng)
    turn, longer = path.fork(), model.fork()
    assert turn.continue_first(20)
    append(turn, longer, 20, rng)
    turn.truncate(FIRST + 5)  # its own tokens: they are written again
    longer.truncate(FIRST + 5)
    assert path.segments[0].length == FIRST + 5
    append(turn, longer, 3, rng)
    check(turn, longer, rng)
    turn.truncate(FIRST - 5)
    longer.truncate(FIRST - 5)
    append(turn, longer, 3, rng)  # not over those of the first path
    check(turn, longer, rng)
    check(path, model, rng)


def test_clusters_of_dropped_tokens_are_forgotten() -> None:
    rng = np.random.default_rng(8)
    path, model = path_of(rng)
    cluster_stored(path, 0, FIRST)
    turn, longer = path.fork(), model.fork()
    assert turn.continue_first(20) and turn.clusters is not None
    append(turn, longer, 20, rng)
    cluster_table(turn, 0, len(turn))
    shared = turn.clusters.shared
    turn.truncate(FIRST + 5)
    longer.truncate(FIRST + 5)
    append(turn, longer, 9, rng)
    table = cluster_table(turn, 0, len(turn))
    assert table is not None and turn.clusters.shared is shared
    members = shared.members(turn.segments[0], 0, len(turn), Format.FLOAT32)[:, : len(turn)]
    np.testing.assert_array_equal(members[:, FIRST:], shared.assign(longer.keys[:, FIRST:]))
    np.testing.assert_array_equal(table.counts[0], np.bincount(members[0], minlength=shared.clusters))


def test_newest_tokens_get_the_clusters_that_a_device_found() -> None:
    """Those before them without any join first; other tokens keep theirs."""
    rng = np.random.default_rng(10)
    path, model = path_of(rng)
    cluster_stored(path, 0, FIRST - 10)
    turn, longer = path.fork(), model.fork()
    assert turn.continue_first(20) and turn.clusters is not None
    append(turn, longer, 20, rng)
    shared, segment = turn.clusters.shared, turn.segments[0]
    before = shared.known(segment)[:, : FIRST - 10].copy()
    found = nearest_on_device(shared, torch.from_numpy(longer.keys[:, FIRST:])).numpy()
    np.testing.assert_array_equal(found, shared.assign(longer.keys[:, FIRST:]))
    other = (1 - found).astype(np.uint8)  # not what the host would find
    join_newest(turn, other)
    members = shared.members(segment, 0, len(turn), Format.FLOAT32)
    np.testing.assert_array_equal(members[:, : FIRST - 10], before)
    np.testing.assert_array_equal(members[:, FIRST - 10 : FIRST], shared.assign(longer.keys[:, FIRST - 10 : FIRST]))
    np.testing.assert_array_equal(members[:, FIRST : len(turn)], other)


def test_a_device_forgets_clusters_of_dropped_tokens() -> None:
    rng = np.random.default_rng(9)
    path, model = path_of(rng)
    cluster_stored(path, 0, FIRST)
    assert path.clusters is not None
    shared, segment = path.clusters.shared, path.segments[0]
    there = _SegmentClusters(np.zeros((HEADS, shared.clusters, VALUE_DIM), np.float32), 0, torch.device("cpu"))
    shared.on_devices[segment] = {there.members.device: there}
    ids = np.zeros((HEADS, FIRST), np.uint8)
    there.cover(ids, FIRST)
    shared.forget(segment, FIRST - 10)
    there.cover(ids + 1, FIRST)
    assert there.members[0, :FIRST].tolist() == [0] * (FIRST - 10) + [1] * 10


def test_an_undone_turn_leaves_what_a_fork_has() -> None:
    rng = np.random.default_rng(11)
    path, model = path_of(rng)
    turn, longer = path.fork(), model.fork()
    assert turn.continue_first(20)
    append(turn, longer, 5, rng)
    before, undone = turn.snapshot(), longer.fork()
    append(turn, longer, 5, rng)
    other, kept = turn.fork(), longer.fork()
    turn.restore(before)
    append(turn, undone, 3, rng)
    check(turn, undone, rng)
    check(other, kept, rng)


def test_a_segment_without_room_is_not_continued() -> None:
    path, _ = path_of(np.random.default_rng(4), room=FIRST + 10)
    turn = path.fork()
    assert not turn.continue_first(path.segments[0].capacity - FIRST + 1)
    assert turn.continue_first(path.segments[0].capacity - FIRST)


def test_indexes_on_the_host_are_not_continued() -> None:
    rng = np.random.default_rng(5)
    path = SequenceKV(HEADS, DIM, VALUE_DIM, Format.FLOAT32, index=IndexSpec.of("flat")).reserve(400)
    append(path, Model(), FIRST, rng)
    path.build_index(0, FIRST)
    path.seal()
    assert not path.fork().continue_first(1)


def test_a_save_has_no_token_of_another_path() -> None:
    """Later tokens belong to another request, which may overwrite them during the save."""
    rng = np.random.default_rng(7)
    path, model = path_of(rng)
    turn = path.fork()
    assert turn.continue_first(20)
    append(turn, model.fork(), 20, rng)
    turn.extend_index(len(turn))
    assert path.segments[0].indexed == (0, FIRST + 20)
    plain, arrays = path_state(path, 0)
    assert plain["spans"][0]["held"] == FIRST and arrays["0/keys"].shape[1] == FIRST
    assert {arrays[name].shape[-2] for name in arrays if name.endswith("/codes")} == {FIRST}
    again = SequenceKV(HEADS, DIM, VALUE_DIM, Format.FLOAT32, index=IndexSpec.of("device"))
    path_from_states([(plain, {name: np.array(array) for name, array in arrays.items()})], again, None)
    check(again, model, rng)
    assert again.segments[0].indexed == (0, FIRST)


def test_a_text_outgrows_the_codes_of_its_beginning() -> None:
    path, _ = path_of(np.random.default_rng(6))
    assert not outgrows_codes(path, LEARNED_SHARE * FIRST) and outgrows_codes(path, LEARNED_SHARE * FIRST + 1)
