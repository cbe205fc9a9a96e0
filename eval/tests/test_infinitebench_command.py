"""The infinitebench command: flags, a dry run, and one real run of the bundled model, continued and scored again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.tests.shared import parsed
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn_eval.infinitebench import command
from retrieval_attn_eval.runs import RunFolderError


def _run(*flags: str) -> int:
    return command.run(parsed(command, *flags, "--no-plot"))


def test_a_dry_run_shows_every_block(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert _run("--dry-run", "--lengths", "1k,2k", "--n", "3", "--tasks", "all", "--profile", "infllm") == 0
    shown = capsys.readouterr().out
    for task in ("passkey", "number_string", "kv_retrieval", "code_run", "math_calc", "math_find"):
        assert shown.count(f" {task} ") == 2
    assert "generated here" in shown and "profile infllm" in shown
    data = tmp_path / "passkey.jsonl"
    data.write_text(json.dumps({"context": "A 12345 b.", "input": "What?", "answer": "12345"}) + "\n")
    assert _run("--dry-run", "--data-dir", str(tmp_path), "--tasks", "Retr.P") == 0
    assert "file        1" in capsys.readouterr().out
    with pytest.raises(InputDataError, match=r"needed number_string.jsonl, found passkey.jsonl"):
        _run("--dry-run", "--data-dir", str(tmp_path))


def test_flags_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'niah' is unknown here; choose from passkey, number_string"):
        _run("--dry-run", "--tasks", "niah")
    with pytest.raises(ConfigError, match="longbook_qa_eng"):
        _run("--dry-run", "--tasks", "longbook_qa_eng")  # not without its file
    with pytest.raises(ConfigError, match="write kv_retrieval=100"):
        _run("--dry-run", "--max-new-tokens", "kv_retrieval")
    with pytest.raises(SystemExit):
        _run("--dry-run", "--profile", "gpt5")


def test_the_bundled_model_answers_and_the_run_goes_on_and_is_scored_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It knows pass keys from its training; cut and generated rows go the same way through the runner."""
    out = tmp_path / "run"
    same = ("--methods", "full", "--question-position", "inside", "--output-dir", str(out), "--tasks", "Retr.P")
    assert _run(*same, "--lengths", "600", "--n", "2") == 0
    assert _run(*same, "--lengths", "600", "--n", "3") == 0
    rows = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert [row["score"] for row in rows] == [1.0, 1.0, 1.0] and len({row["id"] for row in rows}) == 3
    assert all(row["scores"] == {"official": 1.0, "fixed": 1.0} for row in rows)
    assert "Retr.P" in (out / "summary.md").read_text()
    with pytest.raises(RunFolderError, match="profile"):
        _run(*same, "--lengths", "600", "--n", "3", "--profile", "kvpress")
    capsys.readouterr()
    assert _run("--score-only", str(out)) == 0
    assert "Retr.P" in capsys.readouterr().out


def test_the_bundled_model_answers_rows_of_a_file(tmp_path: Path) -> None:
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    needle = "The pass key is 71432. Remember it. 71432 is the pass key.\n"
    row = {"id": 7, "context": noise * 4 + needle + noise * 80, "input": "What is the pass key?", "answer": "71432"}
    (tmp_path / "passkey.jsonl").write_text(json.dumps(row) + "\n")
    out = tmp_path / "run"
    flags = ("--methods", "full", "--question-position", "inside", "--output-dir", str(out), "--tasks", "passkey")
    assert _run(*flags, "--data-dir", str(tmp_path), "--lengths", "700") == 0
    (prediction,) = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert prediction["score"] == 1.0
    meta = prediction["meta"]
    assert meta["truncated"] and meta["answer_in_context"] and meta["file_id"] == 7
    assert meta["prompt_tokens"] + prediction["max_new_tokens"] == 700
