"""RULER's variable tracking: a chain of assignments in noise, after one worked example."""

from __future__ import annotations

import random
from typing import Any

from retrieval_attn_eval.plans import NOISE_LINE, number
from retrieval_attn_eval.ruler import specs
from retrieval_attn_eval.ruler.needles import cut_line
from retrieval_attn_eval.suite.fit import Draft
from retrieval_attn_eval.suite.fitted import TaskSpec
from retrieval_attn_eval.text.tokens import TokenCounter

__all__ = ["Chains", "Example"]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_EXAMPLE_TOKENS = 500


def _names(rng: random.Random, count: int, letters: int, taken: set[str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        name = "".join(rng.choices(_LETTERS, k=letters))
        if name not in taken:
            found[name] = None
    return list(found)


def _statements(names: list[str], value: str) -> list[str]:
    following = [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)]
    return [f"VAR {names[0]} = {value}", *following]


def _text(lines: list[str]) -> str:
    return "\n".join(lines).replace(". \n", ".\n")


def _insert(lines: list[str], statements: list[str], places: list[int]) -> list[str]:
    """Lines with statement i put before line places[i] of the original ones; places ascend."""
    for shift, (place, statement) in enumerate(zip(places, statements, strict=True)):
        lines.insert(place + shift, statement)
    return lines


class Example:
    """Where the noise and the statements of the worked example stand: the same in every sample of a seed.

    Sized once to 500 tokens; names and value are drawn anew for every sample.
    """

    def __init__(self, counter: TokenCounter, seed: int, hops: int) -> None:
        self.hops = min(10, hops)
        rng = random.Random(f"ruler/vt-example/{seed}")
        names = _names(rng, self.hops + 1, 3, set())
        self.lines = self.hops + 1
        self.places: list[int] = []
        for lines in range(self.hops + 1, 200):
            places = sorted(random.Random(f"ruler/vt-example/{seed}/places").sample(range(lines), self.hops + 1))
            if self.places and counter.counts([self._prompt(lines, places, names, "12345")])[0] > _EXAMPLE_TOKENS:
                break
            self.lines, self.places = lines, places

    def _prompt(self, lines: int, places: list[int], names: list[str], value: str) -> str:
        context = _text(_insert([NOISE_LINE] * lines, _statements(names, value), places))
        question, prefix = _ask(value, len(names))
        return specs.VT_INSTRUCTION + context + question + prefix

    def render(self, rng: random.Random, taken: set[str]) -> str:
        """The example with its answer, ready to stand before the task."""
        names = _names(rng, self.hops + 1, 3, taken)
        return self._prompt(self.lines, self.places, names, number(rng, 5)) + " " + " ".join(names) + "\n\n"


def _ask(value: str, count: int) -> tuple[str, str]:
    return (specs.VT_QUESTION.format(query=value), specs.VT_PREFIX.format(query=value, num_v=count))


class Chains(Draft):
    """Unit: a line of noise."""

    def __init__(self, spec: TaskSpec, rng: random.Random, counter: TokenCounter, example: Example) -> None:
        hops, chains = int(spec.options["hops"]), int(spec.options["chains"])
        self._counter = counter
        names = _names(rng, (hops + 1) * chains, 5, set())
        values: list[str] = []
        while len(values) < chains:
            value = str(rng.randint(10000, 99998))
            if value not in values:
                values.append(value)
        groups = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(chains)]
        self.answers = tuple(groups[0])
        self._chains = [_statements(group, value) for group, value in zip(groups, values, strict=True)]
        self.instruction = example.render(rng, set(values)) + specs.VT_INSTRUCTION
        self.question, self.prefix = _ask(values[0], hops + 1)
        self._places = rng.getrandbits(64)
        self._extra = ""
        self.lowest = hops + 1
        flat = [statement for chain in self._chains for statement in chain]
        self._fixed = counter.counts([self.instruction])[0] + sum(counter.inside(["\n" + line for line in flat]))
        self._per_line = counter.inside(["\n" + NOISE_LINE])[0]

    def estimate(self, n: int) -> float:
        return self._fixed + n * self._per_line

    def context(self, n: int) -> str:
        lines = [NOISE_LINE] * n
        rng = random.Random(self._places)
        for chain in self._chains:
            lines = _insert(lines, chain, sorted(rng.sample(range(len(lines)), len(chain))))
        if self._extra:
            lines.append(self._extra)
        return self.instruction + _text(lines)

    def tune(self, n: int, room: int) -> bool:
        self._extra = cut_line(NOISE_LINE, room, self._counter, keep="start")
        return bool(self._extra)

    def untune(self) -> None:
        self._extra = ""

    def meta(self, n: int, context: str) -> dict[str, Any]:
        start = len(self.instruction)
        places = [context.index(statement.rstrip(), start) - start for statement in self._chains[0]]
        return {"depths": [round(100 * place / (len(context) - start), 2) for place in places]}
