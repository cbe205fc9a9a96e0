"""Terminal: lines as a user types or pastes them, or as a pipe has them, and messages wrapped to the width."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrieval_attn.compile.progress import columns_of
from retrieval_attn.store.layout import user_folder

PROMPT, CONTINUED = ">>> ", "... "
HISTORY, HISTORY_LINES = "chat_history", 1000
"""File in the user's data folder, and how many lines of it are kept."""


class Terminal:
    """Standard input and error output of a chat.

    At a terminal lines can be edited, and arrow keys recall those of this chat and of earlier ones.
    """

    def __init__(self) -> None:
        """Prepare readline at a terminal, if Python has it."""
        self._reads_terminal = sys.stdin.isatty()
        self._readline: Any = None
        if self._reads_terminal and importlib.util.find_spec("readline") is not None:
            self._readline = _prepared_readline()

    def read_line(self, continues: bool) -> str:
        """Return the next line; pasted text is one line with its line breaks. Raises EOFError at the end.

        continues: whether it continues the line before.
        """
        if not self._reads_terminal:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line.rstrip("\r\n")
        line = input(CONTINUED if continues else PROMPT)
        if self._readline is not None:
            _save_history(self._readline)
        return line

    def say(self, text: str) -> None:
        """Print a message on the error output, wrapped to the terminal's width."""
        shown = wrapped(text, columns_of(sys.stderr)) if sys.stderr.isatty() else text
        print(shown, file=sys.stderr, flush=True)

    def end_line(self) -> None:
        """End the prompt's line after Ctrl-D."""
        if self._reads_terminal:
            print(file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def typing_ahead(self) -> Iterator[None]:
        """Keep keys that are typed during an answer for the next prompt, unseen until then, even after Ctrl-C."""
        if not self._reads_terminal or importlib.util.find_spec("termios") is None:
            yield
            return
        import termios

        before = termios.tcgetattr(sys.stdin)
        silent = [*before]
        silent[3] = (silent[3] & ~termios.ECHO) | termios.NOFLSH
        termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
        try:
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def wrapped(text: str, width: int) -> str:
    """Return the lines of a text wrapped between words; a line of two columns continues in its second one."""
    lines = []
    for line in text.split("\n"):
        columns = re.match(r"(\S.*?\s{2,})\S", line)
        indent = " " * (len(columns[1]) if columns and len(columns[1]) < width // 2 else 0)
        pieces = textwrap.wrap(
            line, max(20, width - 1), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += pieces or [line]
    return "\n".join(lines)


def _prepared_readline() -> Any:
    """Return readline, by which `input` edits its lines, with pasted text as one line and the saved history."""
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(_history_file())
    return readline


def _save_history(readline: Any) -> None:
    """Write the history, readable by its user alone. A folder that cannot be written to keeps none."""
    path = _history_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)


def _history_file() -> Path:
    return user_folder() / HISTORY
