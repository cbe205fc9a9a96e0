"""Records: small JSON files with a checksum, written in one way only, so that no changed bit goes unseen."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from retrieval_attn.errors import ConfigError
from retrieval_attn.store.crc import crc32c

_BEGIN, _MIDDLE, _END = b'{"crc32c":"', b'","record":', b"}\n"


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
    """The bytes of a record's file."""
    text = canonical(record, "record").encode()
    return _BEGIN + b"%08x" % crc32c(text) + _MIDDLE + text + _END


def decode(data: bytes) -> dict[str, Any]:
    """What `encode` was given. Raises ValueError, which says what is wrong with the bytes."""
    at = len(_BEGIN) + 8
    text = data[at + len(_MIDDLE) : -len(_END)]
    if not data.startswith(_BEGIN) or data[at : at + len(_MIDDLE)] != _MIDDLE or not data.endswith(_END):
        raise ValueError("it is not a whole record")
    if data[len(_BEGIN) : at] != b"%08x" % crc32c(text):
        raise ValueError("its checksum differs")
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError("it holds no record")
    return record
