"""`trace make` and `trace replay` against the real server with the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retrieval_attn.cli import main
from retrieval_attn.trace.line import read_trace

BLOCK = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("fastapi", reason="the server needs FastAPI; pip install 'retrieval-attn[serve]'")
    process = pytest.importorskip("tests.server.process", reason="there is no server here")
    folder = tmp_path_factory.mktemp("store")
    with process.serving("bundled", "--store", str(folder), "--warm-up", "0", "--max-context", "8k") as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_drawn_trace_is_answered(server: Any, tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have the tokens of the trace, and later turns find the blocks of the earlier ones at the server."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    trace, out = tmp_path / "trace.jsonl", tmp_path / "result.json"
    assert main(["trace", "make", "--sessions", "4", "--most", "8k", "--seed", "1", "--output", str(trace)]) == 0
    flags = ["--block", str(BLOCK), "--scale", "0.01", "--speed", "100", "--api", api, "--requests", "12"]
    flags += ["--seed", str(len(api)), "--no-progress"]
    assert main(["trace", "replay", str(trace), "--url", server.url, *flags, "--output", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["answered"] == report["requests"] == 12 and report["errors"] == {}
    wanted = sum(line.prompt_tokens for line in read_trace(trace, 12, BLOCK))
    assert report["prompt_tokens"] == pytest.approx(wanted, rel=0.15)
    assert report["cached"] > 0.1 and report["first"]["p99"] > 0 and report["tokens_per_second"] > 0
