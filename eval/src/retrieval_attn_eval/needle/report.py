"""What a needle run says: a panel per method and question position, and how often a method answers as full does."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrieval_attn_eval.baselines import METHODS
from retrieval_attn_eval.needle.heatmap import Panel, save_heatmap, text_table
from retrieval_attn_eval.suite.tables import ordered

__all__ = ["agreement_lines", "panels_of", "report", "share_lines"]

_PLACES = {"inside": "question inside the prompt", "after": "question after the context"}


def panels_of(cells: Iterable[Mapping[str, Any]]) -> list[Panel]:
    """One panel per method and position from a summary's cells; full attention once if both positions score the same.

    The task of a cell is its depth, such as "25%".
    """
    good = [cell for cell in cells if cell["score"] is not None]
    lengths = tuple(sorted({cell["length"] for cell in good}))
    depths = tuple(sorted({_depth(cell) for cell in good}))
    methods = ordered({cell["method"] for cell in good}, METHODS)
    panels: dict[tuple[str, str], Panel] = {}
    for position in ordered({cell["position"] for cell in good}, tuple(_PLACES)):
        for method in methods:
            own = [cell for cell in good if (cell["method"], cell["position"]) == (method, position)]
            scores = {(_depth(cell), cell["length"]): cell["score"] for cell in own}
            grid = tuple(tuple(scores.get((depth, length)) for length in lengths) for depth in depths)
            title = "full attention" if method == "full" else f"{method}, {_PLACES.get(position, position)}"
            if own:
                panels[method, position] = Panel(title, lengths, depths, grid, sum(cell["n"] for cell in own))
    inside, after = panels.get(("full", "inside")), panels.get(("full", "after"))
    if inside is not None and inside == after:
        del panels["full", "after"]
    return list(panels.values())


def _depth(cell: Mapping[str, Any]) -> float:
    return float(cell["task"].removesuffix("%"))


def agreement_lines(agreement: Mapping[str, Mapping[str, Mapping[str, int]]]) -> list[str]:
    """A summary's agreement with full attention in words, a line per method."""
    lines = []
    for method in ordered(agreement, METHODS):
        counts = agreement[method]
        total = {key: sum(c[key] for c in counts.values()) for key in ("answers", "same_text", "same_score")}
        parts = [f"question {name} {c['same_text']} of {c['answers']}" for name, c in sorted(counts.items())[::-1]]
        lines.append(
            f"{method} equals full attention's answer in {total['same_text']} of {total['answers']} cells"
            f" ({', '.join(parts)}); same score in {total['same_score']} of {total['answers']}"
        )
    return lines


def report(folder: Path, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, plot: bool) -> str:
    """The text for the terminal; writes heatmap.png into the folder."""
    panels, failed = panels_of(summary["cells"]), [row for row in rows if row.get("error")]
    if not panels:
        return "no answers to show" + (f"; the first error: {failed[0]['error']}" if failed else "")
    if plot:
        save_heatmap(panels, folder / "heatmap.png", title=_title(summary))
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = max(shutil.get_terminal_size((120, 24)).columns, 60)
    parts = [text_table(panels, color=color, width=width), "\n".join(agreement_lines(summary["agreement"]))]
    shown = [*share_lines(summary["cells"]), *([f"heatmap: {folder / 'heatmap.png'}"] if plot else [])]
    parts.append("\n".join(shown))
    if failed:
        parts.append(f"{len(failed)} answers failed; the first, {failed[0]['id']}: {failed[0]['error']}")
    return "\n\n".join(part for part in parts if part) + "\n"


def share_lines(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say of each method but full attention how many tokens of the longest text a generated token attends to."""
    known = [cell for cell in cells if cell.get("attended") is not None and cell["method"] != "full"]
    lines = []
    for method in ordered({cell["method"] for cell in known}, METHODS):
        longest = max(cell["length"] for cell in known if cell["method"] == method)
        own = [cell["attended"] for cell in known if (cell["method"], cell["length"]) == (method, longest)]
        mean = sum(own) / len(own)
        share = f"{mean:,.0f} of {longest:,} tokens ({100 * mean / longest:.1f} %)"
        lines.append(f"{method} attended to {share} for each generated token; full attention to all of them")
    return lines


def _title(summary: Mapping[str, Any]) -> str:
    """The title of the heatmap in plain words, with the share of tokens that retrieval attended to."""
    share = next((line for line in share_lines(summary["cells"]) if line.startswith("retrieval attended")), "")
    found = f"Share of hidden sentences found, by length and depth (model {summary['settings']['model']})"
    return "\n".join([found, *([share.partition(";")[0]] if share else [])])
