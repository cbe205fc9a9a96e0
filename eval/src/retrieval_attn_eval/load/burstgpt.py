"""Traces from BurstGPT's CSV files: requests to ChatGPT and GPT-4 as a cloud's users sent them.

Columns: Timestamp (seconds), Model, Request tokens, Response tokens, Log Type; newer releases add Session ID and
Elapsed time. Texts are not published. A session's prompt is taken to begin with its last prompt and answer where it is
longer than both; a shorter one shares nothing. Rows without tokens are failures of the service, and are left out.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.load.conversation import Conversation
from retrieval_attn_eval.load.line import Line

__all__ = ["read_burstgpt"]

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
SESSION, ELAPSED, MODEL = "Session ID", "Elapsed time", "Model"


@dataclass
class _Session:
    conversation: Conversation
    tokens: int = 0
    answered: float | None = None


def read_burstgpt(path: Path, requests: int | None = None, model: str | None = None) -> Iterator[Line]:
    """The requests of a file, in its order; of one model where it is named ("ChatGPT" or "GPT-4").

    Raises InputDataError for a file without these columns, and for a row that has no numbers there.
    """
    numbers = itertools.count(1)
    sessions: dict[str, _Session] = {}
    given = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (rows.fieldnames or [])]
            if missing:
                raise InputDataError(
                    f"{path}: needed the columns {', '.join(COLUMNS)} of BurstGPT, {', '.join(missing)} is not there; "
                    "give one of its CSV files"
                )
            for row in rows:
                if requests is not None and given >= requests:
                    return
                if model is not None and row.get(MODEL) != model:
                    continue
                line = _line(path, rows.line_num, row, sessions, numbers)
                if line is not None:
                    given += 1
                    yield line
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputDataError(f"{path}: needed a CSV file in UTF-8, {error}; give one of BurstGPT's") from None


def _line(
    path: Path, number: int, row: Mapping[str, str], sessions: dict[str, _Session], numbers: Iterator[int]
) -> Line | None:
    try:
        seconds = float(row["Timestamp"])
        asked, answered = (int(float(row[name])) for name in COLUMNS[1:])
        elapsed = float(row.get(ELAPSED) or 0)
    except (TypeError, ValueError) as error:
        raise InputDataError(
            f"{path}, line {number}: needed numbers as {', '.join(COLUMNS)}, {error}; correct the line or remove it"
        ) from None
    if asked < 1 or answered < 1:
        return None
    name = row.get(SESSION) or None
    if name is None:
        return Line(seconds, Conversation(numbers).prompt(asked), answered)
    session = sessions.setdefault(name, _Session(Conversation(numbers)))
    if asked <= session.tokens:  # the user, or the service, cut what came before
        session.conversation = Conversation(numbers)
    delay = None if session.answered is None else max(0.0, seconds - session.answered)
    session.tokens, session.answered = asked + answered, seconds + elapsed
    return Line(seconds, session.conversation.prompt(asked), answered, name, delay)
