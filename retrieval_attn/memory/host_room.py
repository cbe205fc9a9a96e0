"""Whether the host has memory for what is about to be read, before anything is computed."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrieval_attn.config import Config
from retrieval_attn.errors import MemoryPlanError, RetrievalAttentionError
from retrieval_attn.memory.arithmetic import Item
from retrieval_attn.memory.plan import host_needs
from retrieval_attn.memory.reclaim import reclaim
from retrieval_attn.memory.units import host_memory_bytes, parse_bytes, show_bytes

log = logging.getLogger(__name__)

VARIABLE = "RETRIEVAL_ATTN_HOST_MEMORY"
"""Environment variable: memory to count with, such as 128GiB, where the system does not tell what it could have."""


def available_host_bytes() -> int:
    """Memory that this process could still get without swapping: the system's or its control group's, the less.

    Some machines are given memory only as they use it and tell too little: VARIABLE overrides.
    """
    if told := os.environ.get(VARIABLE):
        return parse_bytes(told, VARIABLE)
    available = host_memory_bytes()
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in rows:
            available = min(available, 1024 * int(rows["MemAvailable"].split()[0]))
    group = Path("/sys/fs/cgroup")
    limit, current, stat = (group / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit.is_file() and current.is_file() and limit.read_text().strip().isdigit():
        files = next((int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("file ")), 0)
        available = min(available, int(limit.read_text()) - int(current.read_text()) + files)
    return max(0, available)


def require_host_room(model_config: Any, config: Config, tokens: int, batch: int, *, hidden_on_host: bool) -> None:
    """Raise MemoryPlanError if `tokens` more tokens of `batch` rows do not fit host memory.

    Int8 rows of other texts and idle prefix cache entries are freed first if that makes room. A model of unknown shape
    is not checked; a log line says so.
    hidden_on_host: whether hidden states are stored in host memory during prefill; keys, values and indexes always are.
    """
    try:
        # a GPU without limits: hidden states are counted below, where they are
        shape, needs = host_needs(model_config, tokens, batch, config)
    except RetrievalAttentionError as error:
        log.warning("memory of the host is not checked before reading: %s", error)
        return
    items = [*needs[:-1]]  # the last one is the process itself
    if hidden_on_host:
        size = tokens * batch * shape.hidden * shape.dtype_bytes
        items.append(Item("prefill: hidden states", size, "page-locked, while reading"))
    needed = sum(item.bytes for item in items)
    available = available_host_bytes()
    if needed > available and reclaim(host=needed - available)[0]:
        available = available_host_bytes()
    if needed > available:
        parts = ", ".join(f"{item.name} {show_bytes(item.bytes)} ({item.detail})" for item in items)
        raise MemoryPlanError(
            f"reading {batch} x {tokens:,} tokens needs {show_bytes(needed)} of host memory, {show_bytes(available)} "
            f"is free: {parts}. Read a shorter text, free memory, store keys with host_dtype='int8', or set "
            f"{VARIABLE} if this machine reports less memory than a process can get"
        )


@contextlib.contextmanager
def host_shortage(doing: str) -> Iterator[None]:
    """Turn a lack of host memory inside the block into a MemoryPlanError: "no memory to <doing>"."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        said = str(error)
        if not isinstance(error, MemoryError) and not any(words in said for words in _SHORTAGES):
            raise
        free = show_bytes(available_host_bytes())
        raise MemoryPlanError(
            f"The host has no memory to {doing} ({said.splitlines()[0] if said else 'MemoryError'}); {free} are free. "
            "Read less at once, choose a smaller window or prefill_chunk, or give the process more memory."
        ) from error


_SHORTAGES = ("DefaultCPUAllocator", "bad_alloc", "can't start new thread")
"""In messages of RuntimeErrors of torch and Python where the system gives no memory."""
