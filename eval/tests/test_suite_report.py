"""Reports of suites: numbers from rows, the published tables' shapes, errors and unknowns kept out of means."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from eval.tests.toy_suite import ToySuite
from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.runs import RunFolder, RunFolderError
from retrieval_attn_eval.suite import tables
from retrieval_attn_eval.suite.report import write_report
from retrieval_attn_eval.suite.scoring import score_again

SETTINGS = {"suite": "toy", "model": "m", "seed": 1, "dtype": "float32", "device": "cpu", "options": {}}
METHODS = ("full", "flat", "retrieval")


def row(method: str, task: str, index: int, score: float, length: int = 4096, **more: Any) -> dict[str, Any]:
    name = f"toy/{task}/{length}/1/{index}"
    return {
        "id": f"{name}/{method}/inside", "row_id": name, "task": task, "length": length, "index": index,
        "method": method, "position": "inside", "question": "?", "answer_prefix": "", "answers": ["1"], "options": [],
        "max_new_tokens": 6, "target_tokens": length, "prompt_tokens": length - 106, "response": "1" if score else "0",
        "output_tokens": 2, "finish_reason": "stop", "score": score, "scores": {}, "empty": False, "meta": {},
        "seconds": {"prefill": 1.0, "index": 0.5, "decode": 0.1}, "error": None,
        "stats": {"tokens_attended_per_step": None if method == "full" else 740.0}, **more,
    }  # fmt: skip


def failed(method: str, task: str, index: int, length: int = 4096) -> dict[str, Any]:
    """What the runner writes for a failure: no score."""
    made = row(method, task, index, 0.0, length, error="RuntimeError: gone", prompt_tokens=None)
    for name in ("score", "scores", "empty"):
        del made[name]
    return made


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Two tasks, ten samples: full 8 and 10 right, flat 7 and 10, retrieval 5 and 10; one failure of retrieval."""
    right = {"full": (8, 10), "flat": (7, 10), "retrieval": (5, 10)}
    made = [
        row(method, task, i, float(i < right[method][t]))
        for method in METHODS
        for t, task in enumerate(ToySuite().tasks())
        for i in range(10)
    ]
    return [*made, failed("retrieval", "niah_single_1", 10)]


def test_cells(rows: list[dict[str, Any]]) -> None:
    """Means over answered samples only; the failure is counted beside them, not as a zero."""
    found = {(c["method"], c["task"]): c for c in tables.cells(rows, ToySuite().tasks(), METHODS)}
    cell = found["retrieval", "niah_single_1"]
    assert (cell["n"], cell["score"], cell["errors"], cell["attended"]) == (10, 0.5, 1, 740.0)
    assert cell["error_of_score"] == pytest.approx((0.25 / 9) ** 0.5)
    assert cell["fill"] == pytest.approx(3996 / 4096) and cell["decode_seconds_per_token"] == pytest.approx(0.05)
    assert found["full", "niah_single_1"]["attended"] is None
    assert next(iter(found))[0] == "full"


def test_differences_and_the_parts_of_the_gap(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Gap to full attention -15 points: the budget takes 5, the index 10; only shared samples are paired."""
    text = write_report(tmp_path, rows, ToySuite(), SETTINGS, plot=False)
    assert "| retrieval | 4K | -15.0 | -5.0 | -10.0 |" in text
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {(c["first"], c["second"], c["task"]): c for c in summary["comparisons"]}
    whole = found["full", "retrieval", None]
    assert (whole["n"], whole["wins"], whole["losses"]) == (20, 0, 3)
    assert whole["mean"] == pytest.approx(-0.15)
    assert whole["low"] < -0.15 < whole["high"] <= 0.0  # no loss is drawn with 0.7**10, more than 2.5 %
    assert found["full", "retrieval", "niah_single_3"]["mean"] == 0.0
    assert whole["p_value"] == pytest.approx(0.25)


def test_retrieval_with_a_tail_is_compared_with_retrieval() -> None:
    """Paired, on the same samples."""
    scores = {"retrieval": (0.5, 1.0, 0.0), "retrieval_tail": (1.0, 1.0, 0.5)}
    made = [row(name, "a", index, score) for name, own in scores.items() for index, score in enumerate(own)]
    (found,) = tables.comparisons(made, list(scores))
    assert (found["first"], found["second"]) == ("retrieval", "retrieval_tail")
    assert found["mean"] == pytest.approx(1 / 3)


def test_markdown_has_the_published_shape(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Tasks side by side with the average and its gap; lengths side by side with the effective length."""
    more = [row("full", task, i, 0.8, 8192) for task in ToySuite().tasks() for i in range(2)]
    more += [row("flat", "niah_single_1", i, 1.0, 8192) for i in range(2)]
    text = write_report(tmp_path, [*rows, *more], ToySuite(), SETTINGS, plot=False, notes=["from a note"])
    assert "| method | act. tokens | S1 | S3 | avg. (Δ full) |" in text
    assert "| retrieval | 740 | 50.0 ±16.7 | 100.0 ±0.0 | 75.0 (-15.0) |" in text
    assert "| method | act. tokens | effective | 4K | 8K | avg. (Δ full) |" in text
    assert "| full | - | 4K | 90.0 ±6.7 | 80.0 ±0.0 | 85.0 |" in text
    assert "| flat | 740 | <4K | 85.0 ±7.6 | 100.0 ±0.0* | - |" in text  # one task of two at 8K: no average
    assert "- from a note" in text and "built-in prose" not in text  # the run's notes, not the suite's of today
    assert "1 answers failed; the first, toy/niah_single_1/4096/1/10/retrieval/inside: RuntimeError: gone" in text


def test_csv_and_plots(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """One line per cell, unknown values empty; both pictures are PNG files."""
    write_report(tmp_path, rows, ToySuite(), SETTINGS)
    with open(tmp_path / "summary.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 6 and lines[0]["method"] == "full" and lines[0]["attended"] == ""
    assert float(lines[-1]["score"]) == 1.0
    for name in ("by_length.png", "by_task.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_run_of_failures_only_is_reported(tmp_path: Path) -> None:
    """No answer at all must not divide by zero or look like a score."""
    text = write_report(tmp_path, [failed("full", "niah_single_1", 0)], ToySuite(), SETTINGS)
    assert "| full | - | - | - |" in text and "1 answers failed" in text


def test_scoring_again_uses_the_suites_rule(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Stored scores are ignored: the answers are scored anew, and other suites' folders are refused."""
    with RunFolder.open(tmp_path, SETTINGS, start={"notes": ["one note"]}) as run:
        run.append(*({**r, "score": 0.0} for r in rows if not r["error"]))
    assert score_again(tmp_path, ToySuite(), plot=False) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["cells"][0]["score"] == 0.8 and "one note" in summary["notes"]
    other = ToySuite()
    other.name = "other"
    with pytest.raises(RunFolderError, match="needed a run of other, found one of 'toy'"):
        score_again(tmp_path, other, plot=False)
    with pytest.raises(InputDataError, match="found neither"):
        score_again(tmp_path / "nothing", ToySuite(), plot=False)


def test_shards_of_different_settings_are_not_joined(tmp_path: Path) -> None:
    for i in range(2):
        with RunFolder.open(tmp_path / f"shard-{i}-of-2", {**SETTINGS, "seed": i}) as run:
            run.append(row("full", "niah_single_1", i, 1.0))
    with pytest.raises(RunFolderError, match="shard-1-of-2 was run with other settings"):
        score_again(tmp_path, ToySuite(), plot=False)
