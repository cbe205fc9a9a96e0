"""Tables, summaries and plots of measured points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from retrieval_attn_eval.bench.measure import Point
from retrieval_attn_eval.bench.plots import Plot
from retrieval_attn_eval.bench.plots import table as markdown_table

AIM = 0.95
"""The recall at which kinds are compared: RetrievalAttention's figure 6."""


def mean(values: Sequence[float]) -> float:
    """The mean, not-a-number for none."""
    return float(np.mean(values)) if len(values) else float("nan")


def median(values: Sequence[float]) -> float:
    """The median, not-a-number for none."""
    return float(np.median(values)) if len(values) else float("nan")


def worst_decile(values: Sequence[float]) -> float:
    """The value that a tenth of the entries are below."""
    return float(np.quantile(values, 0.1)) if len(values) else float("nan")


def summary(point: Point) -> dict[str, Any]:
    """One row of the table as plain values; None for what is not known."""
    found = {
        "variant": point.variant,
        "value": point.value,
        "keys": point.keys,
        "query_heads": len(point.recall),
        "recall": mean(point.recall),
        "recall_worst_decile": worst_decile(point.recall),
        "mass": mean(point.mass),
        "captured": mean(point.captured),
        "scanned": mean(point.scanned),
        "key_bytes": mean(point.key_bytes),
        "warm_us": median(point.warm_us),
        "cold_us": median(point.cold_us),
        "warm_cpu_us": median(point.warm_cpu_us),
        "cold_cpu_us": median(point.cold_cpu_us),
        "build_seconds": mean(point.build_seconds),
        "bytes_per_key": mean(point.index_bytes) / max(1, point.keys),
    }
    return {name: None if isinstance(value, float) and value != value else value for name, value in found.items()}


_MEASURES = (  # heading, name in the summary, factor, form
    ("recall@k", "recall", 1, "{:.3f}"),
    ("worst decile", "recall_worst_decile", 1, "{:.3f}"),
    ("mass of the exact k", "mass", 1, "{:.4f}"),
    ("captured", "captured", 1, "{:.3f}"),
    ("keys scored", "scanned", 100, "{:.2f} %"),
    ("KiB of keys", "key_bytes", 1 / 1024, "{:,.0f}"),
    ("us warm", "warm_us", 1, "{:,.0f}"),
    ("us cold", "cold_us", 1, "{:,.0f}"),
    ("CPU us warm", "warm_cpu_us", 1, "{:,.0f}"),
    ("CPU us cold", "cold_cpu_us", 1, "{:,.0f}"),
    ("build, s", "build_seconds", 1, "{:.2f}"),
    ("bytes/key", "bytes_per_key", 1, "{:,.0f}"),
)


def table(points: Sequence[Point]) -> str:
    """Markdown, one line per point; the first point of each variant at or above recall AIM is marked."""
    cells = []
    reached: set[tuple[int, str]] = set()
    for point in points:
        row = summary(point)
        mark = ""
        if row["recall"] >= AIM and (point.keys, point.variant) not in reached:
            reached.add((point.keys, point.variant))
            mark = " *"
        values = ("-" if row[name] is None else form.format(factor * row[name]) for _, name, factor, form in _MEASURES)
        cells.append([f"{point.keys:,}", point.label + mark, *values])
    return "\n".join(markdown_table(["keys", "index", *(heading for heading, *_ in _MEASURES)], cells)) + "\n"


def as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Every point with its summary and the lists behind it."""
    rows = []
    for point in points:
        raw = {name: _plain(value) for name, value in asdict(point).items()}
        rows.append({**summary(point), "all": raw})
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [None if item != item else round(float(item), 6) for item in value]
    return value


def plots(points: Sequence[Point], title: str) -> list[tuple[str, list[Plot]]]:
    """(file name, panels): recall against keys scored, latency against recall, build time against length."""
    lengths = sorted({point.keys for point in points})
    found = []
    scan = [
        Plot(
            f"{title}, {keys:,} keys",
            "keys scored, % of all",
            "recall@k",
            _lines(points, keys, lambda row: (100 * row["scanned"], row["recall"])),
            log_x=True,
        )
        for keys in lengths
    ]
    found.append(("recall_scanned.png", scan))
    timed = [point for point in points if point.cold_us]
    if timed:
        latency = [
            Plot(
                f"{title}, {keys:,} keys",
                "recall@k",
                "us per query head, cold",
                _lines(timed, keys, lambda row: (row["recall"], row["cold_us"])),
                log_y=True,
            )
            for keys in lengths
        ]
        found.append(("latency_recall.png", latency))
    names = list(dict.fromkeys(point.variant for point in points))
    build = {
        name: sorted({(float(p.keys), mean(p.build_seconds)) for p in points if p.variant == name and p.build_seconds})
        for name in names
    }
    panel = Plot(title, "keys", "build, s per key-value head", build, log_x=True, log_y=True)
    found.append(("build_length.png", [panel]))
    return found


def _lines(
    points: Sequence[Point], keys: int, place: Callable[[dict[str, Any]], tuple[float, float]]
) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        row = summary(point)
        if point.keys == keys and row["scanned"] is not None or point.keys == keys and point.cold_us:
            if row["scanned"] is None:
                row["scanned"] = float("nan")
            lines.setdefault(point.variant, []).append(place(row))
    return lines
