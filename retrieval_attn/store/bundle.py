"""A bundle: plain values and arrays in one file, every bit of it under a checksum; written as a stream, read as a map.

Layout, all numbers little-endian:
    32 bytes  magic, version of the layout, bytes of the header, bytes of data, CRC-32C of the header, of the prefix
    header    JSON: plain values and the table of arrays; spaces up to a multiple of 4096
    data      arrays, each from a multiple of 64 bytes on (4096 from 64 KiB), zeros between; a multiple of 64
    table     CRC-32C of every 64 KiB of data, then that of the table
Checksums find damage, not malice: the store is private to its user.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn.store.disk import Disk, damaged, guarded
from retrieval_attn.store.mapped import Mapped, resident_bytes
from retrieval_attn.store.polynomial import BLOCK
from retrieval_attn.store.record import block_sums, canonical, crc32c, is_count, is_fields, is_list_of, parse_json

MAGIC = b"RABUNDLE"
VERSION = 1
PAGE = 4096
LINE = 64
_BIG = 1 << 16
_PREFIX = struct.Struct("<8sIIQII")
_SEALED = struct.Struct("<8sIIQI")
_PIECE = 1 << 24
"""Bytes that are written, or checked, at a time."""
_DIRTY = 1 << 28
"""Bytes of a file that may wait in memory for the disk."""
_NAME = re.compile(r"[\w./-]+", re.ASCII)
_DTYPES = {dtype.str: dtype for dtype in (np.dtype(kind).newbyteorder("<") for kind in "?bBhHiIlLqQefd")}
"""Of the arrays of a bundle, by their names in its header."""
_MAX_DIMS = 32
"""Of an array, as NumPy 1 has them."""
NEARLY_ALL = 0.9
"""Share of a file in memory from which on no disk is waited for, to speak of."""


class Bundle(NamedTuple):
    """plain: JSON values. arrays: of plain numbers (kinds b, u, i, f; at most 8 bytes each) by their names.

    A name has letters, digits and _ . / - only.
    """

    plain: dict[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Seal:
    """Size and checksums of a bundle's file in the record of its node, which detect a replaced file."""

    nbytes: int
    header_crc: int
    table_crc: int


class _Place(NamedTuple):
    """Where an array lies in the data."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def laid_out(bundle: Bundle) -> tuple[bytes, int, int]:
    """Prefix and header of the file that `bundle` becomes, the bytes of its data, and of the whole file.

    Raises ConfigError for arrays that are not of plain numbers, and for values that are not plain.
    """
    table, place = [], 0
    for name, array in bundle.arrays.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"an array's name has letters, digits and _ . / - only, got {name!r:.80}")
        if array.dtype.kind not in "buif" or array.dtype.itemsize > 8:
            raise ConfigError(f"array {name} of dtype {array.dtype} cannot be saved; use plain numbers")
        place = _aligned(place, PAGE if array.nbytes >= _BIG else LINE)
        table.append([name, array.dtype.newbyteorder("<").str, list(array.shape), place])
        place += array.nbytes
    place = _aligned(place, LINE)
    text = canonical({"plain": bundle.plain, "arrays": table}, "bundle").encode()
    header = text.ljust(_aligned(_PREFIX.size + len(text), PAGE) - _PREFIX.size)
    sealed = _SEALED.pack(MAGIC, VERSION, len(header), place, crc32c(header))
    start = sealed + struct.pack("<I", crc32c(sealed)) + header
    return start, place, len(start) + place + 4 * (-(-place // BLOCK)) + 4


def write_bundle(disk: Disk, path: Path, bundle: Bundle, on_piece: Callable[[], object] | None = None) -> Seal:
    """Write `bundle` to a new file and wait until it is on the disk. on_piece: called after each _PIECE bytes or fewer.

    An array may be a view of any strides: it is written by contiguous parts and copied part by part at most.
    """
    start, data_bytes, nbytes = laid_out(bundle)
    handle = disk.create(path)
    try:
        stream = _BundleStream(disk, handle)
        stream.write(np.frombuffer(start, np.uint8), count=False)
        places = _places(parse_json(start[_PREFIX.size :])["arrays"], data_bytes)
        for array, place in zip(bundle.arrays.values(), places.values(), strict=True):
            stream.write(np.zeros(place.offset - stream.data_bytes, np.uint8))
            for piece in _pieces(array.astype(place.dtype, copy=False)):
                stream.write(piece)
                if on_piece is not None:
                    on_piece()
        stream.write(np.zeros(data_bytes - stream.data_bytes, np.uint8))
        table = stream.table()
        disk.write(handle, memoryview(table + struct.pack("<I", crc32c(table))))
        disk.fsync(handle)
    finally:
        disk.close(handle)
    return Seal(nbytes, crc32c(start[_PREFIX.size :]), crc32c(table))


def _places(table: Any, data_bytes: int) -> dict[str, _Place]:
    """A header's table of arrays (name, dtype, shape, offset), in `data_bytes` of data. Raises ValueError."""
    places: dict[str, _Place] = {}
    for entry in table if isinstance(table, list) else [None]:
        if not isinstance(entry, list) or len(entry) != 4:
            raise ValueError("its table of arrays is malformed")
        name, kind, shape, offset = entry
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in places:
            raise ValueError(f"an array has the invalid or repeated name {name!r:.80}")
        dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
        if dtype is None or not is_list_of(is_count)(shape) or len(shape) > _MAX_DIMS:
            raise ValueError(f"array {name} has the invalid type {kind!r:.80} or shape {shape!r:.80}")
        nbytes = math.prod(shape) * dtype.itemsize
        if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 62:  # NumPy refuses empty ones, too
            raise ValueError(f"array {name} has the invalid shape {shape!r:.80}")
        if not is_count(offset) or offset % LINE or offset + nbytes > data_bytes:
            raise ValueError(f"array {name} is outside of the file")
        places[name] = _Place(dtype, tuple(shape), offset, nbytes)
    return places


