"""Nodes of the prefix cache: spans of token ids with KV, index and codes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from retrieval_attn.engine.ids import Ids
from retrieval_attn.errors import ConfigError, RetrievalAttentionError

__all__ = ["Branches", "Namespace", "Node", "Offloadable", "Payload", "Place", "SessionPins", "Sizes"]


class PrefixCacheError(RetrievalAttentionError):
    """Too few pages are free, or a page or node is used after it was freed or evicted. Never leaves the engine."""


class Sizes(NamedTuple):
    """Bytes by the memory that holds them.

    Attributes:
        host: host memory; for a model on a CPU also windows and codes.
        device: GPU memory.
        pages: KV pages of an engine for paged prefixes. Freed pages serve other prefixes; the memory stays allocated.
    """

    host: int = 0
    device: int = 0
    pages: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self)

    @property
    def lacking(self) -> tuple[int, ...]:
        """Numbers of the kinds with more than 0 bytes; used on bytes that are needed."""
        return tuple(kind for kind, nbytes in enumerate(self) if nbytes > 0)

    def of(self, kinds: Sequence[int]) -> int:
        """Return the bytes of these kinds together."""
        return sum(self[kind] for kind in kinds)

    def plus(self, other: Sizes) -> Sizes:
        """Return the sum."""
        return Sizes(self.host + other.host, self.device + other.device, self.pages + other.pages)

    def less(self, other: Sizes) -> Sizes:
        """Return the difference, which may be negative."""
        return Sizes(self.host - other.host, self.device - other.device, self.pages - other.pages)

    def beyond(self, other: Sizes) -> Sizes:
        """Return the difference, 0 for kinds in which `other` has more."""
        return Sizes(*(max(0, nbytes) for nbytes in self.less(other)))


Namespace = str | None
"""Whose prefix it is, an API key for instance; None: everybody's. No text can be mistaken for None."""


class Payload(Protocol):
    """Cached KV of a node. The tree counts its bytes and never cuts, copies or changes it."""

    @property
    def sizes(self) -> Sizes:
        """Bytes that are free once no reference is left."""
        ...


@runtime_checkable
class Offloadable(Payload, Protocol):
    """Payload that can move from GPU to host memory and stays usable.

    copied: whether `copy_to_host` has ended.
    """

    copied: bool

    def copy_to_host(self) -> None:
        """Copy to host memory what `offload` would copy, as far as it is large, and update `sizes`. Thread-safe."""
        ...

    def offload(self) -> None:
        """Move the data in GPU memory to host memory and update `sizes`. Thread-safe."""
        ...


class Place(NamedTuple):
    """Token boundary after the first `at` tokens of a node's span. The root's only place is at 0."""

    node: Node
    at: int

    @property
    def length(self) -> int:
        """Tokens from the start of the text."""
        return self.node.start + self.at


MAX_MARKS = 2
"""Leading ids of a text that are no tokens: of other weights, and of a saved context."""


