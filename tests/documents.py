"""Fenced code blocks of the documents, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ("python", "sh")
"""Languages of blocks that run."""
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
LOCAL = "localhost:8000"
"""Address of the server that the blocks use."""


@dataclass(frozen=True)
class Block:
    """A fenced block. `line`: line of its first code line. `reason`: why it is not run, empty if it is."""

    document: str
    line: int
    language: str
    code: str
    reason: str


def documents() -> list[Path]:
    """Return the documents for users: README files, changelog and docs/ without generated and archived pages."""
    live = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "commands.md"]
    return [ROOT / "README.md", *live, ROOT / "eval" / "README.md"]


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a document."""
    found: list[Block] = []
    language, start, code, before = "", 0, list[str](), ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            code.append(line)
            before = line if line.strip() and not start else before
        elif not start:
            language, start, code = line.removeprefix("```").strip(), number + 1, []
        else:
            marked = NOT_RUN.fullmatch(before.strip())
            reason = marked.group(1) if marked else ""
            found.append(Block(path.relative_to(ROOT).as_posix(), start, language, "\n".join(code), reason))
            start, before = 0, ""
    return found


def shell_words(command: str) -> list[str]:
    """Return the words of a command, without comments and line continuations."""
    return shlex.split(command.replace("\\\n", " "), comments=True)


def shell_commands(code: str) -> Iterator[str]:
    """Split shell code into commands: a command ends at a newline outside quotes that no backslash precedes."""
    command = ""
    for line in code.splitlines():
        command += line + "\n"
        if line.endswith("\\"):
            continue
        try:
            words = shell_words(command)
        except ValueError:  # an open quote
            continue
        if words:
            yield command
        command = ""
    if command.strip():
        raise ValueError(f"this shell command does not end: {command}")
