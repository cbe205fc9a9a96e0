"""The scripts in examples/ run as they are and find what they look for."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FOUND = {
    "ask_a_document.py": ["4815162", "2342108"],
    "many_questions.py": ["4815162", "7391846", "1208934"],
    "plain_transformers.py": ["retrieval:  4815162", "full attention:  4815162"],
}


SERVED = ["agent_session.py", "ask_a_server.py"]
"""Run by `tests/server/test_sessions.py` and `test_process.py`: they need a server."""


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted([*FOUND, *SERVED])


@pytest.mark.parametrize("name", list(FOUND))
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    for words in FOUND[name]:
        assert words in printed
