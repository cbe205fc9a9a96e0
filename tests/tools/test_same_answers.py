"""The tool that compares the answers of two runs finds a changed letter and a missing answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.same_answers import main


def run(folder: Path, texts: dict[str, str]) -> str:
    (folder / "one").mkdir(parents=True)
    rows = [json.dumps({"id": name, "response": text}) for name, text in texts.items()]
    (folder / "one" / "predictions.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("after", "status", "said"),
    [
        ({"a": "x", "b": "y"}, 0, "0 differ"),
        ({"a": "x", "b": "Y"}, 1, "'y' became 'Y'"),
        ({"a": "x"}, 1, "only in one run"),
    ],
)
def test_answers_are_compared_letter_by_letter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: dict[str, str], status: int, said: str
) -> None:
    before = run(tmp_path / "before", {"a": "x", "b": "y"})
    assert main([before, run(tmp_path / "after", after)]) == status
    assert said in capsys.readouterr().out


def test_two_empty_folders_prove_nothing(tmp_path: Path) -> None:
    assert main([str(tmp_path), str(tmp_path)]) == 1
