"""PagePool: pages are conserved, never had and free at once, and what goes wrong changes nothing."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from retrieval_attn.engine.node import PrefixCacheError
from retrieval_attn.engine.paged_prefix import PageCounts, PagePool
from retrieval_attn.errors import ConfigError, ShapeError
from tests.engine.audit import check_pages


def test_pages_are_taken_and_freed() -> None:
    pool = PagePool(8)
    first = pool.take(3)
    assert first.dtype == np.int32 and first.tolist() == [0, 1, 2]
    assert pool.counts() == PageCounts(free=5, held=3, total=8)
    assert pool.free(first[:2]) == 2
    assert pool.free(first[2:]) == 1
    assert pool.counts() == PageCounts(free=8, held=0, total=8)
    check_pages(pool)


def test_the_page_freed_last_is_taken_first() -> None:
    pool = PagePool(8)
    ids = pool.take(5)
    pool.free(ids[[1, 3]])
    assert pool.take(3).tolist() == [1, 3, 5]


def test_out_of_pages_says_the_numbers_and_takes_nothing() -> None:
    pool = PagePool(10, page_tokens=64)
    pool.take(7)
    with pytest.raises(
        PrefixCacheError, match=r"4 pages of 64 tokens are needed, but 3 of 10 are free and 7 are in use"
    ):
        pool.take(4)
    assert pool.free_pages == 3
    check_pages(pool)


def test_freeing_more_often_than_taken_is_an_error_and_changes_nothing() -> None:
    pool = PagePool(4)
    ids = pool.take(2)
    with pytest.raises(PrefixCacheError, match=r"\[1\] are freed more often"):
        pool.free([0, 1, 1])
    with pytest.raises(PrefixCacheError, match=r"\[3\] are freed more often"):
        pool.free([0, 3])
    assert pool.counts() == PageCounts(free=2, held=2, total=4)
    check_pages(pool)
    pool.free(ids)
    with pytest.raises(PrefixCacheError):
        pool.free(ids)


def test_bad_arguments() -> None:
    pool = PagePool(4)
    for bad in ([4], [-1], [2**40]):
        with pytest.raises(ShapeError, match="page ids must"):
            pool.free(bad)
    with pytest.raises(ShapeError, match="integers"):
        pool.free([0.5])  # type: ignore[list-item]
    with pytest.raises(ShapeError, match="0 or more"):
        pool.take(-1)
    with pytest.raises(ConfigError, match="pages"):
        PagePool(-1)
    with pytest.raises(ConfigError, match="page_tokens"):
        PagePool(1, 0)
    assert pool.take(0).tolist() == [] and pool.free([]) == 0
    assert [PagePool(0, 64).pages_for(tokens) for tokens in (0, 1, 64, 65)] == [0, 1, 1, 2]


def test_check_finds_a_page_that_is_lost_or_free_twice() -> None:
    for damage in ("lost", "twice"):
        pool = PagePool(4)
        pool.free(pool.take(2))
        if damage == "lost":
            pool._free -= 1
        else:
            pool._stack[0] = pool._stack[1]
        with pytest.raises(AssertionError):
            check_pages(pool)


def test_random_operations_conserve_pages() -> None:
    """300 seeds against the set of held pages: a page is taken only if it is free."""
    for seed in range(300):
        draw = random.Random(seed)
        pool = PagePool(draw.randint(0, 12))
        held: set[int] = set()
        for _ in range(40):
            if draw.random() < 0.5:
                n = draw.randint(0, 4)
                if n > pool.pages - len(held):
                    with pytest.raises(PrefixCacheError):
                        pool.take(n)
                else:
                    ids = pool.take(n).tolist()
                    assert len(set(ids)) == n and not set(ids) & held
                    held.update(ids)
            else:
                some = draw.sample(sorted(held), draw.randint(0, len(held)))
                assert pool.free(some) == len(some)
                held.difference_update(some)
            check_pages(pool)
            assert pool.counts() == (pool.pages - len(held), len(held), pool.pages), f"seed {seed}"


def test_threads_take_and_free() -> None:
    """Two threads that take and free never get the same page at once."""
    pool = PagePool(16)
    owners = np.zeros(16, np.int64)
    errors: list[str] = []

    def work(name: int) -> None:
        draw = random.Random(name)
        for _ in range(2000):
            try:
                ids = pool.take(draw.randint(1, 10))
            except PrefixCacheError:
                continue
            owners[ids] = name
            if not (owners[ids] == name).all():
                errors.append(f"pages of {name} were written to by another thread")
            pool.free(ids)

    threads = [threading.Thread(target=work, args=(name,)) for name in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check_pages(pool)
    assert pool.free_pages == 16
