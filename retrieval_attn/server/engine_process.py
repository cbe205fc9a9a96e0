"""Process of the engine: `python -m retrieval_attn.server.engine_process FD`, started by `Child.start`.

It reads frames from the socket FD: an `EngineSpec`, then commands for `Worker`. It ends when the socket is closed.
Importing this module is fast: the process starts before the server's own imports.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from typing import NamedTuple

from retrieval_attn.compile.gc_pause import no_gc
from retrieval_attn.imports import quiet, skip_unused

__all__ = ["Child", "main", "set_allocator"]

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
MMAP_BYTES = 1 << 20


def set_allocator() -> bool:
    """Let all threads allocate from one arena, and map arrays of MMAP_BYTES and more. Return whether both hold now.

    Call it before threads are started. glibc gives threads arenas of their own, up to eight for each core, and raises
    the size from which it maps memory with each array that is freed, up to 32 MiB. What a prefill frees then stays in
    the process, between arrays of the prefix cache. With a fixed threshold such memory returns to the system when it is
    freed. See docs/archive/numbers.md, memory of a server. Does nothing with another C library. MALLOC_ARENA_MAX and
    MALLOC_MMAP_THRESHOLD_ of the environment are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((M_ARENA_MAX, 1, "MALLOC_ARENA_MAX"), (M_MMAP_THRESHOLD, MMAP_BYTES, "MALLOC_MMAP_THRESHOLD_"))
    done = [mallopt(option, value) == 1 for option, value, variable in wanted if variable not in os.environ]
    return len(done) == len(wanted) and all(done)


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


def main(number: int) -> int:
    """Load what the first frame says, tell that it is ready, and work. 0: it was closed; 1: it could not start."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # they come to the whole group; the server says when this ends
    quiet()
    set_allocator()
    with no_gc():  # all that the engine needs, while the server still imports what it needs itself
        skip_unused()
        from retrieval_attn.server.ipc import frame_of, plain_error, receive_frame
        from retrieval_attn.server.logs import log_to
        from retrieval_attn.server.settings import EngineSpec
        from retrieval_attn.server.worker import Worker

    log_to()
    with socket.socket(fileno=number) as sock:
        first = receive_frame(sock)
        if first is None:
            return 1
        try:
            spec = EngineSpec(**first)
            llm, engine = spec.load()
        except Exception as error:
            sock.sendall(frame_of({"error": plain_error(error)}))
            return 1
        gc.freeze()  # modules and model live to the end: no collection visits them while answers wait
        facts = list(spec.facts(llm, engine))
        sock.sendall(frame_of({"ready": facts, "warming": engine.warming}))
        Worker(sock, engine).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
