"""Models by name: what tells two folders apart."""

from __future__ import annotations

from pathlib import Path

from retrieval_attn_eval import models


def test_model_digest(tmp_path: Path) -> None:
    """A changed weight file changes the digest; a hub id has none."""
    (tmp_path / "config.json").write_text("{}")
    first = models.model_digest(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"1")
    assert first != models.model_digest(str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"GGUF1")
    first = models.model_digest(str(tmp_path / "model.gguf"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF2")
    assert first is not None and first != models.model_digest(str(tmp_path / "model.gguf"))
    assert models.model_digest("nobody/nothing") is None
