"""Table and plot of `bench decode`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrieval_attn_eval.bench.plots import Plot, shown, table
from retrieval_attn_eval.bench.row import Row, median_ms, same_tokens

GIB = 1 << 30
MIB = 1 << 20
_MEASURES = (  # heading, field of a row, form, unit
    ("recall", "recall", ".3f", 1),
    ("mass", "mass", ".4f", 1),
    ("captured", "captured", ".3f", 1),
    ("same tokens", "same_tokens", ".0%", 1),
    ("scanned", "scanned", ".2%", 1),
    ("waits", "wait", ".0%", 1),
    ("search, ms", "search", ".2f", 1),
    ("attend, ms", "attend", ".2f", 1),
    ("copy, ms", "copy", ".2f", 1),
    ("GPU, ms", "gpu", ".2f", 1),
    ("device, GiB", "device_allocated", ",.2f", GIB),
    ("peak", "device_process", ",.2f", GIB),
    ("prepare peak", "prepare_peak", ",.2f", GIB),
    ("host, GiB", "host_bytes", ",.2f", GIB),
    ("device MiB/token", "device_touched", ",.2f", MIB),
    ("host MiB/token", "host_touched", ",.2f", MIB),
)
_COLUMNS = ("context", "method", "ms/token", "tokens/s", "x static", *(heading for heading, *_ in _MEASURES))


def header(report: dict[str, Any]) -> list[str]:
    """Lines on command, machine, versions and model, as docs/benchmarks.md needs them."""
    machine, versions = report["machine"], report["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "numba"))
    cap = "no cap" if report["gpu_memory"] is None else f"cap {report['gpu_memory'] / GIB:.2f} GiB"
    return [
        f"- command: `{' '.join(report['command'])}`",
        f"- machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {report['threads']} "
        f"threads, device {report['device']}, {cap}",
        f"- versions: {shown}",
        f"- commit: {report['commit']}",
        f"- model: {report['model']}, {report['dtype']}, weights {report['weight_bytes'] / GIB:,.2f} GiB, CUDA context "
        f"{report['context_bytes'] / GIB:.2f} GiB; batch {report['batch']}",
    ]


def markdown(rows: Sequence[Row], report: dict[str, Any]) -> str:
    """Header lines, the table, and what the columns mean."""
    config = report["config"]
    lines = [
        *header(report),
        f"- keys: {report['keys']}; sink {config['sink']}, window {config['window']}, retrieve {config['retrieve']}, "
        f"host keys {config['host_dtype']}",
        "",
        *table(_COLUMNS, [_cells(row, rows) for row in rows]),
    ]
    worst = max((row.error for row in rows if row.error is not None), default=None)
    checked = "nothing was" if worst is None else f"largest relative difference {worst:.1e}"
    noise = "" if report.get("noise") is None else f"; transformers' sdpa and eager attention: {report['noise']:.1e}"
    lines += [
        "",
        "Times: median of single steps (10th to 90th percentile), sampling and reading the token included. MiB/token: "
        "keys and values, without weights. x static: against sinks and window only under the same loop. recall: of the "
        "keys that exact search finds; mass: of their attention weight; captured: of all attention, sinks and window "
        "included. same tokens: of those decoded, up to the first that is not full attention's. "
        "waits: share of a step in which the device has nothing to do. GPU: kernels; copy: between host and device. "
        "prepare peak: device memory of the process while the context was placed. Checked before timing: logits of "
        f"every method against its definition ({checked}{noise}), and retrieved attention against that over the keys "
        "found.",
        *_notes(rows),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    static = median_ms(rows, "static", row.context)
    times = "" if row.ms is None or static is None else f"{row.ms.median / static:.2f}"
    label = row.method + ("" if not row.how or row.how == "eager" else f" ({row.how.partition(':')[0]})")
    if row.ms is None:
        return [f"{row.context:,}", label, row.status, *[""] * (len(_COLUMNS) - 3)]
    values = {**vars(row), "same_tokens": same_tokens(row, rows)}
    return [
        f"{row.context:,}",
        label + (" (beyond the cap)" if row.beyond else ""),
        f"{row.ms.median:.2f} ({row.ms.low:.2f} to {row.ms.high:.2f})",
        f"{row.tokens_per_second:,.1f}",
        times,
        *(shown(values[name], form, unit) for _, name, form, unit in _MEASURES),
    ]


def _notes(rows: Sequence[Row]) -> list[str]:
    told = [f"- {row.context:,} {row.method}: {row.status}: {row.note}" for row in rows if row.note]
    return ["", *told] if told else []


def plots(rows: Sequence[Row], title: str) -> list[Plot]:
    """Latency against context, both axes logarithmic."""
    methods = list(dict.fromkeys(row.method for row in rows))
    lines = {
        name: [(float(row.context), row.ms.median) for row in rows if row.method == name and row.ms] for name in methods
    }
    known = {name: points for name, points in lines.items() if points}
    return [Plot(title, "tokens of context", "ms per token", known, log_x=True, log_y=True)]
