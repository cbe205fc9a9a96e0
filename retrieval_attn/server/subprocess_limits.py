"""Child: the engine's process as its parent holds it. Light: it starts before the server's own slow imports."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import NamedTuple

__all__ = ["Child"]


class Child(NamedTuple):
    """process: imports, then waits for an `EngineSpec` through sock; it ends when sock is closed."""

    process: subprocess.Popen[bytes]
    sock: socket.socket

    @classmethod
    def start(cls) -> Child:
        """Spawned, never forked: CUDA and threads do not survive a fork."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            command = [sys.executable, "-m", "retrieval_attn.server.engine_process", str(theirs.fileno())]
            return cls(subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL), ours)
