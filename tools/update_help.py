"""Write the program's own help into the documents, between two markers each.

    python -m tools.update_help [--check]

docs/commands.md gets the list of commands and the options of this package's commands, eval/docs/commands.md the options
of the evaluation's.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from retrieval_attn.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- help: begin, written by python -m tools.update_help -->"
END = "<!-- help: end -->"
WIDTH = 100


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands below a parser by their words, in the order they were added; those with commands of their own
    are replaced by these. Empty if it has none.
    """
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                below = subparsers(sub)
                found |= {f"{name} {words}": leaf for words, leaf in below.items()} or {name: sub}
    return found


def blocks(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the text between the markers of each document, by path from the root, WIDTH columns wide."""
    before = os.environ.get("COLUMNS")
    # argparse takes the width from the environment before it asks the terminal.
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        overview = parser.format_help()
        details = {name: sub.format_help() for name, sub in subparsers(parser).items()}
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    found: dict[str, list[str]] = {"docs/commands.md": [_fenced(overview)], "eval/docs/commands.md": []}
    for name, text in details.items():
        document = "docs/commands.md" if name.split()[0] in COMMANDS else "eval/docs/commands.md"
        found[document].append(f"## {parser.prog} {name}\n\n{_fenced(text)}")
    return {name: "\n" + "\n".join(some) + "\n" for name, some in found.items()}


def replace_block(text: str, block: str) -> str:
    """`text` with what stands between the markers replaced. Raises ValueError if a marker is missing."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs the lines {BEGIN!r} and {END!r} around the help text")
    return f"{head}{BEGIN}\n{block}{END}{tail}"


def outdated(parser: argparse.ArgumentParser) -> dict[Path, str]:
    """Documents whose help differs from the program's, with the text they should have."""
    found = {}
    for name, block in blocks(parser).items():
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = replace_block(old, block)
        if new != old:
            found[path] = new
    return found


def main(arguments: list[str] | None = None) -> int:
    """Rewrites what is out of date, or with --check only says so (exit status 1)."""
    from retrieval_attn.cli import build_parser

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    args = parser.parse_args(arguments)
    changes = outdated(build_parser())
    for path, text in changes.items():
        print(f"{path.relative_to(ROOT)}: {'out of date' if args.check else 'written'}")
        if not args.check:
            path.write_text(text, encoding="utf-8")
    return int(bool(changes) and args.check)


def _fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
