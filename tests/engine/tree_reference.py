"""A tree of prefixes as plain lists, without any index: what `retrieval_attn.engine.radix_cache` must agree with."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

from retrieval_attn.engine.node import Namespace, Node, Sizes
from retrieval_attn.engine.resident_set import (
    CHILD_HEAT,
    FIRST_HALF_LIFE,
    LATEST,
    LEAST_HALF_LIFE,
    LONGER,
    MOST_HALF_LIFE,
    SHORTER,
)


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
    held: Sizes
    heat: float = 0.0
    heat_at: float = 0.0
    used: float = 0.0
    leases: int = 0


@dataclass
class Reference:
    """Everything is looked for among all records, and counted anew."""

    share_tokens: int
    records: list[Record] = field(default_factory=list)
    turnovers: float = 0.0
    half_life: float = FIRST_HALF_LIFE
    evicted: dict[tuple[tuple[int, ...], Namespace], tuple[float, float]] = field(default_factory=dict)
    latest: Record | None = None

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

    def match(self, ids: tuple[int, ...], namespace: Namespace) -> int:
        """Tokens of the longest match."""
        return max((self.agreeing(record, ids[:-1], namespace) for record in self.records), default=0)

    def prefixes(self, namespace: Namespace) -> set[tuple[int, ...]]:
        """Every known beginning of every text that a namespace sees."""
        seen = [record.text for record in self.records if record.namespace in (None, namespace)]
        return {text[:end] for text in seen for end in range(len(text) + 1)}

    def touch(self, record: Record | None, now: float) -> None:
        while record is not None:
            record.used, record = now, record.parent

    def heat(self, record: Record) -> float:
        """Uses of a record, each halved once per half_life turnovers."""
        return record.heat * 0.5 ** ((self.turnovers - record.heat_at) / self.half_life)

    def count_use(self, record: Record | None) -> None:
        above, latest = list[Record](), self.latest
        while latest is not None:
            above, latest = [*above, latest], latest.parent
        least = 0.0 if record is None else self.heat(record) + (record not in above)
        self.latest = record
        while record is not None:
            record.heat, record.heat_at = max(self.heat(record), least), self.turnovers
            least, record = record.heat, record.parent

    def add(self, record: Record) -> None:
        """Append a record, as hot as when it was evicted and one use more, or as its parent up to CHILD_HEAT."""
        self.turnovers += sum(record.held) / max(1, sum(sum(one.held) for one in (*self.records, record)))
        if back := self.evicted.pop((record.text, record.namespace), None):
            factor = SHORTER if self.turnovers - back[1] < 1 else LONGER
            self.half_life = sorted((LEAST_HALF_LIFE, self.half_life * factor, MOST_HALF_LIFE))[1]
        record.heat, record.heat_at = back or (0.0, self.turnovers)
        self.records.append(record)
        self.count_use(record)
        if record.parent is not None:
            record.heat = max(record.heat, min(CHILD_HEAT, self.heat(record.parent)))

    def evict(self, need: Sizes) -> Sizes:
        freed = Sizes()
        while True:
            lacking = [kind for kind in range(3) if freed[kind] < need[kind]]
            candidates = [
                record
                for record in self.records
                if not self.refs(record)
                and not self.children(record)
                and any(self.could_go(one) and self.bytes_of(one, lacking) for one in self.path(record))
            ]
            if not candidates:
                while self.latest is not None and self.latest not in self.records:
                    self.latest = self.latest.parent
                return freed
            victim = min(candidates, key=lambda record: self.order(record, lacking))
            freed = Sizes(*(one + more for one, more in zip(freed, victim.held, strict=True)))
            self.evicted[victim.text, victim.namespace] = victim.heat, victim.heat_at
            self.records.remove(victim)

    def path(self, record: Record) -> list[Record]:
        """The record and all before it."""
        return [record] if record.parent is None else [record, *self.path(record.parent)]

    def could_go(self, record: Record) -> bool:
        """Whether neither it nor a record below it is leased."""
        return not self.refs(record)

    @staticmethod
    def bytes_of(record: Record, kinds: list[int]) -> int:
        return sum(record.held[kind] for kind in kinds)

    def order(self, record: Record, lacking: list[int]) -> tuple[bool, float, float, int]:
        nbytes = self.bytes_of(record, lacking)
        tokens = len(record.text) - record.start
        score = (
            log2(record.heat * (LATEST if record is self.latest else 1) * tokens / max(nbytes, 1))
            + record.heat_at / self.half_life
        )
        return nbytes == 0, score, record.used, record.number
