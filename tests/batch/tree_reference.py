"""A tree of prefixes as plain lists, without any index: what `retrieval_attn.batch.tree` must agree with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from retrieval_attn.batch.node import Namespace, Node


@dataclass
class Bytes:
    """What a node holds, in tests: a number of bytes."""

    nbytes: int


@dataclass(eq=False)
class Record:
    """A node as the reference knows it; text: all ids from the beginning."""

    node: Node
    parent: Record | None
    start: int
    text: tuple[int, ...]
    namespace: Namespace
    number: int
    held: int | None = None
    seconds: float = 0.0
    used: float = 0.0
    stored: bool = False
    leases: int = 0


@dataclass
class Reference:
    """Everything is looked for among all records, and counted anew."""

    share_tokens: int
    records: list[Record] = field(default_factory=list)

    def of(self, node: Node) -> Record | None:
        return next((record for record in self.records if record.node is node), None)

    def children(self, record: Record) -> list[Record]:
        return [other for other in self.records if other.parent is record]

    def refs(self, record: Record) -> int:
        return record.leases + sum(map(self.refs, self.children(record)))

    def agreeing(self, record: Record, ids: tuple[int, ...], namespace: Namespace) -> int:
        """Tokens from the beginning in which a record's text agrees with ids; 0 where it may not be found by them."""
        if record.namespace not in (None, namespace):
            return 0
        if record.parent is not None and self.agreeing(record.parent, ids, namespace) < record.start:
            return 0
        same = 0
        while same < min(len(ids), len(record.text)) and ids[same] == record.text[same]:
            same += 1
        return same if same - record.start >= min(self.share_tokens, len(record.text) - record.start) else 0

    def ready(self, record: Record | None, length: int) -> int:
        if record is None:
            return 0
        return length if record.held is not None else self.ready(record.parent, min(length, record.start))

    def match(self, ids: tuple[int, ...], namespace: Namespace, in_memory: bool) -> tuple[int, int]:
        """Tokens of the longest match, and of these in memory."""
        found = [(0, 0)]
        for record in self.records:
            length = self.agreeing(record, ids[:-1], namespace)
            if length and (record.held is not None or not in_memory):
                found.append((length, self.ready(record, length)))
        return max(found)

    def prefixes(self, namespace: Namespace) -> set[tuple[int, ...]]:
        """Every known beginning of every text that a namespace sees."""
        seen = [record.text for record in self.records if record.namespace in (None, namespace)]
        return {text[:end] for text in seen for end in range(len(text) + 1)}

    def touch(self, record: Record | None, now: float) -> None:
        while record is not None:
            record.used, record = now, record.parent

    def evict(self, need: int, keep: Collection[Node], now: float) -> int:
        freed = 0
        while freed < need:
            candidates = [
                record
                for record in self.records
                if record.held is not None
                and not self.refs(record)
                and record.node not in keep
                and all(child.held is None for child in self.children(record))
            ]
            if not candidates:
                break
            victim = min(candidates, key=lambda record: (self.worth(record, now), record.number))
            assert victim.held is not None
            freed += victim.held
            victim.held = None
            self.prune()
        return freed

    @staticmethod
    def worth(record: Record, now: float) -> float:
        return record.seconds / max(record.held or 0, 1) / max(now - record.used, 1e-9)

    def prune(self) -> None:
        """Records that nobody needs leave, until there are none."""
        while useless := [
            record
            for record in self.records
            if record.held is None and not record.stored and not self.refs(record) and not self.children(record)
        ]:
            self.records.remove(useless[0])
