"""The picture and the table show the scores that they were given, on a fixed scale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.needle.heatmap import Panel, save_heatmap, text_table
from retrieval_attn_eval.suite.tables import length_label


def panel(title: str, *rows: tuple[float | None, ...]) -> Panel:
    lengths = tuple(4096 * 2**i for i in range(len(rows[0])))
    return Panel(title, lengths, tuple(100.0 * i / max(len(rows) - 1, 1) for i in range(len(rows))), rows, n=7)


def pixels(path: Path) -> list[tuple[int, int, int]]:
    from matplotlib.image import imread

    image = (imread(path)[..., :3] * 255).round().astype(int)
    return [tuple(pixel) for pixel in image.reshape(-1, 3).tolist()]


def test_colours_mean_the_same_in_every_picture(tmp_path: Path) -> None:
    """With a scale fitted to the data, a run of all zeros would look like a run of all ones."""
    near = {"red": (0xF0, 0x49, 0x6E), "yellow": (0xEB, 0xB8, 0x39), "green": (0x0C, 0xD7, 0x9F)}
    for score, wanted in ((0.0, "red"), (0.5, "yellow"), (1.0, "green")):
        path = tmp_path / f"{wanted}.png"
        save_heatmap([panel("one", (score,) * 4, (score,) * 4)], path, title="t")
        found = pixels(path)
        share = {
            name: sum(max(abs(a - b) for a, b in zip(pixel, rgb, strict=True)) <= 4 for pixel in found) / len(found)
            for name, rgb in near.items()
        }
        assert share[wanted] > 0.05, share
        assert all(value < 0.02 for name, value in share.items() if name != wanted), share


def test_picture_has_a_panel_per_method_and_replaces_itself(tmp_path: Path) -> None:
    path = tmp_path / "heatmap.png"
    save_heatmap([panel("one", (1.0, 0.0))], path)
    first = path.read_bytes()
    save_heatmap([panel("one", (1.0, 0.0)), panel("two", (1.0, None))], path)
    assert path.read_bytes()[:4] == b"\x89PNG" and path.read_bytes() != first
    assert [p.name for p in tmp_path.iterdir()] == ["heatmap.png"]


def test_large_grids_fit(tmp_path: Path) -> None:
    """35 x 35 cells, the grid of the published test: labels are thinned, nothing is raised."""
    save_heatmap([panel("one", *[(0.5,) * 35] * 35)] * 2, tmp_path / "x.png")


def test_no_panels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one panel"):
        save_heatmap([], tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_table_shows_every_score() -> None:
    """Fails if a column slips, a missing cell is shown as a score, or n and mean are those of another panel."""
    table = text_table([panel("full", (1.0, 0.5), (0.0, None)), panel("ours", (0.25, 1.0), (1.0, 1.0))], width=80)
    lines = table.splitlines()
    assert lines[0].split() == ["full", "ours"]
    assert lines[1].split() == ["depth", "4K", "8K", "depth", "4K", "8K"]
    assert lines[2].split() == ["0%", "1.00", "0.50", "0%", "0.25", "1.00"]
    assert lines[3].split() == ["100%", "0.00", "-", "100%", "1.00", "1.00"]
    assert lines[4].split("   ")[0] == "n 7, mean 0.500" and lines[4].rstrip().endswith("mean 0.812")


def test_table_wraps_and_colours() -> None:
    """Narrow terminals get the panels below each other; colour codes must not shift the columns."""
    panels = [panel("full", (1.0, 0.4)), panel("ours", (0.6, 1.0))]
    assert len(text_table(panels, width=20).splitlines()) == 2 * 4 + 1
    plain, colored = text_table(panels, width=99), text_table(panels, width=99, color=True)
    assert "\033[32m" in colored and "\033[31m" in colored and "\033[33m" in colored
    assert re.sub(r"\033\[\d+m", "", colored) == plain


def test_mean_leaves_out_missing_cells() -> None:
    assert panel("x", (1.0, None), (0.0, None)).mean == 0.5
    assert panel("x", (None,)).mean is None


@pytest.mark.parametrize(
    ("tokens", "label"), [(4096, "4K"), (131072, "128K"), (1 << 20, "1M"), (5000, "5000"), (1, "1")]
)
def test_length_label(tokens: int, label: str) -> None:
    assert length_label(tokens) == label
