"""Table, plot and comparison of `bench session`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.bench.plots import Plot, table
from retrieval_attn_eval.bench.session.children import Process
from retrieval_attn_eval.bench.session.header import cap_of, header
from retrieval_attn_eval.bench.session.row import Row

__all__ = ["markdown", "plots", "ratios", "read_baseline"]

GIB = 1 << 30


def markdown(processes: Sequence[Process], report: dict[str, Any]) -> str:
    """Header lines, the table, its notes and simplifications."""
    notes = _Notes()
    columns = ["measure", "unit"]
    for process in processes:
        columns += [f"{process.caches}: first", "later"]
    columns += ["card, GiB", "process, GiB", "holds under"]
    lines = []
    for key in dict.fromkeys(row.key for process in processes for row in process.rows):
        rows = [process.row(key) for process in processes]
        known = [row for row in rows if row is not None]
        cells = [known[0].what, next((row.unit for row in known if row.unit), "")]
        for row in rows:
            cells += ["", ""] if row is None else _times(row, notes)
        cells += [_bytes([row.device_bytes for row in known]), _bytes([row.host_bytes for row in known])]
        said = dict.fromkeys(number for row in known for number in map(notes.number, row.simplifications))
        lines.append([*cells, ", ".join(map(str, said))])
    facts = next((process.facts for process in processes if "device" in process.facts), {})
    head = [
        *header(report, facts, cap_of(report)),
        f"- model: {report['model']}, {facts.get('dtype', 'dtype not known')}, all {facts.get('layers', '?')} layers "
        f"distinct; contexts of {report['settings']['length']:,} tokens; options {json.dumps(report['config'])}",
        "",
    ]
    legend = [
        "",
        "first: the first time in a new process; later: the median of what followed in it. cold: the process found "
        "empty compile caches; warm: it found those of the process before; as found: the caches of this machine. card: "
        "used at most meanwhile, as nvidia-smi counts it; process: resident in host memory at most meanwhile. Times "
        "are wall clock around calls of the public API; batch 1 but where several questions are asked at once.",
        *notes.lines(),
    ]
    return "\n".join([*head, *_named(table(columns, lines, left=1)), *legend]) + "\n"


def plots(processes: Sequence[Process], title: str) -> list[Plot]:
    """Seconds to the first token against the question's tokens, both axes logarithmic."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for process in processes:
        for row in process.rows:
            kind, _, rest = row.key.partition("/")
            if kind != "first_token":
                continue
            append, _, tokens = rest.partition("/")
            for when, value in (("first", row.first), ("later", row.later)):
                if value is not None:
                    name = f"{append}, {process.caches}, {when}"
                    lines.setdefault(name, []).append((float(tokens), value))
    return [Plot(title, "tokens of the question", "seconds to the first token", lines, log_x=True, log_y=True)]


def read_baseline(path: Path) -> dict[str, Any]:
    """A result file of an earlier run. Raises InputDataError for anything else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputDataError(f"--baseline {path}: needed a session.json of an earlier run, {error}") from None
    if not isinstance(report, dict) or report.get("what") != "session" or "processes" not in report:
        raise InputDataError(f"--baseline {path}: needed a session.json of an earlier run, found another file")
    return report


def ratios(processes: Sequence[Process], baseline: dict[str, Any]) -> str:
    """This run over the earlier one, for every measure that both have; below 1 is faster, or less.

    Caches as found are compared with warm ones where the other run has no process like it.
    """
    before = {process["caches"]: [Row.from_dict(row) for row in process["rows"]] for process in baseline["processes"]}
    lines = []
    for process in processes:
        other = _OTHER_CACHES.get(process.caches, process.caches)
        name = process.caches if process.caches in before else other
        for old in before.get(name, []):
            row = process.row(old.key)
            if row is None:
                continue
            cells = [_ratio(getattr(row, name), getattr(old, name)) for name in ("first", "later", "device_bytes")]
            if any(cells):
                caches = process.caches if name == process.caches else f"{process.caches} / {name}"
                lines.append([row.what, caches, *cells])
    head = f"This run over that of commit {baseline['commit']} (`{' '.join(baseline['command'])}`):"
    if not lines:
        return f"{head} no measure in common.\n"
    return "\n".join([head, "", *_named(table(["measure", "caches", "first", "later", "card"], lines, left=1))]) + "\n"


_OTHER_CACHES = {"as found": "warm", "warm": "as found"}


class _Notes:
    """Numbered notes, each text once."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def number(self, text: str) -> int:
        if text not in self._texts:
            self._texts.append(text)
        return 1 + self._texts.index(text)

    def lines(self) -> list[str]:
        return ["", *(f"{number}. {text}" for number, text in enumerate(self._texts, start=1))] if self._texts else []


def _times(row: Row, notes: _Notes) -> list[str]:
    if row.status != "ok":
        return [f"{row.status} ({notes.number(f'{row.what}: {row.note}')})", ""]
    return ["" if value is None else _number(value) for value in (row.first, row.later)]


def _number(value: float) -> str:
    """Three digits, as many as the machine's noise leaves."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known) / GIB:.2f}" if known else ""


def _ratio(new: float | None, old: float | None) -> str:
    return "" if new is None or not old else f"{new / old:.2f}"


def _named(lines: list[str]) -> list[str]:
    """A table whose first column has words: it stands left."""
    return [lines[0], lines[1].replace("|---:|", "|:---|", 1), *lines[2:]]
