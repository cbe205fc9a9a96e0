"""Table and plot of `bench serve`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrieval_attn_eval.bench.plots import Plot, shown, table
from retrieval_attn_eval.bench.serve.row import Row
from retrieval_attn_eval.bench.session.header import header

__all__ = ["NAMES", "markdown", "plots"]

NAMES = {
    "one": "one after the other",
    "static": "static batches",
    "engine": "engine",
    "tree-off": "engine, tree off",
    "transformers": "transformers' continuous batching",
    "completions": "completions",
    "chat-user": "chat, in the user's message",
    "chat-system": "chat, in the system message",
}
COLUMNS = (
    "way", "tokens/s", "x one", "x static", "seconds", "CPU s", "first p50, s", "p99, s", "next p50, ms", "p99, ms",
    "good", "slots filled", "cached",
)  # fmt: skip
CACHE_COLUMNS = (
    "prefix cache", "hit rate", "ceiling", "optimal", "first p50, s", "p90, s", "p99, s", "hits p50, s",
    "misses p50, s", "per token, ms", "evicted", "hit tokens", "refused",
)  # fmt: skip
POINTS = 64
"""Of a line in the plot, at most."""


def markdown(rows: Sequence[Row], report: dict[str, Any]) -> str:
    """Header lines, the table, and what its columns mean."""
    facts, prompts, workload = report["facts"], report["prompts"], report["workload"]
    lines = [
        *header(report, facts),
        f"- model: {report['model']}, {facts.get('dtype', 'dtype not known')}, {facts.get('layers', '?')} layers; "
        f"options {json.dumps(report['config'])}",
        f"- workload: {workload['kind']}, {prompts['requests']} requests, prompts of {prompts['least']:,} to "
        f"{prompts['most']:,} tokens, {prompts['answers']:,} tokens of answers, the last one comes after "
        f"{prompts['last_arrival']:.3g} s; {report['slots']} slots"
        + ("; beginnings of prompts are read before the clock starts" if report["read_first"] else ""),
        "",
    ]
    rates = {row.way: row.rate for row in rows}
    cells = [_cells(row, rates.get("one"), rates.get("static")) for row in rows]
    made = table(COLUMNS, cells, left=0)
    bounds = report["bounds"]
    lines += [
        made[0],
        made[1].replace("|---:|", "|:---|", 1),
        *made[2:],
        "",
        "tokens/s: generated tokens a second from the first arrival to the last token, reading included. CPU s: of "
        "all threads, which other work on the machine does not change much. first: "
        "from a request's arrival to its first token. next: from token to token. good: requests with a first token "
        f"within {bounds['first_seconds']:g} s and {bounds['token_seconds'] * 1000:g} ms from token to token on "
        "average. slots filled: of those that steps had while a request waited. cached: tokens of prompts that were "
        "not read for their request. Every answer has the tokens of one after the other, where that ran. static "
        "batches: the engine gets as many requests as it has slots, of those that are there, and the next ones when "
        "all are answered. one, static: with the tree. transformers computes full attention; its answers are not "
        "compared.",
    ]
    lines += _cache_lines(rows)
    notes = [f"- {NAMES[row.way]}: {row.note}" for row in rows if row.note]
    notes += [f"- {text}" for text in report["simplifications"]]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def _cache_lines(rows: Sequence[Row]) -> list[str]:
    """The table of the prefix cache, and the meaning of its columns; none without a row that has counts."""
    used = [(row, row.use) for row in rows if row.use is not None and row.status == "ok"]
    if not used:
        return []
    cells = []
    for row, use in used:
        evicted, hits = (
            ", ".join(f"{tier} {count:,}" for tier, count in counts.items() if count or tier == "all")
            for counts in (use.counts.evicted, use.counts.hit_tokens)
        )
        rates = [shown(value, ".1%") for value in (use.hit, use.ceiling, use.optimal)]
        firsts = [_number(value) for value in (*use.first, use.first_hit, use.first_miss)]
        token = None if use.token is None else use.token * 1000
        cells.append([NAMES[row.way], *rates, *firsts, _number(token), evicted, hits, str(use.refused)])
    made = table(CACHE_COLUMNS, cells, left=0)
    return [
        "",
        made[0],
        made[1].replace("|---:|", "|:---|", 1),
        *made[2:],
        "",
        "hit rate: cached tokens of prompts over all their tokens. ceiling: the same of an unlimited cache, which has "
        "all earlier prompts, by the longest common prefix of token ids. optimal: the same of a cache that never has "
        "more tokens than this one had at most (bytes over the bytes of a token), and evicts the tokens that are "
        "needed last (Belady's policy). hits, misses: requests of whose prompt an unlimited cache has at least half, "
        "and less. per token: mean after the first one of an answer. evicted: entries, by tier if they are counted so. "
        "hit tokens: "
        "by tier. An answer in a later prompt is the trace's, not the one that was generated.",
    ]


def _cells(row: Row, one: float | None, static: float | None) -> list[str]:
    name = NAMES[row.way]
    if row.status != "ok":
        return [name, row.status, *[""] * (len(COLUMNS) - 2)]
    first, gap = row.first or (None, None), row.gap or (None, None)
    return [
        name,
        _number(row.rate),
        _ratio(row.rate, one),
        _ratio(row.rate, static),
        _number(row.seconds),
        _number(row.cpu_seconds),
        *map(_number, first),
        *(_number(None if value is None else value * 1000) for value in gap),
        shown(row.good, ".0%"),
        shown(row.filled, ".1%"),
        shown(row.cached, ".0%"),
    ]


def plots(rows: Sequence[Row], title: str) -> list[Plot]:
    """Share of requests with their first token, and of tokens with their next one, within so many seconds."""
    firsts: dict[str, list[tuple[float, float]]] = {}
    gaps: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.status == "ok":
            for into, values in (
                (firsts, [one.first_seconds for one in row.answers if one.first_seconds is not None]),
                (gaps, [gap for one in row.answers for gap in one.gaps]),
            ):
                if values:
                    into[NAMES[row.way]] = _shares(values)
    return [
        Plot(f"{title}: first token", "seconds", "share of requests", firsts, log_x=True),
        Plot(f"{title}: token to token", "seconds", "share of tokens", gaps, log_x=True),
    ]


def _shares(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the cumulative distribution; a logarithmic axis has no zero."""
    shares = np.linspace(0, 1, min(POINTS, len(values) + 1))
    found = np.quantile(values, shares, method="inverted_cdf")
    return [(max(float(value), 1e-5), float(share)) for value, share in zip(found, shares, strict=True)]


def _ratio(rate: float | None, other: float | None) -> str:
    return "" if rate is None or not other else f"{rate / other:.2f}"


def _number(value: float | None) -> str:
    """Three digits, as many as the machine's noise leaves."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
