"""A file is replaced as a whole, and old temporary files of killed processes are removed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from retrieval_attn_eval.replace import replace_file
from tests.cpu.reference import in_threads


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk must not cost the results that were there."""
    path = tmp_path / "results"
    replace_file(path, lambda file: file.write(b"old"))

    def fail(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        replace_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_threads_replace_one_path(tmp_path: Path) -> None:
    """Their temporary file had one name for all of a process: a third of the writes failed."""
    path = tmp_path / "results"

    def save() -> None:
        for _ in range(10):
            replace_file(path, lambda file: file.write(b"whole"))

    in_threads(save, save, save)
    assert path.read_bytes() == b"whole"
    assert [one.name for one in tmp_path.iterdir()] == ["results"]


def test_what_a_killed_save_left_is_swept(tmp_path: Path) -> None:
    """Old files that nobody holds go; young ones, locked ones and other people's stay. Links are not followed."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    os.utime(victim, (1, 1))
    left = {name: tmp_path / name for name in (".index.123.tmp", ".index.0abc.tmp", ".index.held.tmp", ".other.1.tmp")}
    for path in left.values():
        path.write_text("half")
        os.utime(path, (1, 1))
    os.utime(left[".index.0abc.tmp"])
    link = tmp_path / f".index.{os.getpid()}.tmp"
    link.symlink_to(victim)
    with left[".index.held.tmp"].open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        replace_file(tmp_path / "index", lambda file: file.write(b"whole"))
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"victim", "index", ".index.0abc.tmp", ".index.held.tmp", ".other.1.tmp", link.name}
    assert victim.read_text() == "mine"


def test_a_slow_save_is_not_swept(tmp_path: Path) -> None:
    """A save of the same path removes files that look left over, but not one that is being written."""
    path = tmp_path / "index"

    def slowly(file: Any) -> None:
        file.write(b"first")
        os.utime(file.fileno(), (1, 1))
        replace_file(path, lambda other: other.write(b"second"))

    replace_file(path, slowly)
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_planted_temporary_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its name was guessed: what a link there points to stays as it was, and so does the old index."""
    path, victim = tmp_path / "index", tmp_path / "victim"
    for one in (path, victim):
        one.write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".index.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        replace_file(path, lambda file: file.write(b"new"))
    assert victim.read_text() == path.read_text() == "mine"
