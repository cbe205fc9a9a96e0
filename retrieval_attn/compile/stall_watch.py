"""A watch over threads that answer a device: where one is late, a log file says what every thread of the process does.

Off unless RETRIEVAL_ATTN_STALL_LOG names a file. Another process (`stall_log.py`) looks at the beacon fifty times a
second and writes the log, so that nobody here has to be able to run: neither a thread that holds Python's lock nor a
driver that lets nobody in can keep it from looking. Nothing is done here while nothing is late.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

from retrieval_attn.compile import beacon, place

VARIABLE = "RETRIEVAL_ATTN_STALL_LOG"
"""Environment variable: the file that is written to; empty or unset: nobody watches."""
LATE_SECONDS = 0.1
_SET_PTRACER = 0x59616D61  # PR_SET_PTRACER: who may look into this process where only its parents may


class StallWatch:
    """See the module. A context manager; one at a time."""

    def __init__(self, log: Path, late_seconds: float = LATE_SECONDS) -> None:
        """log: is appended to. late_seconds: for how long a thread may be at one thing. Raises OSError where the
        system cannot do it, and for a file that cannot be written.
        """
        if beacon.FILE < 0 or not hasattr(signal, "SIGRTMIN"):
            raise OSError(f"{VARIABLE} needs Linux, for /proc and files in memory; leave it unset on {sys.platform}.")
        # one that nobody else uses: libraries take the first few
        self._signal = int(signal.SIGRTMIN) + 11
        self._log = log.open("a")
        # Writes the stack of every Python thread from a signal handler, without Python's lock. Asked for only where
        # nobody gets that lock: where a thread runs Python meanwhile, its frames go away while they are read.
        faulthandler.register(self._signal, self._log, all_threads=True)
        self._asked, asks = os.pipe()
        arguments = [os.getpid(), beacon.FILE, asks, log.absolute(), late_seconds, self._signal]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "retrieval_attn.compile.stall_log", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(place.PACKAGE.parent), "CUDA_VISIBLE_DEVICES": "", VARIABLE: ""},
            stdin=subprocess.DEVNULL,
            pass_fds=[beacon.FILE, asks],
            start_new_session=True,  # a signal of the terminal reaches this process alone, which ends it
        )
        os.close(asks)
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(self._process.pid), 0, 0, 0)
        self._thread = threading.Thread(target=self._listen, name="retrieval_attn-stall", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody watches any more."""
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        faulthandler.unregister(self._signal)
        os.close(self._asked)
        self._log.close()

    def __enter__(self) -> StallWatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _listen(self) -> None:
        """Answer the other process, which asks by 8 bytes: the moment. Waits in the system, without Python's lock."""
        while asked := os.read(self._asked, 8):
            moment = int.from_bytes(asked, "little")
            beacon.note_heard(moment)
            waited = time.monotonic_ns() - moment
            names = {one.ident: one for one in threading.enumerate()}
            lines = [f"-- Python's lock was to be had {waited / 1e6:.1f} ms after the look above; its threads:"]
            for ident, frame in sys._current_frames().items():
                thread = names.get(ident)
                lines.append(f"thread {ident:#018x} tid {thread and thread.native_id} {thread and thread.name}")
                lines += [line.rstrip() for line in traceback.format_stack(frame)[-4:]]
            self._log.write("\n".join(lines) + "\n")
            self._log.flush()


def watch_if_asked() -> None:
    """Begin to watch this process if the environment says so and nobody does yet. Raises as `StallWatch`."""
    global _watch
    log = os.environ.get(VARIABLE)
    if not log:
        return
    with _beginning:
        if _watch is None:
            _watch = StallWatch(Path(log))


_watch: StallWatch | None = None
_beginning = threading.Lock()
