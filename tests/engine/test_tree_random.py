"""Random operations on the tree: after each, it agrees with a naive reference, and its own check holds."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

import numpy as np
import pytest

from retrieval_attn.engine.node import Namespace, Node, Place, PrefixCacheError, Sizes
from retrieval_attn.engine.radix_cache import Lease, Match, RadixCache
from retrieval_attn.errors import ConfigError
from tests.engine.audit import check_tree
from tests.engine.tree_reference import Bytes, Record, Reference

NAMESPACES: tuple[Namespace, ...] = (None, "a", "b")
OPERATIONS = 50
ALL = Sizes(2**60, 2**60, 2**60)


def total(sizes: Iterable[Sizes]) -> Sizes:
    """Of all together."""
    return Sizes(*(sum(one[kind] for one in every) for every in [list(sizes)] for kind in range(3)))


class Play:
    """A tree and its reference under the same operations, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.share = self.random.choice([1, 1, 2, 3])
        self.alphabet = self.random.choice([1, 2, 3])
        self.tree = RadixCache(share_tokens=self.share, clock=lambda: self.now)
        self.reference = Reference(self.share)
        self.leases: list[Lease] = []
        self.gone: list[Node] = []
        self.inserted = 0

    def text(self, longest: int = 10) -> tuple[int, ...]:
        return tuple(self.random.randrange(self.alphabet) for _ in range(self.random.randint(1, longest)))

    def held(self) -> Bytes:
        """Of many nodes nothing of some kinds."""
        host, device, pages = (self.random.choice([0, self.random.randint(1, 100)]) for _ in range(3))
        return Bytes(host, device, pages or int(host == device == 0))

    def known_text(self) -> tuple[int, ...]:
        """A text that goes on from, or ends in, one that is known, or a new one."""
        if not self.reference.records or self.random.random() < 0.2:
            return self.text()
        text = self.random.choice(self.reference.records).text
        return text[: self.random.randint(1, len(text))] + self.text(4)

    def step(self) -> None:
        self.now += self.random.random()
        operation = self.random.choices(
            [self.match, self.insert, self.lease, self.release, self.evict], [4, 6, 3, 3, 2]
        )[0]
        operation()
        self.compare()

    def looked_up(self, ids: tuple[int, ...], namespace: Namespace, *, leased: bool = False) -> Match:
        found = self.tree.match(ids, namespace, leased=leased)
        self.reference.count_use(self.reference.of(found.node))
        return found

    def match(self) -> None:
        ids, namespace = self.known_text(), self.random.choice(NAMESPACES)
        found = self.looked_up(ids, namespace)
        assert found.length == self.reference.match(ids, namespace)
        assert found.length == found.place.length <= len(ids) - 1
        assert tuple(found.node.prefix(found.tokens)) == ids[: found.length]
        assert found.node.namespace in (None, namespace)
        if self.share == 1:
            prefixes = self.reference.prefixes(namespace)
            assert found.length == max(end for end in range(len(ids)) if not end or ids[:end] in prefixes)

    def place(self) -> tuple[Place, Namespace]:
        """Where a match ends, or any place of any node."""
        namespace = self.random.choice(NAMESPACES)
        if self.reference.records and self.random.random() < 0.4:
            node = self.random.choice(self.reference.records).node
            at = self.random.randint(min(self.share, len(node)), len(node))
            return Place(node, at), self.random.choice([namespace, node.namespace])
        found = self.looked_up(self.known_text(), namespace)
        return found.place, namespace

    def insert(self) -> None:
        place, namespace = self.place()
        ids, held = self.text(), self.held()
        parent = self.reference.of(place.node)
        if place.node.namespace not in (None, namespace):
            with pytest.raises(ConfigError):
                self.tree.insert(place, ids, held, namespace)
            return
        node = self.tree.insert(place, np.array(ids), held, namespace)
        self.inserted += 1
        record = self.reference.of(node)
        text = tuple(place.node.prefix(place.at)) + ids
        if record is None:
            same = [other for other in self.reference.records if other.text == text and other.namespace == namespace]
            assert not same and node.held is held
            record = Record(node, parent, place.length, text, namespace, node.number, held.sizes)
            self.reference.add(record)
        assert record.text == text and record.namespace in (None, namespace)
        record.used = self.now

    def lease(self) -> None:
        if self.random.random() < 0.5:
            lease = self.looked_up(self.known_text(), self.random.choice(NAMESPACES), leased=True).lease
            assert lease is not None
        elif self.gone and self.random.random() < 0.3:
            with pytest.raises(PrefixCacheError, match="evicted"):
                self.tree.lease(self.random.choice(self.gone))
            return
        else:
            records = self.reference.records
            lease = self.tree.lease(self.random.choice(records).node if records else self.tree.root)
        self.leases.append(lease)
        record = self.reference.of(lease.node)
        if record is not None:
            record.leases += 1
            self.reference.touch(record, self.now)

    def release(self) -> None:
        if self.leases:
            lease = self.random.choice(self.leases)
            record = self.reference.of(lease.node)
            if lease.open and record is not None:
                record.leases -= 1
                self.reference.touch(record, self.now)
            lease.release()
            assert not lease.open

    def evict(self) -> None:
        need = Sizes(*(self.random.choice([0, 0, -3, 1, 50, 200, 10_000]) for _ in range(3)))
        before = self.tree.sizes
        assert self.tree.evict(need) == self.reference.evict(need) == before.less(self.tree.sizes)

    def compare(self) -> None:
        check_tree(self.tree)
        nodes, waiting = [], [self.tree.root]
        while waiting:
            node = waiting.pop()
            children = list(node.children())
            nodes += children
            waiting += children
        known = {record.node: record for record in self.reference.records}
        assert set(nodes) == set(known) and len(nodes) == len(self.tree)
        for node in nodes:
            record = known[node]
            assert node.refs == self.reference.refs(record)
            assert node.in_memory and node.sizes == record.held
            assert (node.used, node.heat, node.heat_at) == (record.used, record.heat, record.heat_at)
            assert tuple(node.prefix(len(node))) == record.text
        assert self.tree.sizes == total(record.held for record in self.reference.records)
        stats = self.tree.stats
        assert (stats.host_nbytes, stats.device_nbytes, stats.page_nbytes) == self.tree.sizes
        assert stats.nbytes == sum(self.tree.sizes)
        self.gone = [lease.node for lease in self.leases if lease.node.gone]

    def end(self) -> None:
        for lease in self.leases:
            lease.release()
            lease.release()
        self.tree.evict(ALL)
        check_tree(self.tree)
        assert (len(self.tree), self.tree.sizes, self.tree.root.refs) == (0, Sizes(), 0)
        assert self.tree.root.branches is None


