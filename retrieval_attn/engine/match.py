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

    node, tokens: the last node and how many tokens of its span. length: tokens in all. ready: of these, tokens that are
    in memory; the others an engine brings from its store or reads. lease: on node, where one was asked for.
    """

    node: Node
    tokens: int
    length: int
    ready: int
    lease: Lease | None = None

    @property
    def place(self) -> Place:
        """Where the rest of the text begins."""
        return Place(self.node, self.tokens)

    @property
    def missing(self) -> tuple[Node, ...]:
        """Nodes of the match that are not in memory, in the order in which they must be brought."""
        return tuple(node for node in self.node.path() if not node.in_memory)


def longest(root: Node, ids: Ids, namespace: Namespace, *, in_memory: bool = False) -> Match:
    """The longest match of all ids; of equally long ones the one with more in memory, then the one whose span ends
    there, then the one found first.

    in_memory: pass over what is not. Every id is compared. Each node is visited once at most, and only those whose
    first tokens agree: O(tokens + nodes on the way), and once more for each node that doubles another's span.
    """
    best, most = (root, 0), (0, 0, True)

    def visit(node: Node, tokens: int, ready: int) -> bool:
        nonlocal best, most
        found = node.start + tokens, ready, tokens == len(node)
        if found > most:
            best, most = (node, tokens), found
        return ready == len(ids) and tokens == len(node)

    _walk(root, ids, namespace, in_memory, visit)
    return Match(*best, *most[:2])


def ending(root: Node, ids: Ids, namespace: Namespace, serves: Callable[[Node], bool]) -> Node | None:
    """The node that serves and whose span ends where ids end, all of which agree.

    Of several one that is in memory comes first, then one of the namespace's own, then the one found first.
    """
    best: Node | None = None
    best_rank = (False, False)

    def visit(node: Node, tokens: int, ready: int) -> bool:
        nonlocal best, best_rank
        if tokens == len(node) and node.end == len(ids) and node.parent is not None and serves(node):
            rank = node.in_memory, node.namespace == namespace
            if best is None or rank > best_rank:
                best, best_rank = node, rank
        return best_rank == (True, True)

    _walk(root, ids, namespace, False, visit)
    return best


def _walk(root: Node, ids: Ids, namespace: Namespace, in_memory: bool, visit: Callable[[Node, int, int], bool]) -> None:
    """Visit nodes that agree with ids: with tokens that do, and all so far in memory; until visit says enough."""
    namespaces = (None,) if namespace is None else (None, namespace)
    stack = [(root, 0)]
    while stack:
        node, ready = stack.pop()
        rest = ids[node.start :]
        tokens = common(node.ids, rest)
        if node.held is not None or node.parent is None:  # node.in_memory, without a call
            ready = node.start + tokens
        if visit(node, tokens, ready):
            return
        if node.branches is not None:
            for name in namespaces:
                for child in node.branches.behind(name, tokens, rest):
                    if child.in_memory or not in_memory:
                        stack.append((child, min(ready, child.start)))
