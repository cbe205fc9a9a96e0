"""What nodes hold is of several kinds, and each may run short: who goes then, and who need not."""

from __future__ import annotations

import numpy as np

from retrieval_attn.engine.node import Node, Sizes
from retrieval_attn.engine.radix_cache import RadixCache
from tests.engine.audit import check_tree
from tests.engine.tree_reference import Bytes


def add(tree: RadixCache, fill: int, sizes: Bytes, uses: int = 1, parent: Node | None = None) -> Node:
    """A text of its own behind a parent."""
    node = tree.insert(parent or tree.root, np.full(100, fill), sizes, "a")
    for _ in range(uses - 1):
        tree.match(np.full(101, fill), "a")
    return node


def tree_of() -> RadixCache:
    """Whose clock stands still, so that uses and bytes alone decide."""
    return RadixCache(clock=lambda: 10.0)


def test_who_has_what_is_short_goes() -> None:
    """However little it is worth, a node that has none of it stays."""
    tree = tree_of()
    host = add(tree, 1, Bytes(1000, 0))
    device = add(tree, 2, Bytes(10, 50), uses=100)
    assert tree.evict(Sizes(device=1)) == Sizes(10, 50) and device.gone and not host.gone
    assert tree.evict(Sizes(device=1)) == Sizes(), "nothing that could go has any"
    assert tree.evict(Sizes(host=1)) == Sizes(1000) and host.gone
    check_tree(tree)


def test_bytes_of_the_kind_that_is_short_decide_who_is_worth_least() -> None:
    """Used as often as each other: the one goes that gives most of what is lacking."""
    tree = tree_of()
    much_host = add(tree, 1, Bytes(1000, 10))
    much_device = add(tree, 2, Bytes(10, 1000))
    tree.match([9, 9], "a")  # neither is the latest used
    assert tree.evict(Sizes(device=5)) == Sizes(10, 1000) and much_device.gone
    much_device = add(tree, 2, Bytes(10, 1000))
    assert tree.evict(Sizes(host=5)) == Sizes(1000, 10) and much_host.gone and not much_device.gone


def test_until_both_are_free() -> None:
    """When one kind is enough, the other alone decides."""
    tree = tree_of()
    both = add(tree, 1, Bytes(100, 100))
    host = [add(tree, fill, Bytes(60, 0), uses=fill) for fill in (3, 4, 5)]
    device = [add(tree, fill, Bytes(0, 60), uses=fill - 3) for fill in (6, 7)]
    assert tree.evict(Sizes(250, 90)) == Sizes(280, 100)
    assert both.gone and all(node.gone for node in host) and not any(node.gone for node in device)
    assert tree.sizes == Sizes(0, 120) and tree.stats.evicted_bytes == 380
    check_tree(tree)


def test_children_without_go_for_what_is_before_them_and_last() -> None:
    tree = tree_of()
    parent = add(tree, 1, Bytes(10, 100))
    child = add(tree, 2, Bytes(10, 0), parent=parent)
    other = add(tree, 3, Bytes(10, 20), uses=100)
    assert tree.evict(Sizes(device=1)) == Sizes(10, 20) and other.gone and not child.gone
    assert tree.evict(Sizes(device=1)) == Sizes(20, 100) and child.gone and parent.gone


def test_a_child_does_not_go_in_vain() -> None:
    """Its parent has what is short, but is leased, or stands before what is."""
    tree = tree_of()
    parent = add(tree, 1, Bytes(10, 100))
    child = add(tree, 2, Bytes(10, 0), parent=parent)
    sibling = add(tree, 3, Bytes(10, 0), parent=parent)
    for leased in (child, parent):
        with tree.lease(leased):
            assert tree.evict(Sizes(device=1)) == Sizes()
    with tree.lease(sibling):
        assert tree.evict(Sizes(device=1)) == Sizes()
        assert tree.evict(Sizes(host=1)) == Sizes(10) and child.gone, "it has host bytes"
    assert tree.evict(Sizes(device=1)) == Sizes(20, 100) and len(tree) == 0


def test_pages_are_a_kind_of_their_own() -> None:
    tree = tree_of()
    pages = add(tree, 1, Bytes(1, 1, 64), uses=100)
    add(tree, 2, Bytes(1000, 1000))
    assert tree.evict(Sizes(pages=1)) == Sizes(1, 1, 64) and pages.gone
    assert tree.evict(Sizes(pages=1)) == Sizes()


def test_what_cannot_stay_goes_first() -> None:
    """A text larger than all texts may be is evicted before older ones that fit."""
    tree = tree_of()
    fits, large = add(tree, 1, Bytes(40, 5)), add(tree, 2, Bytes(101, 5), uses=100)
    assert tree.evict(Sizes(41), Sizes(100, 10)) == Sizes(101, 5) and large.gone and not fits.gone
    large = add(tree, 2, Bytes(101, 11), uses=100)
    assert tree.evict(Sizes(device=6), Sizes(200, 10)) == Sizes(101, 11) and not fits.gone
    other = add(tree, 3, Bytes(70, 5), uses=100)
    assert tree.evict(Sizes(10), Sizes(100, 10)) == Sizes(40, 5) and fits.gone and not other.gone
    check_tree(tree)


def test_bytes_in_use_are_not_idle() -> None:
    tree = tree_of()
    parent = add(tree, 1, Bytes(10, 100))
    child = add(tree, 2, Bytes(5, 50), parent=parent)
    other = add(tree, 3, Bytes(1, 7))
    assert tree.idle == tree.sizes == Sizes(16, 157)
    with tree.lease(child), tree.lease(parent):
        assert tree.idle == Sizes(1, 7)
        check_tree(tree)
        assert tree.evict(Sizes(100, 1000)) == Sizes(1, 7) and other.gone and tree.idle == Sizes()
    assert tree.idle == Sizes(15, 150)
    check_tree(tree)
