"""The program in a pseudo-terminal: keys are typed, and what a user would see is read."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from tests.preloaded import CLI, ROOT, PreloadedProcess

WAIT_SECONDS = 120.0
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """seen: all that was shown so far, without colours and cursor moves."""

    def __init__(self, process: PreloadedProcess, file: int) -> None:
        self._process, self._file = process, file
        self.seen = ""

    def type(self, keys: str) -> None:
        """As they are; a line ends with a line break."""
        os.write(self._file, keys.encode())

    def interrupt(self, pattern: str, *, behind: int = 0) -> str:
        """Ctrl-C at a prompt, until its effect is shown. Python sees a signal that comes between the prompt and the
        wait for a key no sooner than the next key (its readline asks for signals only where that wait is ended), so a
        user who is that fast presses Ctrl-C again, and so does this."""
        for attempt in range(1, 7):
            self.type(CTRL_C)
            try:
                return self.wait_for(pattern, behind=behind, seconds=WAIT_SECONDS / 6)
            except TimeoutError:
                if attempt == 6 or self._ended():
                    raise
        raise AssertionError("not reached")

    def wait_for(self, pattern: str, *, behind: int = 0, seconds: float = WAIT_SECONDS) -> str:
        """Until it is shown behind so many characters; returns what it matched. Raises TimeoutError with all of it."""
        deadline = time.monotonic() + seconds
        while True:
            found = re.search(pattern, self.seen[behind:])
            if found:
                return found[0]
            came = self._read(1.0)
            if time.monotonic() > deadline or (not came and self._ended()):
                raise TimeoutError(f"{pattern!r} was not shown: {self.seen!r}")

    def status(self) -> int:
        """Its exit status, once it has ended."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            self._read(0.1)
            status = self._process.poll()
            if status is not None:
                return status
        raise TimeoutError(f"it has not ended: {self.seen!r}")

    def require_success(self) -> None:
        """That it ended, and well. Raises AssertionError with all that it showed."""
        status = self.status()
        assert status == 0, f"it ended with {status}: {self.seen!r}"

    def _read(self, seconds: float) -> bool:
        """Take in what is shown; False if nothing was."""
        ready, _, _ = select.select([self._file], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self._file, 65536)
        except OSError:  # Linux: nobody writes there any more
            return False
        text = data.decode(errors="replace")
        self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
        return bool(data)

    def _ended(self) -> bool:
        return self._process.poll() is not None


@contextmanager
def in_terminal(*arguments: str, **variables: str) -> Iterator[Terminal]:
    """`retrieval-attn ARGUMENTS` with these environment variables, killed at the end if it still runs."""
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200", **variables}
    file, terminal = os.openpty()
    try:
        process = PreloadedProcess([*CLI, *arguments], environment, ROOT, dict.fromkeys(range(3), terminal))
    finally:
        os.close(terminal)
    try:
        yield Terminal(process, file)
    finally:
        process.send_signal(signal.SIGKILL)
        process.close()
        os.close(file)


def chatting(*arguments: str, **variables: str) -> AbstractContextManager[Terminal]:
    """`retrieval-attn chat` in a terminal."""
    return in_terminal("chat", *arguments, **variables)
