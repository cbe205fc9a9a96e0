"""Collect English text already on this machine (package READMEs and docstrings) as extra training filler."""

from __future__ import annotations

import argparse
import re
import sysconfig
from pathlib import Path


def collect(limit_chars: int) -> str:
    """Up to `limit_chars` characters from METADATA files and docstrings of the installed packages."""
    parts: list[str] = []
    size = 0
    root = Path(sysconfig.get_paths()["purelib"])
    files = sorted(root.glob("*.dist-info/METADATA")) + sorted(root.glob("torch/**/*.py")) + sorted(root.glob("*/*.py"))
    for path in files:
        text = path.read_text(errors="ignore")[:60_000]
        blocks = re.findall(r'"""(.{200,4000}?)"""', text, flags=re.S) if path.suffix == ".py" else [text]
        for block in blocks:
            for paragraph in block.split("\n\n"):
                flat = " ".join(paragraph.split())
                if len(flat) > 120 and sum(c.isalpha() or c == " " for c in flat) > 0.85 * len(flat):
                    parts.append(flat)
                    size += len(flat)
        if size > limit_chars:
            break
    return "\n\n".join(dict.fromkeys(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder; collected.txt is written there")
    parser.add_argument("--chars", type=int, default=4_000_000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    text = collect(args.chars)
    (args.out / "collected.txt").write_text(text)
    print(f"collected {len(text)} characters")


if __name__ == "__main__":
    main()
