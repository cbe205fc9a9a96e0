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
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_WILL_NEED = 3
"""MADV_WILLNEED: the disk gets all of a range at once, instead of what a fault reads ahead."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14: reads pages in, and fails where touching one would end the process."""
_AHEAD = 1 << 24
"""Bytes behind a range that the disk is asked for with it: it reads on while the range is used."""
_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_PAGE = mmap.PAGESIZE
_FLAGS = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


class OddFileError(OSError):
    """A path of the store that is no regular file, or a file that is larger than it may be."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, or a link to one, without blocking. flags: of `os.open`; with O_CREAT a link is refused.

    Raises OddFileError for a device, a pipe, a socket or a folder: some of these have no end, or block the reader.
    """
    try:
        require_regular(path, os.stat(path))  # opening a device can change its state
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    if flags & os.O_CREAT:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(path, flags | _FLAGS, 0o600)
    try:
        require_regular(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def require_regular(path: Path, status: os.stat_result) -> None:
    """Raise OddFileError for the status of anything but a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OddFileError(path, "it is not a regular file")


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


class _FileRead(Mapped):
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
                with os.fdopen(open_regular(self._path), "rb", buffering=0) as file:
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
        self._address, self.nbytes = int(address), nbytes
        self.twin: _Map | None = None
        """Of a private map: the shared one of the same file."""
        self.__array_interface__ = _interface(self._address, nbytes, not private)

    @property
    def address(self) -> int:
        return self._address

    def advise(self, start: int, stop: int) -> None:
        first = start // _PAGE * _PAGE
        self._libc.madvise(self._address + first, min(stop + _AHEAD, self.nbytes) - first, _WILL_NEED)  # a hint
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
            self._libc.munmap(self._address, self.nbytes)


class _Unwritten:
    """Makes arrays over a shared map that look as if they could be written to: drivers and PyTorch take no others."""

    def __init__(self, owner: _Map) -> None:
        self._owner = owner
        self.__array_interface__ = _interface(owner.address, owner.nbytes, False)


def _interface(address: int, nbytes: int, read_only: bool) -> dict[str, Any]:
    return {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, read_only)}


def file_bytes(view: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """The file's own pages behind a C-contiguous view of a private map, of the same shape; None for any other array.

    They can be page-locked where they are: those of a private map would be copied first. They are what `view` has as
    long as it was not written to. To write to them ends the process.
    """
    private = _map_of(view)
    if private is None or private.twin is None or not view.flags.c_contiguous:
        return None
    begin = view.ctypes.data - private.address
    whole = np.asarray(_Unwritten(private.twin))
    return whole[begin : begin + view.nbytes].view(view.dtype).reshape(view.shape)


def is_mapped(view: npt.NDArray[Any]) -> bool:
    """Whether `file_bytes` finds a file behind it."""
    private = _map_of(view)
    return private is not None and private.twin is not None and view.flags.c_contiguous


def populate(view: npt.NDArray[Any]) -> None:
    """Read the bytes of a C-contiguous view of a map into memory now; nothing for others. Raises OSError."""
    private = _map_of(view)
    if private is not None and view.nbytes:
        begin = view.ctypes.data - private.address
        (private.twin or private).advise(begin, begin + view.nbytes)


def _map_of(view: npt.NDArray[Any]) -> _Map | None:
    owner: Any = view
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, _Map) else None


class _Private(Mapped):
    def __init__(self, handle: int, nbytes: int) -> None:
        super().__init__(nbytes)
        # checksums are those of the file: of a page that this process has written to, the private map has its own
        self._owner, self._seen = _Map(handle, nbytes, private=True), _Map(handle, nbytes, private=False)
        self._owner.twin = self._seen
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
    return _FileRead(path, nbytes)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    offset = ctypes.c_long
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def give_up(path: Path) -> None:
    """Ask the system to evict a file from its page cache. Mapped pages stay. Raises OSError."""
    if not hasattr(os, "posix_fadvise"):  # macOS and Windows have no such call
        return
    handle = open_regular(path)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def resident_bytes(path: Path) -> int | None:
    """Return the bytes of a file in memory, in whole pages; None if the system does not report them. Raises OSError."""
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
