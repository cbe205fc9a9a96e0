"""What one process of `bench contexts` does; plain values, as a parent hands them to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from retrieval_attn_eval.bench.session.subject import Settings

__all__ = ["NAME", "Job"]

NAME = "bench"
"""Of the context that later processes open."""


@dataclass(frozen=True)
class Job:
    """kind: "save"; "cold" or "warm": a process that opens what was saved, with its bytes on disk alone or in RAM.

    store: folder. turns: how often the context grows by `turn_tokens` and is saved again. questions: texts to ask, one
    per repeat. expected: tokens that the saved context chose for each of them, by way.
    """

    kind: str
    settings: Settings
    store: str
    turns: int
    turn_tokens: int
    questions: tuple[str, ...] = ()
    expected: dict[str, list[list[int]]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Job:
        """What `to_dict` gave, read back from JSON."""
        given = {"settings": Settings.from_dict(fields["settings"]), "questions": tuple(fields["questions"])}
        return cls(**{**fields, **given})
