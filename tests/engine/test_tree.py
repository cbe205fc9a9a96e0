"""The tree, case by case: what is found, what stays, what goes, and what is refused."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from retrieval_attn.engine.ids import common, int32_row
from retrieval_attn.engine.node import Namespace, Node, Place, PrefixCacheError, Sizes
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.resident_set import ResidentSet
from retrieval_attn.errors import ConfigError, ShapeError
from tests.engine.audit import check_tree
from tests.engine.tree_reference import Bytes

TEXT = np.arange(200, dtype=np.int32)


def add(tree: RadixCache, ids: np.ndarray, nbytes: int = 10, namespace: Namespace = "a") -> Node:
    """As a request does: match, then insert what is left of the text."""
    found = tree.match(ids, namespace)
    return tree.insert(found, ids[found.length :], Bytes(nbytes), namespace)


def join(*parts: object) -> np.ndarray:
    return np.concatenate([np.atleast_1d(np.asarray(part, np.int32)) for part in parts])


def test_longest_match_leaves_the_last_token() -> None:
    tree = RadixCache()
    node = add(tree, TEXT)
    found = tree.match(TEXT, "a")
    assert (found.node, found.tokens, found.length) == (node, 199, 199)
    assert tree.match(join(TEXT, 5), "a").length == 200
    assert tree.match(TEXT[:1], "a").length == tree.match([], "a").length == 0


def test_a_child_begins_inside_a_span_that_is_not_cut() -> None:
    tree = RadixCache()
    node = add(tree, TEXT)
    held = node.held
    other = add(tree, join(TEXT[:120], 7, 7, 7, 7))
    assert (other.parent, other.at, other.start, len(other)) == (node, 120, 120, 4)
    assert node.held is held and len(node) == 200, "nothing was cut"
    assert tree.match(join(TEXT[:120], 7, 7, 7, 7, 1), "a").length == 124
    assert tree.match(join(TEXT, 1), "a").node is node
    assert other.prefix(4).tolist() == [*range(120), 7, 7, 7, 7]
    assert other.path() == [node, other]
    check_tree(tree)


def test_all_ids_are_compared() -> None:
    """A difference at any place ends the match there, whatever the blocks that are compared."""
    long = np.arange(20_000, dtype=np.int32)
    tree = RadixCache()
    add(tree, long)
    for place in (64, 511, 512, 513, 8703, 8704, 19_999):
        other = long.copy()
        other[place] = -1
        assert tree.match(join(other, 0), "a").length == place
    assert tree.match(join(5, long[1:]), "a").length == 0


def test_common_counts_equal_ids() -> None:
    draw = random.Random(0)
    for _ in range(300):
        first = np.array([draw.randrange(2) for _ in range(draw.choice([0, 1, 5, 600, 9000]))], np.int32)
        second = first.copy()[: draw.randint(0, len(first))] if draw.random() < 0.5 else first.copy()
        if len(second):
            second[draw.randrange(len(second))] ^= draw.randrange(2)
        agree = [a == b for a, b in zip(first.tolist(), second.tolist(), strict=False)]
        assert common(first, second) == (agree.index(False) if False in agree else len(agree))


def test_a_node_supersedes_those_whose_tokens_it_has() -> None:
    """Of a conversation one node is left, as hot as the one before; what another request or child needs stays."""
    tree = RadixCache()
    first = add(tree, TEXT[:100], 100)
    turn = add(tree, TEXT[:150], 15)
    for _ in range(3):
        tree.match(join(TEXT[:150], 0), "a")
        add(tree, join(7, TEXT), 1)  # uses in turn count
    assert turn.heat > 2
    leases = (tree.lease(turn), tree.lease(first))
    assert tree.superseded(leases, 0) == [turn, first] and tree.superseded(leases, 100) == [turn]
    with tree.lease(first):
        assert tree.superseded(leases, 0) == [turn], "another request continues it"
    heir = tree.insert(Place(tree.root, 0), TEXT, Bytes(120), "a")
    tree.supersede([turn, first], heir)
    assert not turn.gone and not first.gone, "they are leased"
    for one in leases:
        one.release()
    hot = turn.heat
    tree.supersede([turn, first], heir)
    assert turn.gone and first.gone and tree.sizes.total == 121
    assert heir.heat == pytest.approx(hot, rel=0.2) and tree.stats.evicted == 0
    assert tree.match(join(TEXT, 0), "a").node is heir
    check_tree(tree)
    branch = add(tree, join(TEXT, 9))
    with tree.lease(heir) as lease:
        assert tree.superseded((lease,), 0) == [], "it has a child"
    assert branch.parent is heir


def test_few_tokens_in_common_do_not_make_a_shared_parent() -> None:
    """Every prompt begins with the same tokens: the first document would never leave memory."""
    tree = RadixCache(share_tokens=64)
    first = add(tree, join(TEXT[:63], np.full(100, 1)))
    second = add(tree, join(TEXT[:63], np.full(100, 2)))
    third = add(tree, join(TEXT[:63], np.full(50, 1), np.full(50, 3)))
    assert first.parent is second.parent is tree.root
    assert third.parent is first and third.at == 113


def test_ten_thousand_children_of_one_place_are_told_apart() -> None:
    tree = RadixCache(share_tokens=8)
    texts = np.random.default_rng(0).integers(0, 2, (10_000, 40)).astype(np.int32)
    for text in texts:
        add(tree, text)
    for text in texts[::97]:
        assert tree.match(join(text, 5), "a").length == 40
    check_tree(tree)


def test_equal_text_is_one_node_however_it_was_cut() -> None:
    tree = RadixCache()
    node = add(tree, TEXT)
    again = Bytes(10)
    found = tree.insert(tree.root, TEXT, again, "a")
    assert found is node and node.held is not again
    child = add(tree, join(TEXT[:150], np.full(100, 3)))
    assert tree.insert(tree.root, join(TEXT[:150], np.full(100, 3)), again, "a") is child
    assert len(tree) == 2 and tree.sizes == Sizes(20)


def test_texts_that_were_read_at_the_same_time_are_all_found() -> None:
    """Two requests read the same beginning at once, so the second doubles a part of the first."""
    tree = RadixCache(share_tokens=4)
    add(tree, TEXT)
    tree.insert(tree.root, join(TEXT[:100], 7, 7), Bytes(1), "a")
    inside = tree.insert(Place(tree.match(TEXT, "a").node, 50), join(TEXT[50:60], 8, 8), Bytes(1), "a")
    assert tree.match(join(TEXT, 0), "a").length == 200
    assert tree.match(join(TEXT[:100], 7, 7, 7), "a").length == 102
    assert tree.match(join(TEXT[:60], 8, 8, 8), "a").node is inside
    check_tree(tree)


def test_namespaces_are_apart_unless_public() -> None:
    tree = RadixCache()
    system = add(tree, TEXT, namespace=None)
    mine = add(tree, join(TEXT, TEXT), namespace="a")
    assert mine.parent is system
    assert tree.match(join(TEXT, TEXT, 1), "a").length == 400
    assert tree.match(join(TEXT, TEXT, 1), "b").length == 200
    assert tree.match(join(TEXT, TEXT, 1), None).length == 200
    secret = np.full(100, 5, np.int32)
    node = add(tree, secret, namespace="a")
    assert tree.match(join(secret, 1), "b").length == tree.match(join(secret, 1), None).length == 0
    assert add(tree, secret, namespace="b") is not node, "the other's node is neither used nor told of"
    for namespace in ("b", None):
        with pytest.raises(ConfigError, match="namespace"):
            tree.insert(node, [1, 2], Bytes(1), namespace)
    check_tree(tree)


def test_a_lease_holds_all_before_it() -> None:
    tree = RadixCache()
    first = add(tree, TEXT)
    second = add(tree, join(TEXT, TEXT))
    with tree.lease(second) as lease:
        assert (first.refs, second.refs, second.leases) == (1, 1, 1)
        add(tree, join(TEXT, TEXT, TEXT))
        assert tree.evict(Sizes(2**40)) == Sizes(10), "only what is not leased"
        assert tree.sizes == Sizes(20)
    assert not lease.open and (first.refs, second.refs, tree.root.refs) == (0, 0, 0)
    lease.release()
    assert first.refs == 0
    assert tree.evict(Sizes(2**40)) == Sizes(20) and len(tree) == 0


def test_a_lease_is_released_once_by_many_threads() -> None:
    tree = RadixCache()
    node = add(tree, TEXT)
    keep = tree.lease(node)
    for _ in range(50):
        lease = tree.lease(node)
        barrier = threading.Barrier(4)

        def give_back(lease: object = lease, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            lease.release()  # type: ignore[attr-defined]

        threads = [threading.Thread(target=give_back) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert node.refs == 1
    keep.release()
    check_tree(tree)


def test_match_and_lease_leave_no_gap() -> None:
    tree = RadixCache()
    add(tree, TEXT)
    found = tree.match(TEXT, "a", leased=True)
    assert tree.evict(Sizes(1)) == Sizes(0)
    assert found.lease is not None
    found.lease.release()
    assert tree.evict(Sizes(1)) == Sizes(10)
    with pytest.raises(PrefixCacheError, match="evicted"):
        tree.lease(found.node)
    with pytest.raises(PrefixCacheError, match="evicted"):
        tree.insert(found, [1], Bytes(1), "a")


def full_tree(clock: Callable[[], float] = lambda: 0.0) -> RadixCache:
    """A cache in which some more nodes are no turnover: uses of the others are not forgotten."""
    tree = RadixCache(clock=clock)
    tree.lease(add(tree, np.full(100, 77, np.int32), nbytes=10**8))
    return tree


def test_the_node_with_the_fewest_expected_hits_per_byte_is_evicted() -> None:
    """Expected hits are uses times tokens; of equal nodes, the one used longest ago."""
    now = [0.0]
    tree = full_tree(lambda: now[0])
    dear, large, often, small = (
        add(tree, np.full(tokens, fill, np.int32), nbytes=nbytes)
        for fill, (tokens, nbytes) in enumerate([(100, 1000), (100, 2000), (100, 1000), (50, 1000)])
    )
    now[0] = 1.0
    tree.match(np.full(101, 2, np.int32), "a")
    evicted = []
    for _ in range(4):
        tree.evict(Sizes(1))
        evicted.append(next(node for node in (dear, large, often, small) if node.gone and node not in evicted))
    assert evicted == [large, small, dear, often]
    assert tree.stats.evicted == 4 and tree.stats.evicted_bytes == 5000


def test_of_equal_nodes_the_one_used_longest_ago_is_evicted() -> None:
    tree = RadixCache(clock=lambda: 0.0)
    first, second = (add(tree, np.full(100, fill, np.int32)) for fill in (1, 2))
    for fill in (2, 1, 9):  # 9: neither is the latest used
        tree.match(np.full(101, fill), "a")
    assert tree.evict(Sizes(1)) == Sizes(10) and second.gone and not first.gone


def ask(tree: RadixCache, fill: int, limit: int = 30) -> None:
    """Look a document of 10 bytes up, insert it if it is missing, and evict beyond `limit` bytes."""
    if tree.match(np.full(101, fill), "a").length < 100:
        tree.insert(tree.root, np.full(100, fill), Bytes(10), "a")
    tree.evict(tree.sizes.less(Sizes(limit)))


def is_cached(tree: RadixCache, fill: int) -> bool:
    return tree.match(np.full(101, fill), "a", again=True).length == 100


def test_documents_in_use_outlast_a_scan() -> None:
    """Documents that are asked about once do not evict those that were asked about before."""
    tree = RadixCache()
    for fill in (1, 2) * 6 + (10, 11, 12):
        ask(tree, fill)
    assert is_cached(tree, 1) and is_cached(tree, 2)


def test_new_documents_in_turn_replace_those_out_of_use() -> None:
    """Each time one of them is missed, heat decays faster: the uses of the old ones count less."""
    tree = RadixCache()
    for fill in (1, 2, 3) * 12 + (4, 5, 6) * 3:
        ask(tree, fill)
    assert all(is_cached(tree, fill) for fill in (4, 5, 6))


def test_successive_questions_count_once() -> None:
    """A document that was asked about many times in a row outlasts none that is asked about in turn with others."""
    tree = RadixCache()
    for fill in (1,) * 20 + (2, 3, 2, 3, 4):
        ask(tree, fill)
    assert not is_cached(tree, 1) and is_cached(tree, 2) and is_cached(tree, 3)


def test_a_document_that_returns_after_longer_scans_stays_in_the_end() -> None:
    """In LRU order it is always missed; each time, heat decays more slowly."""
    tree, hits = RadixCache(), []
    for scan in range(20):
        hits.append(is_cached(tree, 1))
        for fill in (1, *range(100 + 4 * scan, 104 + 4 * scan)):
            ask(tree, fill)
    assert not any(hits[:3]) and all(hits[-3:])


def test_a_new_document_stays_for_its_follow_up() -> None:
    """The latest used document is evicted last, although others had more uses."""
    tree = RadixCache()
    for fill in (1, 2, 3, 1, 2, 3, 1, 2, 3, 9):
        ask(tree, fill)
    assert is_cached(tree, 9) and sum(is_cached(tree, fill) for fill in (1, 2, 3)) == 2
    ask(tree, 10)
    assert is_cached(tree, 10) and not is_cached(tree, 9)


@pytest.mark.parametrize("answers", [False, True])
def test_questions_on_one_document_count_once(answers: bool) -> None:
    """Three documents in turn stay behind three that had many questions each: the cache has room for about three."""
    tree = RadixCache()

    def questions(fill: int, count: int) -> None:
        for number in range(count):
            ask(tree, fill, 36)
            if answers:  # the question with its answer, a few tokens below the document
                add(
                    tree,
                    np.concatenate([np.full(100, fill), np.full(5, 1000 + 10 * fill + number)]).astype(np.int32),
                    1,
                )

    for fill in (1, 2, 3):
        questions(fill, 5)
    for fill in (4, 5, 6):
        questions(fill, 1)
    assert [is_cached(tree, fill) for fill in (4, 5, 6)] == [True] * 3


def test_documents_out_of_use_are_evicted() -> None:
    """Uses are forgotten as the cache turns over."""
    tree = RadixCache()
    for fill in (1, 1, 1, 1, *range(100, 150)):
        ask(tree, fill)
    assert not is_cached(tree, 1)


def test_uses_before_an_eviction_count() -> None:
    tree = full_tree()
    used = add(tree, np.full(100, 1, np.int32))
    tree.match([9, 9], "a")
    tree.match(np.full(101, 1), "a")
    tree.evict(Sizes(10))
    assert used.gone
    again, new = (add(tree, np.full(100, fill, np.int32)) for fill in (1, 2))
    tree.match([9, 9], "a")  # neither is the latest used
    assert tree.evict(Sizes(1)) == Sizes(10) and new.gone and not again.gone


def test_uses_of_few_evicted_nodes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieval_attn.engine.resident_set.MAX_EVICTED", 2)
    residents = ResidentSet()
    for number in range(1, 6):
        node = Node(None, np.full(10, number, np.int32), None, number)
        residents.add(node, Bytes(10), 1.0)
        residents.drop(node)
    assert len(residents._evicted) == 2


def test_a_new_child_of_a_used_node_outlasts_a_new_document() -> None:
    """A session's next turn is likely. A child of a node in frequent use is not as likely as that node."""
    tree = full_tree()
    parent = add(tree, TEXT)
    for _ in range(3):
        tree.match(join(TEXT, 0), "a")
        tree.match([9, 9], "a")  # successive uses would count once
    child = tree.insert(parent, np.full(100, 7), Bytes(10), "a")
    document = add(tree, np.full(100, 8, np.int32))
    often = add(tree, np.full(100, 9, np.int32))
    for _ in range(2):
        tree.match([9, 9], "a")
        tree.match(np.full(101, 9), "a")
    assert tree.evict(Sizes(1)) == Sizes(10) and document.gone
    assert tree.evict(Sizes(1)) == Sizes(10) and child.gone and not often.gone


