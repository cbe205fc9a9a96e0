"""The studies' figures on data whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eval.tests.shared import parsed
from retrieval_attn.errors import ConfigError
from retrieval_attn.index.formats import Format
from retrieval_attn_eval.bench import command as bench
from retrieval_attn_eval.bench import index as bench_index
from retrieval_attn_eval.bench.heads import Head
from retrieval_attn_eval.bench.studies import mahalanobis, recovery


def test_mahalanobis_of_known_distributions() -> None:
    """sqrt(d) for the keys themselves, scaled shifts counted in standard deviations, any linear map without effect."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((5000, 8)).astype(np.float32)
    assert mahalanobis(keys, keys).mean() == pytest.approx(np.sqrt(8), rel=0.05)
    far = np.zeros((1, 8), np.float32)
    far[0, 2] = 40
    stretched = keys * np.array([1, 1, 100, 1, 1, 1, 1, 1], np.float32)
    assert mahalanobis(far, keys)[0] == pytest.approx(40, rel=0.05)
    assert mahalanobis(far, stretched)[0] == pytest.approx(0.4, rel=0.1)
    mix = rng.standard_normal((8, 8)).astype(np.float32)
    np.testing.assert_allclose(mahalanobis(far @ mix, keys @ mix), mahalanobis(far, keys), rtol=1e-3)
    flat = keys.copy()
    flat[:, 0] = 1  # a direction without variance must not divide by zero
    assert np.isfinite(mahalanobis(far, flat)).all()


def test_recovery_of_a_query_that_moves() -> None:
    """Two groups of keys; the first token asks for one, later tokens for the other: the static set loses them."""
    keys = np.zeros((40, 4), np.float32)
    keys[:20, 0] = 10
    keys[20:, 1] = 10
    decode = np.zeros((1, 3, 4), np.float32)
    decode[0, 0, 0] = decode[0, 1, 0] = decode[0, 2, 1] = 1
    head = Head("h", Format.FLOAT32, keys, decode, decode, decode, 1.0)
    dynamic, static = recovery(head, 20)
    assert (dynamic > 0.99).all()
    np.testing.assert_allclose(static[0, :2], dynamic[0, :2])
    assert static[0, 2] < 0.01


def command(*flags: str) -> int:
    return bench.run(parsed(bench, "study", *flags))


def test_all_figures_of_a_synthetic_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every figure is written, and shows what such heads are made for: far queries, and easy keys-to-keys searches."""
    monkeypatch.setattr(bench_index, "HEAD_DIM", 64)
    monkeypatch.setattr(bench_index, "TRAIN_QUERIES", 256)
    flags = ("--source", "synthetic:mid", "--n", "1", "--length", "5000")
    where = ("--output-dir", str(tmp_path / "out"))
    assert command(*flags, *where, "--dry-run") == 0
    assert command(*flags, *where) == 0
    figures = json.loads((tmp_path / "out" / "study.json").read_text())["figures"]
    assert set(figures) == {"2", "3a", "3b", "6"}
    assert figures["2"]["static"] < figures["2"]["dynamic"] <= 1
    assert figures["3b"]["ratio"] > 10 and len(figures["3b"]["queries_to_keys"][0]) == 4
    rows = {what: {(r["variant"], r["value"]): r for r in figures["3a"][what]} for what in ("queries", "keys")}
    assert rows["queries"][("flat", None)]["recall"] == rows["keys"][("flat", None)]["recall"] == 1
    assert rows["keys"][("ivf", 16)]["recall"] > rows["queries"][("ivf", 16)]["recall"]
    assert not any(kind == "roargraph" for kind, _ in rows["queries"])
    assert any(row["variant"] == "roargraph" for row in figures["6"]["queries"])
    for name in FIGURE_FILES:
        assert (tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG"
    assert "figure 3b" in capsys.readouterr().out


FIGURE_FILES = [f"figure_{name}.png" for name in ("2", "3a", "3b", "6")]


def test_one_figure_without_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what was asked for."""
    monkeypatch.setattr(bench_index, "HEAD_DIM", 16)
    monkeypatch.setattr(bench_index, "TRAIN_QUERIES", 8)
    flags = ("--source", "synthetic:hard", "--n", "1", "--length", "1500")
    assert command(*flags, "--figures", "3b", "--no-plot", "--output-dir", str(tmp_path / "out")) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["study.json"]
    for wrong in (("--figures", "7"), ("--length", "0")):
        with pytest.raises(ConfigError):
            command(*flags, *wrong, "--output-dir", str(tmp_path / "other"))
