"""Dense extraction: every asked record stands in the text once, lengths are kept, and fields are scored exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.tests.shared import bundled_tokenizer
from retrieval_attn.cli import main
from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.extract.records import FIELDS, recovered
from retrieval_attn_eval.extract.suite import TASKS, ExtractSuite
from retrieval_attn_eval.suite.sample import Row


def row(task: str = "extract_4", length: int = 1500, index: int = 0, seed: int = 0) -> Row:
    (one,) = ExtractSuite().rows(task, length, [index], bundled_tokenizer(), seed)
    return one


@pytest.mark.parametrize(("task", "length"), [("extract_4", 1500), ("extract_16", 4096), ("extract_4", 9000)])
def test_rows_hold_what_they_ask_for(task: str, length: int) -> None:
    """Each asked record is one line of the text with all of its fields; prompt and answer fill the length."""
    one = row(task, length)
    answers = [json.loads(answer) for answer in one.answers]
    assert len(answers) == TASKS[task] == len({answer["parcel"] for answer in answers})
    lines = one.context.splitlines()
    for answer in answers:
        (line,) = [line for line in lines if answer["parcel"] in line.replace(".", " ").replace(",", " ").split()]
        assert all(answer[name] in line for name in FIELDS)
        assert answer["parcel"] in one.question
    assert len(lines) - 1 == one.meta["records"] > TASKS[task]
    places = [next(i for i, line in enumerate(lines) if answer["parcel"] in line) for answer in answers]
    assert places != sorted(places) or task == "extract_4"
    used = len(bundled_tokenizer()(one.prompt)["input_ids"]) + one.max_new_tokens
    assert length - 100 < used <= length  # a line has about 40
    assert json.loads(one.answer_prefix + str(one.meta["completion"])) == answers


def test_rows_depend_on_their_own_numbers_alone() -> None:
    many = list(ExtractSuite().rows("extract_4", 1500, [0, 1], bundled_tokenizer(), 0))
    assert many[0] == row() and many[1] == row(index=1) and many[0].context != many[1].context
    assert row(seed=1).context != row().context
    with pytest.raises(ConfigError, match="choose from extract_4"):
        row("extract_5")
    with pytest.raises(ConfigError, match="length 300 is too short for extract_4"):
        row(length=300)


def test_fields_are_scored_exactly() -> None:
    """Objects count by their parcel in any order, a broken end loses the last one, a second telling is ignored."""
    suite, one = ExtractSuite(), row()
    true = str(one.meta["completion"])
    assert suite.score(one, true) == 1 and suite.scores(one, true) == {"records": 1}
    backwards = ", ".join(reversed(one.answers))
    assert suite.score(one, backwards) == 1
    assert suite.score(one, true[: len(true) - 4]) == 0.75  # the last object is not closed
    first = json.loads(one.answers[0])
    wrong = json.dumps({**first, "seal": "0", "city": "Nowhere"})
    assert recovered(wrong, one.answers) == (2 / 16, 0)
    assert recovered(wrong + one.answers[0], one.answers) == (2 / 16, 0)
    assert recovered(json.dumps({**first, "seal": int(first["seal"])}), one.answers) == (4 / 16, 1 / 4)
    for nothing in ("", "[]", "{not json}", one.context, json.dumps({**first, "parcel": "another"})):
        assert recovered(nothing, one.answers) == (0, 0)


def test_the_command_shows_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lengths", "1500", "--tasks", "extract_4", "--n", "2", "--dry-run", "--device", "cpu"]
    assert main(["extract", *flags, "--output-dir", str(tmp_path / "out")]) == 0
    assert "extract_4" in capsys.readouterr().out
