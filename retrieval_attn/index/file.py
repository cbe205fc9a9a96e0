"""One index in one file: written as a whole, checked when read, mapped instead of copied.

Layout, all numbers little-endian:
    8 bytes   magic
    4 bytes   version of the layout
    4 bytes   length of the header
    4 bytes   CRC-32 of the header
    header    JSON: kind, number format, identity, sizes, plain values, and the table of arrays
    arrays    each from a multiple of 64 bytes on (4096 from 64 KiB), counted from the first 4096 after the header
Every array has its own CRC-32 in the table. Checksums find damage, not malice: read only files that you trust.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, InputDataError, RetrievalAttentionError, ShapeError
from retrieval_attn.index.base import KeyIndex, StateValue
from retrieval_attn.index.formats import Format, check_rows
from retrieval_attn.index.replace import replace_file
from retrieval_attn.index.spec import IndexSpec

MAGIC = b"RAINDEX\n"
VERSION = 1
PAGE = 4096
LINE = 64
_BIG = 1 << 16
_PREFIX = struct.Struct("<8sIII")
_MAX_HEADER = 1 << 24
logger = logging.getLogger(__name__)
_KEYS = "keys"  # the table's name for the keys; state arrays are called "state.<name>"


@dataclass(frozen=True)
class SavedIndex:
    """What a file held. keys: (n, head_dim) of fmt.dtype, a map of the file unless the caller gave them."""

    index: KeyIndex
    keys: npt.NDArray[Any]
    fmt: Format
    identity: str


def save_index(
    path: Path | str,
    index: KeyIndex,
    keys: npt.NDArray[Any],
    fmt: Format,
    *,
    identity: str = "",
    with_keys: bool = True,
) -> None:
    """Write `index`, which was built over `keys` (n, head_dim) of fmt.dtype, to `path`, replacing what is there.

    identity: names model, layer, head and text in the caller's words; `load_index` compares it. with_keys=False
    leaves the keys out (the caller stores them) and keeps their checksum. A crash leaves the old file or the new one.
    Raises ShapeError for keys that are not the index's, ConfigError for a kind that cannot be saved, OSError.
    """
    check_rows("keys", keys, fmt, 2)
    if keys.shape != (len(index), fmt.width(index.head_dim)):
        wanted = len(index), index.head_dim
        raise ShapeError(f"keys must be the index's, {wanted}, got {(len(keys), fmt.dim_of(keys))}")
    plain: dict[str, int | float | str] = {}
    arrays: list[tuple[str, npt.NDArray[Any]]] = [(_KEYS, np.ascontiguousarray(keys))] if with_keys else []
    for name, value in index.state().items():
        if isinstance(value, np.ndarray):
            arrays.append((f"state.{name}", np.ascontiguousarray(value, value.dtype.newbyteorder("<"))))
        else:
            plain[name] = value.item() if isinstance(value, np.generic) else value
    table, place = [], 0
    for name, array in arrays:
        place = _aligned(place, PAGE if array.nbytes >= _BIG else LINE)
        table.append(
            {
                "name": name,
                "dtype": _dtype_name(name, array.dtype),
                "shape": list(array.shape),
                "offset": place,
                "crc32": _checksum(array),
            }
        )
        place += array.nbytes
    header = {
        "kind": index.kind,
        "format": fmt.value,
        "identity": identity,
        "keys": len(index),
        "head_dim": index.head_dim,
        "keys_crc32": _checksum(np.ascontiguousarray(keys)),
        "plain": plain,
        "arrays": table,
        "data_bytes": place,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > _MAX_HEADER:
        raise ConfigError(f"the header of a saved index holds at most {_MAX_HEADER} bytes, got {len(text)}")
    # not writable by a group even where the umask would allow it: `load_index` maps what others cannot cut
    replace_file(Path(path), lambda file: _write(file, text, [array for _, array in arrays], table), mode=0o644)


def load_index(
    path: Path | str,
    *,
    keys: npt.NDArray[Any] | None = None,
    identity: str | None = None,
    verify: bool = True,
    mapped: bool | None = None,
) -> SavedIndex:
    """Read the index in `path`; its arrays are maps of the file, so that the system reads and drops pages.

    Writes to the arrays stay private to the process. mapped: True maps the file, False reads all of it into memory,
    None maps it where nobody but its reader and root may write to it, else reads it. Who shortens a mapped file ends
    this process by SIGBUS, which no program can turn into an exception once NumPy or a kernel has touched the page; so
    a file that a group or everybody may write to, or that is another user's, is copied unless you say True.
    `save_index` never shortens a file: it puts a new one in its place, and lets its owner alone write to that.
    keys: for a file saved without keys (checked against the checksum there), or to use these instead of the file's.
    identity: what the file must say (None: anything). verify=False skips the checksums of arrays (the header's is
    always checked): nothing is read before it is used.
    Raises InputDataError for a missing, foreign, damaged or newer file, or one of another identity; ConfigError for a
    kind that is not known here; ShapeError for keys of another shape.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            header, start = _read_header(path, file)
            _check_header(path, header)
            contents = _contents(path, file, start + header["data_bytes"], mapped)
    except OSError as error:
        raise InputDataError(f"{path} cannot be read ({error.strerror}); save the index first") from error
    if identity is not None and header["identity"] != identity:
        raise InputDataError(
            f"{path} must be the index of {identity!r}, it is of {header['identity']!r}; build the index for this one"
        )
    fmt = Format.from_name(header["format"])
    arrays = _arrays(path, contents, header, start, verify)
    shape = (header["keys"], header["head_dim"])
    kept = _choose_keys(path, arrays.pop(_KEYS, None), keys, fmt, shape, header["keys_crc32"] if verify else None)
    state: dict[str, StateValue] = {**header["plain"]}
    state.update({name.removeprefix("state."): array for name, array in arrays.items()})
    cls = IndexSpec.of(header["kind"]).cls
    try:
        index = cls.from_state(kept, fmt, state)
    except RetrievalAttentionError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, AttributeError, MemoryError) as error:
        raise InputDataError(f"{path} does not describe an index of kind {cls.kind!r} ({error!r})") from error
    if (len(index), index.head_dim) != shape:
        raise InputDataError(f"{path} promises {shape} keys, its index has {(len(index), index.head_dim)}")
    return SavedIndex(index, kept, fmt, header["identity"])


