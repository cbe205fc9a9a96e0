"""The files of a finished run: summary.json, summary.csv, summary.md in the shape of published tables, two plots."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrieval_attn_eval.baselines import METHODS
from retrieval_attn_eval.flags import check_matplotlib
from retrieval_attn_eval.runs import write_atomically
from retrieval_attn_eval.suite import statistics, tables
from retrieval_attn_eval.suite.suite import TaskSuite
from retrieval_attn_eval.suite.tables import length_label

__all__ = ["markdown", "write_report"]

_PLACES = {"inside": "question inside the prompt", "after": "question after the context is indexed"}


def write_report(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    suite: TaskSuite,
    settings: Mapping[str, Any],
    *,
    plot: bool = True,
    notes: Sequence[str] | None = None,
) -> str:
    """Write the files into `folder`, replacing older ones; returns the suite's own view, or the text of summary.md.

    notes: what the run noted when it was started; None: what the suite says now.
    """
    kept = list(dict.fromkeys(getattr(suite, "notes", ()) if notes is None else notes))
    found = tables.summarise(rows, suite.tasks(), METHODS)
    summary = {**found, "settings": dict(settings), "notes": kept}
    text = markdown(summary, rows, suite, settings, kept)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    write_atomically(folder / "summary.csv", summary_csv(summary["cells"]))
    write_atomically(folder / "summary.md", text)
    own = getattr(suite, "view", None)
    if own is not None:
        return str(own(folder, summary, rows, plot=plot))
    if plot and summary["cells"]:
        check_matplotlib()
        from retrieval_attn_eval.suite.plots import save_plots

        save_plots(folder, summary, titles_of(suite, summary["cells"]), title=_title(suite, settings))
    return text


def titles_of(suite: TaskSuite, cells: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Column names of the suite's tasks and of those found: the published table's, else the task's own name."""
    titles = getattr(suite, "titles", {})
    return {task: titles.get(task, task) for task in (*suite.tasks(), *(cell["task"] for cell in cells))}


def summary_csv(cells: Sequence[Mapping[str, Any]]) -> str:
    """One line per method, position, length and task; an empty field is unknown."""
    file = io.StringIO()
    names = list(dict.fromkeys(name for cell in cells for name in cell))
    table = csv.DictWriter(file, names, lineterminator="\n", restval="")
    table.writeheader()
    for cell in cells:
        table.writerow({k: "" if v is None else round(v, 6) if isinstance(v, float) else v for k, v in cell.items()})
    return file.getvalue()


