"""Results folders: nothing is lost, nothing overwritten, and a folder of other settings is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.runs import (
    RunFolder,
    RunFolderError,
    environment,
    fingerprint,
    load_run,
    read_rows,
    write_atomically,
)

SETTINGS = {"model": "m", "retrieval": {"retrieve": 100, "sink": 128}}


def test_rows_survive_reopening(tmp_path: Path) -> None:
    """Fails if a second start forgets rows, rewrites the file or loses the first start's environment."""
    folder = tmp_path / "run"
    with RunFolder.open(folder, SETTINGS, start={"n": 1}) as run:
        run.append({"id": "a", "score": 1.0})
    before = (folder / "predictions.jsonl").read_bytes()
    with RunFolder.open(folder, SETTINGS, start={"n": 2}) as run:
        assert run.missing(["b", "a", "c"]) == ["b", "c"]
        run.append({"id": "b", "score": 0.5})
    after = (folder / "predictions.jsonl").read_bytes()
    assert after.startswith(before) and len(after.splitlines()) == 2
    assert [start["n"] for start in json.loads((folder / "env.json").read_text())] == [1, 2]
    assert [row["id"] for row in load_run(folder)[1]] == ["a", "b"]


def test_torn_last_line_is_dropped(tmp_path: Path) -> None:
    """A crash in the middle of a write must cost one row, not the folder, and must not glue two rows together."""
    with RunFolder.open(tmp_path, SETTINGS) as run:
        run.append({"id": "a"}, {"id": "b"})
    rows = tmp_path / "predictions.jsonl"
    rows.write_bytes(rows.read_bytes() + b'{"id": "c", "sco')
    assert [row["id"] for row in load_run(tmp_path)[1]] == ["a", "b"]
    with RunFolder.open(tmp_path, SETTINGS) as run:
        assert run.missing(["a", "b", "c"]) == ["c"]
        run.append({"id": "c", "score": 1.0})
    assert [json.loads(line)["id"] for line in rows.read_text().splitlines()] == ["a", "b", "c"]


def test_damaged_line_is_named(tmp_path: Path) -> None:
    """Damage before the end is no torn write: it is reported with its line, never skipped."""
    with RunFolder.open(tmp_path, SETTINGS) as run:
        run.append({"id": "a"})
    (tmp_path / "predictions.jsonl").write_bytes(b'{"id": "a"}\nnot json\n{"id": "b"}\n')
    with pytest.raises(RunFolderError, match="line 2"):
        RunFolder.open(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    "line",
    [
        *("[1]", "7", '{"score": 1}', "null", '{"id": []}', '{"id": 5}', '{"id": "a", "score": "1"}'),
        '{"id": "\\ud800"}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:20],
)
def test_rows_need_an_id(tmp_path: Path, line: str) -> None:
    """JSON without an id would be a row that resume can never find."""
    (tmp_path / "rows").write_text(line + "\n")
    with pytest.raises(RunFolderError, match="line 1"):
        read_rows(tmp_path / "rows")


def test_unicode_line_separators_stay_inside_a_row(tmp_path: Path) -> None:
    """Answers may hold U+2028 or U+0085; splitting the file as text would tear such a row in two."""
    text = "one\u2028two\x85three\x0bfour\r\nfive"
    with RunFolder.open(tmp_path, SETTINGS) as run:
        run.append({"id": "a", "response": text})
    assert load_run(tmp_path)[1] == [{"id": "a", "response": text}]


def test_other_settings_are_refused(tmp_path: Path) -> None:
    """The message must name what differs, and the folder must stay as it was."""
    with RunFolder.open(tmp_path, SETTINGS) as run:
        run.append({"id": "a"})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = {"model": "m", "retrieval": {"retrieve": 200, "sink": 128}}
    with pytest.raises(RunFolderError, match=r"retrieval\.retrieve: 100 there, 200 here.*choose another output folder"):
        RunFolder.open(tmp_path, other)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    """Results must not be mixed into a folder of the user's."""
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunFolderError, match=r"thesis\.tex"):
        RunFolder.open(tmp_path, SETTINGS)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(RunFolderError, match="found a file"):
        RunFolder.check(tmp_path / "thesis.tex", SETTINGS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("env.json", "{}", "env.json: needed a list of starts"),
        ("config.json", "[]", "config.json: needed fingerprint and settings"),
        ("config.json", '{"fingerprint": "a", "settings": 5}', "config.json: needed fingerprint and settings"),
        ("config.json", "[" * 100_000, "config.json: not JSON"),
        ("config.json", None, "config.json: needed a file, found a folder"),
    ],
)
def test_other_contents_of_a_folder_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    with RunFolder.open(tmp_path, SETTINGS) as run:
        run.append({"id": "a"})
    (tmp_path / name).unlink()
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(RunFolderError, match=message):
        RunFolder.open(tmp_path, SETTINGS)


def test_check_creates_nothing(tmp_path: Path) -> None:
    RunFolder.check(tmp_path / "new", SETTINGS)
    assert not (tmp_path / "new").exists()


def test_two_writers_are_refused(tmp_path: Path) -> None:
    """Two runs in one folder would interleave and repeat rows."""
    pytest.importorskip("fcntl")
    with RunFolder.open(tmp_path, SETTINGS), pytest.raises(RunFolderError, match="another process"):
        RunFolder.open(tmp_path, SETTINGS)
    RunFolder.open(tmp_path, SETTINGS).close()


def test_error_rows_are_tried_again(tmp_path: Path) -> None:
    """A row with an error counts as missing; a good row is never written twice."""
    with RunFolder.open(tmp_path, SETTINGS) as run:
        run.append({"id": "a", "error": "out of memory"})
        assert run.missing(["a"]) == ["a"]
        run.append({"id": "a", "score": 1.0, "error": None})
        assert run.missing(["a"]) == []
        with pytest.raises(ValueError, match="already has a row"):
            run.append({"id": "a", "score": 0.0})
    assert load_run(tmp_path)[1] == [{"id": "a", "score": 1.0, "error": None}]


def test_load_run_needs_a_results_folder(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"config\.json"):
        load_run(tmp_path)


def test_fingerprint_ignores_the_order_of_keys() -> None:
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})


def test_atomic_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x", "one")
    write_atomically(tmp_path / "x", b"two")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "two")]


def test_environment_is_json() -> None:
    found = json.loads(json.dumps(environment()))
    assert found["versions"]["numpy"] and found["machine"]["cores"] >= 1
