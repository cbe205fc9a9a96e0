"""The engine's process: `python -m retrieval_attn.server.engine_process FD`, started by `RemoteEngine`, ended with it.

It reads frames from the socket FD: first an `EngineSpec`, then what `Worker` does.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys

from retrieval_attn.compile.gc_pause import no_gc
from retrieval_attn.imports import quiet
from retrieval_attn.server.heap import set_allocator

__all__ = ["main"]


def main(number: int) -> int:
    """Load what the first frame says, tell that it is ready, and work. 0: it was closed; 1: it could not start."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # they come to the whole group; the server says when this ends
    quiet()
    set_allocator()
    with no_gc():  # all that the engine needs, while the server still imports what it needs itself
        from retrieval_attn.server.ipc import frame_of, plain_error, receive_frame
        from retrieval_attn.server.logs import log_to
        from retrieval_attn.server.spec import EngineSpec
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
        sock.sendall(frame_of({"ready": list(spec.facts(llm, engine))}))
        Worker(sock, engine).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
