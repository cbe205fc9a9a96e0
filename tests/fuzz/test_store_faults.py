"""A share of what `python -m tests.fuzz.store_faults` does in full: kills, errors, power cuts, flipped bits, races."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_structure import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_share_of_all_faults(tmp_path: Path) -> None:
    """In a process without torch, and with one thread, so that it may fork."""
    shares = ["--kills", "40", "--errors", "40", "--crashes", "40", "--flips", "150", "--races", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.store_faults", *shares, "--folder", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing wrong\n")