class Node:
    """Span of token ids after a place of its parent. Compared by identity; only the tree changes it.

    Attributes:
        ids: int32 (tokens,), read-only.
        start: tokens before the span.
        held: payload; None for the root and after eviction.
        sizes: bytes of the payload when they were last counted.
        rebuild_seconds: seconds to prefill the payload again.
        used: time of the last use, by the tree's clock.
        heat, heat_at: decayed count of uses, and the time of its last update, in turnovers (`ResidentSet`).
        text_key: namespace and hash of all ids up to the end of the span, by which an evicted node's heat is kept.
        refs, leases: leases on this node and its descendants; on this node alone.
        gone: whether the node was removed from the tree.
    """

    __slots__ = (
        "at",
        "branches",
        "gone",
        "heat",
        "heat_at",
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
        "text_key",
        "used",
    )

    def __init__(self, parent: Place | None, ids: Ids, namespace: Namespace, number: int) -> None:
        """parent: None for the root. number: order of insertion, which breaks ties."""
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
        self.used = self.heat = self.heat_at = 0.0
        self.text_key: tuple[Namespace, int] = namespace, 0
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
        """Tokens from the start of the text to the end of the span."""
        return self.start + len(self.ids)

    @property
    def marks(self) -> int:
        """Leading ids of the whole text that are no tokens."""
        return int((self.path()[0].ids[:MAX_MARKS] < 0).sum())

    @property
    def in_memory(self) -> bool:
        """Whether the node has a payload; True for the root."""
        return self.held is not None or self.parent is None

    def path(self) -> list[Node]:
        """Return the nodes from the root, which is left out, to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix(self, at: int) -> Ids:
        """Return all ids from the start of the text to a place of this node, int32 (start + at,)."""
        ids = np.empty(self.start + at, np.int32)
        node, stop = self, at
        while node.parent is not None:
            ids[node.start : node.start + stop] = node.ids[:stop]
            node, stop = node.parent, node.at
        return ids

    def children(self) -> Iterator[Node]:
        """Return the nodes that begin at any place of the span."""
        return iter(()) if self.branches is None else iter(self.branches)


class Branches:
    """Children of a node, found by namespace, place and first tokens.

    A child is found by its first key_tokens tokens, a shorter one by all of its tokens. A child *doubles* the span if
    its first token equals the span's next token: two requests prefilled the same text at the same time.
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
        """Add a child that begins at child.at."""
        seen = self._seen.setdefault(child.namespace, _Seen({}, {}, {}))
        key = child.ids[: self._key_tokens]
        self._children[child] = doubles
        seen.found.setdefault((child.at, key.tobytes()), []).append(child)
        _count(seen.lengths.setdefault(child.at, {}), len(key), 1)
        if doubles:
            _count(seen.doubled, child.at, 1)

    def remove(self, child: Node) -> None:
        """Remove a child. Raises KeyError for any other node."""
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
        """Yield children of a namespace that may continue ids of which the span has exactly the first `tokens`.

        rest: ids from the start of the span. A child that begins before that place and does not double the span differs
        from it, and so from the ids, in its first token. Only doubling children before the place, and then children at
        it, are compared.
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

    def doubles(self, child: Node) -> bool:
        """Return whether a child doubles the span. Raises KeyError for any other node."""
        return self._children[child]


class _Seen(NamedTuple):
    """Children in one namespace, by place and first tokens, with the lengths of these.

    doubled: places with children that double the span.
    """

    found: dict[tuple[int, bytes], list[Node]]
    lengths: dict[int, dict[int, int]]
    doubled: dict[int, int]

    def at(self, at: int, rest: Ids) -> list[Node]:
        """Yield the children at a place whose first tokens equal those of rest[at:], short ones first."""
        found: list[Node] = []
        for length in sorted(self.lengths.get(at, ())):
            if at + length <= len(rest):
                found += self.found.get((at, rest[at : at + length].tobytes()), ())
        return found


def _count(counts: dict[int, int], key: int, more: int) -> None:
    counts[key] = counts.get(key, 0) + more
    if not counts[key]:
        del counts[key]


Session = tuple[Namespace, str]
"""Namespace and name of a session."""


class SessionPins:
    """The last node of each session that ran within `keep_seconds`.

    Such nodes are evicted after all other idle nodes, and so are their ancestors, because a parent is evicted after its
    children. A session has one pinned node: a branch that its later prompts left, as after a compaction, is not pinned.

    Not thread-safe: the prefix cache calls it under its lock.
    """

    def __init__(self, keep_seconds: float) -> None:
        """keep_seconds: time from the last use of a session to the end of its pin. 0: no node is pinned.

        Raises ConfigError for a negative number.
        """
        if not keep_seconds >= 0:
            raise ConfigError(f"keep_session_seconds must be at least 0, but is {keep_seconds}")
        self._keep_seconds = keep_seconds
        self._last: dict[Session, tuple[Node, float]] = {}  # with the time of the use, oldest first
        self._sessions: dict[Node, set[Session]] = {}

    def __len__(self) -> int:
        """Sessions with a pinned node."""
        return len(self._last)

    def pin(self, session: Session, node: Node, now: float) -> None:
        """Pin a node in place of the session's last one. now: seconds, by the clock of all calls."""
        if not self._keep_seconds:
            return
        self._remove(session)
        self._last[session] = node, now
        self._sessions.setdefault(node, set()).add(session)

    def nodes(self, now: float) -> Set[Node]:
        """Return the pinned nodes, after the removal of those whose time is over."""
        while self._last:
            session, (_, used) = next(iter(self._last.items()))
            if now - used <= self._keep_seconds:
                break
            self._remove(session)
        return self._sessions.keys()

    def note_eviction(self, node: Node) -> None:
        """Pin the parent of an evicted node for its sessions."""
        parent = node.parent
        for session in self._sessions.pop(node, set()):
            if parent is None or parent.parent is None or parent.held is None:
                del self._last[session]
                continue
            self._last[session] = parent, self._last[session][1]  # its place in the order stays
            self._sessions.setdefault(parent, set()).add(session)

    def _remove(self, session: Session) -> None:
        found = self._last.pop(session, None)
        if found is not None:
            sessions = self._sessions[found[0]]
            sessions.remove(session)
            if not sessions:
                del self._sessions[found[0]]
