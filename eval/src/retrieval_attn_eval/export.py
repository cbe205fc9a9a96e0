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
from retrieval_attn_eval.runs import write_atomically
from retrieval_attn_eval.suite.sample import Row

__all__ = ["kvpress_row", "write_rows"]


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
