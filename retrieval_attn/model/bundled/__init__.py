"""The model that comes with the package: small, finds planted numbers and can do little else."""

from __future__ import annotations

from pathlib import Path

BUNDLED = Path(__file__).parent
NAME = "bundled"


def model_path(name: str | Path) -> str:
    """Return the path that transformers loads for `name`, a folder or a hub name: for "bundled" its folder."""
    return str(BUNDLED) if str(name) == NAME else str(name)
