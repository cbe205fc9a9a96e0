"""`pairwise` runs each pair of values, and marks the other combinations."""

from __future__ import annotations

import itertools

from tests.pairs import pairwise


def test_all_pairs_are_run() -> None:
    axes = "abcd", "123", "xyz"
    found = pairwise(*axes)
    run = [one.values for one in found if not one.marks]
    assert [one.values for one in found] == list(itertools.product(*axes)) and len(run) <= 15
    for first, second in itertools.combinations(range(3), 2):
        assert {(one[first], one[second]) for one in run} == set(itertools.product(axes[first], axes[second]))
