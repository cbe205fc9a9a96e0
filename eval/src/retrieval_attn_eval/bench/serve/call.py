"""Call: one request of a workload, and when it comes."""

from __future__ import annotations

from typing import NamedTuple

import retrieval_attn as ra

__all__ = ["Call"]


class Call(NamedTuple):
    """arrival: seconds from the workload's beginning."""

    request: ra.Request
    arrival: float
