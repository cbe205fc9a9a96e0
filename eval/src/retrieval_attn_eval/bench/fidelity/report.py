"""Table and plots of `bench fidelity`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrieval_attn_eval.bench.fidelity.measure import TAIL
from retrieval_attn_eval.bench.fidelity.row import Row
from retrieval_attn_eval.bench.plots import Plot, shown, table

__all__ = ["markdown", "plots"]

_COLUMNS = (
    "context", "method", "retrieve", "attended", "KL, nats", "95 % interval", "p99", "without / with tail",
    "KL / entropy", "same token", "captured", "estimated", "head error",
)  # fmt: skip


def markdown(rows: Sequence[Row], report: dict[str, Any]) -> str:
    """Header lines, a table per text, and what the columns mean."""
    machine, versions = report["machine"], report["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "numba"))
    lines = [
        f"- command: `{' '.join(report['command'])}`",
        f"- machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; threads: "
        f"{report['threads']}, device {report['device']}",
        f"- versions: {named}",
        f"- commit: {report['commit']}",
        f"- model: {report['model']}, {report['dtype']}; sink {report['config']['sink']}, window "
        f"{report['config']['window']}, host keys {report['config']['host_dtype']}; seed {report['seed']}",
    ]
    floor = report.get("floor")
    if floor is not None:
        lines.append(f"- with everything retrieved the KL is {floor:.1e}: what rounding does")
    lines += [f"- problem: {problem}" for problem in report["problems"]]
    for text in dict.fromkeys(row.text for row in rows):
        own = [row for row in rows if row.text == text]
        lines += ["", f"### {text}", "", *_entropies(own), "", *table(_COLUMNS, [_cells(row, own) for row in own])]
    lines += ["", *_legend(), *_refusals(rows)]
    return "\n".join(lines) + "\n"


def _entropies(rows: Sequence[Row]) -> list[str]:
    """One line per length: what was fed, and how sure full attention is of what comes."""
    seen = {row.length: row for row in rows}
    many = {row.length: f"{row.texts} texts, of each " if row.texts > 1 else "" for row in rows}
    return [
        f"{many[row.length]}{row.context:,} tokens read, {row.tokens} fed; full attention's entropy {row.entropy:.3f} "
        "nats."
        for row in seen.values()
    ]


def _without_tail(row: Row, rows: Sequence[Row]) -> float | None:
    """How many times the KL of a row with a tail is that of the same method and budget without; None: not known."""
    name = row.method.removesuffix(TAIL)
    others = [one.kl for one in rows if (one.length, one.method, one.budget) == (row.length, name, row.budget)]
    return others[0] / row.kl if name != row.method and others and others[0] is not None and row.kl else None


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """rows: of the same text, among which that without a tail may be."""
    budget = "" if row.budget is None else f"{row.budget:,}" if isinstance(row.budget, int) else str(row.budget)
    head = [f"{row.context:,}", row.method, budget]
    if row.kl is None:
        return [*head, "", "refused", *[""] * (len(_COLUMNS) - 5)]
    interval = "" if row.low is None or row.high is None else f"{_number(row.low)} to {_number(row.high)}"
    return [
        *head,
        shown(row.attended, ",.0f"),
        _number(row.kl),
        interval,
        "" if row.kl_p99 is None else _number(row.kl_p99),
        shown(_without_tail(row, rows), ".1f"),
        "" if row.entropy <= 0 else _number(row.kl / row.entropy),
        f"{round((row.same or 0) * row.tokens * row.texts)} of {row.tokens * row.texts}",
        shown(row.captured, ".3f"),
        shown(row.estimated, ".3f"),
        "" if row.head_error is None else _number(row.head_error),
    ]


def _number(value: float) -> str:
    """Three digits: 0.334, 0.00452, 1.2e-11."""
    return f"{value:.1e}" if 0 < abs(value) < 1e-4 else f"{value:.3g}"


def _legend() -> list[str]:
    return [
        "Every method reads the same ids, then gets the same next tokens one at a time at the same positions, "
        "whatever it would have said itself. KL: KL(full attention || method) of the next token, mean over the fed "
        "tokens, from logarithms of softmax in float64; full attention is transformers' own with its DynamicCache. "
        "Interval: bootstrap over the texts of a row and the tokens of each; those of a single text are not "
        "independent. p99: the KL that 99 % of the tokens do not exceed. without / with tail: how many times the KL "
        "is larger without. same token: the likeliest next one. attended: tokens per query, mean over layers and "
        "heads; published methods get sinks, window and `retrieve` together as their budget, and some attend to "
        "everything in their first layers, as published. captured: share of exact attention's weight that was "
        "attended to, over sampled heads. head error: |out - exact| / |exact| of a head's output; exact is full "
        "attention, in float32, with the method's own query over the keys and values that its own run stored; mean "
        "over heads, full-attention layers and fed tokens. + tail: what was not retrieved is estimated from "
        "clusters, which `estimated` of the weight is. ruler: the last tokens of question and answer are fed; "
        "extract: the first tokens of the true JSON. Everything decodes eagerly, or kinds of index by captured steps "
        "where --captured says so."
    ]


def _refusals(rows: Sequence[Row]) -> list[str]:
    told = dict.fromkeys(f"- {row.method}, retrieve {row.budget}: {row.refused}" for row in rows if row.refused)
    return ["", *told] if told else []


def plots(rows: Sequence[Row]) -> list[Plot]:
    """KL against keys retrieved, a panel per text and length; both axes logarithmic; dashed with a tail. Budgets that
    are no number of keys are left out."""
    panels = []
    for text, length in dict.fromkeys((row.text, row.length) for row in rows):
        own = [row for row in rows if (row.text, row.length) == (text, length)]
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in own:
            if isinstance(row.budget, int) and row.kl:
                lines.setdefault(row.method, []).append((float(row.budget), row.kl))
        if lines:
            title = f"{text}, {own[0].context:,} tokens"
            dashed = {name: name.removesuffix(TAIL) for name in lines if name.endswith(TAIL)}
            words = "keys retrieved per head", "KL to full attention, nats"
            panels.append(Plot(title, *words, lines, log_x=True, log_y=True, dashed=dashed))
    return panels
