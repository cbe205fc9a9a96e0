"""Import the modules of a server and of a chat, for processes that are forked from the importing one."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from retrieval_attn.compile.gc_pause import no_gc
from retrieval_attn.imports import quiet, skip_unused

quiet()
with no_gc():
    skip_unused()
    import uvicorn.loops.auto
    import uvicorn.protocols.http.auto  # noqa: F401

    import retrieval_attn.engine.engine
    import retrieval_attn.llm
    import retrieval_attn.server.run  # noqa: F401
gc.freeze()  # garbage collection in a forked process must not copy the pages of modules


def other_threads() -> list[str]:
    """Return names of this process's threads but the main one and jemalloc's, which restarts after a fork. Linux."""
    tasks = [task for task in Path("/proc/self/task").glob("*") if task.name != str(os.getpid())]
    names = [(task / "comm").read_text().strip() for task in tasks]
    return [name for name in names if not name.startswith("jemalloc")]


assert not other_threads(), f"imports started threads that forked processes would lack: {other_threads()}"
