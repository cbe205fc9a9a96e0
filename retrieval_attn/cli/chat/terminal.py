"""Lines as a user types them at a terminal, or as a pipe has them."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["read_line"]

PROMPT, CONTINUED = ">>> ", "... "


def read_line(continues: bool) -> str:
    """The next line, with a prompt and its editing at a terminal. Raises EOFError at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() edits its line, and knows earlier ones, once it is imported
    return input(CONTINUED if continues else PROMPT)
