"""Flags of the evaluation's commands and what is written behind them: lengths, numbers of keys, names, folders."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from retrieval_attn.errors import ConfigError
from retrieval_attn.memory.units import parse_tokens
from retrieval_attn_eval.runs import RunFolderError

__all__ = [
    "as_tokens",
    "add_flag",
    "check_at_least",
    "check_matplotlib",
    "new_folder",
    "parse_choices",
    "parse_lengths",
    "parse_retrieve",
]


def add_flag(group: Any, *names: str, **options: Any) -> None:
    """Add a flag; its other names and underscore spellings work too but stay out of the help."""
    action = group.add_argument(names[0], dest=names[0][2:].replace("-", "_"), **options)
    spelled = {n for name in names for n in (name, "--" + name[2:].replace("-", "_"))} - {names[0]}
    if spelled:
        hidden = {**options, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        group.add_argument(*sorted(spelled), dest=action.dest, **hidden)


def parse_lengths(text: str, flag: str = "--lengths") -> tuple[int, ...]:
    """Token counts of a list such as "4096,8k,128k" or "[4096, 8192]", each once, as given.  Raises ConfigError."""
    parts = [part for part in text.strip("[] ").split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"{flag} {text!r} holds no length; write 4096,8k,128k")
    return tuple(dict.fromkeys(parse_tokens(part, flag) for part in parts))


def parse_retrieve(text: str) -> int | Literal["all", "auto"]:
    """Return Config's `retrieve` from its spelling on the command line. Raises ConfigError."""
    if text == "all":
        return "all"
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--retrieve {text!r} is no number of keys; write 100, all or auto") from None


def parse_choices(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Comma-separated names, in the order of `known` (the baseline first).  Raises ConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            f"{flag} {text!r}: {unknown[0] if unknown else 'nothing'!r} is unknown; choose from {', '.join(known)}"
        )
    return tuple(name for name in known if name in names)


def as_tokens(text: str) -> int:
    """A number of tokens as argparse's `type`: 4096, "4k" or "1m"; zero and less are for the command to refuse."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return parse_tokens(text, "tokens")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_at_least(least: int, args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError for a number in args below `least`; None and names that args lacks are passed over."""
    for name in names:
        value = getattr(args, name, None)
        if value is not None and value < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be at least {least}, got {value}; give a larger number")


def check_matplotlib() -> None:
    """Raises ConfigError if plots cannot be drawn."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib, which is not installed; pip install matplotlib, or use --no-plot")


def new_folder(name: str, what: str) -> Path:
    """The folder for results, which must not hold any; "auto": results/WHAT/TIME.  Raises RunFolderError."""
    folder = Path(name) if name != "auto" else Path("results") / what / time.strftime("%Y%m%d-%H%M%S")
    if folder.exists() and any(folder.iterdir()):
        raise RunFolderError(f"{folder} holds results already; give another --output-dir")
    return folder
