"""Process of the engine: `python -m retrieval_attn.server.engine_process FD SPEC`, started by `Child.start`.

It loads the model of SPEC, an `EngineSpec` as JSON, then reads commands for `Worker` as frames from the socket FD. It
ends when the socket is closed. Importing this module is fast: the process starts before the server's own imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from retrieval_attn.compile.gc_pause import no_gc
from retrieval_attn.imports import quiet, read_ahead, skip_unused

if TYPE_CHECKING:
    from retrieval_attn.server.settings import EngineSpec

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
    """process: loads a model, then serves commands through sock; it ends when sock is closed."""

    process: subprocess.Popen[bytes]
    sock: socket.socket

    @classmethod
    def start(cls, spec: EngineSpec) -> Child:
        """Spawned, never forked: CUDA and threads do not survive a fork."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            module = "retrieval_attn.server.engine_process"
            command = [sys.executable, "-m", module, str(theirs.fileno()), json.dumps(asdict(spec))]
            return cls(subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL), ours)


def _open_device(name: str) -> None:
    """Create the CUDA context of a device, which takes seconds, while other threads import. Raises nothing: errors of
    the device are raised when the model is loaded.
    """
    import torch

    with contextlib.suppress(Exception):
        device = torch.device("cuda" if name == "auto" else name)
        if device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.synchronize(device)


def _is_closed(sock: socket.socket) -> bool:
    """Whether the other process has ended."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _freeze() -> None:
    """Have no collection visit what is there now: modules, model and graphs live to the end.

    A capture collects garbage first: .08 to .16 s with all of these, 4 s of a start.
    """
    gc.collect()
    gc.freeze()


def main(number: int, given: str) -> int:
    """Load the model of a spec, send that it is ready, and work. 0: the socket was closed; 1: it could not start."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # they come to the whole group; the server says when this ends
    quiet()
    set_allocator()
    fields = json.loads(given)
    read_ahead(fields["model"])
    with no_gc():  # all that the engine needs, while the server still imports what it needs itself
        import torch  # noqa: F401  before the thread: two threads must not import it at once

        threading.Thread(target=_open_device, args=(fields["loading"].get("device", "auto"),), daemon=True).start()
        skip_unused()
        from retrieval_attn.server.ipc import frame_of, plain_error
        from retrieval_attn.server.logs import log_as_json
        from retrieval_attn.server.settings import EngineSpec
        from retrieval_attn.server.worker import Worker

    log_as_json()
    with socket.socket(fileno=number) as sock:
        if _is_closed(sock):
            return 1
        try:
            spec = EngineSpec(**fields)
            llm, engine = spec.load(_freeze)
        except Exception as error:
            sock.sendall(frame_of({"error": plain_error(error)}))
            return 1
        facts = list(spec.facts(llm))
        sock.sendall(frame_of({"ready": facts, "warming": engine.warming}))
        Worker(sock, engine, _freeze).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