@pytest.mark.parametrize("block", range(6))
def test_agrees_with_the_reference_after_every_operation(block: int) -> None:
    """900 seeds: matches, nodes, references, bytes and what is evicted are those of plain lists."""
    inserted = 0
    for seed in range(block * 150, block * 150 + 150):
        play = Play(seed)
        for number in range(OPERATIONS):
            try:
                play.step()
            except BaseException as error:
                error.add_note(f"seed {seed}, operation {number}")
                raise
        play.end()
        inserted += play.inserted
    assert inserted > 150 * 5


def test_same_operations_same_tree() -> None:
    """With a given clock nothing depends on addresses or hashes: two plays of one seed evict the same nodes."""

    def trace(seed: int) -> list[object]:
        play = Play(seed)
        seen: list[object] = []
        for _ in range(OPERATIONS):
            play.step()
            seen += [play.tree.stats, sorted((record.number, record.text) for record in play.reference.records)]
        return seen

    assert all(trace(seed) == trace(seed) for seed in range(20))


def test_two_threads_keep_the_counts() -> None:
    """One thread plans (matches, inserts, evicts), two release leases; afterwards all adds up to nothing."""
    tree = RadixCache(share_tokens=2)
    leases: list[Lease] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def give_back(seed: int) -> None:
        draw = random.Random(seed)
        try:
            while not over.is_set() or leases:
                if leases:
                    lease = draw.choice(list(leases))
                    lease.release()
                    if lease in leases:
                        leases.remove(lease)
        except ValueError:  # the other thread took it off the list first
            return give_back(seed + 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=give_back, args=(seed,)) for seed in (1, 1000)]
    for thread in threads:
        thread.start()
    draw = random.Random(0)
    try:
        for number in range(1500):
            text = np.array([draw.randrange(3) for _ in range(draw.randint(1, 20))], np.int32)
            found = tree.match(text, "a", leased=True)
            assert found.lease is not None and not found.node.gone
            tree.insert(found, text[found.length :], Bytes(10), "a")
            leases.append(found.lease)
            if number % 7 == 0:
                tree.evict(Sizes(30))
            if number % 50 == 0:
                check_tree(tree)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not errors
    check_tree(tree)
    assert tree.root.refs == 0
    tree.evict(ALL)
    assert (len(tree), tree.sizes) == (0, Sizes())