def markdown(
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    suite: TaskSuite,
    settings: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> str:
    """summary.md: per question position the tables by length and by task, the paired differences, and the counts."""
    parts = [f"# {_title(suite, settings)}", "", _facts(summary, settings)]
    parts += [f"- {note}" for note in notes]
    titles = titles_of(suite, summary["cells"])
    positions = tables.ordered({cell["position"] for cell in summary["cells"]}, tuple(_PLACES))
    for position in positions:
        cells = [cell for cell in summary["cells"] if cell["position"] == position]
        parts += ["", f"## {_PLACES.get(position, position).capitalize()}", ""]
        if len({cell["length"] for cell in cells}) > 1:
            parts += [*_by_length(summary, position), ""]
        for length in sorted({cell["length"] for cell in cells}, key=lambda n: n or 0):
            at = [cell for cell in cells if cell["length"] == length]
            parts += [*_by_task(at, titles, _span(length)), ""]
        parts += _differences(summary["comparisons"], position, titles)
        parts += _parts_of_the_gap(summary["comparisons"], position)
        parts += _own_summary(suite, cells)
    parts += ["", *_counts(summary["cells"], titles)]
    failed = [row for row in rows if row.get("error")]
    if failed:
        parts += ["", f"{len(failed)} answers failed; the first, {failed[0]['id']}: {failed[0]['error']}"]
    return "\n".join(parts).rstrip() + "\n"


def _title(suite: TaskSuite, settings: Mapping[str, Any]) -> str:
    return f"{suite.name}: {settings.get('model', '?')}"


def _facts(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    counts = sorted({cell["n"] for cell in summary["cells"]}) or [0]
    n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    options = json.dumps(settings.get("options", {}), sort_keys=True)
    return (
        f"- percent, mean ± standard error; n = {n} samples per cell; seed {settings.get('seed')};"
        f" {settings.get('dtype')} on {settings.get('device')}; options {options}"
    )


def _span(length: int | None) -> str:
    return "all lengths of the files" if length is None else f"{length_label(length)} tokens"


def percent(value: float | None, error: float | None = None) -> str:
    """ "93.1 ±0.8" of fractions; a dash for nothing."""
    if value is None:
        return "-"
    return f"{100 * value:.1f}" + (f" ±{100 * error:.1f}" if error is not None else "")


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, first column left, the others right."""
    rule = "|---|" + "---:|" * (len(head) - 1)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)]


def _by_length(summary: Mapping[str, Any], position: str) -> list[str]:
    """Shape of the paper's Table 3: means over the tasks, effective length, average, difference to full attention."""
    curves = [c for c in summary["curves"] if c["position"] == position and c["length"] is not None]
    lengths = sorted({c["length"] for c in curves})
    most = {n: max(c["tasks"] for c in curves if c["length"] == n) for n in lengths}
    averages: dict[str, float | None] = {}
    lines = []
    for method in tables.ordered({c["method"] for c in curves}, METHODS):
        own = {c["length"]: c for c in curves if c["method"] == method}
        complete = {n: own[n]["score"] for n in lengths if n in own and own[n]["tasks"] == most[n]}
        average = statistics.mean(list(complete.values())) if len(complete) == len(lengths) else None
        averages[method] = average
        effective = statistics.effective_length({n: 100 * s for n, s in complete.items()})
        shown = [
            percent(own[n]["score"], own[n]["error_of_score"]) + ("" if n in complete else "*") if n in own else "-"
            for n in lengths
        ]
        lines.append(
            [
                method,
                _attended([own[n]["attended"] for n in own]),
                length_label(effective) if effective else f"<{length_label(lengths[0])}",
                *shown,
                _with_gap(average, averages.get("full"), method),
            ]
        )
    head = ["method", "act. tokens", "effective", *(length_label(n) for n in lengths), "avg. (Δ full)"]
    notes = (
        ["", "\\* fewer tasks than another method has at this length"]
        if any("*" in c for r in lines for c in r)
        else []
    )
    return ["Mean over the tasks, by length", "", *table(head, lines), *notes]


def _by_task(cells: Sequence[Mapping[str, Any]], titles: Mapping[str, str], span: str) -> list[str]:
    """Shape of the paper's Tables 2 and 9: tasks side by side, their average and its difference to full attention."""
    tasks = [task for task in titles if any(cell["task"] == task for cell in cells)]
    full: float | None = None
    lines = []
    for method in tables.ordered({cell["method"] for cell in cells}, METHODS):
        own = {cell["task"]: cell for cell in cells if cell["method"] == method}
        scores = [own[t]["score"] for t in tasks if t in own and own[t]["score"] is not None]
        average = statistics.mean(scores) if len(scores) == len(tasks) else None
        full = average if method == "full" else full
        lines.append(
            [
                method,
                _attended([cell["attended"] for cell in own.values()]),
                *(percent(own[t]["score"], own[t]["error_of_score"]) if t in own else "-" for t in tasks),
                _with_gap(average, full, method),
            ]
        )
    head = ["method", "act. tokens", *(titles[t] for t in tasks), "avg. (Δ full)"]
    return [f"Tasks, {span}", "", *table(head, lines)]


def _attended(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{sum(known) / len(known):,.0f}" if known else "-"


def _with_gap(average: float | None, full: float | None, method: str) -> str:
    if average is None or full is None or method == "full":
        return percent(average)
    return f"{percent(average)} ({100 * (average - full):+.1f})"


def _differences(comparisons: Sequence[Mapping[str, Any]], position: str, titles: Mapping[str, str]) -> list[str]:
    """Paired differences: the mean over the tasks, and the single tasks whose interval excludes zero."""
    here = [c for c in comparisons if c["position"] == position]
    if not here:
        return []
    whole = {(c["first"], c["second"], c["length"]) for c in here if c["task"] is None}
    lines = []
    for c in here:
        alone = (c["first"], c["second"], c["length"]) not in whole
        known = c["low"] is not None
        if c["task"] is None or alone or (known and (c["low"] > 0 or c["high"] < 0)):
            lines.append(
                [
                    f"{c['second']} − {c['first']}",
                    "files" if c["length"] is None else length_label(c["length"]),
                    "all tasks" if c["task"] is None else titles.get(c["task"], c["task"]),
                    f"{100 * c['mean']:+.1f}",
                    f"[{100 * c['low']:+.1f}, {100 * c['high']:+.1f}]" if known else "too few",
                    f"{c['p_value']:.3g}",
                    f"{c['wins']} / {c['losses']}",
                    str(c["n"]),
                ]
            )
    head = ["pair", "length", "task", "difference", "95 % interval", "McNemar p", "only 2nd / only 1st right", "n"]
    return [
        "Paired differences in points, same samples: bootstrap interval over samples within tasks, exact McNemar test",
        "of fully right answers.  Single tasks are listed where the interval excludes zero; summary.json has all.",
        "",
        *table(head, lines),
        "",
    ]


def _parts_of_the_gap(comparisons: Sequence[Mapping[str, Any]], position: str) -> list[str]:
    """Flat search has the same budget and no index error: it splits the gap to full attention in two."""
    found = {
        (c["first"], c["second"], c["length"]): c["mean"]
        for c in comparisons
        if c["position"] == position and c["task"] is None
    }
    lines = []
    for (first, second, length), index in found.items():
        if first == "flat" and ("full", second, length) in found and ("full", "flat", length) in found:
            gap, budget = found["full", second, length], found["full", "flat", length]
            span = "files" if length is None else length_label(length)
            lines.append([second, span, f"{100 * gap:+.1f}", f"{100 * budget:+.1f}", f"{100 * index:+.1f}"])
    if not lines:
        return []
    head = ["method", "length", "gap to full", "of that the budget (flat − full)", "the index (method − flat)"]
    return ["Where the gap to full attention comes from, in points", "", *table(head, lines), ""]


def _own_summary(suite: TaskSuite, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The suite's own lines, method by method."""
    own = getattr(suite, "summary", None)
    if own is None:
        return []
    lines: list[str] = []
    for method in tables.ordered({cell["method"] for cell in cells}, METHODS):
        scores: dict[int, dict[str, float]] = {}
        for cell in cells:
            if cell["method"] == method and cell["score"] is not None and cell["length"] is not None:
                scores.setdefault(cell["length"], {})[cell["task"]] = cell["score"]
        if scores:
            lines += [f"{method}:", *own(scores), ""]
    return lines


def _counts(cells: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> list[str]:
    """What could spoil a number, per method and position."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["method"], cell["position"]), []).append(cell)
    lines = []
    for (method, position), group in groups.items():
        fills = [cell["fill"] for cell in group if cell["fill"] is not None]
        speeds = [cell["decode_seconds_per_token"] for cell in group if cell["decode_seconds_per_token"] is not None]
        counts = [
            str(sum(cell[name] for cell in group))
            for name in ("n", "errors", "nulls", "truncated", "over", "cut_by_budget")
        ]
        fill = f"{min(fills):.3f} / {sum(fills) / len(fills):.3f}" if fills else "-"
        lines.append([method, position, *counts, fill, f"{1000 * sum(speeds) / len(speeds):.0f}" if speeds else "-"])
    head = ["method", "question", "answers", "errors", "empty", "truncated", "over length", "stopped by budget"]
    return ["## Counts", "", *table([*head, "fill, min / mean of cells", "ms per token"], lines)]
