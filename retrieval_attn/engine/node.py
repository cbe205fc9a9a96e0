"""Node: a span of token ids whose keys and values, index and codes were made once. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from retrieval_attn.engine.ids import Ids

__all__ = ["Branches", "Namespace", "Node", "Payload", "Place", "Sizes"]


class Sizes(NamedTuple):
    """host: of host memory; of a model on a CPU, its windows and codes, too. device: of a GPU's. pages: of an engine's
    pages for exact prefixes, wherever these lie: they are free for others then, and the memory stays the engine's.
    """

    host: int = 0
    device: int = 0
    pages: int = 0

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self)

    @property
    def lacking(self) -> tuple[int, ...]:
        """Kinds of which there is more than nothing, by their number: for bytes that are needed."""
        return tuple(kind for kind, nbytes in enumerate(self) if nbytes > 0)

    def of(self, kinds: Sequence[int]) -> int:
        """Bytes of these kinds together."""
        return sum(self[kind] for kind in kinds)

    def plus(self, other: Sizes) -> Sizes:
        """Both together."""
        return Sizes(self.host + other.host, self.device + other.device, self.pages + other.pages)

    def less(self, other: Sizes) -> Sizes:
        """Without the other's; below 0 where it has more."""
        return Sizes(self.host - other.host, self.device - other.device, self.pages - other.pages)

    def beyond(self, other: Sizes) -> Sizes:
        """What of each kind is more than the other's."""
        return Sizes(*(max(0, nbytes) for nbytes in self.less(other)))


Namespace = str | None
"""Whose prefix it is, an API key for instance; None: everybody's. No text can be mistaken for None."""


class Payload(Protocol):
    """What a node keeps in memory. The tree only counts its bytes; it never cuts, copies or changes it."""

    @property
    def sizes(self) -> Sizes:
        """Bytes that are free once nobody has it."""
        ...


class Place(NamedTuple):
    """A token boundary: behind the first `at` tokens of a node's span. The root's only place is at 0."""

    node: Node
    at: int

    @property
    def length(self) -> int:
        """Tokens from the beginning of the text to here."""
        return self.node.start + self.at


