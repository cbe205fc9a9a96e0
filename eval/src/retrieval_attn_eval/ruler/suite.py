"""RULER as a task suite: rows of any task, length and seed, each made from its own random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.ruler import scoring
from retrieval_attn_eval.ruler.chains import Chains, Example
from retrieval_attn_eval.ruler.documents import Documents
from retrieval_attn_eval.ruler.essay import Essay, EssaySource
from retrieval_attn_eval.ruler.frequency import CodedText, CommonWords, Vocabulary
from retrieval_attn_eval.ruler.lexicon import Lexicon
from retrieval_attn_eval.ruler.needles import make_needles
from retrieval_attn_eval.ruler.qa_files import QuestionSource, read_hotpotqa, read_squad
from retrieval_attn_eval.ruler.qa_synth import SyntheticSource
from retrieval_attn_eval.ruler.specs import HOTPOTQA, QA_SYNTHETIC, SPECS, SQUAD, TASKS, spec_of
from retrieval_attn_eval.suite.fit import Draft
from retrieval_attn_eval.suite.fitted import FittedSuite, Stock, TaskSpec
from retrieval_attn_eval.suite.sample import Row

__all__ = ["GENERATOR", "RulerSuite"]

GENERATOR = "ruler/1"  # part of every row: raise it when the same settings give other rows


class RulerSuite(FittedSuite):
    """The 13 tasks.  Without SQuAD or HotpotQA file, qa_synth_1 or qa_synth_2 stands in for qa_1 or qa_2.

    haystack: essay text (file or folder; None: built-in prose).  words: word list of cwe.
    form: what stands around the prompt; set it, and its tokens are counted; None counts what the tokenizer puts
    before a text on its own (BOS), once.
    Raises InputDataError for bad files when made.
    """

    name, generator = "ruler", GENERATOR

    def __init__(
        self,
        *,
        haystack: Path | None = None,
        squad: Path | None = None,
        hotpotqa: Path | None = None,
        words: Path | None = None,
    ) -> None:
        from retrieval_attn_eval.text.haystack import read_haystack

        super().__init__()
        self._essays = EssaySource.of_text(read_haystack(haystack), haystack.name) if haystack else None
        self._lexicon = Lexicon.read(words) if words else Lexicon()
        self._files: dict[str, QuestionSource] = {}
        if squad:
            self._files["qa_1"] = read_squad(squad)
        if hotpotqa:
            self._files["qa_2"] = read_hotpotqa(hotpotqa)
        self.titles = {name: spec.title for name, spec in SPECS.items()}
        self.notes = self.notes_for(self.tasks())

    def tasks(self) -> tuple[str, ...]:
        """The 13 tasks in the paper's order, stand-ins in the place of what they stand in for."""
        return tuple(name if name not in QA_SYNTHETIC or name in self._files else QA_SYNTHETIC[name] for name in TASKS)

    def notes_for(self, tasks: Iterable[str]) -> list[str]:
        """What belongs beside the numbers of these tasks."""
        chosen, notes = set(tasks), []
        if self._essays is None and any(SPECS[task].options.get("haystack") == "essay" for task in chosen):
            notes.append("essay tasks use built-in prose, not the Paul Graham essays; give --haystack")
        for task, file in (("qa_1", SQUAD), ("qa_2", HOTPOTQA)):
            if QA_SYNTHETIC[task] in chosen:
                notes.append(
                    f"{QA_SYNTHETIC[task]} (built-in questions) stands in for {task}; give --data-dir with {file}"
                )
        return notes

    def check_tasks(self, names: Iterable[str]) -> None:
        """Raises ConfigError for a task that is unknown, or whose file was not given."""
        for name in names:
            self.available(name)

    def count(self, task: str) -> int | None:
        spec_of(task)
        return self._files[task].count if task in self._files else None

    def fingerprint(self) -> dict[str, Any]:
        """What decides the rows beside task, length, seed, index and tokenizer."""
        return {
            "generator": GENERATOR,
            "haystack": self._essays.digest if self._essays else "built-in prose",
            "words": self._lexicon.digest(),
            "questions": {task: source.digest for task, source in sorted(self._files.items())},
        }

    def score(self, row: Row, text: str) -> float:
        """0 to 1: the share of references found, or for questions whether one is."""
        return (scoring.match_part if spec_of(row.task).part else scoring.match_all)(text, row.answers)

    def nulls(self, text: str) -> bool:
        """True for a prediction that counts as empty."""
        return scoring.is_null(text)

    def summary(self, scores: dict[int, dict[str, float]]) -> list[str]:
        """Markdown lines with RULER's aggregates of one method: length -> task -> mean score (0 to 1)."""
        found = scoring.aggregate(scores)
        lines = [f"mean {length}: {mean:.2f}" for length, mean in found.means.items()]
        lines.append(f"wAvg (inc) {found.wavg_inc:.2f}, wAvg (dec) {found.wavg_dec:.2f}")
        lines.append(
            f"effective length {found.effective or 'none'} (mean >= {scoring.THRESHOLD}),"
            f" {found.effective_paper_002 or 'none'} (mean >= {scoring.PAPER_002_THRESHOLD})"
        )
        if not found.same_tasks:
            lines.append("the lengths have different tasks: averages over lengths compare different things")
        if not set(TASKS) <= set(next(iter(scores.values()))):
            lines.append("not the 13 tasks of the benchmark: not comparable with published averages")
        return [f"* {line}" for line in lines]

    def available(self, task: str) -> TaskSpec:
        spec = spec_of(task)
        if spec.needs and task not in self._files:
            raise ConfigError(
                f"task {task} needs {spec.needs}, which was not given; put it into --data-dir, or use"
                f" {QA_SYNTHETIC[task]}"
            )
        return spec

    def draft(self, stock: Stock, spec: TaskSpec, length: int, seed: int, i: int) -> Draft:
        counter, stream = stock.counter, partial(self.stream, spec, length, seed, i)

        if spec.family == "niah":
            return make_needles(
                spec, stream("needles"), stream("lines"), counter, lambda: self._essay(stock, length, seed)
            )
        if spec.family == "vt":
            hops = int(spec.options["hops"])
            example = stock.cached(("vt", seed), lambda: Example(counter, seed, hops))
            return Chains(spec, stream("chains"), counter, example)
        if spec.family == "cwe":
            vocabulary = stock.cached(("cwe", length), lambda: Vocabulary(counter, self._lexicon, length))
            return CommonWords(spec, stream("words"), counter, vocabulary, length)
        if spec.family == "fwe":
            return CodedText(spec, stream("words"), counter, length)
        source = self._files.get(spec.name) or stock.cached(
            (spec.name, seed), lambda: SyntheticSource(int(spec.options["hops"]), seed)
        )
        return Documents(source, i, stream("documents"), counter, length)

    def _essay(self, stock: Stock, length: int, seed: int) -> Essay:
        source = self._essays or EssaySource.shipped(seed)
        key = ("essay", length) if self._essays else ("essay", length, seed)
        return stock.cached(key, lambda: Essay(source, stock.counter, length))
