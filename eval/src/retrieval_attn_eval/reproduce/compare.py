"""Reads the results of a reproduced table or figure and puts the paper's numbers beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.reproduce.experiments import Experiment, Step
from retrieval_attn_eval.reproduce.paper import CLAIMS, SLIPS, TABLES, Cell, PaperTable
from retrieval_attn_eval.suite.report import percent, table
from retrieval_attn_eval.suite.tables import length_label

__all__ = ["comparison", "paper_only"]

Results = dict[tuple[str, str], str]  # (method, column) -> our cell


def paper_only(name: str, experiment: Experiment, model: str) -> str:
    """The paper's numbers alone, as Markdown."""
    return "\n".join(_with_paper(name, experiment, {}, model))


def comparison(name: str, experiment: Experiment, folder: Path, steps: Sequence[Step], model: str) -> str:
    """Markdown of our numbers with the paper's in brackets.  Raises InputDataError if results are missing."""
    read = _READERS[experiment.kind]
    found = read(folder, steps)
    if isinstance(found, str):
        return "\n".join([found, "", *_claim(name)])
    return "\n".join(_with_paper(name, experiment, found, model))


def _claim(name: str) -> list[str]:
    if name not in CLAIMS:
        return []
    where, words = CLAIMS[name]
    return [f"The paper ({where}): {words}."]


def _with_paper(name: str, experiment: Experiment, ours: Results, model: str) -> list[str]:
    lines: list[str] = []
    for number, key in enumerate(experiment.papers):
        paper = TABLES[key]
        rows = paper.rows.get(model) or next(iter(paper.rows.values()))
        shown = model if model in paper.rows else next(iter(paper.rows))
        own = ours
        columns = list(paper.columns)
        extra = [c for c in dict.fromkeys(c for _, c in own) if c not in columns]
        methods = [*rows, *(m for m in dict.fromkeys(m for m, _ in own) if m not in rows)]
        body = []
        for method in methods:
            cells = [
                _cell(
                    own.get((method, column)) if own else "",
                    _paper_cell(paper, shown, method, column) if column in columns else None,
                )
                for column in [*extra, *columns]
            ]
            body.append([method, paper.tokens.get(method, "-"), *cells])
        if number:
            lines.append("")
        what = "ours, and the paper's in brackets" if own else "the paper's numbers"
        lines.append(f"{paper.title} ({paper.where}{', ' + shown if shown else ''}): {what}")
        lines += ["", *table(["method", "paper's act. tokens", *extra, *columns], body)]
        for (where, of, method, column), right in SLIPS.items():
            if where == key and of == shown:
                lines.append(
                    f"\n[!] {method}, {column}: the paper prints another number than its row's mean, {right:.2f}"
                )
    return [*lines, *([""] + _claim(name) if name in CLAIMS else [])]


def _paper_cell(paper: PaperTable, model: str, method: str, column: str) -> Cell:
    cells = paper.rows[model].get(method)
    return None if cells is None else cells[paper.columns.index(column)]


def _cell(ours: str | None, paper: Cell) -> str:
    """Ours with the paper's in brackets; None: we have none; "": only the paper's is wanted."""
    if isinstance(paper, tuple):
        theirs = " / ".join(f"{value:g}" for value in paper)
    else:
        theirs = "-" if paper is None else paper if isinstance(paper, str) else f"{paper:g}"
    return theirs if ours == "" else f"{'-' if ours is None else ours} ({theirs})"


# ---- results of the steps -------------------------------------------------------------------------


def _json(path: Path) -> Any:
    if not path.is_file():
        raise InputDataError(f"{path}: needed the results of a finished run, found none; run without --dry-run")
    return json.loads(path.read_text(encoding="utf-8"))


def _suite_cells(folder: Path, step: Step) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    summary = _json(folder / step.folder / "summary.json")
    return summary["cells"], summary


def _titles(step: Step) -> Mapping[str, str]:
    """task -> column of the paper's table; stand-ins keep their own name, they are not the paper's tasks."""
    if step.words[0] == "ruler":
        from retrieval_attn_eval.ruler.specs import SPECS

        short = {"cwe": "CW", "fwe": "FW", "qa_1": "Q1", "qa_2": "Q2"}  # as the paper heads these columns
        return {name: short.get(name, spec.title) for name, spec in SPECS.items()}
    from retrieval_attn_eval.infinitebench.catalogue import TITLES

    return TITLES


def _tasks(folder: Path, steps: Sequence[Step]) -> Results:
    """The longest length's cells; a second step gives a second number, of the larger budget."""
    titles = _titles(steps[0])
    found: Results = {}
    for number, step in enumerate(steps):
        cells, _ = _suite_cells(folder, step)
        longest = max((cell["length"] or 0 for cell in cells), default=0)
        at = [cell for cell in cells if (cell["length"] or 0) == longest]
        for cell in at:
            key = (cell["method"], titles[cell["task"]])
            shown = percent(cell["score"], cell["error_of_score"])
            found[key] = f"{found[key]} / {shown}" if number and key in found else shown
        if number == 0:
            for method in {cell["method"] for cell in at}:
                scores = [cell["score"] for cell in at if cell["method"] == method and cell["score"] is not None]
                if scores:
                    found[method, "Avg."] = percent(sum(scores) / len(scores)) + f" of {len(scores)}"
    return found


def _lengths(folder: Path, steps: Sequence[Step]) -> Results:
    found: Results = {}
    _, summary = _suite_cells(folder, steps[0])
    means: dict[str, list[float]] = {}
    for curve in summary["curves"]:
        found[curve["method"], length_label(curve["length"])] = percent(curve["score"], curve["error_of_score"])
        means.setdefault(curve["method"], []).append(curve["score"])
    for method, scores in means.items():
        found[method, "Avg."] = percent(sum(scores) / len(scores))
    return found


