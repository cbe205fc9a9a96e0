"""Pins of sessions: nodes of the prefix cache that the next turns of recent sessions continue. Imports no torch."""

from __future__ import annotations

from collections.abc import Set

from retrieval_attn.engine.node import Namespace, Node
from retrieval_attn.errors import ConfigError

__all__ = ["KEEP_SESSION_SECONDS", "SessionPins"]

KEEP_SESSION_SECONDS = 1800.0
"""Default: longer than most pauses of a user between two turns."""

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
