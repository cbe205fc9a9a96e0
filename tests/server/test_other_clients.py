"""A chat client that is not ours: `llm` (pip install llm), told of the server in its own file of models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.process import ANSWER, QUESTION, Served, document

pytest.importorskip("llm", reason="needs the client llm: pip install llm")


def llm(folder: Path, *arguments: str, given: str | None = None) -> str:
    """What the client prints."""
    command = [sys.executable, "-m", "llm", *arguments]
    variables = {**os.environ, "LLM_USER_PATH": str(folder)}
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_lists_asks_and_goes_on(served: Served, tmp_path: Path) -> None:
    """A document from its input, a stream, and a second turn of the conversation that it kept."""
    models = tmp_path / "extra-openai-models.yaml"
    models.write_text(f"- model_id: here\n  model_name: bundled\n  api_base: {served.url}/v1\n  api_key_name: none\n")
    assert "here" in llm(tmp_path, "models", "list")
    options = ("-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "16", "--key", "none")
    assert ANSWER in llm(tmp_path, "prompt", *options, "-s", document(), QUESTION)
    assert ANSWER in llm(tmp_path, "prompt", *options, "--no-stream", "-s", document(), QUESTION)
    assert ANSWER in llm(tmp_path, "prompt", *options, "-c", QUESTION)
    with served.client() as http:
        assert http.post("/v1/contexts", json={"name": "book", "text": document()}).status_code == 200
    models.write_text(
        f"- model_id: book\n  model_name: bundled@book\n  api_base: {served.url}/v1\n  api_key_name: none\n"
    )
    options = ("-m", "book", *options[2:])
    assert ANSWER in llm(tmp_path, "prompt", *options, QUESTION)
