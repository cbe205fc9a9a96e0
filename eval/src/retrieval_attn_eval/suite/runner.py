"""Runs a task suite: rows x methods x question positions, into a results folder that an interrupted run continues.

Contexts are the outer loop: while one is in memory, every method answers every question about it.  Rows are made
when they are needed, so the first answer does not wait for the last sample.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval_attn.errors import ConfigError, ContextLengthError, InputDataError
from retrieval_attn_eval.baselines.reply import POSITIONS
from retrieval_attn_eval.prompts import PromptFormat, Prompts
from retrieval_attn_eval.runs import RunFolder, RunFolderError, utc_now
from retrieval_attn_eval.suite.sample import Row
from retrieval_attn_eval.suite.suite import TaskSuite

__all__ = ["Block", "Outcome", "Selection", "SuiteRun", "score_fields"]


@dataclass(frozen=True)
class Block:
    """Rows of one task at one length (None: the rows of a file), by index."""

    task: str
    length: int | None
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Selection:
    """Rows to run.

    Attributes:
        n: Rows per task and length. None: all rows of a file.
        shard: (i, of): the i-th of equal consecutive parts of every block, from 0. Consecutive, because neighbours may
            share a context.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int | None, ...]
    n: int | None
    seed: int = 42
    shard: tuple[int, int] = (0, 1)

    def blocks(self, suite: TaskSuite) -> list[Block]:
        """Raises ConfigError for an unknown task, an endless one without n, or a shard that does not exist."""
        known = suite.tasks()
        unknown = [task for task in self.tasks if task not in known]
        if unknown or not self.tasks:
            raise ConfigError(
                f"task {unknown[0] if unknown else 'nothing'!r} is unknown in {suite.name};"
                f" choose from {', '.join(known)}"
            )
        part, of = self.shard
        if not 0 <= part < of:
            raise ConfigError(f"shard {part}/{of} does not exist; give I/N with I from 0 to N - 1")
        blocks = []
        for length, task in itertools.product(self.lengths, self.tasks):
            there = suite.count(task)
            if there is None and self.n is None:
                raise ConfigError(f"task {task} has no end; say how many rows with --n")
            total = min(x for x in (there, self.n) if x is not None)
            indices = tuple(range(total * part // of, total * (part + 1) // of))
            if indices:
                blocks.append(Block(task, length, indices))
        if not blocks:
            raise ConfigError("nothing to run: no rows are left after --n and --shard; ask for more")
        return blocks


@dataclass(frozen=True)
class Outcome:
    """Result of a run.  rows: newest prediction per id, of the whole folder.  errors: failed among those asked for."""

    folder: Path
    rows: list[dict[str, Any]]
    errors: int


class SuiteRun:
    """A run ready to start: rows chosen and every bad input found that can be found without the weights."""

    def __init__(
        self,
        suite: TaskSuite,
        selection: Selection,
        form: PromptFormat,
        *,
        positions: Sequence[str] = POSITIONS,
        max_positions: int | None = None,
    ) -> None:
        """max_positions: tokens the model has positions for; None if it does not say."""
        unknown = [position for position in positions if position not in POSITIONS]
        if unknown or not positions:
            raise ConfigError(
                f"question position {unknown[0] if unknown else 'nothing'!r} is unknown;"
                f" choose from {', '.join(POSITIONS)}"
            )
        self.suite, self.selection, self.form = suite, selection, form
        self.positions, self.max_positions = tuple(positions), max_positions
        self.blocks = selection.blocks(suite)
        self.prompts = Prompts(form)
        if hasattr(suite, "max_positions"):
            suite.max_positions = max_positions
        self._check_lengths()

    def rows(self, block: Block, indices: Iterable[int] | None = None) -> Iterator[tuple[int, Row]]:
        """(index, row) of a block, or of some of its indices."""
        wanted = list(block.indices if indices is None else indices)
        made = self.suite.rows(block.task, block.length, wanted, self.form.tokenizer, self.selection.seed)
        count = 0
        for index, row in zip(wanted, made, strict=False):
            count += 1
            yield index, row
        if count != len(wanted):
            raise InputDataError(f"{block.task}: needed {len(wanted)} rows, the suite made {count}; give a smaller --n")

    def check_contexts(self) -> None:
        """Refuse what the model has no positions for.

        Generated rows fill their target length, so one row of every block stands for it; rows of files are
        measured one by one unless the suite cuts them (max_tokens).  Raises ContextLengthError, and whatever the
        suite raises for a length too short.
        """
        bound = getattr(self.suite, "max_tokens", None)
        if bound is not None and self.max_positions is not None and bound > self.max_positions:
            raise ContextLengthError(
                f"rows of up to {bound} tokens need as many positions, the model has {self.max_positions};"
                " truncate them to that"
            )
        for block in self.blocks:
            one = block.length is not None or bound is not None
            for _, row in self.rows(block, block.indices[:1] if one else None):
                self._require_positions(row)

    def _check_lengths(self) -> None:
        longest = max((b.length for b in self.blocks if b.length is not None), default=0)
        if self.max_positions is not None and longest > self.max_positions:
            raise ContextLengthError(
                f"length {longest} needs {longest} positions, the model has {self.max_positions};"
                f" give lengths up to {self.max_positions}"
            )

    def _require_positions(self, row: Row) -> None:
        if self.max_positions is None:
            return
        around = len(row.question) + len(row.answer_prefix) + len(self.form.tail) + len(self.form.head)
        if 4 * (len(row.context) + around) + row.max_new_tokens <= self.max_positions:
            return  # no tokenizer makes more tokens than bytes
        counted = row.meta.get("prompt_tokens")
        needed = (len(self.prompts.of(row)) if counted is None else int(counted)) + row.max_new_tokens
        if needed > self.max_positions:
            raise ContextLengthError(
                f"{row.id} needs {needed} positions (template and {row.max_new_tokens} answer tokens included),"
                f" the model has {self.max_positions}; give shorter lengths, a truncation or another model"
            )

    # -- running ----------------------------------------------------------------------------------

    def execute(
        self,
        methods: Mapping[str, Any],
        folder: Path,
        settings: Mapping[str, Any],
        *,
        start: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> Outcome:
        """Answer what has no answer yet.  settings: see RunFolder.open; what row ids do not say."""
        with RunFolder.open(folder, settings, start=start) as out:
            todo = self._todo(out, list(methods))
            total = sum(len(b.indices) for b in self.blocks) * len(methods) * len(self.positions)
            missing = sum(len(keys) for keys in todo.values())
            if missing < total:
                print(f"continuing {folder}: {total - missing} of {total} answers are there already", file=sys.stderr)
            with _Bar(self.blocks, todo, total, progress and bool(missing), getattr(self.suite, "label", str)) as bar:
                for number, block in enumerate(self.blocks):
                    self._run_block(out, methods, block, todo[number], bar)
            asked = {
                (block.task, block.length, index, method, position)
                for block in self.blocks
                for index in block.indices
                for method in methods
                for position in self.positions
            }
            rows = list(out.rows.values())
        return Outcome(folder, rows, sum(bool(row.get("error")) for row in rows if _key(row) in asked))

    def _todo(self, out: RunFolder, methods: Sequence[str]) -> dict[int, set[tuple[int, str, str]]]:
        """Per block: (index, method, position) without a good row."""
        for row in out.rows.values():
            if lacking := _FIELDS - set(row) - ({"score"} if row.get("error") else set()):
                raise RunFolderError(
                    f"{out.path}: the row {row['id']!r} lacks {', '.join(sorted(lacking))}; remove it from "
                    "predictions.jsonl, or choose another output folder"
                )
        done = {_key(row) for row in out.rows.values() if not row.get("error")}
        return {
            number: {
                (index, method, position)
                for index in block.indices
                for method in methods
                for position in self.positions
                if (block.task, block.length, index, method, position) not in done
            }
            for number, block in enumerate(self.blocks)
        }

    def _run_block(
        self, out: RunFolder, methods: Mapping[str, Any], block: Block, todo: set[tuple[int, str, str]], bar: _Bar
    ) -> None:
        left = {index for index, _, _ in todo}
        indices = [index for index in block.indices if index in left]
        made = self.rows(block, indices) if indices else iter(())
        for _, group in itertools.groupby(made, key=lambda pair: pair[1].context):
            rows = list(group)
            for name, method in methods.items():
                for index, row in rows:
                    asked = [p for p in self.positions if (index, name, p) in todo]
                    if asked:
                        bar.now(block, name)
                        answers = self._answer(block, index, row, (name, method), asked)
                        self._append(out, answers)
                        bar.done(block, name, answers)
            for method in methods.values():
                _release(method)

    def _append(self, out: RunFolder, answers: list[dict[str, Any]]) -> None:
        for answer in answers:
            known = out.rows.get(answer["id"])
            if known is not None and not known.get("error"):
                raise InputDataError(
                    f"two rows have the id {answer['row_id']!r} (rows {known['index']} and {answer['index']} of"
                    f" {answer['task']}); every row needs its own"
                )
        out.append(*answers)

    def _answer(
        self, block: Block, index: int, row: Row, named: tuple[str, Any], positions: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Predictions of one row and method.  What goes wrong inside the method becomes rows with an error."""
        from retrieval_attn.model.loading import launched_processes

        name, method = named
        begin = time.perf_counter()
        replies: dict[str, Any] = {}
        error, tokens = None, None
        try:
            prompt = self.prompts.of(row)
            tokens = len(prompt)
            self._require_positions(row)
            replies = method.answers(prompt, positions, row.max_new_tokens)
        except Exception as problem:  # one row must not end a run of hours: kept, counted, tried again on resume
            if launched_processes() > 1:  # but the other processes may be waiting for this one in the middle of it
                raise
            error = f"{type(problem).__name__}: {problem}"
            _release(method)  # what it holds may be what went wrong, or be too much for the next row
        spent = {"total": round(time.perf_counter() - begin, 4)}
        sample = row.to_dict(context=False)
        del sample["id"]
        rows = []
        for position in positions:
            reply = replies.get(position)
            problem_here = error or (None if reply else f"{name} gave no answer for the position {position!r}")
            rows.append(
                {
                    "id": f"{row.id}/{name}/{position}",
                    "row_id": row.id,
                    "length": block.length,
                    "index": index,
                    "seed": self.selection.seed,
                    "method": name,
                    "position": position,
                    **sample,
                    "prompt_tokens": tokens,
                    "response": reply.text if reply else "",
                    "output_tokens": len(reply.ids) if reply else 0,
                    "finish_reason": reply.finish_reason if reply else None,
                    **({} if problem_here or not reply else score_fields(self.suite, row, reply.text)),
                    "seconds": {k: round(v, 4) for k, v in reply.seconds.items()} if reply else spent,
                    "stats": dict(reply.stats) if reply else {},
                    "timestamp_utc": utc_now(),
                    "error": problem_here,
                }
            )
        return rows


def score_fields(suite: TaskSuite, row: Row, text: str) -> dict[str, Any]:
    """What scoring adds to a prediction: score, the suite's other scorers, whether the answer counts as empty."""
    others, nulls = getattr(suite, "scores", None), getattr(suite, "nulls", None)
    return {
        "score": suite.score(row, text),
        "scores": dict(others(row, text)) if others is not None else {},
        "empty": bool(nulls(text)) if nulls is not None else not text.strip(),
    }


def _release(method: Any) -> None:
    """Let a method that keeps the last context forget it."""
    release = getattr(method, "release", None)
    if release is not None:
        release()


_FIELDS = {"task", "length", "index", "method", "position", "score"}
"""What a row must say to be counted; one of a failed answer has no score."""


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["length"], row["index"], row["method"], row["position"]


class _Bar:
    """Progress over the work, not over the answers: a context costs its length and, for attention, its square."""

    def __init__(
        self,
        blocks: Sequence[Block],
        todo: Mapping[int, set[tuple[int, str, str]]],
        total: int,
        show: bool,
        label: Callable[[str], str],
    ) -> None:
        """label: words for a task."""
        from retrieval_attn.testing import ProgressBar

        pairs = {number: {(i, m) for i, m, _ in keys} for number, keys in todo.items()}
        self._answers, self._total = total - sum(len(keys) for keys in todo.values()), total
        self._scores: dict[str, list[float]] = {}
        self._label = label
        self._failed = 0
        self._bar = ProgressBar(
            total=sum(_cost(blocks[number]) * len(found) for number, found in pairs.items()),
            bar_format="{percentage:3.0f}%|{bar:10}| {elapsed}<{remaining} {desc}{postfix}",
            desc=f"{self._answers} of {total} answers",
            line_format="{percentage:.0f} %, {desc}, {elapsed} elapsed, {remaining} left",
            disable=not show,
        )

    def now(self, block: Block, method: str) -> None:
        place = self._label(block.task) + (f", {block.length:,} tokens" if block.length is not None else "")
        self._describe(f"; now {place}, {method}")

    def _describe(self, now: str) -> None:
        means = "".join(f", {m} {sum(s) / len(s):.2f}" for m, s in self._scores.items() if s)
        failed = f", {self._failed} failed" if self._failed else ""
        answers = f"{self._answers} of {self._total} answers"
        self._bar.set_description_str(f"{answers}{means}{failed}{now}", False)

    def done(self, block: Block, method: str, answers: Sequence[Mapping[str, Any]]) -> None:
        self._answers += len(answers)
        self._failed += sum(bool(a["error"]) for a in answers)
        self._scores.setdefault(method, []).extend(a["score"] for a in answers if not a["error"])
        self._describe("")
        self._bar.update(_cost(block))

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _cost(block: Block) -> int:
    length = block.length if block.length is not None else 1 << 16
    return length * (length + 16384)
