"""Scores a results folder, or the shards below it, again.  Needs no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.flags import check_matplotlib
from retrieval_attn_eval.parsed import parsed
from retrieval_attn_eval.runs import CONFIG, ENVIRONMENT, RunFolderError, load_run
from retrieval_attn_eval.suite.report import write_report
from retrieval_attn_eval.suite.runner import score_fields
from retrieval_attn_eval.suite.sample import Row
from retrieval_attn_eval.suite.suite import TaskSuite

__all__ = ["load_parts", "score_again"]


def score_again(folder: Path, suite: TaskSuite, *, plot: bool = True) -> int:
    """Score every answer anew, write the report into `folder`, print it; 1 if some answers had failed.

    predictions.jsonl stays as it is.  Raises InputDataError or RunFolderError for what is no run of this suite.
    """
    if plot:
        check_matplotlib()
    settings, rows, notes = load_parts(folder)
    if settings.get("suite") != suite.name:
        raise RunFolderError(
            f"{folder}: needed a run of {suite.name}, found one of {settings.get('suite')!r}; use that command"
        )
    scored = []
    for row in rows:
        if not row.get("error"):
            try:
                row = {**row, **score_fields(suite, Row.from_dict({**row, "id": row["row_id"]}), row["response"])}
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RunFolderError(
                    f"{folder}: the row {row['id']!r} is not one of {suite.name} ({error!r}); remove it from "
                    "predictions.jsonl and run again"
                ) from error
        scored.append(row)
    print(write_report(folder, scored, suite, settings, plot=plot, notes=notes or None))
    return 1 if any(row.get("error") for row in scored) else 0


def load_parts(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Settings, rows and notes of a run: the folder itself, or its shard-* folders joined.

    An id that two shards hold counts once; an answer goes before an error.
    Raises InputDataError if there is nothing, RunFolderError if shards were run with different settings.
    """
    parts = [folder] if (folder / CONFIG).is_file() else sorted(p.parent for p in folder.glob(f"shard-*/{CONFIG}"))
    if not parts:
        raise InputDataError(f"{folder}: needed a results folder or shard-* folders, found neither; give one of a run")
    settings: dict[str, Any] = load_run(parts[0])[0]["settings"]
    rows: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for part in parts:
        config, found = load_run(part)
        if config["settings"] != settings:
            raise RunFolderError(f"{part} was run with other settings than {parts[0]}; score them one by one")
        for row in found:
            if row["id"] not in rows or rows[row["id"]].get("error"):
                rows[row["id"]] = row
        environment = part / ENVIRONMENT
        if environment.is_file():
            for start in _starts(environment):
                notes += [note for note in start.get("notes", ()) if note not in notes]
    if not rows:
        raise InputDataError(f"{folder}: needed at least one row in predictions.jsonl, found none; run it first")
    return settings, list(rows.values()), notes


def _starts(environment: Path) -> list[dict[str, Any]]:
    try:
        starts = parsed(environment.read_bytes())
    except ValueError:
        starts = None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise RunFolderError(f"{environment}: needed a list of starts; remove it")
    return starts
