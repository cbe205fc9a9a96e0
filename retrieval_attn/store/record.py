"""Records: small JSON files with a checksum, written in one way only, so that no changed bit goes unseen.

Checksums are CRC-32C (Castagnoli); the polynomial, its reflection and the inverted start and end are those of RFC 3720,
appendix B.4. Records are short: a loop in Python does them, so that listing contexts imports no compiler.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn.store.polynomial import BLOCK, byte_table

_BEGIN, _MIDDLE, _END = b'{"crc32c":"', b'","record":', b"}\n"
MAX_BYTES = 1 << 24
"""Of a record's file: a chain of 200,000 nodes. A larger file is no record."""
Check = Callable[[Any], bool]
"""Returns whether a parsed JSON value can be what a program wrote."""
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHORT, _LONG = 64, 1 << 15
"""Bytes from which kernels are worth a call where they are loaded; and where Numba must be imported for them first."""

_loaded = False


def _kernels() -> ModuleType:
    global _loaded
    from retrieval_attn.store import crc_kernels

    _loaded = True
    return crc_kernels


def crc32c(data: bytes | memoryview | npt.NDArray[np.uint8], start: int = 0) -> int:
    """The checksum of `data`, contiguous bytes. start: the checksum of what came before them; 0 for nothing."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if len(view) >= (_SHORT if _loaded else _LONG):
        return _kernels().checksum(np.frombuffer(view, np.uint8), start)
    table, register = byte_table(), ~start & 0xFFFFFFFF
    for byte in view:
        register = table[(register ^ byte) & 255] ^ register >> 8
    return ~register & 0xFFFFFFFF


def block_sums(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """The checksum of every BLOCK bytes of `data`, (bytes,) contiguous; the last block may be shorter.

    Holds no interpreter lock.
    """
    sums = np.zeros(-(-len(data) // BLOCK), np.uint32)
    _kernels().blocks(data, sums)
    return sums


def is_text(value: Any) -> bool:
    """Whether it is a string."""
    return isinstance(value, str)


def is_fields(value: Any) -> bool:
    """Whether it is a JSON object."""
    return isinstance(value, dict)


def is_count(value: Any, stop: int = 1 << 62) -> bool:
    """Whether it is an integer in [0, stop)."""
    return type(value) is int and 0 <= value < stop


def is_digest(value: Any) -> bool:
    """Whether it is a node's digest: 64 hexadecimal digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def is_list_of(check: Check) -> Check:
    """Return a check for lists whose elements pass `check`."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else, for NaN and infinity, and for too deep nesting."""
    try:
        value = json.loads(data, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("it contains no record")
    return value


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it contains the number {text}, which is not finite")


def _finite(text: str) -> float:
    value = float(text)
    return value if abs(value) < float("inf") else _refuse_constant(text)


def canonical(value: Any, what: str) -> str:
    """The one JSON text of plain values: keys sorted, no spaces, ASCII. what: names them in an error.

    Raises ConfigError for what JSON would lose or change: other types, keys that are not text, infinity and NaN.
    """
    return json.dumps(_plain(value, what), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one, what) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(one, f"{what}.{key}") for key, one in value.items()}
    wanted = "text, finite numbers, true, false, null, lists, and dicts with text as keys"
    raise ConfigError(f"{what} must be plain values ({wanted}), got {value!r:.80}; save arrays as arrays")


def encode(record: dict[str, Any]) -> bytes:
    """The bytes of a record's file. Raises ConfigError for values that are not plain, or of more than MAX_BYTES."""
    text = canonical(record, "record").encode()
    if len(text) > MAX_BYTES - 64:
        raise ConfigError(
            f"a record of {len(text)} bytes cannot be saved, at most {MAX_BYTES - 64} are; save shorter values, or "
            "read the text again and save it as one node"
        )
    return _BEGIN + b"%08x" % crc32c(text) + _MIDDLE + text + _END


def decode(data: bytes) -> dict[str, Any]:
    """Decode a record of `encode`. Raises ValueError with the fault."""
    at = len(_BEGIN) + 8
    text = data[at + len(_MIDDLE) : -len(_END)]
    if not data.startswith(_BEGIN) or data[at : at + len(_MIDDLE)] != _MIDDLE or not data.endswith(_END):
        raise ValueError("it is not a complete record")
    if data[len(_BEGIN) : at] != b"%08x" % crc32c(text):
        raise ValueError("its checksum differs")
    return parse_json(text)
