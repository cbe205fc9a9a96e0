"""KVReplica: a new kind is one class with one registration, and follows its path or segment through every operation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_attn.cpu import replica
from retrieval_attn.cpu.replica import KVReplica, State, register_replica
from retrieval_attn.cpu.segment import PathTokens, Segment
from retrieval_attn.cpu.store import COPIED_TOKENS, SequenceKV, held_memory
from retrieval_attn.errors import ConfigError
from retrieval_attn.index.base import HeldMemory
from retrieval_attn.index.formats import Format
from retrieval_attn.saving.sequence import path_from_states, path_mark, path_state, spans_since

DIM, VALUE_DIM = 8, 12
Rows = list[float]


class PathLog(KVReplica[PathTokens]):
    """The first number of each key from token `start` on."""

    kind = "path_log"

    def __init__(self, start: int, rows: Rows) -> None:
        self.start, self.rows = start, rows

    @classmethod
    def of_empty(cls, owner: PathTokens) -> PathLog:
        return cls(0, [])

    @property
    def num_tokens(self) -> int:
        return self.start + len(self.rows)

    @property
    def nbytes(self) -> HeldMemory:
        return HeldMemory(1000 * len(self.rows))

    def append(self, owner: PathTokens, start: int, keys: Any, values: Any) -> None:
        assert start == self.num_tokens and len(owner) == start + keys.shape[1] == start + values.shape[1]
        self.rows += keys[0, :, 0].tolist()

    def truncate(self, owner: PathTokens, length: int) -> bool:
        assert len(owner) >= self.num_tokens, "the tokens are still there"
        del self.rows[max(0, length - self.start) :]
        return True

    def fork(self) -> PathLog:
        return PathLog(self.start, list(self.rows))

    def forget(self, owner: PathTokens, start: int, stop: int) -> PathLog:
        assert stop == self.num_tokens
        return PathLog(start, self.rows[start - self.start :])

    def mark(self, owner: PathTokens) -> int:
        return self.num_tokens

    def state(self, owner: PathTokens, since: int, tokens: Sequence[int], mark: int | None) -> State:
        same = sum(span.length for span in owner.spans[:since])
        first = self.start if mark is None else max(self.start, min(mark, same))
        return {"start": self.start, "first": first}, {"path_log/rows": np.array(self.rows[first - self.start :])}

    @classmethod
    def restored(cls, owner: PathTokens, plain: Any, arrays: Mapping[str, Any], earlier: PathLog | None) -> PathLog:
        start, first = plain["start"], plain["first"]
        known = [] if earlier is None else earlier.rows[start - earlier.start : first - earlier.start]
        return cls(start, [*known, *arrays["path_log/rows"].tolist()])


class SegmentLog(KVReplica[Segment]):
    """The same of a segment. obstinate: it drops nothing."""

    kind = "segment_log"
    of_segments = True
    obstinate = False

    def __init__(self) -> None:
        self.rows: Rows = []

    @classmethod
    def of_empty(cls, owner: Segment) -> SegmentLog:
        return cls()

    @property
    def num_tokens(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> HeldMemory:
        return HeldMemory(0, 10 * len(self.rows))

    def append(self, owner: Segment, start: int, keys: Any, values: Any) -> None:
        assert start == self.num_tokens and owner.length == start + keys.shape[1]
        self.rows += keys[0, :, 0].tolist()

    def truncate(self, owner: Segment, length: int) -> bool:
        if self.obstinate:
            return False
        del self.rows[length:]
        return True


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "_kinds", dict(replica._kinds))
        register_replica(PathLog)
        register_replica(SegmentLog)
        yield


class Sequences:
    """Paths, each with a plain list of the numbers of its tokens and the first token that is not forgotten."""

    def __init__(self) -> None:
        self.paths, self.numbers, self.starts = [self._path()], [Rows()], [0]
        self._next = 1.0

    @staticmethod
    def _path() -> SequenceKV:
        return SequenceKV(1, DIM, VALUE_DIM, Format.FLOAT32)

    def append(self, which: int, amount: int) -> None:
        count = amount % 400
        numbers = [self._next + number for number in range(count)]
        self._next += count
        keys = np.zeros((1, count, DIM), np.float32)
        keys[0, :, 0] = numbers
        self.paths[which].append(keys, np.ones((1, count, VALUE_DIM), np.float32))
        self.numbers[which] = self.numbers[which] + numbers

    def truncate(self, which: int, amount: int) -> None:
        start, length = self.starts[which], len(self.numbers[which])
        kept = start + amount % (length - start + 1)
        self.paths[which].truncate(kept)
        self.numbers[which] = self.numbers[which][:kept]

    def fork(self, which: int, amount: int) -> None:
        self._add(self.paths[which].fork(), which)

    def forget(self, which: int, amount: int) -> None:
        start, length = self.starts[which], len(self.numbers[which])
        self.starts[which] = start + amount % (length - start + 1)
        self.paths[which].forget(self.starts[which], length)
        self.paths[which].release_before(self.starts[which])

    def roll_back(self, which: int, amount: int) -> None:
        path, numbers, start = self.paths[which], self.numbers[which], self.starts[which]
        snapshot = path.snapshot()
        self.append(which, amount)
        path.forget(start + amount % (len(path) - start + 1), len(path))
        self.append(which, amount // 3)
        path.restore(snapshot)
        self.numbers[which] = numbers

    def save(self, which: int, amount: int) -> None:
        """And load: a state, and what followed it in another one."""
        mark, states = path_mark(self.paths[which]), [path_state(self.paths[which], 0)]
        if amount % 3:
            self.truncate(which, amount // 2)
            self.append(which, amount)
            path = self.paths[which]
            states.append(path_state(path, spans_since(path, mark), mark))
            assert len(states[1][1]["path_log/rows"]) <= amount % 400 + COPIED_TOKENS, "others were saved"
        loaded = self._path()
        copies = [(json.loads(json.dumps(plain)), {k: a.copy() for k, a in arrays.items()}) for plain, arrays in states]
        path_from_states(copies, loaded, None)
        self._add(loaded, which)

    def _add(self, path: SequenceKV, like: int) -> None:
        self.paths.append(path)
        self.numbers.append(list(self.numbers[like]))
        self.starts.append(self.starts[like])

    def check(self) -> None:
        for path, numbers, start in zip(self.paths, self.numbers, self.starts, strict=True):
            log = path.replicas["path_log"]
            assert isinstance(log, PathLog) and len(path) == log.num_tokens == len(numbers)
            assert (log.start, log.rows) == (start, numbers[start:])
            assert path.read(start, len(path))[0][0, :, 0].tolist() == numbers[start:]
            for span in path.spans:
                own = span.segment.replicas["segment_log"]
                assert isinstance(own, SegmentLog)
                assert own.rows == span.segment.keys[0, : own.num_tokens, 0].tolist()
                assert own.num_tokens in (0, span.segment.length), "one that was loaded has none"
        stored = {id(one): one.nbytes for path in self.paths for one in path.segments}
        logs = {
            id(one): one.nbytes
            for path in self.paths
            for span in path.spans
            if (one := span.segment.replicas["segment_log"])
        }
        held = held_memory(self.paths)
        assert held.host == sum(stored.values()) + 1000 * sum(map(len, self.numbers)) - 1000 * sum(self.starts)
        assert held.device == sum(one.device for one in logs.values())


OPERATIONS = ("append", "truncate", "fork", "forget", "roll_back", "save")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 7), st.integers(0, 2000)), min_size=1, max_size=20)
)
def test_replicas_follow_the_keys(operations: list[tuple[str, int, int]]) -> None:
    """Whatever happens to some paths that share segments, each log has the numbers that a plain list has."""
    sequences = Sequences()
    sequences.append(0, 300)
    for name, which, amount in operations:
        if len(sequences.paths) < 8 or name not in ("fork", "save"):
            getattr(sequences, name)(which % len(sequences.paths), amount)
            sequences.check()


def test_a_segment_keeps_what_a_replica_cannot_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It freezes, as for an index that cannot drop keys, and the path goes on in another segment."""
    monkeypatch.setattr(SegmentLog, "obstinate", True)
    sequences = Sequences()
    sequences.append(0, 300)
    sequences.truncate(0, 280)
    (segment,) = sequences.paths[0].segments
    assert segment.frozen and segment.length == 300 and len(sequences.paths[0]) == 280
    sequences.append(0, 30)
    sequences.check()
    assert len(sequences.paths[0].segments) == 2


def test_kinds_have_one_class_each() -> None:
    class Other(PathLog):
        pass

    with pytest.raises(ConfigError, match="path_log"):
        register_replica(Other)
    assert register_replica(PathLog) is PathLog
