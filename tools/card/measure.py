"""Measure: a command whose result file holds one or more numbers that are owed, each with its goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Goal", "Measure", "decode_rate", "of_row", "ratio", "row_of", "value"]

Report = Mapping[str, Any]
"""A result file's JSON."""


@dataclass(frozen=True)
class Goal:
    """A number and what it should be. bound: None where there is no goal. least: the number should be at least that,
    else at most. find: the number in a result file; None: it is not there.
    """

    what: str
    unit: str
    find: Callable[[Report], float | None]
    bound: float | None = None
    least: bool = True

    def verdict(self, found: float | None) -> str:
        """Met, missed, "not run", or "no goal"."""
        if found is None:
            return "not run"
        if self.bound is None:
            return "no goal"
        return "met" if (found >= self.bound if self.least else found <= self.bound) else "missed"

    @property
    def text(self) -> str:
        """The goal as a table has it."""
        return "" if self.bound is None else f"{'>=' if self.least else '<='} {self.bound:g} {self.unit}".strip()


@dataclass(frozen=True)
class Measure:
    """module, arguments: `python -m MODULE ARGUMENTS`, to which the folder of its results is added behind `folder`.

    result: the file there. seconds: what it takes on an H100, by estimate; limit: when it is ended. setting: what the
    row's reader must know of it, simplifications included.
    """

    name: str
    module: str
    arguments: Sequence[str]
    folder: str
    result: str
    goals: Sequence[Goal]
    seconds: float
    setting: str

    @property
    def limit(self) -> float:
        """Seconds after which it is ended: a first run on a machine compiles."""
        return 2 * self.seconds + 60

    def command(self, folder: str) -> list[str]:
        """Behind `python -m`."""
        return [self.module, *self.arguments, self.folder, folder]


def row_of(report: Report, way: str) -> Report | None:
    """A row of `bench serve` that is a measurement."""
    return next((row for row in report["rows"] if row["way"] == way and row["status"] == "ok"), None)


def value(*names: str) -> Callable[[Report], float | None]:
    """The number under these names, one in the other."""

    def find(report: Report) -> float | None:
        found: Any = report
        for name in names:
            found = None if found is None else found.get(name)
        return None if found is None else float(found)

    return find


def ratio(way: str, other: str) -> Callable[[Report], float | None]:
    """Tokens a second of one way of `bench serve` over another's."""

    def find(report: Report) -> float | None:
        one, two = row_of(report, way), row_of(report, other)
        return None if one is None or two is None else float(one["rate"] / two["rate"])

    return find


def of_row(way: str, name: str) -> Callable[[Report], float | None]:
    """A number of one way's row in `bench serve`."""

    def find(report: Report) -> float | None:
        row = row_of(report, way)
        return None if row is None or row[name] is None else float(row[name])

    return find


def decode_rate(way: str) -> Callable[[Report], float | None]:
    """Tokens a second of one way of `bench serve` while all requests decode: from the last first token to the first
    last one. None where there is no such time.
    """

    def find(report: Report) -> float | None:
        row = row_of(report, way)
        if row is None:
            return None
        times = [[one["arrival"] + time / 1000 for time in one["token_ms"]] for one in row["answers"]]
        began, ended = max(one[0] for one in times), min(one[-1] for one in times)
        tokens = sum(began < time <= ended for one in times for time in one)
        return tokens / (ended - began) if ended > began else None

    return find
