"""A store's bytes in RAM or on disk alone, and the disk's own rate. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from retrieval_attn.testing import ContextStore, give_up, resident_bytes

__all__ = ["context_files", "in_ram", "make_cold", "read_through"]

_PIECE = 1 << 24
_PATIENCE = 5.0
"""Seconds in which the system is asked again to forget files."""


def context_files(folder: str, name: str) -> list[Path]:
    """All files of a saved context's nodes. Raises StoreError."""
    store = ContextStore(folder)
    return [path for node in store.resolve(name).chain for path in store.files(node)]


def make_cold(files: Sequence[Path]) -> float | None:
    """Ask the system to forget the files (posix_fadvise, DONTNEED); the share that it still holds, None if unknown.

    It keeps pages that are on their way to the disk, or that a process which ends still maps: so it is asked again.
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
    """Share of the files' bytes in memory; None where the system does not tell."""
    found = [resident_bytes(path) for path in files]
    known = [value for value in found if value is not None]
    nbytes = sum(path.stat().st_size for path in files)
    return sum(known) / nbytes if len(known) == len(found) and nbytes else None


def read_through(files: Sequence[Path]) -> float:
    """Seconds to read all files once, one after the other, in pieces of 16 MiB, as `dd` does."""
    piece = bytearray(_PIECE)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return time.perf_counter() - started
