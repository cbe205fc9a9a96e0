"""Files of a saved context in the page cache or on disk only, and the read rate of the disk. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from retrieval_attn.testing import ContextStore, give_up, resident_bytes

__all__ = ["context_files", "in_ram", "make_cold", "read_through"]

_PIECE = 1 << 24
_PATIENCE = 5.0
"""Seconds of repeated eviction calls."""


def context_files(folder: str, name: str) -> list[Path]:
    """Return all files of a saved context. Raises StoreError."""
    store = ContextStore(folder)
    return [path for node in store.resolve(name).chain for path in store.files(node)]


def make_cold(files: Sequence[Path]) -> float | None:
    """Evict files from the page cache (posix_fadvise, DONTNEED). Return the share still cached, None if unknown.

    The kernel keeps dirty pages and pages that an ending process still maps, so the call is repeated.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        for path in files:
            give_up(path)
        share = in_ram(files)
        if not share or time.monotonic() > deadline:
            return share
        time.sleep(0.05)


def in_ram(files: Sequence[Path]) -> float | None:
    """Return the cached share of the files' bytes; None if the system does not report it."""
    found = [resident_bytes(path) for path in files]
    known = [value for value in found if value is not None]
    nbytes = sum(path.stat().st_size for path in files)
    return sum(known) / nbytes if len(known) == len(found) and nbytes else None


def read_through(files: Sequence[Path]) -> float:
    """Read all files once, in order, in pieces of 16 MiB. Return the seconds."""
    piece = bytearray(_PIECE)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return time.perf_counter() - started
