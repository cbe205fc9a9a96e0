"""Claims: equal texts that arrive together are read once; work that fails or is cancelled is passed on."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from retrieval_attn.engine.inflight_prefills import PrefillClaim
from retrieval_attn.engine.node import Node, PrefixCacheError, Sizes
from retrieval_attn.engine.radix_cache import Match, RadixCache
from retrieval_attn.errors import ConfigError, ShapeError
from tests.engine.audit import check_tree
from tests.engine.tree_reference import Bytes
from tests.waiting import WAIT_SECONDS

TEXT = np.arange(100, dtype=np.int32)


def claim(tree: RadixCache, ids: np.ndarray, namespace: str | None = "a") -> PrefillClaim:
    """As a request does: match, then claim what is left."""
    found = tree.match(ids, namespace)
    return tree.pending(found, ids[found.length :], namespace)


def read(tree: RadixCache, ids: np.ndarray, namespace: str | None = "a") -> Node:
    found = tree.match(ids, namespace)
    return tree.insert(found, ids[found.length :], Bytes(1), namespace)


def test_equal_texts_are_read_once() -> None:
    tree = RadixCache()
    first, *others = [claim(tree, TEXT) for _ in range(5)]
    assert first.is_owner and first.future.result() is None
    assert not any(other.is_owner or other.future.done() for other in others)
    assert tree.stats.reading == 1 and tree.stats.waiting == 4
    check_tree(tree)
    node = read(tree, TEXT)
    first.done(node)
    assert [other.future.result() for other in others] == [node] * 4
    assert not any(other.is_owner for other in others)
    assert tree.stats.reading == tree.stats.waiting == 0
    first.release()
    assert tree.match(TEXT, "a").length == 99


def test_one_by_one_the_others_get_the_work_of_who_fails() -> None:
    tree = RadixCache()
    claims = [claim(tree, TEXT) for _ in range(4)]
    claims[0].release()
    assert claims[1].is_owner and claims[1].future.result() is None
    assert not claims[2].future.done()
    claims[1].release()
    assert claims[2].is_owner and not claims[3].is_owner
    check_tree(tree)
    node = read(tree, TEXT)
    claims[2].done(node)
    assert claims[3].future.result() is node


def test_who_left_gets_neither_work_nor_node() -> None:
    tree = RadixCache()
    claims = [claim(tree, TEXT) for _ in range(5)]
    claims[1].release()
    assert claims[1].future.cancelled()
    assert claims[2].future.cancel()
    claims[0].release()
    assert claims[3].is_owner and not claims[1].is_owner and not claims[2].is_owner
    assert claims[4].future.cancel()
    claims[3].done(read(tree, TEXT))
    assert tree.stats.reading == tree.stats.waiting == 0


def test_all_gone_nothing_is_left() -> None:
    tree = RadixCache()
    claims = [claim(tree, TEXT) for _ in range(3)]
    claims[2].future.cancel()
    for one in claims:
        one.release()
        one.release()
    assert tree.stats.reading == tree.stats.waiting == 0
    assert claim(tree, TEXT).is_owner


def test_a_longer_and_a_shorter_text_wait_if_that_spares_them_enough() -> None:
    tree = RadixCache()
    first = claim(tree, TEXT)
    longer = claim(tree, np.append(TEXT, [7, 8]).astype(np.int32))
    shorter = claim(tree, TEXT[:80])
    unlike = claim(tree, np.append(TEXT[:63], TEXT + 500).astype(np.int32))
    too_short = claim(tree, TEXT[:40])
    other = claim(tree, np.append(TEXT[:70], TEXT[:70] + 500).astype(np.int32))
    assert first.is_owner and not longer.is_owner and not shorter.is_owner and not other.is_owner
    assert too_short.is_owner, "it would wait for 100 tokens of which it needs 39"
    assert unlike.is_owner, "63 tokens in common are fewer than share_tokens"
    check_tree(tree)


def test_a_short_prompt_does_not_wait_for_a_long_document() -> None:
    tree = RadixCache()
    document = np.append(TEXT, np.full(100_000, 9)).astype(np.int32)
    assert claim(tree, document).is_owner
    assert claim(tree, np.append(TEXT, [1, 2, 3]).astype(np.int32)).is_owner


def test_waiting_ones_that_do_not_serve_each_other_all_read() -> None:
    """A short text serves two that have nothing else in common; without it each reads its own."""
    tree = RadixCache()
    first = claim(tree, TEXT[:4])
    others = [claim(tree, np.append(TEXT[:4], np.full(90, fill)).astype(np.int32)) for fill in (1, 1, 2)]
    assert not any(other.is_owner for other in others)
    first.release()
    assert [other.is_owner for other in others] == [True, False, True]
    check_tree(tree)


def test_the_last_token_is_not_waited_for() -> None:
    """It is read in any case: a thousand equal requests for one token would wait for each other forever."""
    tree = RadixCache()
    read(tree, TEXT)
    assert all(claim(tree, TEXT).is_owner for _ in range(3))
    assert claim(RadixCache(), TEXT[:1]).is_owner


def test_what_the_tree_learned_since_the_match_is_not_read_again() -> None:
    tree = RadixCache()
    found = tree.match(TEXT, "a")
    node = read(tree, TEXT)
    late = tree.pending(found, TEXT, "a")
    assert not late.is_owner and late.future.result() is node
    assert tree.stats.reading == 0


def test_namespaces_do_not_wait_for_each_other() -> None:
    tree = RadixCache()
    assert claim(tree, TEXT, "a").is_owner
    assert claim(tree, TEXT, "b").is_owner
    everybody = claim(tree, TEXT, None)
    assert everybody.is_owner
    assert not claim(tree, TEXT, "c").is_owner, "what is read for everybody serves c"


def test_bad_claims() -> None:
    tree = RadixCache(share_tokens=4)
    node = tree.insert(tree.root, TEXT, Bytes(5), "a")
    with pytest.raises(ShapeError, match="at least one token"):
        tree.pending(node, [], "a")
    with pytest.raises(ConfigError, match="namespace"):
        tree.pending(node, [1], "b")
    tree.evict(Sizes(1))
    with pytest.raises(PrefixCacheError, match="evicted"):
        tree.pending(node, [1], "a")


def test_what_hangs_on_a_future_may_use_the_tree() -> None:
    """Futures resolve outside of all locks: a waiting request matches in its callback."""
    tree = RadixCache()
    first, second, third = (claim(tree, TEXT) for _ in range(3))
    seen: list[int] = []

    def matched(future: Future[Node | None]) -> None:
        check_tree(tree)
        seen.append(tree.match(TEXT, "a").length)
        claim(tree, TEXT[::-1].copy()).release()

    second.future.add_done_callback(matched)
    third.future.add_done_callback(matched)
    first.release()
    second.done(read(tree, TEXT))
    assert seen == [0, 99]


def test_random_requests_all_end_and_read_only_what_is_needed() -> None:
    """300 seeds of requests that read, fail, are cancelled or wait: each ends, nothing is left or read twice."""
    for seed in range(300):
        draw = random.Random(seed)
        share = draw.choice([1, 2, 4])
        tree = RadixCache(share_tokens=share, clock=lambda: 0.0)
        texts = [[draw.randrange(2) for _ in range(draw.randint(1, 12))] for _ in range(3)]
        waiting: list[tuple[np.ndarray, Match, PrefillClaim]] = []
        faults, reads = draw.choice([0.0, 0.3]), 0

        def ask(ids: np.ndarray, again: bool, tree: RadixCache = tree, waiting: list = waiting) -> None:
            found = tree.match(ids, "a", leased=True, again=again)
            waiting.append((ids, found, tree.pending(found, ids[found.length :], "a")))

        for _ in range(12):
            ask(np.array(draw.choice(texts), np.int32), False)
        for _ in range(400):
            if not waiting:
                break
            ready = [place for place, entry in enumerate(waiting) if entry[2].future.done()]
            assert ready, f"seed {seed}: all wait"
            ids, found, mine = waiting.pop(draw.choice(ready if draw.random() > faults else range(len(waiting))))
            assert found.lease is not None
            if not mine.future.done() or draw.random() < faults:
                mine.release()
            elif mine.future.result(timeout=0) is None:
                assert mine.is_owner
                reads += len(ids) - found.length > share  # fewer are not found by an equal text
                mine.done(tree.insert(found, ids[found.length :], Bytes(1), "a"))
            else:
                ask(ids, True)
                assert waiting[-1][1].length > found.length, f"seed {seed}: it waited for nothing"
            found.lease.release()
            check_tree(tree)
        assert not waiting and tree.stats.prefix_lookups == 12
        assert tree.stats.reading == tree.stats.waiting == tree.root.refs == 0
        if not faults:
            assert reads <= len({tuple(text) for text in texts}), f"seed {seed}"


def test_threads_that_arrive_together_read_once() -> None:
    tree = RadixCache()
    barrier = threading.Barrier(8)
    reads: list[int] = []
    ends: list[int] = []

    def request(number: int) -> None:
        barrier.wait()
        while True:
            found = tree.match(TEXT, "a", leased=True)
            assert found.lease is not None
            with found.lease, contextlib.ExitStack() as ended:
                mine = tree.pending(found, TEXT[found.length :], "a")
                ended.callback(mine.release)
                if mine.future.result(timeout=WAIT_SECONDS) is not None:
                    continue
                if found.length < len(TEXT) - 1:
                    reads.append(number)
                    if len(reads) < 3:
                        return  # two readers give up
                mine.done(tree.insert(found, TEXT[found.length :], Bytes(1), "a"))
                ends.append(number)
                return

    threads = [threading.Thread(target=request, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 3 and len(ends) == 6
    check_tree(tree)
    assert tree.root.refs == 0 and tree.stats.reading == tree.stats.waiting == 0
