"""What a benchmark writes: JSON, Markdown and line plots. matplotlib is imported when a plot is drawn."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieval_attn_eval.runs import write_atomically

_COLOURS = (
    "#1b6ca8", "#d1495b", "#3c8d5a", "#e3a72f", "#7a5195", "#4c4c4c", "#00a6a6", "#b5651d", "#888888", "#c06c84",
)  # fmt: skip
_MARKERS = "os^Dv<>PX*"
_PANELS_ABREAST = 4
_MAX_TICKS = 8


@dataclass(frozen=True)
class Plot:
    """One panel. lines: name -> points (x, y), joined in order of x; not-a-number points are left out. dashed: name ->
    the line whose colour and marker it shares.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None
    notes: Sequence[str] = field(default_factory=tuple)
    dashed: Mapping[str, str] = field(default_factory=dict)


def shown(value: float | None, form: str, unit: float = 1) -> str:
    """A cell: the value in this unit as `form` says, such as ",.2f"; empty for what is not known."""
    return "" if value is None else format(value / unit, form)


def table(columns: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A Markdown table; after the first column `left` ones with words stand left, numbers right."""
    rule = f"|---:|{':---|' * left}{'---:|' * (len(columns) - 1 - left)}"
    return [f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(line)} |" for line in lines)]


def save_results(folder: Path, name: str, report: Mapping[str, Any], text: str, panels: Sequence[Plot] = ()) -> None:
    """Write NAME.json and NAME.md into `folder`, and NAME.png if there is a line to draw."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{name}.json", json.dumps(report, indent=1) + "\n")
    write_atomically(folder / f"{name}.md", text)
    if any(panel.lines for panel in panels):
        save_plot(panels, folder / f"{name}.png")


def save_plot(panels: Sequence[Plot], path: Path) -> None:
    """Draw the panels, up to four side by side, and write a PNG, replacing `path` as a whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(len(panels), _PANELS_ABREAST)
    down = -(-len(panels) // across)
    figure = Figure(figsize=(5.2 * across, 4.2 * down), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(panel.dashed.get(name, name) for panel in panels for name in panel.lines))
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(down, across, place + 1)
        for name, points in panel.lines.items():
            known = sorted((x, y) for x, y in points if x == x and y == y)
            style = names.index(panel.dashed.get(name, name))
            axes.plot(
                [x for x, _ in known],
                [y for _, y in known],
                label=name,
                color=_COLOURS[style % len(_COLOURS)],
                marker=_MARKERS[style % len(_MARKERS)],
                linestyle="--" if name in panel.dashed else "-",
                markersize=4.5,
                linewidth=1.4,
            )
        axes.set_xscale("log" if panel.log_x else "linear")
        values = sorted({x for points in panel.lines.values() for x, _ in points if x == x})
        if panel.log_x and 0 < len(values) <= _MAX_TICKS and all(value % 1 == 0 for value in values):
            axes.set_xticks(values, [f"{value:,.0f}" for value in values])  # a decade's own labels overlap
            axes.set_xticks([], minor=True)
        axes.set_yscale("log" if panel.log_y else "linear")
        if panel.y_range is not None:
            axes.set_ylim(*panel.y_range)
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set_xlabel(panel.x, fontsize=9)
        axes.set_ylabel(panel.y, fontsize=9)
        axes.grid(True, color="#e4e4e4", linewidth=0.7)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8, frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_atomically(path, data.getvalue())
