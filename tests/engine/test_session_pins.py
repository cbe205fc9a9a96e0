"""Sessions in the prefix cache: those that ran lately outlast texts of more recent use, and what they left does not."""

from __future__ import annotations

import numpy as np
import pytest

from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.node import Node, SessionPins, Sizes
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.request import Request
from retrieval_attn.errors import ConfigError
from tests.engine.audit import check_engine, check_tree
from tests.engine.test_reuse import SHARED, answers_of, ids, llm_of, request
from tests.engine.tree_reference import Bytes

KEEP = 60.0


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def text(fill: int) -> np.ndarray:
    return np.full(100, fill, np.int32)


def tree_of(clock: Clock, keep: float = KEEP) -> RadixCache:
    return RadixCache(keep_session_seconds=keep, clock=clock)


def add(tree: RadixCache, fill: int, *, session: str = "", after: Node | None = None, nbytes: int = 10) -> Node:
    """A text that is used once; of a session, if it has a name."""
    node = tree.insert(after or tree.root, text(fill), Bytes(nbytes), "a")
    if session:
        tree.keep_session(session, "a", node)
    return node


def evicted(tree: RadixCache, nodes: list[Node]) -> list[int]:
    """Numbers of the nodes in order of their eviction, which the preview has, too."""
    preview = tree.victims(Sizes(10 * len(nodes)))
    order = []
    while any(not node.gone for node in nodes):
        before = [node for node in nodes if node.gone]
        assert tree.evict(Sizes(1)).total == 10
        order += [number for number, node in enumerate(nodes) if node.gone and node not in before]
        check_tree(tree)
    assert [nodes.index(node) for node in preview] == order
    return order


@pytest.mark.parametrize(("keep", "order"), [(KEEP, [1, 2, 3, 0]), (0.0, [0, 1, 2, 3])])
def test_a_session_outlasts_texts_of_more_recent_use(keep: float, order: list[int]) -> None:
    tree = tree_of(Clock(), keep)
    nodes = [add(tree, 1, session="s"), *(add(tree, fill) for fill in (2, 3, 4))]
    assert evicted(tree, nodes) == order


def test_texts_in_frequent_use_go_before_a_session() -> None:
    tree = tree_of(Clock())
    session, often, other = add(tree, 1, session="s"), add(tree, 2), add(tree, 3)
    for _ in range(9):
        tree.match(text(2), "a")
        tree.match(text(3), "a")
    assert evicted(tree, [session, often, other])[-1] == 0


def test_a_session_is_kept_for_its_time() -> None:
    clock = Clock()
    tree = tree_of(clock)
    nodes = [add(tree, 1, session="s"), add(tree, 2)]
    clock.now += KEEP + 1
    assert evicted(tree, nodes) == [0, 1]
    nodes = [add(tree, 1, session="s"), add(tree, 2)]
    clock.now += KEEP - 1
    tree.keep_session("s", "a", nodes[0])
    clock.now += KEEP - 1
    assert evicted(tree, nodes) == [1, 0], "its next turn begins the time anew"


def test_a_branch_that_a_session_left_is_not_kept() -> None:
    """As after a compaction: the first prompt of the summary shares the system prompt alone."""
    tree = tree_of(Clock())
    system = add(tree, 1)
    before = add(tree, 2, session="s", after=system)
    other = add(tree, 3)
    after = add(tree, 4, session="s", after=system)
    assert evicted(tree, [system, before, other, after]) == [1, 2, 3, 0]


def test_the_parent_of_an_evicted_node_is_kept_in_its_place() -> None:
    tree = tree_of(Clock())
    parent = add(tree, 1)
    child = add(tree, 2, session="s", after=parent)
    assert tree.evict(Sizes(1)).total == 10 and child.gone
    nodes = [parent, add(tree, 3), add(tree, 4, session="t"), add(tree, 5)]
    assert evicted(tree, nodes) == [1, 3, 0, 2]
    assert len(tree._pins) == 0


def test_sessions_of_two_namespaces_are_two() -> None:
    tree = tree_of(Clock())
    mine = add(tree, 1, session="s")
    theirs = tree.insert(tree.root, text(1), Bytes(10), "b")
    tree.keep_session("s", "b", theirs)
    assert evicted(tree, [mine, add(tree, 2), theirs])[0] == 1


def test_what_waiting_requests_continue_goes_after_sessions() -> None:
    tree = tree_of(Clock())
    session, awaited = add(tree, 1, session="s"), add(tree, 2)
    tree.evict(Sizes(1), waiting={awaited: 0})
    assert session.gone and not awaited.gone


def test_a_negative_time_is_refused() -> None:
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="at least 0"):
            SessionPins(seconds)


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("keep", [0.0, KEEP])
def test_a_request_of_a_session_keeps_its_prompt(generated: bool, keep: float) -> None:
    """A prompt of a session, then as many others as the cache has no room for; and the next turn."""
    llm, prompt = llm_of(), (ids(600, 1), ids(9, 2))
    with Engine(llm, prefix_cache_bytes=SHARED) as engine:
        engine.submit(request(prompt, 4)).result()
        room = 3 * engine.stats["shared"].nbytes
    with Engine(llm, prefix_cache_bytes=room, cache_generated=generated, keep_session_seconds=keep) as engine:
        first = engine.submit(request(prompt, 4, session="s")).result()
        for number in range(8):
            engine.submit(request((ids(600, 10 + number), ids(9, 3)), 4)).result()
            check_engine(engine)
        again = (*prompt[:1], (*prompt[1], *first.tokens, *ids(80, 5)))
        kept = 609 + 3 if generated else 600
        assert engine.submit(request(again, 4, session="s")).result().cached_tokens == (kept if keep else 0)
        assert bool(answers_of(engine)) == generated
        assert engine.stats["shared"].evicted


def test_requests_have_no_session_by_default() -> None:
    assert Request(((1, 2),)).session == ""
