"""Records: the benchmark's samples before they become prompts, read from its jsonl files and checked.

A file is read once from end to end when it is first asked for (hash, every line checked, places of the lines); its
contexts stay on the disk, so that a file of 300 MB costs no memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.infinitebench.catalogue import CATALOGUE, GENERATED, TASKS
from retrieval_attn_eval.parsed import parsed

__all__ = ["DataFile", "Record", "answers_of", "parse_record"]

_SHOWN = 5


@dataclass(frozen=True)
class Record:
    """One sample as the benchmark stores it.

    answers: references as text; for the tasks with options the right option's text and its letter.
    where: "file, line n" or the generator, for messages.  meta: what is worth keeping (depth, id in the file, ...).
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    options: tuple[str, ...] = ()
    where: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


def answers_of(task: str, answer: Any, options: tuple[str, ...], where: str) -> tuple[str, ...]:
    """References as text from the many shapes the files have: text, number, list, list of lists, option, letter.

    Raises InputDataError if there is none, or if a right option is not among the options.
    """
    while isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], list):
        answer = answer[0]
    items = answer if isinstance(answer, list) else [answer]
    if not items or not all(isinstance(i, str | int | float) and not isinstance(i, bool) for i in items):
        raise InputDataError(f"{where}: needed an answer (text, number or a list of them), found {_short(answer)}")
    texts = tuple(str(item) for item in items)
    if CATALOGUE[task].choice:
        if len(texts) == 2 and texts[1] in tuple("ABCD"):
            return texts
        if len(texts) == 1 and texts[0] in options:
            return texts[0], "ABCD"[options.index(texts[0])]
        if len(texts) == 1 and texts[0] in tuple("ABCD") and len(options) == 4:
            return options["ABCD".index(texts[0])], texts[0]
        raise InputDataError(f"{where}: needed an answer that is one of the options, found {_short(answer)}")
    if task in ("math_find", "math_calc", "code_run"):
        for text in texts:
            try:
                float(text)
            except ValueError:
                raise InputDataError(f"{where}: needed a number as the answer, found {_short(text)}") from None
    if not any(text.strip() for text in texts):
        raise InputDataError(f"{where}: needed an answer, found an empty one")
    return texts


def parse_record(task: str, line: str, where: str) -> Record:
    """Record of one jsonl line.  Raises InputDataError that names `where` for anything missing or malformed."""
    try:
        row = parsed(line)
    except ValueError as error:
        raise InputDataError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise InputDataError(f"{where}: needed a JSON object, found {type(row).__name__}")
    context: Any = row.get("context", row.get("content"))  # the published kv_retrieval file says content
    missing = [
        name for name, value in (("context", context), ("input", row.get("input"))) if not isinstance(value, str)
    ]
    if "answer" not in row:
        missing.append("answer")
    given = row.get("options") or []
    if not isinstance(given, list) or not all(isinstance(option, str) for option in given):
        raise InputDataError(f"{where}: needed options that are text, in a list, found {_short(given)}")
    options = tuple(given)
    if CATALOGUE[task].choice and len(options) != 4:
        missing.append(f"options (4, found {len(options)})")
    if missing:
        raise InputDataError(f"{where}: needed the fields {', '.join(missing)}, found {', '.join(map(str, row))}")
    answers = answers_of(task, row["answer"], options, where)
    return Record(task, context, row["input"], answers, options, where, {"file_id": row.get("id")})


@dataclass(frozen=True)
class _Line:
    start: int
    stop: int
    number: int
    question: str
    options: tuple[str, ...]
    answers: tuple[str, ...]


class DataFile:
    """The jsonl file of one task, checked from the first to the last line when made.

    len(file): records.  file[i]: the record, read from the disk.  sha256: of the whole file.
    Raises InputDataError: no such folder or file, a file without records, or malformed lines, the first ones by number.
    """

    def __init__(self, folder: Path, task: str) -> None:
        self.path, self.task = find_file(folder, task), task
        digest, bad = hashlib.sha256(), []
        self._lines: list[_Line] = []
        at = 0
        with open(self.path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                digest.update(raw)
                where = f"{self.path}, line {number}"
                try:
                    text = raw.decode("utf-8-sig")
                    if text.strip():
                        record = parse_record(task, text, where)
                        place = (at, at + len(raw), number)
                        self._lines.append(_Line(*place, record.question, record.options, record.answers))
                except UnicodeDecodeError as error:
                    bad.append(f"{where}: byte {error.start} is not UTF-8")
                except InputDataError as error:
                    bad.append(str(error))
                at += len(raw)
        self.sha256 = digest.hexdigest()
        if bad:
            more = f"; {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            raise InputDataError(
                f"{'; '.join(bad[:_SHOWN])}{more}: {len(bad)} of {len(bad) + len(self._lines)} records are malformed,"
                " nothing was run; correct these lines or fetch the file again"
            )
        if not self._lines:
            raise InputDataError(f"{self.path}: needed at least one record, found none; fetch the file again")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Record:
        line = self._lines[index]
        with open(self.path, "rb") as file:
            file.seek(line.start)
            text = file.read(line.stop - line.start).decode("utf-8-sig")
        return parse_record(self.task, text, f"{self.path}, line {line.number}")

    def questions(self) -> Iterator[Record]:
        """Every record, its context left empty: what the room for questions is counted from."""
        for line in self._lines:
            where = f"{self.path}, line {line.number}"
            yield Record(self.task, "", line.question, line.answers, line.options, where)


def find_file(folder: Path, task: str) -> Path:
    """The task's jsonl in the folder.  Raises InputDataError saying what is there and what to do."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise InputDataError(
            f"{folder}: needed the folder of InfiniteBench's jsonl files, found none; check --data-dir"
        )
    path = folder / f"{task}.jsonl"
    if path.is_file():
        return path
    there = [name for name in TASKS if (folder / f"{name}.jsonl").is_file()]
    way_out = "; or leave --data-dir out to generate it" if task in GENERATED else ""
    raise InputDataError(
        f"{folder}: needed {task}.jsonl, found {', '.join(f'{n}.jsonl' for n in there) or 'none of the task files'};"
        f" fetch it from the dataset xinrongzhang2022/InfiniteBench, or choose among the tasks that are there{way_out}"
    )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
