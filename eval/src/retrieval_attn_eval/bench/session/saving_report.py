"""Table of the saving stage of `bench session`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval_attn_eval.bench.plots import table

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.session.row import Row
    from retrieval_attn_eval.bench.session.saving import Saved

__all__ = ["saving_table"]

GB = 10**9
WHERE = {"save": "", "warm": "in RAM: ", "cold": "on disk: "}


def saving_table(saved: Saved) -> str:
    """Format the table, its notes, and the meaning of its columns."""
    notes: list[str] = []
    lines = [f"Saved contexts of {saved.length:,} tokens", "", *_table(saved, notes)]
    lines += [
        "",
        "first: the first time in a new process; later: the median of later times. in RAM: all files of the context "
        "are in the page cache, each was read just before. on disk: posix_fadvise(DONTNEED) evicted them just before, "
        "and mincore confirms it; caches of the disk itself are unknown. The opened context generated the saved one's "
        "tokens every time. disk: all files read once, in pieces of 16 MiB. GB/s: of the context's bytes. x reading: "
        "over the plain read's later time and the saved context's later first token.",
        *(["", *notes] if notes else []),
    ]
    return "\n".join(lines) + "\n"


def _table(saved: Saved, notes: list[str]) -> list[str]:
    nbytes = saved.disk.get("nbytes")
    reread = {
        append: _sum(_later(saved, "read"), _later(saved, f"first/{append}")) for append in ("exact", "retrieval")
    }
    cells = []
    for process in saved.processes:
        for row in process.rows:
            rate = ratio = ""
            value = row.first if row.later is None else row.later
            kind, _, append = row.key.partition("/")
            if value and nbytes and (row.key in ("save", "resume/exact")):
                rate = f"{nbytes / value / GB:.2f}"
            before = reread.get(append) if kind == "resume" else None
            if before and value:
                ratio = f"{value / before:.3f}"
            first, later = _number(row.first), _number(row.later)
            if row.status != "ok":
                first, note = row.status, f"- {saved.length:,} tokens, {row.what}: {row.note}"
                notes.append(note)
            cells.append([WHERE.get(process.caches, "") + row.what, row.unit, first, later, rate, ratio])
        if process.caches == "save" and nbytes:
            for name, words in (("cold", "on disk"), ("warm", "in RAM")):
                seconds = saved.disk.get(f"{name}_seconds")
                if seconds:
                    rate = f"{nbytes / seconds / GB:.2f}"
                    cells.append([f"disk: {words}, read all files", "s", "", _number(seconds), rate, ""])
    made = table(["measure", "unit", "first", "later", "GB/s", "x reading"], cells, left=1)
    return [made[0], made[1].replace("|---:|", "|:---|", 1), *made[2:]]


def _row(saved: Saved, caches: str, key: str) -> Row | None:
    process = next((one for one in saved.processes if one.caches == caches), None)
    return None if process is None else process.row(key)


def _later(saved: Saved, key: str, caches: str = "save") -> float | None:
    row = _row(saved, caches, key)
    return None if row is None or row.status != "ok" else row.later


def _sum(*values: float | None) -> float | None:
    return None if any(value is None for value in values) else sum(value for value in values if value is not None)


def _number(value: float | None) -> str:
    """Three digits, as many as the machine's noise leaves."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
