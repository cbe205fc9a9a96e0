"""Table and plot of `bench contexts`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from retrieval_attn_eval.bench.plots import Plot, table
from retrieval_attn_eval.bench.session.header import cap_of, header

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.contexts.found import Found
    from retrieval_attn_eval.bench.session.row import Row

__all__ = ["markdown", "plots"]

GB = 10**9
WHERE = {"save": "", "warm": "in RAM: ", "cold": "on disk: "}


def markdown(found: Sequence[Found], report: dict[str, Any]) -> str:
    """Header lines, a table for each length, and what the columns mean."""
    facts = next((process.facts for one in found for process in one.processes if "device" in process.facts), {})
    lines = [
        *header(report, facts, cap_of(report)),
        f"- model: {report['model']}, {facts.get('dtype', 'dtype not known')}, {facts.get('layers', '?')} layers; "
        f"options {json.dumps(report['config'])}",
    ]
    notes: list[str] = []
    for one in found:
        lines += ["", f"{one.length:,} tokens", "", *_table(one, notes)]
    lines += [
        "",
        "first: the first time in a new process; later: the median of what followed in it. in RAM: the system's cache "
        "holds all of the context's files, each was read just before. on disk: posix_fadvise(DONTNEED) took them out "
        "of it just before, and mincore says that they are gone; caches of the disk itself are not known. The opened "
        "context gave the saved one's tokens every time. disk: all files read once, in pieces of 16 MiB. GB/s: of the "
        "context's bytes, where all of them pass. x reading: over the plain read's later time and the saved context's "
        "later first token.",
        *(["", *notes] if notes else []),
    ]
    return "\n".join(lines) + "\n"


def _table(found: Found, notes: list[str]) -> list[str]:
    nbytes = found.disk.get("nbytes")
    anew = {append: _sum(_later(found, "read"), _later(found, f"first/{append}")) for append in ("exact", "retrieval")}
    cells = []
    for process in found.processes:
        for row in process.rows:
            rate = ratio = ""
            value = row.first if row.later is None else row.later
            kind, _, append = row.key.partition("/")
            if value and nbytes and (row.key in ("save", "resume/exact")):
                rate = f"{nbytes / value / GB:.2f}"
            before = anew.get(append) if kind == "resume" else None
            if before and value:
                ratio = f"{value / before:.3f}"
            first, later = _number(row.first), _number(row.later)
            if row.status != "ok":
                first, note = row.status, f"- {found.length:,} tokens, {row.what}: {row.note}"
                notes.append(note)
            cells.append([WHERE.get(process.caches, "") + row.what, row.unit, first, later, rate, ratio])
        if process.caches == "save" and nbytes:
            for name, words in (("cold", "on disk"), ("warm", "in RAM")):
                seconds = found.disk.get(f"{name}_seconds")
                if seconds:
                    rate = f"{nbytes / seconds / GB:.2f}"
                    cells.append([f"disk: {words}, read all files", "s", "", _number(seconds), rate, ""])
    made = table(["measure", "unit", "first", "later", "GB/s", "x reading"], cells, left=1)
    return [made[0], made[1].replace("|---:|", "|:---|", 1), *made[2:]]


def _row(found: Found, caches: str, key: str) -> Row | None:
    process = next((one for one in found.processes if one.caches == caches), None)
    return None if process is None else process.row(key)


def _later(found: Found, key: str, caches: str = "save") -> float | None:
    row = _row(found, caches, key)
    return None if row is None or row.status != "ok" else row.later


def _sum(*values: float | None) -> float | None:
    return None if any(value is None for value in values) else sum(value for value in values if value is not None)


def plots(found: Sequence[Found], title: str) -> list[Plot]:
    """Seconds to a first token against the context's tokens, read anew and opened, both axes logarithmic."""
    panels = []
    for append, way in (("retrieval", "through the index"), ("exact", "exact")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for one in found:
            points = {
                "read anew": _sum(_later(one, "read"), _later(one, f"first/{append}")),
                "opened, in RAM": _later(one, f"resume/{append}", "warm"),
                "opened, on disk": _later(one, f"resume/{append}", "cold"),
            }
            for name, value in points.items():
                if value is not None:
                    lines.setdefault(name, []).append((float(one.length), value))
        panels.append(Plot(f"{title}, {way}", "tokens", "seconds to the first token", lines, log_x=True, log_y=True))
    return panels


def _number(value: float | None) -> str:
    """Three digits, as many as the machine's noise leaves."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
