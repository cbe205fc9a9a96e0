"""What the fuzzers share: outcomes by name, faults, the last line of a run and its exit status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Tally", "conclude"]

MOST_FAULTS = 50
"""Faults that a run prints."""


@dataclass
class Tally:
    """Outcomes of tries of one kind. seconds: the longest from a signal to its end."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    def note(self, where: str, fault: str | None, outcome: str) -> None:
        """Count a try: as `outcome`, or as wrong if it has a fault."""
        self.outcomes["wrong" if fault else outcome] += 1
        if fault:
            self.faults.append(f"{where}: {fault}")

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {what}" for what, count in sorted(self.outcomes.items()))


def conclude(faults: Sequence[str]) -> int:
    """Print faults, or that there are none; return the exit status."""
    print("\n".join(faults[:MOST_FAULTS]) if faults else "nothing wrong")
    return 1 if faults else 0
