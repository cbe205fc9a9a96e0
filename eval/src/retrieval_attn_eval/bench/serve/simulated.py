"""Hit rates that a trace allows: of an unlimited prefix cache, and of an optimal one with limited memory.

Both are simulated over token ids. A request hits the longest common prefix with the tokens in the cache, at most all
but its last token, whose logits are needed.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

__all__ = ["PromptTree", "optimal_hits", "unlimited_hits"]

Ids = NDArray[np.int32]


@dataclass(eq=False)
class _Segment:
    """Span of tokens after which prompts differ or end. parent: None for the first span of a prompt."""

    ids: Ids
    parent: _Segment | None
    children: dict[int, _Segment] = field(default_factory=dict)


class PromptTree:
    """Prompts of a trace, cut into segments wherever two of them differ or one ends.

    Attributes:
        paths: segments of each prompt by number, in order.
        sizes: tokens of each segment.
    """

    def __init__(self, prompts: Iterable[Sequence[int] | Ids]) -> None:
        """prompts: token ids of each request in order. Each must have at least one."""
        self._root = _Segment(np.zeros(0, np.int32), None)
        ends = [self._insert(np.asarray(ids, np.int32)) for ids in prompts]
        numbers: dict[int, int] = {}
        self.paths: list[list[int]] = []
        self.sizes: list[int] = []
        for end in ends:
            path: list[int] = []
            segment: _Segment | None = end
            while segment is not None and segment is not self._root:
                number = numbers.setdefault(id(segment), len(numbers))
                if number == len(self.sizes):
                    self.sizes.append(len(segment.ids))
                path.append(number)
                segment = segment.parent
            self.paths.append(path[::-1])

    @property
    def prompt_tokens(self) -> list[int]:
        """Tokens of each prompt."""
        return [sum(self.sizes[segment] for segment in path) for path in self.paths]

    def _insert(self, ids: Ids) -> _Segment:
        """Return the segment at whose end the prompt ends."""
        at, place = self._root, 0
        while place < len(ids):
            child = at.children.get(int(ids[place]))
            if child is None:
                at.children[int(ids[place])] = child = _Segment(ids[place:], at)
                return child
            common = _common(child.ids, ids[place:])
            if common < len(child.ids):
                child = _split(child, common)
            at, place = child, place + common
        return at


def _common(first: Ids, second: Ids) -> int:
    """Return the number of equal ids at the beginning."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size


def _split(segment: _Segment, size: int) -> _Segment:
    """Cut a segment after `size` tokens; it becomes the child of a new one, which is returned."""
    parent = segment.parent
    assert parent is not None, "the root is never split"
    upper = _Segment(segment.ids[:size], parent)
    parent.children[int(upper.ids[0])] = upper
    segment.ids, segment.parent = segment.ids[size:], upper
    upper.children[int(segment.ids[0])] = segment
    return upper


def unlimited_hits(tree: PromptTree) -> list[int]:
    """Return the cached tokens of each request if nothing is ever evicted."""
    seen: set[int] = set()
    hits = []
    for path in tree.paths:
        known = sum(tree.sizes[segment] for segment in path if segment in seen)
        hits.append(min(known, sum(tree.sizes[segment] for segment in path) - 1))
        seen.update(path)
    return hits


def optimal_hits(tree: PromptTree, capacity: int) -> list[int]:
    """Return the cached tokens of each request if the tokens that are needed last are evicted (Belady's policy).

    After each request at most `capacity` tokens stay. No policy with this capacity hits more tokens.
    """
    uses: dict[int, list[int]] = defaultdict(list)
    for number in reversed(range(len(tree.paths))):
        for segment in tree.paths[number]:
            uses[segment].append(number)
    held: dict[int, int] = {}  # tokens of each segment in the cache, from its start
    order: list[tuple[float, int, int]] = []  # next use and depth, both negative, and the segment
    hits, total = [], 0
    for path in tree.paths:
        hits.append(_hit(tree, held, path))
        for depth, segment in enumerate(path):
            uses[segment].pop()
            total += tree.sizes[segment] - held.get(segment, 0)
            held[segment] = tree.sizes[segment]
            heapq.heappush(order, (-(uses[segment][-1] if uses[segment] else inf), -depth, segment))
        while total > capacity:
            entry = heapq.heappop(order)
            segment = entry[2]
            if not held.get(segment) or -entry[0] != (uses[segment][-1] if uses[segment] else inf):
                continue  # used again since
            evicted = min(held[segment], total - capacity)
            held[segment] -= evicted
            total -= evicted
            if held[segment]:
                heapq.heappush(order, entry)
    return hits


def _hit(tree: PromptTree, held: dict[int, int], path: Sequence[int]) -> int:
    hit = 0
    for segment in path:
        hit += held.get(segment, 0)
        if held.get(segment, 0) < tree.sizes[segment]:
            break
    return min(hit, sum(tree.sizes[segment] for segment in path) - 1)
