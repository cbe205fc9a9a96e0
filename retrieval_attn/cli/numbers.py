"""Numbers that flags give: checked before anything is done."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

from retrieval_attn.errors import ConfigError

__all__ = ["check_numbers"]


def check_numbers(args: argparse.Namespace, least: Mapping[str, int | None]) -> None:
    """Each number that args has must be finite and at least `least`, or more than 0 where that is None.

    Raises ConfigError, the flag named.
    """
    for name, bound in least.items():
        value = getattr(args, name)
        if value is None:
            continue
        if not math.isfinite(value) or (value <= 0 if bound is None else value < bound):
            needed = "more than 0" if bound is None else f"at least {bound}"
            raise ConfigError(f"--{name.replace('_', '-')} must be {needed}, got {value}; give another number")
