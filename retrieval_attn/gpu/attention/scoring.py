"""Scoring: how a layer turns inner products into scores."""

from __future__ import annotations

from typing import NamedTuple


class Scoring(NamedTuple):
    """scale * q.k, soft-capped unless softcap is None."""

    scale: float
    softcap: float | None = None
