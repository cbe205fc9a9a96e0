"""`tools.card.served` from a shape: the model that it makes, and its rows over a server of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import retrieval_attn as ra
from tests.preloaded import forked_processes
from tools.card import served
from tools.card.served import main, make_model


def test_a_made_model_has_a_token_for_each_word(tmp_path: Path) -> None:
    make_model("tiny", str(tmp_path))
    llm = ra.LLM(str(tmp_path), device="cpu")
    assert llm.tokenizer("w5 w7 w999 w127")["input_ids"] == [5, 7, 0, 127]
    asked: Any = llm.tokenizer.apply_chat_template([{"role": "user", "content": "w9"}], add_generation_prompt=True)
    assert list(asked["input_ids"]) == [1, 9, 3, 4]


@pytest.mark.slow
def test_rows_are_printed_for_a_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "subprocess", forked_processes())
    flags = ["--", "--device", "cpu", "--store", str(tmp_path / "store"), "--warm-up", "0"]
    given = ["tiny", "--out", str(tmp_path), "--only", "short", "agent", "--tokens", "3", "--words", "1200"]
    assert main([*given, *flags]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["tokens"] for row in rows if row["what"].startswith("short prompt")] == [3] * 4
    [session] = [row for row in rows if row["what"].startswith("a session of an agent")]
    assert session["turns"] > 20 and session["read_a_turn"] < 64, "a turn reads its result, and the end of its answer"
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == rows
