"""Table and plot of `bench decode`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrieval_attn.eval.bench.plots import Plot
from retrieval_attn.eval.bench.row import Row, median_ms, same_tokens

GIB = 1 << 30
MIB = 1 << 20
_COLUMNS = (
    "context",
    "method",
    "ms/token",
    "tokens/s",
    "x static",
    "recall",
    "mass",
    "captured",
    "same tokens",
    "scanned",
    "waits",
    "search, ms",
    "attend, ms",
    "copy, ms",
    "GPU, ms",
    "device, GiB",
    "peak",
    "prepare peak",
    "host, GiB",
    "device MiB/token",
    "host MiB/token",
)


def header(report: dict[str, Any]) -> list[str]:
    """Lines on command, machine, versions and model, as docs/numbers.md wants them."""
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
        f"{config['train_queries']} training queries per query head, host keys {config['host_dtype']}",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|---:|:---|{'---:|' * (len(_COLUMNS) - 2)}",
    ]
    lines += [f"| {' | '.join(_cells(row, rows))} |" for row in rows]
    worst = max((row.error for row in rows if row.error is not None), default=None)
    checked = "nothing was" if worst is None else f"largest relative difference {worst:.1e}"
    noise = "" if report.get("noise") is None else f"; transformers' sdpa and eager attention: {report['noise']:.1e}"
    lines += [
        "",
        "Times: median of single steps (10th to 90th percentile), sampling and reading the token included. MiB/token: "
        "keys and values, without weights. x static: against sinks and window only under the same loop. recall: of the "
        "exact best retrieve; mass: of their attention weight; captured: of all attention, sinks and window included. "
        "same tokens: of those decoded, up to the first that is not full attention's. "
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
    return [
        f"{row.context:,}",
        label + (" (beyond the cap)" if row.beyond else ""),
        f"{row.ms.median:.2f} ({row.ms.low:.2f} to {row.ms.high:.2f})",
        f"{row.tokens_per_second:,.1f}",
        times,
        _shown(row.recall, "{:.3f}"),
        _shown(row.mass, "{:.4f}"),
        _shown(row.captured, "{:.3f}"),
        _shown(same_tokens(row, rows), "{:.0%}"),
        _shown(row.scanned, "{:.2%}"),
        _shown(row.wait, "{:.0%}"),
        _shown(row.search, "{:.2f}"),
        _shown(row.attend, "{:.2f}"),
        _shown(row.copy, "{:.2f}"),
        _shown(row.gpu, "{:.2f}"),
        _scaled(row.device_allocated, GIB),
        _scaled(row.device_process, GIB),
        _scaled(row.prepare_peak, GIB),
        _scaled(row.host_bytes, GIB),
        _scaled(row.device_touched, MIB),
        _scaled(row.host_touched, MIB),
    ]


def _notes(rows: Sequence[Row]) -> list[str]:
    told = [f"- {row.context:,} {row.method}: {row.status}: {row.note}" for row in rows if row.note]
    return ["", *told] if told else []


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _scaled(value: int | None, unit: int) -> str:
    return "" if value is None else f"{value / unit:,.2f}"


def plots(rows: Sequence[Row], title: str) -> list[Plot]:
    """Latency against context, both axes logarithmic."""
    methods = list(dict.fromkeys(row.method for row in rows))
    lines = {
        name: [(float(row.context), row.ms.median) for row in rows if row.method == name and row.ms] for name in methods
    }
    known = {name: points for name, points in lines.items() if points}
    return [Plot(title, "tokens of context", "ms per token", known, log_x=True, log_y=True)]
