"""A file's bytes in memory: a private map of it, or a copy that is read when it is first asked for.

Python's own maps keep a file open each, and a chain of contexts has more files than a process may have open. This one
keeps the address alone. It is copy on write: a read-only array would be another type to Numba, and compile every kernel
once more.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14: reads pages in, and fails where touching one would end the process."""
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_PAGE = mmap.PAGESIZE


class Mapped:
    """Bytes of one file. nbytes: their number."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """(nbytes,) writeable; what is written stays in this process. Valid as long as a view of it lives."""
        raise NotImplementedError

    @property
    def stored(self) -> npt.NDArray[np.uint8] | None:
        """(nbytes,) read-only: the file's own bytes, whatever was written to `data`. None: there are none apart."""
        return None

    def populate(self, start: int, stop: int) -> None:
        """Read bytes start .. stop into memory now. Raises OSError where the disk fails."""

    def release(self) -> bool:
        """Forget bytes that `data` would read again; False where there are none such."""
        return False


class _Given(Mapped):
    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        super().__init__(len(data))
        self._data = data

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self._data


class _Read(Mapped):
    """Read as a whole, once. Raises OSError from `data`, too."""

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(nbytes)
        self._path, self._lock = path, threading.Lock()
        self._data: npt.NDArray[np.uint8] | None = None

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        with self._lock:
            if self._data is None:
                data = np.empty(self.nbytes, np.uint8)
                with self._path.open("rb", buffering=0) as file:
                    place, view = 0, data.data
                    while place < self.nbytes:
                        count = file.readinto(view[place:])
                        if not count:
                            raise OSError(f"{self._path} became shorter while it was read")
                        place += count
                self._data = data
            return self._data

    def release(self) -> bool:
        with self._lock:
            self._data = None
        return True


class _Map:
    """Owner of an address: arrays made over it keep it alive, and the last of them lets it go."""

    def __init__(self, handle: int, nbytes: int, *, private: bool) -> None:
        """private: writeable, and what is written stays in this process."""
        self._libc = _libc()
        access = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
        kind = mmap.MAP_PRIVATE | _NORESERVE if private else mmap.MAP_SHARED
        address = self._libc.mmap(None, nbytes, access, kind, handle, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address, self._nbytes = int(address), nbytes
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self._address, not private),
        }

    def advise(self, start: int, stop: int) -> None:
        first = start // _PAGE * _PAGE
        code = errno.EINTR
        while code == errno.EINTR:
            if self._libc.madvise(self._address + first, stop - first, _POPULATE_READ) == 0:
                return
            code = ctypes.get_errno()
        if code != errno.EINVAL:  # which says that the kernel is older
            raise OSError(code, os.strerror(code))
        np.asarray(self)[first:stop:_PAGE].max(initial=0)

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._libc.munmap(self._address, self._nbytes)


class _Private(Mapped):
    def __init__(self, handle: int, nbytes: int) -> None:
        super().__init__(nbytes)
        # checksums are those of the file: of a page that this process has written to, the private map has its own
        self._owner, self._seen = _Map(handle, nbytes, private=True), _Map(handle, nbytes, private=False)
        self._data, self._stored = np.asarray(self._owner), np.asarray(self._seen)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self._data

    @property
    def stored(self) -> npt.NDArray[np.uint8]:
        return self._stored

    def populate(self, start: int, stop: int) -> None:
        if stop > start:
            self._owner.advise(start, stop)


def map_file(handle: int, nbytes: int) -> Mapped:
    """A private map of an open file of `nbytes`; the file may be closed and unlinked afterwards."""
    if not nbytes:
        return _Given(np.zeros(0, np.uint8))
    if os.name == "nt":
        return _Given(np.asarray(np.memmap(os.fdopen(os.dup(handle), "rb"), np.uint8, "c")))
    return _Private(handle, nbytes)


def read_file(path: Path, nbytes: int) -> Mapped:
    """The bytes of a file that must not be mapped; its path must stay until they are first asked for."""
    return _Read(path, nbytes)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    offset = ctypes.c_long
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
