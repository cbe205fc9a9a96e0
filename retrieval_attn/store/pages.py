"""A file's pages in the system's cache: how much of it is there, and giving it up. Advice alone: no byte changes."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from retrieval_attn.store.mapped import open_regular

__all__ = ["give_up", "resident_bytes"]

_PAGE = mmap.PAGESIZE


def give_up(path: Path) -> None:
    """Ask the system to forget its copy of a file. Pages that a process has mapped stay. Raises OSError."""
    if not hasattr(os, "posix_fadvise"):  # macOS, Windows: nothing of the kind; the system decides
        return
    handle = open_regular(path)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def resident_bytes(path: Path) -> int | None:
    """Bytes of a file that memory holds, in whole pages; None where the system does not tell. Raises OSError."""
    if os.name == "nt":
        return None
    handle = open_regular(path)
    try:
        nbytes = os.fstat(handle).st_size
        if not nbytes:
            return 0
        with mmap.mmap(handle, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as opened:
            view = ctypes.c_char.from_buffer(opened)
            pages = np.zeros(-(-nbytes // _PAGE), np.uint8)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                address, found = ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_void_p(pages.ctypes.data)
                failed = libc.mincore(address, ctypes.c_size_t(nbytes), found)
            finally:
                del view  # or the map cannot be closed
    finally:
        os.close(handle)
    return None if failed else min(int((pages & 1).sum()) * _PAGE, nbytes)
