"""A tree of prefixes as plain lists, without any index: what `retrieval_attn.engine.tree` must agree with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from retrieval_attn.engine.node import Namespace, Node
from retrieval_attn.engine.sizes import Sizes


@dataclass
class Bytes:
    """What a node holds, in tests: a number of bytes of each kind."""

    host: int
    device: int = 0
    pages: int = 0

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.host, self.device, self.pages)


@dataclass(eq=False)
class Record:
    """A node as the reference knows it; text: all ids from the beginning."""

    node: Node
    parent: Record | None
    start: int
    text: tuple[int, ...]
    namespace: Namespace
    number: int
    held: Sizes | None = None
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

    def evict(self, need: Sizes, keep: Collection[Node], now: float) -> Sizes:
        freed = Sizes()
        while True:
            lacking = [kind for kind in range(3) if freed[kind] < need[kind]]
            candidates = [
                record
                for record in self.records
                if record.held is not None
                and not self.refs(record)
                and record.node not in keep
                and all(child.held is None for child in self.children(record))
                and any(self.could_go(one, keep) and self.bytes_of(one, lacking) for one in self.path(record))
            ]
            if not candidates:
                return freed
            victim = min(candidates, key=lambda record: self.order(record, lacking, now))
            assert victim.held is not None
            freed = Sizes(*(one + more for one, more in zip(freed, victim.held, strict=True)))
            victim.held = None
            self.prune()

    def path(self, record: Record) -> list[Record]:
        """The record and all before it."""
        return [record] if record.parent is None else [record, *self.path(record.parent)]

    def could_go(self, record: Record, keep: Collection[Node]) -> bool:
        """Whether it and all below it that hold something are neither leased nor kept."""
        mine = record.held is None or (not self.refs(record) and record.node not in keep)
        return mine and all(self.could_go(child, keep) for child in self.children(record))

    @staticmethod
    def bytes_of(record: Record, kinds: list[int]) -> int:
        return 0 if record.held is None else sum(record.held[kind] for kind in kinds)

    def order(self, record: Record, lacking: list[int], now: float) -> tuple[bool, float, int]:
        nbytes = self.bytes_of(record, lacking)
        return nbytes == 0, record.seconds / max(nbytes, 1) / max(now - record.used, 1e-9), record.number

    def prune(self) -> None:
        """Records that nobody needs leave, until there are none."""
        while useless := [
            record
            for record in self.records
            if record.held is None and not record.stored and not self.refs(record) and not self.children(record)
        ]:
            self.records.remove(useless[0])