class Node:
    """A span of ids behind a place of its parent. Compared by identity; only the tree writes to it.

    ids: int32 (tokens,), read-only. start: tokens before the span. held: None of the root, and after eviction. sizes:
    of held, as it was when it came. rebuild_seconds: what it would take to make held anew. used: the tree's clock at
    its last use. refs: leases on this node and on all nodes below it; leases: on this node alone. gone: no longer in
    the tree.
    """

    __slots__ = (
        "at",
        "branches",
        "gone",
        "held",
        "held_children",
        "ids",
        "leases",
        "namespace",
        "number",
        "parent",
        "rebuild_seconds",
        "refs",
        "sizes",
        "start",
        "used",
    )

    def __init__(self, parent: Place | None, ids: Ids, namespace: Namespace, number: int) -> None:
        """parent: None for the root alone. number: counts nodes in the order in which they came; breaks ties."""
        self.parent: Node | None = None if parent is None else parent.node
        self.at = 0 if parent is None else parent.at
        self.start = 0 if parent is None else parent.length
        self.ids = ids
        self.namespace = namespace
        self.number = number
        self.held: Payload | None = None
        self.held_children = 0
        self.sizes = Sizes()
        self.rebuild_seconds = 0.0
        self.used = 0.0
        self.refs = 0
        self.leases = 0
        self.gone = False
        self.branches: Branches | None = None

    def __repr__(self) -> str:
        return f"Node({self.number}: tokens {self.start} to {self.end}, {self.sizes.total} bytes, {self.refs} refs)"

    def __len__(self) -> int:
        """Tokens of the span."""
        return len(self.ids)

    def __bool__(self) -> bool:
        return True

    @property
    def end(self) -> int:
        """Tokens from the beginning of the text to the end of the span."""
        return self.start + len(self.ids)

    @property
    def in_memory(self) -> bool:
        """Whether held is there; the root has nothing to hold."""
        return self.held is not None or self.parent is None

    def path(self) -> list[Node]:
        """Nodes from the first below the root to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix(self, at: int) -> Ids:
        """All ids from the beginning of the text to a place of this node, int32 (start + at,)."""
        ids = np.empty(self.start + at, np.int32)
        node, stop = self, at
        while node.parent is not None:
            ids[node.start : node.start + stop] = node.ids[:stop]
            node, stop = node.parent, node.at
        return ids

    def children(self) -> Iterator[Node]:
        """Nodes that begin at any place of the span."""
        return iter(()) if self.branches is None else iter(self.branches)


class Branches:
    """The children of one node, found by namespace, place and the first tokens of their spans.

    A child of more than key_tokens is found by that many, a shorter one by all of its tokens. A child *doubles* the
    span where its first token is the one that the span goes on with: two requests read the same text at the same time.
    """

    __slots__ = ("_children", "_key_tokens", "_seen")

    def __init__(self, key_tokens: int) -> None:
        self._key_tokens = key_tokens
        self._children: dict[Node, bool] = {}
        self._seen: dict[Namespace, _Seen] = {}

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._children)

    def add(self, child: Node, *, doubles: bool) -> None:
        """The child begins at child.at."""
        seen = self._seen.setdefault(child.namespace, _Seen({}, {}, {}))
        key = child.ids[: self._key_tokens]
        self._children[child] = doubles
        seen.found.setdefault((child.at, key.tobytes()), []).append(child)
        _count(seen.lengths.setdefault(child.at, {}), len(key), 1)
        if doubles:
            _count(seen.doubled, child.at, 1)

    def remove(self, child: Node) -> None:
        """Raises KeyError for a node that is not a child."""
        doubles = self._children.pop(child)
        seen = self._seen[child.namespace]
        key = child.ids[: self._key_tokens]
        same = seen.found[child.at, key.tobytes()]
        same.remove(child)
        if not same:
            del seen.found[child.at, key.tobytes()]
        _count(seen.lengths[child.at], len(key), -1)
        if not seen.lengths[child.at]:
            del seen.lengths[child.at]
        if doubles:
            _count(seen.doubled, child.at, -1)
        if not seen.found:
            del self._seen[child.namespace]

    def behind(self, namespace: Namespace, tokens: int, rest: Ids) -> list[Node]:
        """Children of a namespace that may go on with ids of which the span has the first `tokens`, and no more.

        rest: the ids from the span's beginning. A child that begins before that place and does not double the span
        differs from it, and so from the ids, in its first token: only children at the place, which come last here,
        and doubling ones before it are looked at.
        """
        seen = self._seen.get(namespace)
        if seen is None:
            return []
        found: list[Node] = []
        if seen.doubled:
            for at in sorted(at for at in seen.doubled if at < tokens):
                found += seen.at(at, rest)
        found += seen.at(tokens, rest)
        return found

    def finds(self, child: Node) -> bool:
        """Whether a child can be found where it begins, by its own ids."""
        seen = self._seen.get(child.namespace)
        key = child.ids[: self._key_tokens]
        return (
            seen is not None
            and child in seen.found.get((child.at, key.tobytes()), ())
            and len(key) in seen.lengths.get(child.at, ())
            and (not self._children[child] or child.at in seen.doubled)
        )

    def doubles(self, child: Node) -> bool:
        """Whether a child was added as one that doubles the span. Raises KeyError for a node that is not a child."""
        return self._children[child]


class _Seen(NamedTuple):
    """Children that one namespace sees: by place and first tokens; how long these are; places where some double."""

    found: dict[tuple[int, bytes], list[Node]]
    lengths: dict[int, dict[int, int]]
    doubled: dict[int, int]

    def at(self, at: int, rest: Ids) -> list[Node]:
        """Children that begin at a place and whose first tokens are those of rest[at:], short ones before long ones."""
        found: list[Node] = []
        for length in sorted(self.lengths.get(at, ())):
            if at + length <= len(rest):
                found += self.found.get((at, rest[at : at + length].tobytes()), ())
        return found


def _count(counts: dict[int, int], key: int, more: int) -> None:
    counts[key] = counts.get(key, 0) + more
    if not counts[key]:
        del counts[key]
