"""Lengths and depths of a needle grid, as lists or as ranges.  Loads neither a model nor torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from retrieval_attn.errors import ConfigError
from retrieval_attn.memory.units import parse_tokens
from retrieval_attn_eval.flags import add_flag, parse_lengths

__all__ = ["add_arguments", "depths_asked", "lengths_asked", "ranged"]

LENGTHS = "4096,8192,16384"
DEPTHS = "0,25,50,75,100"
_LENGTH_RANGE = ("context_lengths_min", "context_lengths_max", "context_lengths_num_intervals")
_DEPTH_RANGE = tuple(f"document_depth_percent_{name}" for name in ("min", "max", "intervals", "interval_type"))


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """The flags beside --lengths."""
    add_flag(group, "--context-lengths-min", metavar="N", help="lengths as a range instead: first")
    add_flag(group, "--context-lengths-max", metavar="N", help="last")
    add_flag(group, "--context-lengths-num-intervals", type=int, metavar="N", help="how many (default: 35)")
    add_flag(group, "--depths", "--document-depth-percents", metavar="P,P", help=f"percent (default: {DEPTHS})")
    add_flag(group, "--document-depth-percent-min", type=float, metavar="P", help="depths as a range instead: first")
    add_flag(group, "--document-depth-percent-max", type=float, metavar="P", help="last")
    add_flag(group, "--document-depth-percent-intervals", type=int, metavar="N", help="how many (default: 35)")
    add_flag(
        group, "--document-depth-percent-interval-type", choices=["linear", "sigmoid"], help="spacing of the range"
    )


def ranged(args: argparse.Namespace) -> tuple[bool, bool]:
    """Whether lengths, and whether depths, are asked for as a range."""
    lengths, depths = (
        any(getattr(args, name) is not None for name in names) for names in (_LENGTH_RANGE, _DEPTH_RANGE)
    )
    return lengths, depths


def lengths_asked(args: argparse.Namespace) -> tuple[int, ...]:
    """Token counts of --lengths or of the range.  Raises ConfigError."""
    if not ranged(args)[0]:
        return parse_lengths(LENGTHS if args.lengths is None else args.lengths)
    if args.lengths is not None:
        raise ConfigError(
            "--lengths and --context-lengths-min/-max/-num-intervals exclude each other; give one of them"
        )
    least, most, count = (getattr(args, name) for name in _LENGTH_RANGE)
    ends = [
        None if end is None else parse_tokens(end, f"--context-lengths-{name}")
        for name, end in (("min", least), ("max", most))
    ]
    return tuple(dict.fromkeys(round(v) for v in _spaced("context-lengths", (*ends, count), (1000, 16000, 35))))


def depths_asked(args: argparse.Namespace) -> tuple[float, ...]:
    """Percents of --depths or of the range.  Raises ConfigError."""
    if ranged(args)[1]:
        if args.depths is not None:
            raise ConfigError(
                "--depths and --document-depth-percent-min/-max/-intervals exclude each other; give one of them"
            )
        *given, kind = (getattr(args, name) for name in _DEPTH_RANGE)
        depths = _spaced("document-depth-percent", given, (0.0, 100.0, 35))
        depths = [_sigmoid(d) if kind == "sigmoid" else float(round(d)) for d in depths]
    else:
        text = DEPTHS if args.depths is None else args.depths
        try:
            depths = [float(part) for part in text.strip("[] ").split(",") if part.strip()]
        except ValueError:
            raise ConfigError(f"--depths {text!r} is no list of percents; write 0,50,100") from None
    if not depths or not all(0.0 <= d <= 100.0 for d in depths):
        raise ConfigError(f"--depths must be percents from 0 to 100, got {depths}; write 0,50,100")
    return tuple(dict.fromkeys(depths))


def _spaced(name: str, given: Sequence[float | None], defaults: Sequence[float]) -> list[float]:
    """Evenly spaced values from least to most, both included; given: least, most and their number."""
    least, most, count = (d if g is None else g for g, d in zip(given, defaults, strict=True))
    if count < 1 or most < least:
        raise ConfigError(f"--{name}: needed min <= max and at least one interval, got {least}, {most} and {count}")
    steps = int(count)
    return [float(least)] if steps == 1 else [least + (most - least) * i / (steps - 1) for i in range(steps)]


def _sigmoid(depth: float) -> float:
    """Spacing that is dense at both ends; 0 and 100 stay where they are."""
    return depth if depth in (0.0, 100.0) else round(100.0 / (1.0 + math.exp(-0.1 * (depth - 50.0))), 3)
