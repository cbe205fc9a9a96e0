"""What must hold of the nodes of a tree, whatever was done to it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from retrieval_attn.engine.node import Node
from retrieval_attn.engine.resident_set import ResidentSet

__all__ = ["check_nodes"]


def check_nodes(root: Node, residents: ResidentSet, count: int) -> None:
    """Raises AssertionError unless links, references and residents of all nodes agree; count: nodes without the root.

    References: those of a node are its own leases and its children's references. O(nodes).
    """
    found, waiting = 0, [root]
    while waiting:
        node = waiting.pop()
        found += node is not root
        children = list(node.children())
        _check_node(node, children)
        if any(child.held is not None and child not in residents for child in children):
            raise AssertionError(f"a child of {node!r} holds bytes that are not counted")
        waiting += children
    if found != count:
        raise AssertionError(f"{count} nodes are counted, but {found} are in the tree")


def _check_node(node: Node, children: Sequence[Node]) -> None:
    """Raises AssertionError unless a node and its children agree."""
    if node.refs != node.leases + sum(child.refs for child in children) or node.leases < 0:
        raise AssertionError(f"{node!r} has {node.leases} leases, but its children's references do not add up")
    if node.held_children != sum(child.in_memory for child in children):
        raise AssertionError(f"{node!r} counts {node.held_children} children in memory, which is wrong")
    if node.parent is not None and not (node.in_memory or node.refs or children):
        raise AssertionError(f"{node!r} is of no use, but in the tree")
    for child in children:
        inside = child.at < len(node) and node.ids[child.at] == child.ids[0]
        assert node.branches is not None
        if child.parent is not node or child.gone or child.start != node.start + child.at or not len(child):
            raise AssertionError(f"{child!r} is not linked as a child of {node!r}")
        if not node.branches.finds(child) or node.branches.doubles(child) != inside:
            raise AssertionError(f"{child!r} cannot be found from {node!r}")
        if node.namespace is not None and child.namespace != node.namespace:
            raise AssertionError(f"{child!r} has another namespace than {node!r}")
