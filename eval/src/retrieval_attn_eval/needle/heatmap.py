"""Score over context length and needle depth: a PNG with one panel per method, and the same as a terminal table.

The colour scale is fixed from 0 to 1, so that pictures of different runs can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.runs import write_atomically
from retrieval_attn_eval.suite.tables import length_label

__all__ = ["Panel", "save_heatmap", "text_table"]

_RED, _YELLOW, _GREEN = "#F0496E", "#EBB839", "#0CD79F"
_ANSI = ((0.999, "32"), (0.5, "33"), (-1.0, "31"))  # score at least -> colour


@dataclass(frozen=True)
class Panel:
    """One method's scores: title, n answers, and scores[depth][length] in 0..1 or None where nothing was run."""

    title: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    scores: tuple[tuple[float | None, ...], ...]
    n: int

    @property
    def mean(self) -> float | None:
        """Mean over the cells that were run; None if there is none."""
        found = [s for row in self.scores for s in row if s is not None]
        return sum(found) / len(found) if found else None


def text_table(panels: Sequence[Panel], *, color: bool = False, width: int = 100) -> str:
    """The panels side by side (as many as fit into `width` columns, the rest below), scores with two decimals."""
    blocks = [_block(panel, color) for panel in panels]
    lines: list[str] = []
    at = 0
    while at < len(blocks):
        row, used = [blocks[at]], blocks[at][0]
        at += 1
        while at < len(blocks) and used + 4 + blocks[at][0] <= width and len(blocks[at][1]) == len(row[0][1]):
            used += 4 + blocks[at][0]
            row.append(blocks[at])
            at += 1
        lines += ["    ".join(parts).rstrip() for parts in zip(*(block[1] for block in row), strict=True)] + [""]
    return "\n".join(lines[:-1])


def _block(panel: Panel, color: bool) -> tuple[int, list[str]]:
    """Width and lines, padded to the same visible width, of one panel's table."""
    cell = max(5, *(len(length_label(length)) + 1 for length in panel.lengths))
    mean = "-" if panel.mean is None else f"{panel.mean:.3f}"
    head = f"depth {''.join(length_label(length).rjust(cell) for length in panel.lengths)}"
    foot = f"n {panel.n}, mean {mean}"
    width = max(len(panel.title), len(head), len(foot))
    lines = [panel.title.ljust(width), head.ljust(width)]
    for depth, scores in zip(panel.depths, panel.scores, strict=True):
        label = f"{depth:.0f}%" if float(depth).is_integer() else f"{depth:.1f}%"
        text = label.rjust(5) + " " + "".join(_score(score, cell, color) for score in scores)
        lines.append(text + " " * (width - 6 - cell * len(scores)))
    return width, [*lines, foot.ljust(width)]


def _score(score: float | None, cell: int, color: bool) -> str:
    if score is None:
        return "-".rjust(cell)
    text = f"{score:.2f}".rjust(cell)
    if not color:
        return text
    code = next(code for least, code in _ANSI if score >= least)
    return f"\033[{code}m{text}\033[0m"


def save_heatmap(panels: Sequence[Panel], path: Path, *, title: str = "") -> None:
    """Write the panels side by side as a PNG; replaces `path` as a whole.

    Raises ConfigError if matplotlib is not installed or there is no panel.
    """
    import io

    if not panels:
        raise ConfigError("a heatmap needs at least one panel, got none; run at least one cell")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "the heatmap needs matplotlib, which is not installed; pip install matplotlib, or use --no-plot"
        ) from None
    palette = LinearSegmentedColormap.from_list("score", [_RED, _YELLOW, _GREEN]).with_extremes(bad="#E6E6E6")
    columns, rows = len(panels[0].lengths), len(panels[0].depths)
    cell_width = min(max(0.42, 2.4 / columns), 0.9)
    cell_height = min(max(0.20, 1.8 / rows), 0.5)
    panel_width = max(columns * cell_width, 2.6)
    width, height = len(panels) * panel_width + 0.35 * (len(panels) - 1) + 1.9, rows * cell_height + 1.75
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    left, right, bottom, top = 0.75 / width, 1 - 0.95 / width, 0.72 / height, 1 - 0.98 / height
    grid = figure.add_gridspec(1, len(panels), left=left, right=right, bottom=bottom, top=top, wspace=0.14)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(grid[0, place])
        image = _draw(axes, panel, palette, first=place == 0)
    bar = figure.add_axes((right + 0.22 / width, bottom, 0.13 / width, top - bottom))
    figure.colorbar(image, cax=bar, ticks=[0, 0.25, 0.5, 0.75, 1]).outline.set_visible(False)
    bar.tick_params(length=0, labelsize=8)
    bar.set_ylabel("score", fontsize=8)
    figure.text(left, 1 - 0.34 / height, title, fontsize=11, fontweight="bold", ha="left", va="center")
    data = io.BytesIO()
    figure.savefig(data, format="png")
    write_atomically(path, data.getvalue())


def _draw(axes: Any, panel: Panel, palette: Any, *, first: bool) -> Any:
    scores = [[math.nan if s is None else s for s in row] for row in panel.scores]
    columns, rows = len(panel.lengths), len(panel.depths)
    image = axes.pcolormesh(scores, cmap=palette, vmin=0.0, vmax=1.0, edgecolors="white", linewidth=1.6)
    axes.invert_yaxis()
    step_x, step_y = -(-columns // 12), -(-rows // 15)
    axes.set_xticks([i + 0.5 for i in range(0, columns, step_x)], [length_label(n) for n in panel.lengths[::step_x]])
    depths = [f"{d:g}%" for d in panel.depths]
    labels = depths[::step_y] if first else [""] * len(depths[::step_y])
    axes.set_yticks([i + 0.5 for i in range(0, rows, step_y)], labels)
    axes.tick_params(length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    mean = "-" if panel.mean is None else f"{panel.mean:.3f}"
    axes.set_title(f"{panel.title}\nn {panel.n}, mean {mean}", fontsize=9, loc="left")
    axes.set_xlabel("context length (tokens)", fontsize=8)
    if first:
        axes.set_ylabel("depth of the needle", fontsize=8)
    if columns <= 12 and rows <= 15:
        for y, row in enumerate(panel.scores):
            for x, score in enumerate(row):
                text = "–" if score is None else f"{score:.2f}"
                axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7, color="#303030")
    return image
