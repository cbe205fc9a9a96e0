"""Combinations of parameters: ordinary tests run those that cover all pairs of values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

__all__ = ["pairwise"]


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations, for `parametrize`; those that cover no new pair of values are marked `fuzz`."""
    rest = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = {pair for numbers in rest for pair in _pairs(numbers)}
    chosen = set()
    while missing:
        best = max(rest, key=lambda numbers: len(missing & set(_pairs(numbers))))
        missing -= set(_pairs(best))
        chosen.add(best)
    return [
        pytest.param(
            *(axis[number] for axis, number in zip(axes, numbers, strict=True)),
            marks=() if numbers in chosen else pytest.mark.fuzz,
        )
        for numbers in rest
    ]


def _pairs(numbers: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield pairs of an axis and the number of a value."""
    yield from itertools.combinations(enumerate(numbers), 2)
