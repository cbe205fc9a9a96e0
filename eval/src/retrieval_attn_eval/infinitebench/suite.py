"""InfiniteBench as a task suite: all twelve tasks from the benchmark's files, six of them also generated.

"InfiniteBench: Extending Long Context Evaluation Beyond 100K Tokens".  Loads neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.infinitebench.catalogue import GENERATED, TASKS, TITLES, check_tasks
from retrieval_attn_eval.infinitebench.cutting import Context, cut_context
from retrieval_attn_eval.infinitebench.fit import Filler
from retrieval_attn_eval.infinitebench.profiles import Pieces, get_profile
from retrieval_attn_eval.infinitebench.record import DataFile, Record
from retrieval_attn_eval.infinitebench.scoring import SCORERS, score_text
from retrieval_attn_eval.infinitebench.text_scores import need_rouge
from retrieval_attn_eval.prompts import PromptFormat
from retrieval_attn_eval.suite.sample import Row

__all__ = ["GENERATOR", "InfiniteBench"]

GENERATOR = "infinitebench/1"  # part of the fingerprint: raise it when the same settings give other prompts
_KEY = re.compile(r'Key: ("[^"]+")')


class InfiniteBench:
    """The benchmark's tasks as rows.

    data_dir: folder of its jsonl files; None: the six generated tasks.  profile: see `profiles`.
    The tables show the official score; `scores` gives the fixed one, too.
    max_new_tokens: task -> room for the answer instead of the profile's.

    form: what stands around a prompt (set by whoever runs the suite; by default this profile's, for the tokenizer that
    comes first).  max_positions: tokens that rows of files without a length are cut to; None: not at all.
    """

    name = "infinitebench"
    titles: Mapping[str, str] = TITLES

    def __init__(
        self,
        data_dir: str | Path | None = None,
        *,
        profile: str = "minference",
        max_new_tokens: Mapping[str, int] | None = None,
    ) -> None:
        self.data_dir = None if data_dir is None else Path(data_dir)
        self.profile = get_profile(profile)
        self.overrides = dict(max_new_tokens or {})
        check_tasks(self.overrides or ["all"])
        if any(room < 1 for room in self.overrides.values()):
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.overrides}; give larger numbers")
        self.form: PromptFormat | None = None
        self.max_positions: int | None = None
        self._files: dict[str, DataFile] = {}
        self._filler: Filler | None = None
        self._question_room: dict[str, tuple[PromptFormat, int]] = {}

    @property
    def max_tokens(self) -> int | None:
        """Tokens that no row without a length exceeds, its answer included."""
        return self.max_positions

    @property
    def notes(self) -> tuple[str, ...]:
        notes = [f"prompts of the profile {self.profile.name}, scores by the official rules"]
        if self.data_dir is None:
            notes.append("contexts generated here by the benchmark's recipes, not its files")
        return tuple(notes)

    def tasks(self) -> tuple[str, ...]:
        return GENERATED if self.data_dir is None else TASKS

    def count(self, task: str) -> int | None:
        """Records of the task's file; None: generated, endless.  Raises what a run of this task would raise."""
        if task == "longbook_sum_eng":
            need_rouge()
        return None if self.data_dir is None else len(self._file(task))

    def fingerprint(self) -> dict[str, Any]:
        """What rows mean beside their ids, which carry the hash of their file."""
        return {
            "generator": GENERATOR,
            "profile": self.profile.name,
            "source": "generated" if self.data_dir is None else "files",
            "max_new_tokens": self.overrides,
        }

    def frame(self, tokenizer: Any, chat: str = "auto") -> PromptFormat:
        """Head and tail of this profile's prompts.  Raises ConfigError if the chat template refuses them."""
        return self.profile.frame(tokenizer, chat)

    def rows(self, task: str, length: int | None, indices: Iterable[int], tokenizer: Any, seed: int) -> Iterator[Row]:
        """Rows of a task.

        length: tokens of the whole prompt and its answer: generated rows fill it, rows of files are cut down to it
        (None: to `max_positions`).  Raises InputDataError for malformed files, ConfigError for a length too short.
        """
        (task,) = check_tasks([task], self.tasks())
        if self.form is None or self.form.tokenizer is not tokenizer:
            self.form = self.frame(tokenizer)
        make = self._generated if self.data_dir is None else self._from_file
        for index in indices:
            yield make(task, length, index, self.form, seed)

    def score(self, row: Row, text: str) -> float:
        return self.scores(row, text)["official"]

    def scores(self, row: Row, text: str) -> dict[str, float]:
        """Score by every scorer; `row` may come without its context."""
        return {name: score_text(row.task, text, row.answers, options=row.options, scorer=name) for name in SCORERS}

    def nulls(self, text: str) -> bool:
        """True if an answer is empty."""
        return not text.strip()

    def _file(self, task: str) -> DataFile:
        if task not in self._files:
            assert self.data_dir is not None
            self._files[task] = DataFile(self.data_dir, task)
        return self._files[task]

    def _answer_room(self, task: str, length: int | None) -> int:
        """New tokens of an answer; at most half of a length, which matters for math_calc only."""
        room = self.overrides.get(task, self.profile.max_new_tokens[task])
        return room if length is None or task in self.overrides else min(room, max(length // 2, 1))

    def _question_tokens(self, form: PromptFormat, pieces: Pieces) -> int:
        text = pieces.question + form.tail + pieces.answer_prefix
        return len(form.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else 0

    def _generated(self, task: str, length: int | None, index: int, form: PromptFormat, seed: int) -> Row:
        if length is None:
            raise ConfigError(f"{task} is generated and needs a length; give one with --lengths, or --data-dir")
        answer = self._answer_room(task, length)
        fixed = len(form.head) + answer
        if self._filler is None or self._filler.tokenizer is not form.tokenizer:
            self._filler = Filler(form.tokenizer)
        around = self.profile.pieces

        def budget(pieces: Pieces) -> int:
            return length - fixed - self._question_tokens(form, pieces)

        record, tokens = self._filler.make(task, seed, index, around, budget)
        pieces = around(record)
        text = pieces.before + record.context + pieces.after
        total = len(form.head) + tokens + self._question_tokens(form, pieces)
        meta = {"source": "generated", **self._meta(total), "fill": round((total + answer) / length, 4), **record.meta}
        return self._row(f"{length}/{seed}/{index}", record, pieces, text, answer, length, meta)

    def _from_file(self, task: str, length: int | None, index: int, form: PromptFormat, seed: int) -> Row:
        file = self._file(task)
        record = file[index]
        limit = length if length is not None else self.max_positions
        answer = self._answer_room(task, limit)
        pieces = self.profile.pieces(record)
        room = None
        if limit is not None:
            room = limit - len(form.head) - self._longest_question(file, form) - answer
        context = cut_context(form.tokenizer, pieces.before, record.context, pieces.after, room)
        total = len(form.head) + len(context.ids) + self._question_tokens(form, pieces)
        meta = {"source": "file", **self._meta(total, context.dropped), **record.meta}
        if task in ("passkey", "number_string", "kv_retrieval"):
            meta["answer_in_context"] = _survives(record, context)
        # the file's hash stands where generated rows have their seed: rows of another file never mix with these
        place = f"{length or 'file'}/{file.sha256[:12]}/{index}"
        return self._row(place, record, pieces, context.text, answer, length, meta, context)

    def _longest_question(self, file: DataFile, form: PromptFormat) -> int:
        """Tokens of the file's longest question; contexts leave room for it, so that one book is always cut alike."""
        known = self._question_room.get(file.task)
        if known is None or known[0] is not form:
            pieces = (self.profile.pieces(record) for record in file.questions())
            known = form, max(self._question_tokens(form, piece) for piece in pieces)
            self._question_room[file.task] = known
        return known[1]

    def _meta(self, tokens: int, dropped: int = 0) -> dict[str, Any]:
        return {
            "generator": GENERATOR,
            "profile": self.profile.name,
            "prompt_tokens": tokens,
            "truncated": dropped > 0,
            "dropped_tokens": dropped,
        }

    def _row(
        self,
        place: str,
        record: Record,
        pieces: Pieces,
        text: str,
        answer: int,
        length: int | None,
        meta: dict[str, Any],
        context: Context | None = None,
    ) -> Row:
        return Row(
            id=f"{self.name}/{record.task}/{place}",
            task=record.task,
            context=text,
            question=pieces.question,
            answer_prefix=pieces.answer_prefix,
            answers=record.answers,
            max_new_tokens=answer,
            target_tokens=length,
            options=record.options,
            meta=meta,
            context_ids=None if context is None else context.ids,
        )


def _survives(record: Record, context: Context) -> bool:
    """True if the answer is still in the context: the key with its value, or the number."""
    key = _KEY.search(record.question)
    if record.task == "kv_retrieval" and key:
        return context.holds(f'{key.group(1)}: "{record.answers[0]}"')
    return context.holds(record.answers[0])
