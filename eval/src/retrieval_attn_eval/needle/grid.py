"""Lengths and depths of a needle grid. Loads neither a model nor torch."""

from __future__ import annotations

import argparse

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.flags import add_flag, parse_lengths

__all__ = ["add_arguments", "depths_asked", "lengths_asked"]

LENGTHS = "4096,8192,16384"
DEPTHS = "0,25,50,75,100"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags beside --lengths."""
    add_flag(group, "--depths", metavar="P,P", help=f"percent (default: {DEPTHS})")


def lengths_asked(args: argparse.Namespace) -> tuple[int, ...]:
    """Return the token counts of --lengths. Raises ConfigError."""
    return parse_lengths(LENGTHS if args.lengths is None else args.lengths)


def depths_asked(args: argparse.Namespace) -> tuple[float, ...]:
    """Return the percents of --depths. Raises ConfigError."""
    text = DEPTHS if args.depths is None else args.depths
    try:
        depths = [float(part) for part in text.strip("[] ").split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--depths {text!r} is no list of percents; write 0,50,100") from None
    if not depths or not all(0.0 <= d <= 100.0 for d in depths):
        raise ConfigError(f"--depths must be percents from 0 to 100, got {depths}; write 0,50,100")
    return tuple(dict.fromkeys(depths))
