"""What imports print: warnings of torchao about itself are dropped, all other records of its loggers are kept."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrieval_attn import imports
from retrieval_attn.imports import NOISE, quiet, read_ahead, weight_files
from retrieval_attn.memory import host_room
from retrieval_attn.store.mapped import give_up, resident_bytes


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_importing_torchao_prints_nothing() -> None:
    """In a program that uses this package: missing kernels of torchao are no message for its user."""
    code = "import retrieval_attn as ra; ra.Config(); import torchao"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", NOISE)
def test_other_warnings_are_kept(name: str, caplog: pytest.LogCaptureFixture) -> None:
    quiet()
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)
    try:
        logger.warning(NOISE[name] + " by torch", *["Kind"] * NOISE[name].count("%s"))
        logger.warning("x.so failed")
    finally:
        logger.removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"x.so failed"}


@pytest.mark.parametrize("command", ["plan", "verify", "serve"])
def test_a_missing_model_is_refused_without_torch(command: str) -> None:
    code = (
        f"import sys; from retrieval_attn.cli import main; code = main(['{command}', '/no/such/model']); "
        "sys.exit(code if not {'torch', 'transformers'} & set(sys.modules) else 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "there is no '/no/such/model'" in done.stderr


def test_weights_are_those_of_a_folder_a_file_or_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    download = tmp_path / "models--owner--name"
    for folder, name in ((download / "snapshots" / "1", "old"), (download / "snapshots" / "2", "new")):
        folder.mkdir(parents=True)
        (folder / f"{name}.safetensors").write_bytes(b"0")
        (folder / "config.json").write_bytes(b"0")
    (download / "refs").mkdir()
    (download / "refs" / "main").write_text("2")
    new = download / "snapshots" / "2" / "new.safetensors"
    assert weight_files("owner/name") == weight_files(str(new.parent)) == weight_files(str(new)) == [new]
    assert (
        weight_files("owner/other") == weight_files(str(new.with_name("config.json"))) == weight_files("bundled") == []
    )


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs a page cache that can be emptied")
def test_weights_are_read_ahead_where_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "AHEAD_BYTES", 1 << 20)
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(5 << 20))
    os.sync()
    give_up(path)
    if (resident_bytes(path) or 0) > 1 << 20:
        pytest.skip("the file system keeps files in memory")
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: 9 << 20)
    read_ahead(str(tmp_path)).join()
    assert (resident_bytes(path) or 0) < 4 << 20
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: 1 << 30)
    read_ahead(str(tmp_path)).join()
    assert (resident_bytes(path) or 0) >= 5 << 20
