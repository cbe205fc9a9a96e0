"""PNG plots of a suite's summary: mean score over length, and one bar per task and method."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrieval_attn_eval.baselines import METHODS
from retrieval_attn_eval.runs import write_atomically
from retrieval_attn_eval.suite import tables
from retrieval_attn_eval.suite.tables import length_label

__all__ = ["save_plots"]


def save_plots(folder: Path, summary: Mapping[str, Any], titles: Mapping[str, str], *, title: str) -> None:
    """Write by_length.png (if there are lengths) and by_task.png, one panel per question position and length."""
    from matplotlib.figure import Figure

    methods = tables.ordered({cell["method"] for cell in summary["cells"]}, METHODS)
    colors = {method: f"C{i % 10}" for i, method in enumerate(methods)}
    positions = [p for p in ("inside", "after") if any(cell["position"] == p for cell in summary["cells"])]
    lengths = sorted({cell["length"] for cell in summary["cells"] if cell["length"] is not None})
    if lengths:
        figure = Figure(figsize=(5.5 * len(positions), 4.2), layout="constrained")
        for axes, position in zip(figure.subplots(1, len(positions), squeeze=False)[0], positions, strict=True):
            for method in methods:
                _curve(axes, summary["curves"], method, position, colors[method])
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [length_label(n) for n in lengths], minor=False)
            axes.minorticks_off()
            axes.set(xlabel="context length", ylabel="mean score, %", ylim=(-2, 102), title=f"question {position}")
            axes.grid(alpha=0.3)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8)
        figure.suptitle(title)
        _save(figure, folder / "by_length.png")
    answered = [cell for cell in summary["cells"] if cell["score"] is not None]
    if not answered:
        return
    spans: list[int | None] = sorted({cell["length"] for cell in answered}, key=lambda n: n or 0)
    panels = [(position, length) for position in positions for length in spans]
    tasks = [task for task in titles if any(cell["task"] == task for cell in summary["cells"])]
    wide = max(6.0, 0.12 * len(tasks) * len(methods) + 2)
    figure = Figure(figsize=(wide, 2.8 * len(panels)), layout="constrained")
    for axes, (position, length) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        at = {
            (c["method"], c["task"]): c for c in summary["cells"] if (c["position"], c["length"]) == (position, length)
        }
        width = 0.8 / len(methods)
        for place, method in enumerate(methods):
            found = [(i, at[method, task]) for i, task in enumerate(tasks) if (method, task) in at]
            found = [(i, cell) for i, cell in found if cell["score"] is not None]
            axes.bar(
                [i - 0.4 + (place + 0.5) * width for i, _ in found],
                [100 * cell["score"] for _, cell in found],
                width,
                yerr=[100 * (cell["error_of_score"] or 0.0) for _, cell in found],
                color=colors[method],
                label=method,
                error_kw={"elinewidth": 0.7},
            )
        axes.set_xticks(range(len(tasks)), [titles[task] for task in tasks], fontsize=8)
        span = "" if length is None else f", {length_label(length)}"
        axes.set(ylim=(0, 105), ylabel="score, %", title=f"question {position}{span}")
        axes.legend(fontsize=7, ncols=4)
    figure.suptitle(title)
    _save(figure, folder / "by_task.png")


def _curve(axes: Any, curves: Any, method: str, position: str, color: str) -> None:
    own = sorted(
        (c["length"], c["score"], c["error_of_score"] or 0.0)
        for c in curves
        if (c["method"], c["position"]) == (method, position) and c["length"] is not None
    )
    if own:
        x, y, error = zip(*own, strict=True)
        axes.errorbar(
            x, [100 * v for v in y], [100 * e for e in error], marker="o", color=color, label=method, capsize=2
        )


def _save(figure: Any, path: Path) -> None:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    write_atomically(path, file.getvalue())
