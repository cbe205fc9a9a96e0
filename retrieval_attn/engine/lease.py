"""Lease: while it is open, its node and all nodes before it stay in the tree and in memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from retrieval_attn.engine.node import Node

__all__ = ["Lease"]


class Lease:
    """A request's hold on a node; `with` or `release` ends it. Any thread may release it, and more than once."""

    __slots__ = ("_give_back", "node", "open")

    def __init__(self, node: Node, give_back: Callable[[Lease], None]) -> None:
        """Made by `Tree.lease`. give_back: the tree's, which sets `open`, so that of two threads one gives it back."""
        self.node = node
        self.open = True
        self._give_back = give_back

    def __repr__(self) -> str:
        return f"Lease({self.node!r}, {'open' if self.open else 'released'})"

    def release(self) -> None:
        """Gives the node back; does nothing the second time."""
        self._give_back(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
