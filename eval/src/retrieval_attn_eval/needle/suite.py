"""The needle test as a task suite: a task per depth, a row per round, one haystack for all of them."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.needle.text import Drawn, NeedleText, depths_of
from retrieval_attn_eval.prompts import PromptFormat
from retrieval_attn_eval.suite.sample import Row
from retrieval_attn_eval.text.haystack import Haystack, Placed, read_haystack, shipped_prose

__all__ = ["NeedleSuite"]

GENERATOR = "needle/1"  # part of the fingerprint: raise it when the same settings give other prompts
_LEAST_HAYSTACK = 16


class NeedleSuite:
    """Sentences hidden in a long text, asked for at every length and depth.

    The needles of a row depend on seed, length, depth and round alone, so that a grid can grow.
    text: what is hidden and asked.  depths: percent.  lengths: of the grid; the haystack is as long as the longest.
    haystack: file or folder, None for the shipped prose.  max_new_tokens: room for the answer, None for what the text
    needs.
    Raises InputDataError for a haystack that cannot be read.
    """

    name = "needle"

    def __init__(
        self,
        text: NeedleText | None = None,
        depths: Sequence[float] = (),
        lengths: Sequence[int] = (),
        *,
        haystack: Path | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        self.text = text or NeedleText.of(None, None, None, None)
        self._depths = {f"{depth:g}%": depth for depth in depths}
        self._longest = max(lengths, default=0)
        self._prose = None if haystack is None else read_haystack(haystack)
        self._new = max_new_tokens or self.text.answer_tokens
        self._made: tuple[int, Any, Haystack] | None = None
        self._known: str | None = None
        self.form: PromptFormat | None = None

    def tasks(self) -> tuple[str, ...]:
        return tuple(self._depths)

    def label(self, task: str) -> str:
        """Return a task, which is a depth, in words."""
        return f"depth {task.removesuffix('%')} %"

    def count(self, task: str) -> int | None:
        return None

    @property
    def notes(self) -> list[str]:
        """What would make scores mean less, found in the rows made so far."""
        passes = 1 if self._made is None else self._made[2].passes
        notes = []
        if passes > 1:
            notes.append(f"the haystack is shorter than the longest context and is repeated {passes} times")
        if self._known is not None:
            notes.append(f"the haystack itself holds the expected answer ({self._known!r}); scores will be too high")
        return notes

    def fingerprint(self) -> dict[str, Any]:
        text, prose = self.text, self._prose
        return {
            "generator": GENERATOR,
            "needle": text.needles[0] if len(text.needles) == 1 else list(text.needles),
            "question": text.question,
            "answers": list(text.answers),
            "haystack": "shipped prose" if prose is None else hashlib.sha256(prose.encode()).hexdigest(),
            "max_new_tokens": self._new,
        }

    def score(self, row: Row, text: str) -> float:
        """Fraction of the expected strings that occur in the answer, ignoring case."""
        folded = text.casefold()
        return sum(answer.casefold() in folded for answer in row.answers) / len(row.answers) if row.answers else 0.0

    def about(self, row: Row) -> str:
        """What a dry run shows of a row besides its tokens."""
        return f"depth reached {row.meta['achieved_depth']:.1f}%"

    def view(self, folder: Path, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, plot: bool) -> str:
        """The text for the terminal, a table of depth by length per method; draws heatmap.png."""
        from retrieval_attn_eval.needle.report import report

        return report(folder, summary, rows, plot=plot)

    def closing(self) -> str:
        """Return commands to try next, as they can be pasted into a shell."""
        program = Path(sys.executable).with_name("retrieval-attn")
        shown = os.path.relpath(program) if program.is_file() else "retrieval-attn"
        return (
            "\nNext, hide a number in a text of your own and ask for it:\n"
            "(yes 'The grass is green. The sky is blue.' | head -300; "
            "echo 'The special magic Bergen number is: 7391846.'; "
            "yes 'The sun is yellow. Here we go.' | head -300) > haystack.txt\n"
            f"{shown} ask haystack.txt 'What is the special magic Bergen number?'\n"
            "The bundled model can do little else; --model takes a folder or a hub name, such as Qwen/Qwen3-8B."
        )

    def rows(self, task: str, length: int | None, indices: Iterable[int], tokenizer: Any, seed: int) -> Iterator[Row]:
        """Rows of `length` tokens, answer included; row i is round i.

        Raises ConfigError for a length that is too short, InputDataError for a haystack of too few sentences.
        """
        assert length is not None, "the needle test has lengths"
        depth, haystack = self._depths[task], self._haystack(tokenizer, seed)
        for index in indices:
            drawn = self.text.draw(random.Random(f"needle/{seed}/{length}/{depth:g}/{index}"))
            yield self._row(task, length, index, drawn, haystack, seed)

    def _haystack(self, tokenizer: Any, seed: int) -> Haystack:
        if self._made is None or self._made[0] != seed or self._made[1] is not tokenizer:
            text = shipped_prose(self._longest * 7 + 2000, seed) if self._prose is None else self._prose
            self._made = seed, tokenizer, Haystack(text, tokenizer, self._longest)
        return self._made[2]

    def _row(self, task: str, length: int, index: int, drawn: Drawn, haystack: Haystack, seed: int) -> Row:
        form = self.form or PromptFormat.of(haystack.tokenizer, "never")
        question = form.asked(drawn.question)
        asked = haystack.tokenizer(question + form.tail, add_special_tokens=False, verbose=False)["input_ids"]
        around = len(form.head) + len(asked)
        room = sum(haystack.needle_room(needle) for needle in drawn.needles)
        budget = length - around - self._new - room
        if budget < _LEAST_HAYSTACK:
            raise ConfigError(
                f"length {length} is too short: needle {room}, question and template {around}, answer {self._new}"
                f" and some haystack need {length - budget + _LEAST_HAYSTACK} tokens;"
                " give longer --lengths"
            )
        depth = self._depths[task]
        span = haystack.excerpt(budget, length // 200, index)
        placed = haystack.place_all(drawn.needles, depths_of(depth, len(drawn.needles)), span)
        folded = haystack.text.casefold()
        self._known = self._known or next((e for e in drawn.expected if e.casefold() in folded), None)
        return Row(
            id=f"needle/{length}/{depth:g}/{index}",
            task=task,
            context=haystack.tokenizer.decode(placed.ids.tolist()),
            question=question,
            answer_prefix="",
            answers=drawn.expected,
            max_new_tokens=self._new,
            target_tokens=length,
            meta=self._meta(drawn, placed, around, len(form.head), depth),
            context_ids=placed.ids.tolist(),
        )

    def _meta(self, drawn: Drawn, placed: Placed, around: int, head: int, depth: float) -> dict[str, Any]:
        return {
            "generator": GENERATOR,
            "prompt_tokens": len(placed.ids) + around,
            "depth": depth,
            "achieved_depth": round(placed.depth, 3),
            "achieved_depths": [round(reached, 3) for reached in placed.depths],
            "needle_token": placed.needle_start + head,
            "needles": list(drawn.needles),
            "asked": drawn.question,
        }
