"""Node: a span of token ids whose keys and values, index and codes were made once. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from retrieval_attn.batch.ids import Ids

__all__ = ["Branches", "Held", "Namespace", "Node", "Place"]

Namespace = str | None
"""Whose prefix it is, an API key for instance; None: everybody's. No text can be mistaken for None."""


class Held(Protocol):
    """What a node keeps in memory. The tree only counts its bytes; it never cuts, copies or changes it."""

    @property
    def nbytes(self) -> int:
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

    ids: int32 (tokens,), read-only. start: tokens before the span. held: None where the node is known, but not in
    memory. nbytes: of held, as it was when it came. rebuild_seconds: what it would take to make held anew. used: the
    tree's clock at its last use. refs: leases on this node and on all nodes below it; leases: on this node alone. name,
    digest: text by which an engine finds the node in its store, "" without; opaque here. gone: no longer in the tree.
    """

    __slots__ = (
        "at",
        "branches",
        "digest",
        "gone",
        "held",
        "held_children",
        "ids",
        "leases",
        "name",
        "namespace",
        "nbytes",
        "number",
        "parent",
        "rebuild_seconds",
        "refs",
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
        self.held: Held | None = None
        self.held_children = 0
        self.nbytes = 0
        self.rebuild_seconds = 0.0
        self.used = 0.0
        self.refs = 0
        self.leases = 0
        self.name = ""
        self.digest = ""
        self.gone = False
        self.branches: Branches | None = None

    def __repr__(self) -> str:
        return f"Node({self.number}: tokens {self.start} to {self.end}, {self.nbytes} bytes, {self.refs} refs)"

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

    @property
    def stored(self) -> bool:
        """Whether an engine can bring it from a store."""
        return bool(self.digest or self.name)

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

    __slots__ = ("_children", "_doubles", "_found", "_key_tokens", "_lengths")

    def __init__(self, key_tokens: int) -> None:
        self._key_tokens = key_tokens
        self._children: dict[Node, bool] = {}
        self._found: dict[tuple[Namespace, int, bytes], list[Node]] = {}
        self._lengths: dict[tuple[Namespace, int], dict[int, int]] = {}
        self._doubles: dict[Namespace, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._children)

    def add(self, child: Node, *, doubles: bool) -> None:
        """The child begins at child.at."""
        key = child.ids[: self._key_tokens]
        self._children[child] = doubles
        self._found.setdefault((child.namespace, child.at, key.tobytes()), []).append(child)
        _count(self._lengths.setdefault((child.namespace, child.at), {}), len(key), 1)
        if doubles:
            _count(self._doubles.setdefault(child.namespace, {}), child.at, 1)

    def remove(self, child: Node) -> None:
        """Raises KeyError for a node that is not a child."""
        doubles = self._children.pop(child)
        key = child.ids[: self._key_tokens]
        place = (child.namespace, child.at)
        same = self._found[(*place, key.tobytes())]
        same.remove(child)
        if not same:
            del self._found[(*place, key.tobytes())]
        _count(self._lengths[place], len(key), -1)
        if not self._lengths[place]:
            del self._lengths[place]
        if doubles:
            _count(self._doubles[child.namespace], child.at, -1)

    def at(self, namespace: Namespace, at: int, rest: Ids) -> list[Node]:
        """Children of a namespace that begin at a place and whose first tokens are those of rest, oldest first."""
        lengths = self._lengths.get((namespace, at))
        if not lengths:
            return []
        found: list[Node] = []
        for length in sorted(lengths):
            if length <= len(rest):
                found += self._found.get((namespace, at, rest[:length].tobytes()), ())
        return found

    def doubled(self, namespace: Namespace, before: int) -> list[int]:
        """Places before one at which some child doubles the span."""
        places = self._doubles.get(namespace)
        return sorted(at for at in places if at < before) if places else []

    def doubles(self, child: Node) -> bool:
        """Whether a child was added as one that doubles the span. Raises KeyError for a node that is not a child."""
        return self._children[child]


def _count(counts: dict[int, int], key: int, more: int) -> None:
    counts[key] = counts.get(key, 0) + more
    if not counts[key]:
        del counts[key]
