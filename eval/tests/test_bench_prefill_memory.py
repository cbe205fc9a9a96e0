"""`bench prefill` and `bench memory` end to end on a CPU; wrong logits have no time, growing memory is said."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrieval_attn.attention.exact import ExactPass
from retrieval_attn.cli import main
from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.memory.plan import HOST_RESERVE
from retrieval_attn_eval.bench.memory import SLACK, Row, verdict

SMALL = ["--shape", "tiny", "--device", "cpu", "--sink", "4", "--window", "16", "--retrieve", "8", "--train", "64"]


pytestmark = pytest.mark.usefixtures("one_thread")


def test_prefill_reports_phases_and_agreement(tmp_path: Path) -> None:
    """Plain, and two indexes whose clocks stop when they are ready."""
    folder = tmp_path / "out"
    extra = ["--lengths", "300,500", "--chunk", "128", "--batch", "2", "--output-dir", str(folder)]
    assert main(["bench", "prefill", *SMALL, *extra]) == 0
    report = json.loads((folder / "prefill.json").read_text())
    rows = {(row["context"], row["method"]): row for row in report["rows"]}
    assert list(rows) == [(n, name) for n in (300, 500) for name in ("plain", "roargraph", "flat")]
    for (_, name), row in rows.items():
        assert row["status"] == "ok" and row["ready_seconds"] >= row["seconds"] > 0
        if name != "plain":
            assert row["error"] <= 1e-5
            assert row["ratio"] == pytest.approx(row["ready_seconds"] / rows[row["context"], "plain"]["ready_seconds"])
            assert row["host_bytes"] >= 2 * row["context"] * 512
    assert "index_seconds" in rows[500, "roargraph"]["phases"]
    assert "| 500 | roargraph |" in (folder / "prefill.md").read_text()
    assert (folder / "prefill.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_logits_have_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact attention of the prefill off by a tenth: exit status 1, and ours has no seconds."""
    answer = ExactPass.answer

    def louder(*given: Any, **more: Any) -> Partial:
        part = answer(*given, **more)
        return Partial(1.1 * part.out, part.lse)

    monkeypatch.setattr(ExactPass, "answer", louder)
    folder = tmp_path / "out"
    extra = ["--lengths", "300", "--indexes", "flat", "--no-plot", "--output-dir", str(folder)]
    assert main(["bench", "prefill", *SMALL, *extra]) == 1
    plain, ours = json.loads((folder / "prefill.json").read_text())["rows"]
    assert plain["status"] == "ok"
    assert ours["status"] == "wrong" and ours["seconds"] is None and ours["ratio"] is None
    assert not (folder / "prefill.png").exists()


def test_memory_of_windows_is_constant(tmp_path: Path) -> None:
    """Read and placed contexts: the same bytes of windows, host bytes as planned."""
    folder = tmp_path / "out"
    extra = ["--lengths", "300,600", "--read", "300", "--tokens", "2", "--output-dir", str(folder)]
    assert main(["bench", "memory", *SMALL, *extra]) == 0
    short, long = json.loads((folder / "memory.json").read_text())["rows"]
    assert (short["how"], long["how"]) == ("read", "placed")
    assert short["windows"] == long["windows"] > 0
    for row in (short, long):  # keys, values and clusters
        assert 512 * row["context"] < row["host_bytes"] == row["planned_host"] - HOST_RESERVE
    assert "does not depend on the context" in (folder / "memory.md").read_text()
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")


def row_of(context: int, size: int) -> Row:
    return Row(context, 1, "flat", "read", size, size, size, 1000, 0, 3 * SLACK, 3 * SLACK, 0, 0.0, 0, None)


def test_growing_memory_and_broken_plans_are_said() -> None:
    """More than the allocator's steps is growth; more than planned is said with both numbers."""
    rows = [row_of(4096, SLACK), row_of(8192, 2 * SLACK)]
    assert verdict(rows, 640) == []
    grown = verdict([row_of(4096, SLACK), row_of(8192, 2 * SLACK + 1)], 640)
    assert len(grown) == 2 and "depends on the context" in grown[0]
    assert verdict([row_of(1024, 0), row_of(8192, 2 * SLACK)], 640) == [], (
        "shorter than sinks and window proves nothing"
    )
    assert "windows" in verdict([rows[0], replace(rows[1], windows=1001)], 640)[0]
    coded = [replace(row, codes=row.context * SLACK, decode_process=None) for row in rows]
    coded = [replace(row, decode_allocated=SLACK + row.codes) for row in coded]
    assert verdict(coded, 640) == [], "codes of keys may grow, and nothing else"
    assert "beside its codes" in verdict([coded[0], replace(coded[1], decode_allocated=1)], 640)[0]
    (over,) = verdict([replace(row_of(4096, SLACK), decode_process=5 * SLACK)], 640)
    assert f"{5 * SLACK:,}" in over and f"{3 * SLACK:,}" in over


@pytest.mark.parametrize(
    ("what", "extra", "words"),
    [
        ("prefill", ["--indexes", "static"], "names of indexes"),
        ("prefill", ["--rounds", "0"], "--rounds"),
        ("prefill", ["--chunk", "0"], "--chunk"),
        ("memory", ["--index", "flat,ivf"], "one index"),
        ("memory", ["--index", "full-eager"], "one index"),
        ("memory", ["--read", "x"], "--read='x' is not a number of tokens"),
        ("memory", ["--threads", "-1"], "--threads"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, extra: list[str], words: str
) -> None:
    """One line and exit status 2, and no folder left behind."""
    assert main(["bench", what, *SMALL, "--output-dir", str(tmp_path / "out"), *extra]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.cuda
def test_prefill_and_memory_on_a_device(tmp_path: Path) -> None:
    """Under a cap, with peaks; the plan covers what was held."""
    common = [*SMALL, "--device", "cuda", "--gpu-memory", "4GiB", "--lengths", "4k,16k", "--chunk", "2048"]
    assert main(["bench", "prefill", *common, "--output-dir", str(tmp_path / "prefill")]) == 0
    for row in json.loads((tmp_path / "prefill" / "prefill.json").read_text())["rows"]:
        assert row["status"] == "ok" and row["device_process"] <= 4 << 30
    # in a process of its own: what other tests leave on the device is in no plan
    command = [sys.executable, "-m", "retrieval_attn.cli", "bench", "memory", *common]
    subprocess.run([*command, "--output-dir", str(tmp_path / "memory")], check=True, timeout=300)
    rows = json.loads((tmp_path / "memory" / "memory.json").read_text())["rows"]
    assert all(row["decode_process"] for row in rows)
