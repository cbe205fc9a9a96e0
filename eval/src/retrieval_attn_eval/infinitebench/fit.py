"""How many units of a draft fill a budget of tokens, without tokenizing every sample as a whole.

Token counts of units add up for most tokenizers, because units begin and end where words do.  That is checked, once for
every tokenizer, task and size, against the tokens of the whole text; where it does not hold, every sample is
tokenized as a whole and shrunk until it fits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.infinitebench.drafts import DRAFTS, Draft
from retrieval_attn_eval.infinitebench.functions import LAYERS, OPENING, functions_of
from retrieval_attn_eval.infinitebench.profiles import Pieces
from retrieval_attn_eval.infinitebench.record import Record
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["Filler"]

_PORTION = 64
_TRIES = 12


class Filler:
    """Makes generated records of a tokenizer that fill a budget from below.

    make(task, seed, i, pieces, budget): pieces turns a record into the words around its context; budget is for
    everything but the answer, in tokens.  Returns the record and its tokens (of before + context + after).
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.counter = tokenizer, TokenCounter(tokenizer)
        self._adds_up: dict[tuple[str, int], bool] = {}

    def make(
        self, task: str, seed: int, i: int, pieces: Callable[[Record], Pieces], budget: Callable[[Pieces], int]
    ) -> tuple[Record, int]:
        """Raises ConfigError if the budget is too small for the task."""
        make = self._functions if task == "code_run" else self._units
        return make(task, seed, i, pieces, budget)

    def _whole(self, record: Record, pieces: Pieces) -> int:
        return self.counter.count(pieces.before + record.context + pieces.after)

    def _units(
        self, task: str, seed: int, i: int, pieces: Callable[[Record], Pieces], budget: Callable[[Pieces], int]
    ) -> tuple[Record, int]:
        draft = DRAFTS[task](task, seed, i)
        smallest = draft.record(draft.least)
        around = pieces(smallest)
        room = budget(around)
        rest = self._whole(smallest, around) - sum(self._costs(draft, draft.least))
        costs = self._enough(draft, room - rest)
        if not costs:
            self._adds_up[task, room.bit_length()] = False
            return self._shrink(task, draft.record, around, pieces, room, draft.least)
        ends = np.cumsum(costs)
        count = int(np.searchsorted(ends, room - rest, side="right"))
        if count < draft.least:
            raise _too_short(task, room, rest + int(ends[draft.least - 1]))
        record = draft.record(count)
        tokens = rest + int(ends[count - 1])
        if self._trusted(task, room, tokens, record, pieces(record)):
            return record, tokens
        return self._shrink(task, draft.record, around, pieces, room, draft.least)

    def _costs(self, draft: Draft, count: int) -> list[int]:
        return self.counter.inside(draft.units(count), draft.anchor, keep=not draft.distinct)

    def _enough(self, draft: Draft, room: int) -> list[int]:
        """Costs of so many units that together they pass `room`; none if units melt into one another."""
        count = draft.least + _PORTION
        costs = self._costs(draft, count)
        if min(costs) < 1:
            return []
        while (have := sum(costs)) <= room:
            more = int((room - have) * 1.01 / max(have / count, 0.1)) + _PORTION
            units = draft.units(count + more)[count:]
            costs += self.counter.inside(units, draft.anchor, keep=not draft.distinct)
            count += more
        return costs

    def _functions(
        self, task: str, seed: int, i: int, pieces: Callable[[Record], Pieces], budget: Callable[[Pieces], int]
    ) -> tuple[Record, int]:
        least = LAYERS[i % len(LAYERS)]
        count, tried = least, set[int]()
        best: tuple[Record, int] | None = None
        while count not in tried and len(tried) < _TRIES:
            tried.add(count)
            parts, record = functions_of(seed, i, count)
            around = pieces(record)
            room = budget(around)
            rest = self.counter.count(around.before + OPENING + around.after)
            inside = sum(sum(self.counter.inside(column, "\n\n")) for column in zip(*parts, strict=True))
            if rest + inside <= room and (best is None or rest + inside > best[1]):
                best = (record, rest + inside)
            elif count == least:
                raise _too_short(task, room, rest + inside)
            step = int((room - rest - inside) // (inside / count))
            count = max(count + step, least)
        assert best is not None
        record, tokens = best
        if self._trusted(task, room, tokens, record, pieces(record)):
            return best

        def draw(count: int) -> Record:
            return functions_of(seed, i, count)[1]

        return self._shrink(task, draw, pieces(record), pieces, room, least)

    def _trusted(self, task: str, room: int, tokens: int, record: Record, pieces: Pieces) -> bool:
        """True if the counted tokens are those of the whole text; looked at once per task and size."""
        key = (task, room.bit_length())
        if key not in self._adds_up:
            self._adds_up[key] = self._whole(record, pieces) == tokens
        return self._adds_up[key]

    def _shrink(
        self,
        task: str,
        draw: Callable[[int], Record],
        around: Pieces,
        pieces: Callable[[Record], Pieces],
        room: int,
        least: int,
    ) -> tuple[Record, int]:
        """The largest sample found that fits, each candidate tokenized as a whole."""
        record = draw(least)
        best = record, self._whole(record, around)
        if best[1] > room:
            raise _too_short(task, room, best[1])
        # between `fits` and `over` units the right number is guessed along a straight line
        fits, over, tokens_over = least, None, 0
        count = least + _PORTION
        for _ in range(2 * _TRIES):
            record = draw(count)
            tokens = self._whole(record, pieces(record))
            if tokens <= room:
                fits = max(fits, count)
                best = (record, tokens) if tokens >= best[1] else best
            elif over is None or count < over:
                over, tokens_over = count, tokens
            if room - best[1] < 0.002 * room or over == fits + 1:
                break
            if over is None:
                count = 2 * count + int((room - tokens) / (tokens / count) * 0.5)
            else:
                share = (room - best[1]) / max(tokens_over - best[1], 1)
                count = min(max(fits + int((over - fits) * share), fits + 1), over - 1)
            if over is not None and over <= fits:
                break
        return best


def _too_short(task: str, room: int, needed: int) -> ConfigError:
    return ConfigError(
        f"{task}: the length leaves {room} tokens for the context, the smallest sample needs {needed};"
        f" give a length of at least {needed - room} tokens more"
    )