def _choose_keys(
    path: Path,
    stored: npt.NDArray[Any] | None,
    given: npt.NDArray[Any] | None,
    fmt: Format,
    shape: tuple[int, int],
    checksum: int | None,
) -> npt.NDArray[Any]:
    if given is None:
        if stored is None:
            raise InputDataError(f"{path} was saved without its keys; pass keys=, the {shape} they were")
        width = shape[0], fmt.width(shape[1])
        if stored.shape != width or stored.dtype != fmt.dtype:
            raise _damaged(path, f"keys are {stored.dtype} {stored.shape}, not {fmt.dtype} {width}")
        return stored
    check_rows("keys", given, fmt, 2)
    if (len(given), fmt.dim_of(given)) != shape:
        raise ShapeError(f"keys must be {shape} as in {path}, got {(len(given), fmt.dim_of(given))}")
    if checksum is not None and _checksum(np.ascontiguousarray(given)) != checksum:
        raise InputDataError(f"keys= are not the keys that {path} was built from; pass those or build again")
    return given


def _read_header(path: Path, file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """The parsed header and the place of the first array."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or prefix[:8] != MAGIC:
        raise InputDataError(f"{path} is not a saved index (it begins with {prefix[:8]!r})")
    _, version, length, checksum = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise InputDataError(
            f"{path} has layout version {version}, this release reads {VERSION}; use the release that "
            "wrote it, or build the index again"
        )
    text = file.read(min(length, _MAX_HEADER + 1))
    if len(text) != length or zlib.crc32(text) != checksum:
        raise _damaged(path, "its header is cut or changed")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no JSON ({error})") from error
    return header, _aligned(_PREFIX.size + length, PAGE)


def _check_header(path: Path, header: Any) -> None:
    """Raise InputDataError unless the header has all its fields, of the right types."""
    wanted = {"kind": str, "format": str, "identity": str, "keys": int, "head_dim": int, "keys_crc32": int}
    wanted |= {"plain": dict, "arrays": list, "data_bytes": int}
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no object")
    wrong = [name for name, kind in wanted.items() if not isinstance(header.get(name), kind)]
    entry = {"name": str, "dtype": str, "shape": list, "offset": int, "crc32": int}
    for item in header["arrays"] if not wrong else ():
        fields = item if isinstance(item, dict) else {}
        wrong += [f"arrays.{name}" for name, kind in entry.items() if not isinstance(fields.get(name), kind)]
        if not all(isinstance(size, int) and abs(size) < 2**63 for size in fields.get("shape") or ()):
            wrong.append("arrays.shape of sizes")
    if not wrong and not all(0 <= header[name] < 2**63 for name in ("keys", "head_dim", "data_bytes")):
        wrong.append("sizes")
    if wrong:
        raise _damaged(path, f"its header lacks {', '.join(wrong)}")


def _contents(path: Path, file: IO[bytes], wanted: int, mapped: bool | None) -> npt.NDArray[np.uint8]:
    """All `wanted` bytes of the file, mapped or read (see `load_index`). Raises InputDataError if it has others."""
    status = os.fstat(file.fileno())
    if status.st_size != wanted:
        raise _damaged(path, f"it must have {wanted} bytes, it has {status.st_size}")
    if mapped is None:
        mapped = _is_ours_alone(status)
        if not mapped:
            logger.info("%s is read into memory, not mapped: other users may write to it", path)
    file.seek(0)
    # copy on write: a read-only array would be another type to Numba, and compile every kernel once more
    raw = np.asarray(np.memmap(file, np.uint8, "c")) if mapped else np.fromfile(file, np.uint8)
    if len(raw) != wanted:
        raise _damaged(path, "it changed while it was read")
    return raw


def _is_ours_alone(status: os.stat_result) -> bool:
    """Whether only this process's user and root may write to a file. Windows cuts no file that is mapped."""
    if not hasattr(os, "geteuid"):
        return True
    # where a file has an access control list, the group's bits are the most that it grants to anybody
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _arrays(
    path: Path, raw: npt.NDArray[np.uint8], header: dict[str, Any], start: int, verify: bool
) -> dict[str, npt.NDArray[Any]]:
    """The arrays that the header names, as views of the file's bytes."""
    found = {}
    for item in header["arrays"]:
        dtype = _dtype(path, item["dtype"])
        count = -1 if min(item["shape"], default=0) < 0 else math.prod(item["shape"])
        first = start + item["offset"]
        if count < 0 or first % LINE or not start <= first <= len(raw) - count * dtype.itemsize:
            raise _damaged(path, f"array {item['name']} lies outside of it")
        part = raw[first : first + count * dtype.itemsize]
        if verify and _checksum(part) != item["crc32"]:
            raise _damaged(path, f"the checksum of {item['name']} differs")
        found[item["name"]] = part.view(dtype).reshape(item["shape"])
    return found


def _write(file: IO[bytes], text: bytes, arrays: list[npt.NDArray[Any]], table: list[dict[str, Any]]) -> None:
    file.write(_PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text)
    start = _aligned(_PREFIX.size + len(text), PAGE)
    for array, item in zip(arrays, table, strict=True):
        file.write(b"\0" * (start + item["offset"] - file.tell()))
        file.write(array.reshape(-1).view(np.uint8).data)
    file.write(b"\0" * (start - file.tell()))  # a file without arrays ends where they would begin


def _checksum(array: npt.NDArray[Any]) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def _aligned(place: int, step: int) -> int:
    return -(-place // step) * step


def _dtype_name(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.kind not in "buif" or dtype.itemsize > 8:
        raise ConfigError(f"array {name} of dtype {dtype} cannot be saved; use plain numbers")
    return dtype.newbyteorder("<").str


def _dtype(path: Path, name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise _damaged(path, f"it has arrays of dtype {name!r}") from error
    if dtype.kind not in "buif" or dtype.itemsize > 8:
        raise _damaged(path, f"it has arrays of dtype {name!r}")
    return dtype


def _damaged(path: Path, why: str) -> InputDataError:
    return InputDataError(f"{path} is damaged: {why}; build the index again or restore the file")
