"""Compare the answers of two evaluation runs, text by text: `python -m tools.same_answers BEFORE AFTER`.

BEFORE and AFTER are result folders of `retrieval-attn ruler`, `needle` or `infinitebench`, or folders of such folders.
Answers belong together by sample, method and question position. Exit status 1 where a text differs or is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

Key = tuple[str, str]
"""Run folder and id of an answer, which names task, length, sample, method and question position."""


def answers(folder: Path) -> dict[Key, str]:
    """The texts of all predictions below `folder`."""
    found: dict[Key, str] = {}
    for path in sorted(folder.rglob("predictions.jsonl")):
        run = str(path.parent.relative_to(folder))
        for line in path.read_text(encoding="utf-8").splitlines():
            row: dict[str, Any] = json.loads(line)
            found[run, row["id"]] = f"error: {row['error']}" if row.get("error") else row["response"]
    return found


def compare(before: dict[Key, str], after: dict[Key, str]) -> list[str]:
    """What differs, one line each."""
    lines = [f"{' '.join(key)}: only in one run" for key in sorted(before.keys() ^ after.keys())]
    for key in sorted(before.keys() & after.keys()):
        if before[key] != after[key]:
            lines.append(f"{' '.join(key)}: {before[key]!r} became {after[key]!r}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Print what differs. 0: every text is the same letter by letter."""
    parser = argparse.ArgumentParser(prog="same_answers", description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    args = parser.parse_args(argv)
    before, after = answers(args.before), answers(args.after)
    differing = compare(before, after)
    print("\n".join(differing[:50]))
    print(f"{len(before)} answers before, {len(after)} after, {len(differing)} differ")
    return 1 if differing or not before else 0


if __name__ == "__main__":
    sys.exit(main())
