"""Stage `saving` of `bench session`: cost of saving a context, and time until an opened one answers.

One process reads, saves, extends and asks, and ends; two more open the saved context, with its files in the page cache
and on disk only, and must give the same tokens. The read rate of the disk is measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from retrieval_attn_eval.bench.session.children import Process, own_environment, run_process
from retrieval_attn_eval.bench.session.page_cache import context_files, make_cold, read_through
from retrieval_attn_eval.bench.session.row import Row
from retrieval_attn_eval.bench.session.subject import Settings

__all__ = ["NAME", "TURNS", "TURN_TOKENS", "Job", "Saved", "measure_saving"]

NAME = "bench"
"""Name of the context that later processes open."""
TURNS, TURN_TOKENS = 3, 256
"""Number of times that the context is extended and saved again, and the tokens of each turn."""


@dataclass(frozen=True)
class Job:
    """Work of one process, as plain values.

    Attributes:
        kind: "save"; "warm" or "cold" for a process that opens the context, from the page cache or from disk only.
        settings: Model and sizes.
        store: Folder of saved contexts.
        turns: Number of extensions with a save after each.
        turn_tokens: Tokens of an extension.
        questions: Question texts, one per repeat.
        expected: Tokens that the saved context generated for each question, by way of attention.
    """

    kind: str
    settings: Settings
    store: str
    turns: int = TURNS
    turn_tokens: int = TURN_TOKENS
    questions: tuple[str, ...] = ()
    expected: dict[str, list[list[int]]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Job:
        """Rebuild a job from `to_dict`."""
        given = {"settings": Settings.from_dict(fields["settings"]), "questions": tuple(fields["questions"])}
        return cls(**{**fields, **given})


@dataclass
class Saved:
    """Results of the stage.

    Attributes:
        length: Tokens of the context.
        processes: The saving process, then the opening ones.
        disk: Bytes of the context and seconds to read them.
    """

    length: int
    processes: list[Process] = field(default_factory=list)
    disk: dict[str, float | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {"disk": self.disk, "processes": [process.to_dict() for process in self.processes]}


def measure_saving(saved: Saved, job: Job, row_seconds: float, on_row: Callable[[Row], None]) -> None:
    """Run the three processes in order; fill `saved`. A failed save ends the stage."""
    for kind in ("save", "warm", "cold"):
        process = Process(kind)
        saved.processes.append(process)
        run_process(process, replace(job, kind=kind).to_dict(), own_environment(), row_seconds, on_row)
        if kind == "save":
            if "expected" not in process.facts:
                return
            job = replace(job, questions=tuple(process.facts["questions"]), expected=process.facts["expected"])
            files = context_files(str(Path(job.store)), NAME)
            nbytes = sum(path.stat().st_size for path in files)
            saved.disk["nbytes"], saved.disk["share_in_ram"] = nbytes, make_cold(files)
            saved.disk["cold_seconds"] = read_through(files)
            saved.disk["warm_seconds"] = read_through(files)