def _pieces(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.uint8]]:
    """The array's bytes in C order, as contiguous parts of at most _PIECE bytes."""
    if array.flags.c_contiguous:
        flat = array.reshape(-1).view(np.uint8)
        for first in range(0, len(flat), _PIECE):
            yield flat[first : first + _PIECE]
    elif array.ndim == 1 or array.nbytes <= BLOCK:
        step = max(1, _PIECE // max(array[:1].nbytes, 1))
        for first in range(0, len(array), step):
            yield np.ascontiguousarray(array[first : first + step]).reshape(-1).view(np.uint8)
    else:
        for row in array:
            yield from _pieces(row)


class _BundleStream:
    """Writes data and sums up its blocks, whatever the sizes of the parts that it comes in."""

    def __init__(self, disk: Disk, handle: int) -> None:
        self._disk, self._handle = disk, handle
        self._sums: list[npt.NDArray[np.uint32]] = []
        self._open, self._filled, self._dirty = 0, 0, 0
        self.data_bytes = 0

    def write(self, part: npt.NDArray[np.uint8], *, count: bool = True) -> None:
        """Contiguous bytes. count: they are data."""
        if not len(part):
            return
        self._disk.write(self._handle, part.data)
        if count:
            self._sum(part)
            self.data_bytes += len(part)
        self._dirty += len(part)
        if self._dirty >= _DIRTY:
            self._disk.flush(self._handle)
            self._dirty = 0

    def _sum(self, part: npt.NDArray[np.uint8]) -> None:
        if self._filled:
            part = self._continue(part)
        whole = len(part) // BLOCK * BLOCK
        if whole:
            self._sums.append(block_sums(part[:whole]))
        if whole < len(part):
            self._continue(part[whole:])

    def _continue(self, part: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Put bytes to the block that is begun; returns those that it has no room for."""
        taken = part[: BLOCK - self._filled]
        self._open = crc32c(taken, self._open)
        self._filled += len(taken)
        if self._filled == BLOCK:
            self._close()
        return part[len(taken) :]

    def _close(self) -> None:
        self._sums.append(np.array([self._open], np.uint32))
        self._open, self._filled = 0, 0

    def table(self) -> bytes:
        """The sums of all blocks."""
        if self._filled:
            self._close()
        return np.concatenate([np.zeros(0, np.uint32), *self._sums]).astype("<u4").tobytes()


class BundleFile:
    """A bundle's file: its header is checked when it is first used, its blocks when they are asked for, each once.

    Any thread. All methods raise StoreDamagedError for bytes that were not written so, StoreError where the disk fails.
    """

    def __init__(self, path: Path, mapped: Mapped, seal: Seal, report: Callable[[], None]) -> None:
        """seal: what the node knows of the file. report: called once damage is found."""
        self.path, self.nbytes = path, seal.nbytes
        self._mapped, self._seal, self._report = mapped, seal, report
        self._lock = threading.Lock()
        self._places: dict[str, _Place] | None = None
        self._plain: dict[str, Any] = {}
        self._start = 0
        self._sums = np.zeros(0, np.uint32)
        self._checked = np.zeros(0, np.bool_)
        if mapped.nbytes != seal.nbytes:
            raise self._damage(f"it must have {seal.nbytes} bytes, it has {mapped.nbytes}")

    def _damage(self, why: str, blocks: int = 1) -> Exception:
        self._report()
        error = damaged(self.path, why)
        error.blocks = blocks
        return error

    def _bytes(self) -> npt.NDArray[np.uint8]:
        with guarded("read", self.path):
            data = self._mapped.data
        return data

    def _opened(self) -> dict[str, _Place]:
        """Places by name; reads and checks prefix, header and table the first time."""
        with self._lock:
            if self._places is None:
                self._places = self._open()
            return self._places

    def _open(self) -> dict[str, _Place]:
        with guarded("read", self.path):
            self._mapped.populate(0, min(PAGE, self.nbytes))
        data = self._bytes()
        prefix = data[: _PREFIX.size].tobytes()
        if len(prefix) < _PREFIX.size or prefix[:8] != MAGIC:
            raise self._damage("its first bytes are not those of a bundle")
        _, version, header_bytes, data_bytes, header_crc, prefix_crc = _PREFIX.unpack(prefix)
        if crc32c(prefix[:-4]) != prefix_crc:
            raise self._damage("the checksum of its beginning differs")
        if version != VERSION:
            raise self._damage(f"its layout is version {version}, not {VERSION}")
        self._start = _PREFIX.size + header_bytes
        blocks = -(-data_bytes // BLOCK)
        if self._start + data_bytes + 4 * blocks + 4 != self.nbytes:
            raise self._damage("its sizes do not add up")
        with guarded("read", self.path):
            self._mapped.populate(0, self._start)
            self._mapped.populate(self._start + data_bytes, self.nbytes)
        header = data[_PREFIX.size : self._start]
        if crc32c(header) != header_crc:
            raise self._damage("the checksum of its header differs")
        table = data[self._start + data_bytes : -4]
        table_crc = crc32c(table)
        if table_crc != int.from_bytes(data[-4:].tobytes(), "little"):
            raise self._damage("the checksum of its table differs")
        if (header_crc, table_crc) != (self._seal.header_crc, self._seal.table_crc):
            raise self._damage("it is another file than the one that was saved")
        try:
            fields = parse_json(header.tobytes())
            places = _places(fields.get("arrays"), data_bytes)
        except ValueError as error:
            raise self._damage(f"its header is malformed: {error}") from error
        if not is_fields(fields.get("plain")):
            raise self._damage("its header has no values")
        self._plain = fields["plain"]
        self._sums = table.view("<u4")
        self._checked = np.zeros(blocks, np.bool_)
        return places

    def bundle(self, verify: bool | tuple[str, ...]) -> Bundle:
        """Its values, and its arrays as views of the map. verify: True checks all blocks first, False none.

        With suffixes: the blocks of arrays whose name ends with none of them.
        """
        places = self._opened()
        if verify is True or (verify and self._mapped.stored is None):  # later, others may have written to the arrays
            self.check()
        elif verify:
            wanted = np.zeros(len(self._checked), np.bool_)
            for place in [place for name, place in places.items() if not name.endswith(verify)]:
                wanted[place.offset // BLOCK : -(-(place.offset + place.nbytes) // BLOCK)] = True
            self._check(wanted, lambda: False)
        data = self._bytes()[self._start :]
        arrays = {
            name: data[place.offset : place.offset + place.nbytes].view(place.dtype).reshape(place.shape)
            for name, place in places.items()
        }
        return Bundle(self._plain, arrays)

    def check(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Check the blocks that were not yet; `stop` is asked between pieces, and ends it early."""
        self._opened()
        self._check(np.ones(len(self._checked), np.bool_), stop)

    @property
    def is_in_memory(self) -> bool:
        """Whether the system holds nearly all of the file in memory; True where it does not tell."""
        with contextlib.suppress(OSError):  # it may have been removed
            found = resident_bytes(self.path)
            return found is None or found >= NEARLY_ALL * self.nbytes
        return True

    def release(self) -> None:
        """Forget the bytes, if they were read and not mapped, and that they were checked."""
        with self._lock:
            if self._mapped.release():
                self._places, self._sums = None, np.zeros(0, np.uint32)

    def populate(self) -> None:
        """Read the file's bytes into memory."""
        self._opened()
        with guarded("read", self.path):
            self._mapped.populate(0, self.nbytes)

    def _check(self, wanted: npt.NDArray[np.bool_], stop: Callable[[], bool]) -> None:
        """Check those blocks of `wanted` that were not yet, piece by piece."""
        data, stored = self._bytes(), self._mapped.stored
        data = data if stored is None else stored
        for begin, end in _runs(wanted & ~self._checked, _PIECE // BLOCK):
            if stop():
                return
            low = self._start + begin * BLOCK
            high = min(self._start + end * BLOCK, self.nbytes - 4 * len(self._sums) - 4)
            with guarded("read", self.path):
                self._mapped.populate(low, high)
            wrong = np.flatnonzero(block_sums(data[low:high]) != self._sums[begin:end])
            if len(wrong):
                raise self._damage(f"the checksum of {self._owners(begin + int(wrong[0]))} differs", len(wrong))
            self._checked[begin:end] = True

    def _owners(self, block: int) -> str:
        """Names of the arrays that have bytes in a block."""
        low, high = block * BLOCK, (block + 1) * BLOCK
        names = [
            name
            for name, place in (self._places or {}).items()
            if place.offset < high and place.offset + place.nbytes > low and place.nbytes
        ]
        return f"block {block} (in it: {', '.join(names[:3]) or 'nothing'}{', ...' if len(names) > 3 else ''})"


def _runs(wanted: npt.NDArray[np.bool_], most: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of runs of True, none longer than `most`."""
    edges = np.flatnonzero(np.diff(wanted.astype(np.int8), prepend=0, append=0)).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        for begin in range(first, last, most):
            yield begin, min(begin + most, last)


def _aligned(place: int, step: int) -> int:
    return -(-place // step) * step
