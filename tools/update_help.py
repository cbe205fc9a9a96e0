"""Writes the program's own help into README.md between two markers.

python -m tools.update_help [--check]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN = "<!-- help: begin, written by python -m tools.update_help -->"
END = "<!-- help: end -->"
WIDTH = 100


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The subcommands of a parser by name, in the order they were added; empty if it has none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def help_markdown(parser: argparse.ArgumentParser) -> str:
    """Help of the program and of each subcommand as fenced blocks, WIDTH columns on any terminal."""
    before = os.environ.get("COLUMNS")
    # argparse asks the environment for the width, and 3.14 colours its output unless told not to.
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        texts = [parser.format_help(), *(sub.format_help() for sub in subparsers(parser).values())]
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return "\n".join(f"```text\n{text.rstrip()}\n```\n" for text in texts)


def replace_block(text: str, block: str) -> str:
    """`text` with what stands between the markers replaced. Raises ValueError if a marker is missing."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md needs the lines {BEGIN!r} and {END!r} around the help text")
    return f"{head}{BEGIN}\n{block}{END}{tail}"


def main(arguments: list[str] | None = None) -> int:
    """Rewrites README.md, or with --check only says whether it is current (exit status 1 if not)."""
    from retrieval_attn.cli import build_parser

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    args = parser.parse_args(arguments)
    old = README.read_text(encoding="utf-8")
    new = replace_block(old, help_markdown(build_parser()))
    if args.check:
        if old != new:
            print("README.md: help text is out of date; run: python -m tools.update_help", file=sys.stderr)
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
