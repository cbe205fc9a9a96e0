"""RULER's question answering tasks: the documents that answer a question, among others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from retrieval_attn_eval.ruler import specs
from retrieval_attn_eval.ruler.needles import cut_line
from retrieval_attn_eval.ruler.qa_files import QuestionSource
from retrieval_attn_eval.suite.fit import Draft
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["Documents"]

_BATCH = 64
_SWAPS = 4


def _header(i: int) -> str:
    return "\n\n" + specs.QA_HEADER.format(i=i).rstrip()


class Documents(Draft):
    """Unit: a document.  Those of the question come first, then related ones, then others at random; shown shuffled.

    Once every document of the pool is there, the others are shown again.
    """

    def __init__(self, source: QuestionSource, i: int, rng: random.Random, counter: TokenCounter, length: int) -> None:
        question = source.question(i)
        self._source, self._counter, self._rng = source, counter, rng
        self.answers = question.answers
        self.instruction = specs.QA_INSTRUCTION
        self.question, self.prefix = specs.QA_QUESTION.format(query=question.text), specs.QA_PREFIX
        self._gold = list(question.gold)
        self._pool = source.pool(length)
        related = list(question.related)
        rng.shuffle(related)
        self._order = self._gold + related
        self._kept = len(self._order)  # never shown less for a better fill
        self._used = set(self._order)
        self._shuffle = rng.getrandbits(64)
        self.lowest = len(self._gold)
        self._cost = [0]  # tokens of the first n documents
        self._swaps: dict[int, int] = {}  # place in the order -> document that stands there instead
        self._extra = ""

    def _draw(self, count: int) -> None:
        """Let the order have `count` documents or more."""
        while len(self._order) < count:
            if len(self._used) >= self._pool:
                self._used = set(self._gold)
            if len(self._used) >= self._pool:  # the question's own documents are all there are
                self._used = set()
            j = self._rng.randrange(self._pool)
            if j not in self._used:
                self._used.add(j)
                self._order.append(j)

    def _price(self, count: int) -> None:
        """Let the first `count` documents or more have costs."""
        while len(self._cost) <= count:
            done = len(self._cost) - 1
            self._draw(done + _BATCH)
            headers = self._counter.inside([_header(i) for i in range(done + 1, done + _BATCH + 1)])
            for header, cost in zip(headers, self._costs(self._order[done : done + _BATCH]), strict=True):
                self._cost.append(self._cost[-1] + header + cost)

    def _costs(self, documents: list[int]) -> list[int]:
        return self._counter.inside(["\n" + self._source.document(j) for j in documents])

    def estimate(self, n: int) -> float:
        self._price(n)
        return self._cost[n]

    def _shown(self, n: int) -> list[int]:
        """Places in the order, as they are shown."""
        places = list(range(n))
        random.Random(self._shuffle).shuffle(places)
        return places

    def context(self, n: int) -> str:
        self._draw(n)
        chosen = [self._swaps.get(place, j) for place, j in enumerate(self._order[:n])]
        texts = [self._source.document(chosen[place]) for place in self._shown(n)]
        if self._extra:
            texts.append(self._extra)
        return self.instruction + "\n\n".join(
            [specs.QA_HEADER.format(i=i) + text for i, text in enumerate(texts, start=1)]
        )

    def tune(self, n: int, room: int) -> bool:
        """Show longer documents in place of others; if that is not enough, also a part of one more."""
        self._draw(n + _BATCH)
        old = np.array(self._costs(self._order[self._kept : n]), dtype=np.int64)
        spare = self._order[n : n + _BATCH]
        new = np.array(self._costs(spare), dtype=np.int64)
        left = room
        for _ in range(_SWAPS):
            gains = new[None, :] - old[:, None]
            gains = np.where(gains <= left, gains, 0)
            if not gains.size or gains.max() <= 0:
                break
            place, candidate = map(int, np.unravel_index(int(gains.argmax()), gains.shape))
            self._swaps[place + self._kept] = spare[candidate]
            left -= int(gains[place, candidate])
            old[place], new[candidate] = new[candidate], 0  # a document moves once
        if left > room // 4:
            header = self._counter.inside([_header(n + 1)])[0]
            unused = next(j for j in spare if j not in self._swaps.values())
            self._extra = cut_line(self._source.document(unused), left - header, self._counter, keep="start")
        return bool(self._extra or self._swaps)

    def untune(self) -> None:
        self._swaps, self._extra = {}, ""

    def meta(self, n: int, context: str) -> dict[str, Any]:
        start = len(self.instruction)
        places = [context.index(self._source.document(j)) - start for j in self._gold]
        depths = [round(100 * place / (len(context) - start), 2) for place in places]
        return {"documents": n + bool(self._extra), "depths": depths, "repeats": n > self._pool}
