"""What a needle run's rows say: panels for the heatmap, summary files, and the comparison with full attention."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from retrieval_attn.eval.needle.heatmap import Panel, save_heatmap, text_table
from retrieval_attn.eval.runs import write_atomically

__all__ = ["comparison_line", "report", "score", "summarise"]

Row = dict[str, Any]
_PLACES = {"inside": "question inside the prompt", "after": "question after the context"}


def score(expected: Sequence[str], response: str) -> float:
    """Fraction of the expected strings that occur in the response, ignoring case.  No expectation scores 0."""
    folded = response.casefold()
    return sum(text.casefold() in folded for text in expected) / len(expected) if expected else 0.0


def panels_of(rows: Iterable[Row]) -> list[Panel]:
    """One panel per method and question position; full attention once if both positions gave the same answers."""
    good = [row for row in rows if not row.get("error")]
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in good:
        groups[row["method"], row["position"]].append(row)
    if _same_answers(groups.get(("full", "inside"), []), groups.get(("full", "after"), [])):
        del groups["full", "after"]
    lengths = tuple(sorted({row["length"] for row in good}))
    depths = tuple(sorted({row["depth"] for row in good}))
    order = sorted(groups, key=lambda key: (key[1] != "inside", _rank(key[0]), key))
    panels = []
    for key in order:
        cells: dict[tuple[float, int], list[float]] = defaultdict(list)
        for row in groups[key]:
            cells[row["depth"], row["length"]].append(row["score"])
        grid = tuple(tuple(_mean(cells.get((d, n), [])) for n in lengths) for d in depths)
        panels.append(Panel(_title(*key), lengths, depths, grid, len(groups[key])))
    return panels


def _title(method: str, position: str) -> str:
    return "full attention" if method == "full" else f"{method}, {_PLACES.get(position, position)}"


def _rank(method: str) -> int:
    """Full attention first, then in the order of the registry."""
    from retrieval_attn.eval.baselines import METHODS

    return METHODS.index(method) if method in METHODS else len(METHODS)


def comparison(rows: Iterable[Row], method: str = "retrieval") -> dict[str, dict[str, int]]:
    """Per question position: cells where full attention and `method` answered, with the same text, the same score."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if not row.get("error"):
            found[row["id"].replace(f"/{row['method']}/", "/*/")][row["method"]] = row
    counts: dict[str, dict[str, int]] = {}
    for pair in found.values():
        if {"full", method} <= pair.keys():
            full, ours = pair["full"], pair[method]
            count = counts.setdefault(full["position"], {"cells": 0, "same_text": 0, "same_score": 0})
            count["cells"] += 1
            count["same_text"] += full["response"] == ours["response"]
            count["same_score"] += full["score"] == ours["score"]
    return counts


def comparison_line(rows: Sequence[Row]) -> str:
    """The comparisons in words, a line per method; empty if none has a cell in common with full attention."""
    lines = []
    for method in _others(rows):
        counts = comparison(rows, method)
        if counts:
            total = {key: sum(c[key] for c in counts.values()) for key in ("cells", "same_text", "same_score")}
            parts = [f"question {name} {c['same_text']} of {c['cells']}" for name, c in sorted(counts.items())[::-1]]
            lines.append(
                f"{method} equals full attention's answer in {total['same_text']} of {total['cells']} cells"
                f" ({', '.join(parts)}); same score in {total['same_score']} of {total['cells']}"
            )
    return "\n".join(lines)


def _others(rows: Iterable[Row]) -> list[str]:
    return sorted({row["method"] for row in rows} - {"full"}, key=lambda name: (_rank(name), name))


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Means, counts and times over the rows, as JSON values."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[f"{row['method']}/{row['position']}"].append(row)
    methods = {}
    for name, group in sorted(groups.items()):
        good = [row for row in group if not row.get("error")]
        methods[name] = {
            "n": len(good),
            "mean_score": _mean([row["score"] for row in good]),
            "errors": len(group) - len(good),
            "empty_answers": sum(not row["response"].strip() for row in good),
            "stopped_by_length": sum(row["finish_reason"] == "length" for row in good),
            "mean_seconds": {
                key: _mean([row["seconds"][key] for row in good if key in row["seconds"]])
                for key in ("prefill", "index", "decode")
            },
        }
    good = [row for row in rows if not row.get("error")]
    return {
        "methods": methods,
        "retrieval_against_full": comparison(rows),
        "against_full": {method: comparison(rows, method) for method in _others(rows)},
        "mean_fill": _mean([row["achieved_length"] / row["length"] for row in good]),
        "worst_depth_error": max((abs(row["achieved_depth"] - row["depth"]) for row in good), default=None),
        "panels": [
            {
                "title": p.title,
                "lengths": p.lengths,
                "depths": p.depths,
                "scores": p.scores,
                "mean": p.mean,
                "n": p.n,
            }
            for p in panels_of(rows)
        ],
    }


def summary_csv(rows: Sequence[Row]) -> str:
    """One line per method, position, length and depth."""
    cells: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        if not row.get("error"):
            cells[row["method"], row["position"], row["length"], row["depth"]].append(row["score"])
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["method", "position", "length", "depth", "n", "score"])
    for key, scores in sorted(cells.items()):
        table.writerow([*key, len(scores), f"{sum(scores) / len(scores):.4f}"])
    return file.getvalue()


def report(folder: Path, rows: Sequence[Row], *, title: str, plot: bool, color: bool, width: int) -> str:
    """Write summary.json, summary.csv and heatmap.png into the folder; returns the text for the terminal."""
    write_atomically(folder / "summary.json", json.dumps(summarise(rows), indent=2) + "\n")
    write_atomically(folder / "summary.csv", summary_csv(rows))
    panels = panels_of(rows)
    if not panels:
        failed = next((row["error"] for row in rows if row.get("error")), None)
        return "no answers to show" + (f"; the first error: {failed}" if failed else "")
    if plot:
        save_heatmap(panels, folder / "heatmap.png", title=title)
    parts = [text_table(panels, color=color, width=width)]
    line = comparison_line(rows)
    failed = [row for row in rows if row.get("error")]
    if line:
        parts.append(line)
    if failed:
        parts.append(f"{len(failed)} answers failed; the first, {failed[0]['id']}: {failed[0]['error']}")
    return "\n\n".join(parts)


def _same_answers(first: Sequence[Row], second: Sequence[Row]) -> bool:
    def answers(rows: Sequence[Row]) -> dict[tuple[Any, ...], str]:
        return {(row["length"], row["depth"], row["round"]): row["response"] for row in rows}

    return bool(first) and answers(first) == answers(second)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
