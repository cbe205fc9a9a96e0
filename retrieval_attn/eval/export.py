"""Rows of a suite as jsonl for other evaluation code: the fields that kvpress reads, and the rest beside them.

One object per line: context, question, answer_prefix, answer, task, max_new_tokens (kvpress's own), id, length and
options.  Nothing is cut and no template is applied: prompt = context + question + answer_prefix.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from retrieval_attn.errors import InputDataError
from retrieval_attn.eval.runs import write_atomically
from retrieval_attn.eval.suite.sample import Row

__all__ = ["kvpress_row", "read_rows", "write_rows"]


def kvpress_row(row: Row) -> dict[str, Any]:
    """The row as kvpress's data sets have it.  answer: the list of references."""
    return {
        "context": row.context,
        "question": row.question,
        "answer_prefix": row.answer_prefix,
        "answer": list(row.answers),
        "task": row.task,
        "max_new_tokens": row.max_new_tokens,
        "id": row.id,
        "length": row.target_tokens,
        "options": list(row.options),
    }


def write_rows(rows: Iterable[Row], path: Path) -> int:
    """Write the rows to `path`, all or nothing; returns their number.  Raises InputDataError for two of one id."""
    lines: dict[str, str] = {}
    for row in rows:
        if row.id in lines:
            raise InputDataError(f"two rows have the id {row.id!r}; every row needs its own")
        lines[row.id] = json.dumps(kvpress_row(row), ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(line + "\n" for line in lines.values()))
    return len(lines)


def read_rows(path: Path) -> list[Row]:
    """Rows of a file in this shape, kvpress's own data sets included (their rows get the line number as id).

    Raises InputDataError, with the line number, for what is no such row.
    """
    if not path.is_file():
        raise InputDataError(f"{path}: needed a jsonl file of rows, found none; check the path")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            answer = values["answer"]
            rows.append(
                Row(
                    id=str(values.get("id", f"{path.stem}/{number - 1}")),
                    task=values["task"],
                    context=values["context"],
                    question=values["question"],
                    answer_prefix=values["answer_prefix"],
                    answers=tuple(str(a) for a in answer) if isinstance(answer, list) else (str(answer),),
                    max_new_tokens=int(values["max_new_tokens"]),
                    target_tokens=values.get("length"),
                    options=tuple(values.get("options", ())),
                )
            )
        except (ValueError, TypeError, KeyError) as error:
            raise InputDataError(
                f"{path}, line {number}: needed context, question, answer_prefix, answer, task and max_new_tokens"
                f" ({type(error).__name__}: {error}); repair the line"
            ) from None
    return rows
