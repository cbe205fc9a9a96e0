"""The needle test as a task suite, so that every baseline can be put on its grid: one task per depth.

Run as `python -m retrieval_attn.eval.reproduce.needle_grid`; the prompts are those of `retrieval-attn needle`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.eval import needle, needle_options
from retrieval_attn.eval.prompts import PromptFormat
from retrieval_attn.eval.suite import Row, arguments

__all__ = ["NeedleGrid", "heatmap", "main"]


class NeedleGrid:
    """Tasks "depth 0", "depth 25", ...; row i of a cell hides its own number, as round i of the needle command.

    Raises RetrievalAttentionError for a model without a folder or lengths too short.
    """

    name = "needle"

    def __init__(self, model: str | None, lengths: str, depths: Sequence[float], rounds: int, seed: int) -> None:
        parser = argparse.ArgumentParser()
        needle_options.add_arguments(parser)
        flags = ["--methods", "full", "--lengths", lengths, "--depths", ",".join(f"{d:g}" for d in depths)]
        flags += ["--rounds", str(rounds), "--seed", str(seed), *(["--model", model] if model else [])]
        self._test = needle.Test.prepare(needle_options.Options.of(parser.parse_args(flags)))
        self._cells = {(cell.length, cell.depth, cell.round): cell for cell in self._test.cells}
        self._depths = {f"depth {depth:g}": float(depth) for depth in depths}
        self.notes = ["needle, question and haystack are those of the needle command: built-in prose"]

    def frame(self, tokenizer: Any, chat: str) -> PromptFormat:
        """The needle command's own template, with which the cells are measured."""
        return self._test.form

    def tasks(self) -> tuple[str, ...]:
        return tuple(self._depths)

    def rows(self, task: str, length: int | None, indices: Iterable[int], tokenizer: Any, seed: int) -> Iterator[Row]:
        form = self._test.form
        for index in indices:
            assert length is not None, task
            cell = self._cells[length, self._depths[task], index]
            prompt, placed = self._test.prompt(cell)
            context = prompt.context_ids[len(form.head) :].tolist()
            yield Row(
                id=f"needle/{length}/{cell.depth:g}/{seed}/{index}",
                task=task,
                context=str(form.tokenizer.decode(context)),
                question=prompt.question_text.removesuffix(form.tail),
                answer_prefix="",
                answers=cell.expected,
                max_new_tokens=self._test.options.max_new_tokens,
                target_tokens=length,
                meta={"depth": cell.depth, "achieved_depth": round(placed.depth, 3), "prompt_tokens": len(prompt)},
                context_ids=context,
            )

    def score(self, row: Row, text: str) -> float:
        from retrieval_attn.eval.needle_report import score

        return score(row.answers, text)

    def fingerprint(self) -> dict[str, Any]:
        return {"generator": needle.GENERATOR}

    def count(self, task: str) -> int | None:
        return None


def heatmap(folder: Path, cells: Sequence[dict[str, Any]], title: str) -> str:
    """Write heatmap.png of a grid's summary cells, one panel per method; returns the panels as text."""
    from retrieval_attn.eval.heatmap import Panel, save_heatmap, text_table

    lengths = tuple(sorted({cell["length"] for cell in cells}))
    depths = tuple(sorted({float(cell["task"].removeprefix("depth ")) for cell in cells}))
    panels = []
    for method, position in dict.fromkeys((cell["method"], cell["position"]) for cell in cells):
        own = [cell for cell in cells if (cell["method"], cell["position"]) == (method, position)]
        found = {(float(cell["task"].removeprefix("depth ")), cell["length"]): cell["score"] for cell in own}
        grid = tuple(tuple(found.get((depth, length)) for length in lengths) for depth in depths)
        panels.append(Panel(f"{method}, question {position}", lengths, depths, grid, sum(cell["n"] for cell in own)))
    save_heatmap(panels, folder / "heatmap.png", title=title)
    return text_table(panels)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m retrieval_attn.eval.reproduce.needle_grid", description=__doc__)
    needle_options._flag(parser, "--depths", default="0,25,50,75,100", help="percent (default: %(default)s)")
    arguments.add_arguments(parser, lengths="4k,8k", n=1)
    args = parser.parse_args(argv)
    try:
        depths = needle_options._depths(argparse.Namespace(**vars(args), **dict.fromkeys(_RANGES)))
        return arguments.run(args, NeedleGrid(args.model, args.lengths, depths, args.n, args.seed))
    except RetrievalAttentionError as error:
        print(f"needle_grid: {error}", file=sys.stderr)
        return 2


_RANGES = [f"document_depth_percent_{name}" for name in ("min", "max", "intervals", "interval_type")]


if __name__ == "__main__":
    sys.exit(main())