def _by_layer(folder: Path, steps: Sequence[Step]) -> Results:
    """The second step is another row: as many keys on average, another number in every layer."""
    found = _tasks(folder, steps[:1])
    more = _tasks(folder, steps[1:])
    return found | {("retrieval, budget per layer", column): cell for (_, column), cell in more.items()}


def _decoded(folder: Path, steps: Sequence[Step]) -> dict[tuple[str, int], Mapping[str, Mapping[str, Any]]]:
    """Return the rows of every latency step by (method, context), by key; {} for a step that did not run."""
    found: dict[tuple[str, int], Mapping[str, Mapping[str, Any]]] = {}
    for step in steps:
        method, _, length = step.folder.removeprefix("decode/").rpartition("-")
        file = folder / step.folder / "session.json"
        rows = _json(file)["processes"][0]["rows"] if file.is_file() else []
        found[method, int(length)] = {row["key"]: row for row in rows}
    return found


def _seconds(rows: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    """Return the seconds per token of a row of the answers through the index; None if it was not measured."""
    row = rows.get(f"answer/retrieval/{name}")
    return None if row is None or row["later"] is None else float(row["later"]) / 1000


def _shown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format seconds per token with four digits, or the reason for a missing number."""
    took = _seconds(rows, "ms_per_token")
    return f"{took:.4f}" if took is not None else "failed" if rows else "not run"


def _latency(folder: Path, steps: Sequence[Step]) -> Results:
    """Return seconds per token."""
    found = _decoded(folder, steps)
    return {(name, length_label(context)): _shown(rows) for (name, context), rows in found.items()}


def _parts(folder: Path, steps: Sequence[Step]) -> Results:
    """Return host search, host attention, the remaining time and the total at the longest context."""
    measured = _decoded(folder, steps)
    longest = max(context for _, context in measured)
    found: Results = {}
    for (name, context), rows in measured.items():
        if context == longest and name != "full":
            found[name, "Total"] = _shown(rows)
            took, search, attend = (_seconds(rows, part) for part in ("ms_per_token", "search_ms", "attend_ms"))
            if took is not None and search is not None and attend is not None:
                found[name, "Retrieval"], found[name, "Attention"] = f"{search:.4f}", f"{attend:.4f} on the host"
                found[name, "Others"] = f"{took - search - attend:.4f}"
    return found


def _accuracy(folder: Path, steps: Sequence[Step]) -> Results:
    """Return key-value retrieval and seconds per token."""
    cells, _ = _suite_cells(folder, steps[0])
    found = {(c["method"], "Accuracy"): percent(c["score"], c["error_of_score"]) for c in cells}
    for (name, _), rows in _decoded(folder, steps[1:]).items():
        found[name, "Decoding latency"] = _shown(rows)
    return found


def _study(folder: Path, steps: Sequence[Step]) -> str:
    figures = _json(folder / steps[0].folder / "study.json")["figures"]
    lines = []
    if "2" in figures:
        two = figures["2"]
        static = "-" if two["static"] is None else f"{100 * two['static']:.1f}"
        lines += table(
            ["figure 2", "ours, %", "paper, %"],
            [
                [f"{two['k']:,} of {two['keys']:,} keys, chosen for every token", f"{100 * two['dynamic']:.1f}", "89"],
                ["kept from the first token", static, "71"],
            ],
        )
    if "3b" in figures:
        ratio = f"{figures['3b']['ratio']:.1f}"
        lines += ["", *table(["figure 3b", "ours", "paper"], [["distance of queries / of keys", ratio, "above 10"]])]
    papers = {"ivf": "30-50 %", "roargraph": "1-3 %"}
    for name in ("3a", "6"):
        for what, rows in figures.get(name, {}).items():
            body = []
            for variant in dict.fromkeys(row["variant"] for row in rows):
                own = [row for row in rows if row["variant"] == variant]
                enough = min((row["scanned"] for row in own if row["recall"] >= 0.95), default=None)
                best = max(row["recall"] for row in own)
                share = "never" if enough is None else f"{100 * enough:.2f} %"
                theirs = papers.get(variant, "-") if what == "queries" else "1-5 %" if variant == "ivf" else "-"
                body.append([variant, share, f"{best:.3f}", theirs])
            head = [
                f"figure {name}, {what} search keys",
                "scored for recall 0.95",
                "best recall",
                "paper, scored for 0.95",
            ]
            lines += ["", *table(head, body)]
    return "\n".join(lines).strip()


def _needle(folder: Path, steps: Sequence[Step]) -> str:
    """The panels as text, means first; the heatmap lies in the step's folder."""
    from retrieval_attn_eval.needle.heatmap import text_table
    from retrieval_attn_eval.needle.report import panels_of

    panels = panels_of(_suite_cells(folder, steps[0])[0])
    means = [f"{panel.title}: mean {percent(panel.mean)}, n = {panel.n}" for panel in panels]
    return "\n".join([*means, "", "```", text_table(panels), "```", "", str(folder / steps[0].folder / "heatmap.png")])


_READERS: dict[str, Callable[[Path, Sequence[Step]], Results | str]] = {
    "tasks": _tasks,
    "layers": _by_layer,
    "accuracy": _accuracy,
    "lengths": _lengths,
    "decode": _latency,
    "parts": _parts,
    "study": _study,
    "needle": _needle,
}