def test_parents_go_after_their_last_child() -> None:
    tree = RadixCache()
    parent = add(tree, TEXT, nbytes=100)
    children = [add(tree, join(TEXT, np.full(100, fill)), nbytes=10) for fill in (1, 2)]
    assert tree.evict(Sizes(1)) == Sizes(10) and children[0].gone and not parent.gone
    with tree.lease(parent):
        assert tree.evict(Sizes(100)) == Sizes(10) and children[1].gone and not parent.gone
    assert tree.evict(Sizes(100)) == Sizes(100) and parent.gone


def test_nothing_needed_nothing_goes() -> None:
    tree = RadixCache()
    add(tree, TEXT)
    assert tree.evict(Sizes()) == tree.evict(Sizes(-5, -5, -5)) == Sizes() and len(tree) == 1


def test_bad_input() -> None:
    tree = RadixCache()
    node = add(tree, TEXT)
    with pytest.raises(ShapeError, match="at least one token"):
        tree.insert(node, [], Bytes(1), "a")
    for at in (0, 63, 201, -1):
        with pytest.raises(ShapeError, match="64 to 200"):
            tree.insert(Place(node, at), [1], Bytes(1), "a")
    for bad in (np.zeros((2, 2), np.int32), np.array([0.5]), ["a"], [2**31]):
        with pytest.raises(ShapeError, match="token ids"):
            tree.match(bad, "a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="share_tokens"):
        RadixCache(share_tokens=0)
    assert int32_row(TEXT) is TEXT and int32_row(range(3)).dtype == np.int32
    check_tree(tree)


def test_ids_are_the_trees_own() -> None:
    """A caller may reuse its buffer: what was inserted stays as it was."""
    tree = RadixCache()
    ids = TEXT.copy()
    node = add(tree, ids)
    ids[:] = 0
    assert tree.match(join(TEXT, 1), "a").length == 200
    with pytest.raises(ValueError, match="read-only"):
        node.ids[0] = 1


def test_stats_count_requests_once() -> None:
    tree = RadixCache()
    tree.match(TEXT, "a")
    add(tree, TEXT)
    tree.match(TEXT, "a")
    tree.match(TEXT, "a", again=True)
    stats = tree.stats
    assert (stats.prefix_entries_resident, stats.nbytes) == (1, 10)
    assert (stats.prefix_lookups, stats.hits, stats.prefix_tokens_queried, stats.tokens_hit) == (3, 1, 600, 199)


def test_every_operation_waits_for_the_one_that_another_thread_does() -> None:
    """Threads interleave too seldom for a race to show up in every run: so the lock itself is looked at."""
    tree = RadixCache()
    node = add(tree, TEXT)
    lease = tree.lease(node)
    operations: list[Callable[[], object]] = [
        lambda: tree.match(TEXT, "a"),
        lambda: tree.insert(node, [1], Bytes(1), "a"),
        lambda: tree.pending(node, [2], "a"),
        lambda: tree.lease(node).release(),
        lambda: tree.evict(Sizes(host=1)),
        lambda: tree.stats,
        lambda: check_tree(tree),
        lease.release,
    ]
    threads = [threading.Thread(target=operation) for operation in operations]
    with tree._lock:
        for thread in threads:
            thread.start()
        threads[0].join(0.1)
        waiting = [thread.is_alive() for thread in threads]
    for thread in threads:
        thread.join()
    assert all(waiting)
    check_tree(tree)


def test_check_finds_what_does_not_add_up() -> None:
    def damaged(name: str) -> RadixCache:
        tree = RadixCache()
        node = add(tree, TEXT)
        child = add(tree, join(TEXT, TEXT))
        if name == "refs":
            node.refs += 1
        elif name == "bytes":
            child.sizes = child.sizes.plus(Sizes(device=1))
        elif name == "count":
            tree._count += 1
        elif name == "start":
            child.start += 1
        elif name == "held":
            child.held = None
        elif name == "namespace":
            node.namespace = "b"
        return tree

    check_tree(damaged("none"))
    for name in ("refs", "bytes", "count", "start", "held", "namespace"):
        with pytest.raises(AssertionError):
            check_tree(damaged(name))


def test_what_waiting_requests_continue_goes_last() -> None:
    """The last request's first, and before the parents of any; with nothing else, memory still becomes free."""
    tree = RadixCache()
    texts = [TEXT + 1000 * number for number in range(5)]
    nodes = [add(tree, text) for text in texts]
    for _ in range(4):
        tree.match(texts[4], "a")
    tree.match([9, 9], "a")
    waiting = {nodes[0]: 0, nodes[1]: 1}
    assert tree.victims(Sizes(30)) == nodes[:3] and tree.victims(Sizes(30), waiting) == nodes[2:]
    assert tree.victims(Sizes(50), waiting) == [*nodes[2:], nodes[1], nodes[0]] and len(tree) == 5
    child = add(tree, join(texts[2], 7, 7))
    assert tree.victims(Sizes(60), {child: 0})[-2:] == [child, nodes[2]], "the parent follows its child"
    tree.evict(Sizes(10), waiting={**waiting, child: 2})
    assert nodes[3].gone and not nodes[0].gone and tree.evict(Sizes(99), waiting=waiting) == Sizes(50)
    check_tree(tree)


def test_nodes_that_are_kept_count_as_freed() -> None:
    """Neither a kept node nor its parent is evicted, and no other one in its place; a pin counts no use."""
    tree = full_tree()
    nodes = [add(tree, TEXT), add(tree, join(TEXT, 7, 7)), add(tree, TEXT + 1000), add(tree, TEXT + 2000)]
    tree.match(join(TEXT, 0), "a")  # other nodes are evicted before it
    tree.match([9, 9], "a")
    wanted = tree.victims(Sizes(20))
    assert tree.evict(Sizes(20), keeps=lambda node: node is wanted[0]) == Sizes(10)
    assert not wanted[0].gone and wanted[1].gone and len(tree) == 4
    used, child = nodes[0].used, nodes[1]
    lease = tree.pin(child)
    assert lease is not None and child not in tree.victims(Sizes(99)) and nodes[0].used == used
    lease.release()
    assert child in tree.victims(Sizes(99)) and nodes[0].used == used
    assert tree.evict(Sizes(99), keeps=lambda node: node is child) == Sizes(30 - 20)
    assert not nodes[0].gone, "its child stays"
    tree.evict(Sizes(99))
    assert tree.pin(child) is None and len(tree) == 1
    check_tree(tree)
