"""The long-context forms and files as a task suite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn_eval.infinitebench.cutting import cut_context
from retrieval_attn_eval.longcontext.conversation import Conversation
from retrieval_attn_eval.longcontext.counting import LabelledItems
from retrieval_attn_eval.longcontext.extraction import Extraction
from retrieval_attn_eval.longcontext.files import FILES, Asked, HiddenFact, Needle, read_records
from retrieval_attn_eval.longcontext.graph import Walk
from retrieval_attn_eval.longcontext.scoring import SCORERS
from retrieval_attn_eval.suite.fit import Draft
from retrieval_attn_eval.suite.fitted import FittedSuite, Stock, TaskSpec
from retrieval_attn_eval.suite.sample import Row

__all__ = ["GENERATED", "SPECS", "LongContextSuite"]

_ALL = (
    *(TaskSpec(f"mrcr_{n}", f"MRCR {n}", "mrcr", 96, options={"needles": n}) for n in (2, 4, 8)),
    *(
        TaskSpec(f"graphwalks_{what}", f"Graph {what}", "graphwalks", 96, options={"operation": what})
        for what in ("bfs", "parents")
    ),
    TaskSpec("oolong_count", "OOLONG count", "oolong_number", 8, options={"about": "count"}),
    TaskSpec("oolong_user", "OOLONG user", "oolong_number", 8, options={"about": "user"}),
    TaskSpec("oolong_most", "OOLONG most", "oolong_label", 8, options={"about": "most"}),
    TaskSpec("text2json_4", "Text2JSON 4", "text2json", 320, options={"records": 4}),
    TaskSpec("text2json_16", "Text2JSON 16", "text2json", 1280, options={"records": 16}),
    TaskSpec("longbench_v2", "LongBench v2", "longbench", 16, needs=FILES["longbench_v2"]),
    TaskSpec("helmet", "HELMET", "helmet", 32, part=True, needs=FILES["helmet"]),
    TaskSpec("nolima", "NoLiMa", "nolima", 32, part=True, needs=FILES["nolima"]),
)
SPECS = {spec.name: spec for spec in _ALL}
GENERATED = tuple(spec.name for spec in _ALL if not spec.needs)


class LongContextSuite(FittedSuite):
    """Ten generated tasks, and LongBench v2, HELMET and NoLiMa as far as a folder has their files.

    A row of LongBench v2 or HELMET that exceeds the length is cut in the middle of its context; shorter ones stay.
    Raises InputDataError for bad files when made.
    """

    name, generator = "longcontext", "longcontext/1"

    def __init__(self, folder: Path | None = None, haystack: Path | None = None) -> None:
        """folder: has some of FILES. haystack: NoLiMa's books, a file or folder; None: built-in prose."""
        super().__init__()
        self._files: dict[str, tuple[list[Asked] | list[Needle], str]] = {}
        for task, name in FILES.items():
            if folder is not None and (folder / name).is_file():
                self._files[task] = read_records(task, folder / name)
        if folder is not None and not self._files:
            raise InputDataError(f"--data-dir {folder}: needed one of {', '.join(FILES.values())}, found none of them")
        self._haystack = haystack
        self.titles = {name: spec.title for name, spec in SPECS.items()}
        self.notes = ["MRCR, GraphWalks, OOLONG and Text2JSON are forms made up here, not the published data"]
        if "nolima" in self._files and haystack is None:
            self.notes.append("NoLiMa's needles are hidden in built-in prose; give --haystack")

    def tasks(self) -> tuple[str, ...]:
        """The generated tasks, then those with a file."""
        return (*GENERATED, *self._files)

    def available(self, task: str) -> TaskSpec:
        if task not in SPECS:
            raise ConfigError(f"task {task!r} is unknown; choose from {', '.join(SPECS)}")
        spec = SPECS[task]
        if spec.needs and task not in self._files:
            raise ConfigError(f"task {task} needs {spec.needs}, which was not given; put it into --data-dir")
        return spec

    def count(self, task: str) -> int | None:
        return len(self._files[task][0]) if self.available(task).needs else None

    def fingerprint(self) -> dict[str, Any]:
        """What decides the rows beside task, length, seed, index and tokenizer."""
        haystack = None if self._haystack is None else self._haystack.name
        return {
            "generator": self.generator,
            "haystack": haystack,
            "files": {task: digest for task, (_, digest) in self._files.items()},
        }

    def score(self, row: Row, text: str) -> float:
        return SCORERS[SPECS[row.task].family](text, row.answers)

    def rows(self, task: str, length: int | None, indices: Iterable[int], tokenizer: Any, seed: int) -> Iterator[Row]:
        """See `FittedSuite`."""
        if self.available(task).family not in ("longbench", "helmet"):
            yield from super().rows(task, length, indices, tokenizer, seed)
            return
        for i in indices:
            yield self._cut(SPECS[task], length, i, tokenizer)

    def draft(self, stock: Stock, spec: TaskSpec, length: int, seed: int, i: int) -> Draft:
        counter, stream, options = stock.counter, partial(self.stream, spec, length, seed, i), spec.options
        if spec.family == "mrcr":
            return Conversation(int(options["needles"]), stream("turns"), counter)
        if spec.family == "graphwalks":
            return Walk(str(options["operation"]), stream("edges"), counter)
        if spec.family == "text2json":
            return Extraction(int(options["records"]), stream("records"), counter)
        if spec.family != "nolima":
            return LabelledItems(str(options["about"]), stream("items"), counter)
        needle = self._files[spec.name][0][i]
        assert isinstance(needle, Needle)
        return HiddenFact(needle, stock.cached(("nolima",), self._books), stream("needle"), counter)

    def _books(self) -> str:
        from retrieval_attn_eval.text.haystack import read_haystack, shipped_prose

        return shipped_prose(1_000_000, 0) if self._haystack is None else read_haystack(self._haystack)

    def _cut(self, spec: TaskSpec, length: int | None, i: int, tokenizer: Any) -> Row:
        """A row of a file whose whole text is the context, cut to `length` tokens with its answer."""
        records, digest = self._files[spec.name]
        record = records[i]
        assert isinstance(record, Asked)
        [around] = self._around(self.stock_of(tokenizer), [record], spec)
        room = None if length is None else length - around
        context = cut_context(tokenizer, record.before, record.context, "", room)
        used = len(context.ids) + around
        meta = {"generator": self.generator, "prompt_tokens": used - spec.max_new_tokens, "dropped": context.dropped}
        return Row(
            id=f"{self.name}/{spec.name}/{length or 'file'}/{digest[:12]}/{i}",
            task=spec.name,
            context=context.text,
            question=record.question,
            answer_prefix=record.prefix,
            answers=record.answers,
            max_new_tokens=spec.max_new_tokens,
            target_tokens=length,
            meta={**meta, "truncated": context.dropped > 0},
            context_ids=context.ids,
        )
