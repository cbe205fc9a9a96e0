"""`load replay` against the real server with the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retrieval_attn.cli import main
from retrieval_attn_eval.load.conversation import Conversation
from retrieval_attn_eval.load.line import Line, read_trace, written

BLOCK = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("fastapi", reason="the server needs FastAPI; pip install 'retrieval-attn[serve]'")
    process = pytest.importorskip("tests.server.process", reason="there is no server here")
    folder = tmp_path_factory.mktemp("store")
    with process.serving(
        "bundled", "--store", str(folder), "--warm-up", "0", "--max-context", "8k", preloaded=True
    ) as served:
        yield served


def conversations() -> list[Line]:
    """Two of three turns each, five blocks longer from turn to turn, one second apart."""
    numbers = count(1)
    lines = []
    for session in range(2):
        conversation = Conversation(numbers)
        for turn in range(3):
            blocks = conversation.prompt(5 * 512 * (turn + 1))
            lines.append(Line(turn + 0.1 * session, blocks, 4, f"s{session}", 0.2 if turn else None))
    return lines


@pytest.mark.slow
def test_later_turns_find_what_was_read(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have the tokens of the trace, and the server knows the messages of the turn before but the last."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out" / "replay.json"
    trace.write_text("\n".join(written(conversations())))
    flags = ["--block", str(BLOCK), "--output-dir", str(out.parent)]
    assert main(["load", "replay", str(trace), "--url", server.url, *flags]) == 0
    report = json.loads(out.read_text())
    assert report["answered"] == report["requests"] == 6 and report["errors"] == {}
    wanted = sum(line.prompt_tokens for line in read_trace(trace, block_tokens=BLOCK))
    assert report["prompt_tokens"] == pytest.approx(wanted, rel=0.1)
    assert report["cached"] == pytest.approx((4 + 8) / (5 + 10 + 15), abs=0.1)
    assert report["first"]["p99"] > 0 and report["tokens_per_second"] > 0
