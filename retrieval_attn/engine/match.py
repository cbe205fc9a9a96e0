"""Match: how much of a text the tree has, and where. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from retrieval_attn.engine.ids import Ids, common
from retrieval_attn.engine.lease import Lease
from retrieval_attn.engine.node import Namespace, Node, Place

__all__ = ["Match", "ending", "longest"]


class Match(NamedTuple):
    """The longest known beginning of a text; the root's place where nothing is known.

    node, tokens: the last node and how many tokens of its span. length: tokens in all. lease: on node, if one was asked
    for.
    """

    node: Node
    tokens: int
    length: int
    lease: Lease | None = None

    @property
    def place(self) -> Place:
        """Where the rest of the text begins."""
        return Place(self.node, self.tokens)


def longest(root: Node, ids: Ids, namespace: Namespace) -> Match:
    """The longest match of all ids; of equally long ones the one whose span ends there, then the one found first.

    Every id is compared. Each node is visited once at most, and only those whose first tokens agree: O(tokens + nodes
    on the way), and once more for each node that doubles another's span.
    """
    best, most = (root, 0), (0, True)

    def visit(node: Node, tokens: int) -> bool:
        nonlocal best, most
        found = node.start + tokens, tokens == len(node)
        if found > most:
            best, most = (node, tokens), found
        return found == (len(ids), True)

    _walk(root, ids, namespace, visit)
    return Match(*best, most[0])


def ending(root: Node, ids: Ids, namespace: Namespace) -> Node | None:
    """The node whose span ends where ids end, all of which agree.

    Of several one of the namespace's own comes first, then the one found first.
    """
    best: Node | None = None

    def visit(node: Node, tokens: int) -> bool:
        nonlocal best
        if tokens == len(node) and node.end == len(ids) and node.parent is not None:
            own = node.namespace == namespace
            if best is None or (own and best.namespace != namespace):
                best = node
            return own
        return False

    _walk(root, ids, namespace, visit)
    return best


def _walk(root: Node, ids: Ids, namespace: Namespace, visit: Callable[[Node, int], bool]) -> None:
    """Visit nodes that agree with ids: with the number of tokens that do; until visit says enough."""
    namespaces = (None,) if namespace is None else (None, namespace)
    stack = [root]
    while stack:
        node = stack.pop()
        rest = ids[node.start :]
        tokens = common(node.ids, rest)
        if visit(node, tokens):
            return
        if node.branches is not None:
            for name in namespaces:
                stack += node.branches.behind(name, tokens, rest)
