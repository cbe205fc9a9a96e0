"""What imports print: warnings of torchao about itself are dropped, all other records of its loggers are kept."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys

import pytest

from retrieval_attn.imports import NOISE, quiet


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
