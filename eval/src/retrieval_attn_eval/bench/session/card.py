"""Memory of the card as nvidia-smi counts it: sampled while something runs, CUDA context and workspaces included."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["INTERVAL_MS", "CardMemory", "watch"]

INTERVAL_MS = 50
"""Between two samples. Torch's allocator keeps what it once took, so that short peaks stay to be seen."""
MIB = 1 << 20


class CardMemory:
    """Samples the memory that is used on one card, by all processes. Use as a context manager.

    before: bytes used when sampling began, which this process should not be blamed for.
    """

    def __init__(self, uuid: str, command: str = "nvidia-smi") -> None:
        """uuid: of the card, "GPU-...". command: the program that prints the used MiB, one number a line, for ever.

        Raises OSError where it cannot be started, RuntimeError where it prints no number.
        """
        query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", str(INTERVAL_MS)]
        self._process = subprocess.Popen(
            [command, "-i", uuid, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._changed = threading.Condition()
        self._last = self._most = self._count = 0
        self._over = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        if not self._next_sample(10.0):
            self.close()
            raise RuntimeError(f"{command} told no memory of the card {uuid}")
        self.before = self._last

    def start(self) -> None:
        """Begin to measure."""
        with self._changed:
            self._most = self._last

    def peak(self) -> int:
        """Bytes used at most since `start`."""
        self._next_sample(1.0)
        return self._most

    def close(self) -> None:
        """End the sampling program."""
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _next_sample(self, seconds: float) -> bool:
        """Wait for a sample that is made after this call; False if none comes."""
        # the next line may have been made before, the one after it was not
        with self._changed:
            wanted, until = self._count + 2, time.monotonic() + seconds
            while self._count < wanted and not self._over and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())
            return self._count >= wanted

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.strip().isdigit():
                continue
            with self._changed:
                self._last = int(line) * MIB
                self._most = max(self._most, self._last)
                self._count += 1
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()


def watch(uuid: str | None) -> CardMemory | None:
    """The sampler of a card, or None where there is no card or no nvidia-smi."""
    if uuid is None or shutil.which("nvidia-smi") is None:
        return None
    try:
        return CardMemory(uuid)
    except (OSError, RuntimeError):
        return None
