"""Recorded attention data of a model: keys, values, training and decode queries per key-value head, on disk.

A recording is a folder with `meta.json` and one `layer<l>_head<h>.npz` per recorded head. `meta.json` is written
last: a folder without it is not complete.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import InputDataError
from retrieval_attn.testing import Format, from_float32, to_float32
from retrieval_attn_eval.parsed import parsed
from retrieval_attn_eval.runs import write_atomically

FORMAT_VERSION = 2
_ARRAYS = ("keys", "values", "train", "train_rotated", "train_positions", "train_targets", "decode", "decode_positions")


@dataclass(frozen=True)
class HeadRecording:
    """One key-value head of one layer, after RoPE, and the query heads of its group.

    keys (n, head_dim), values (n, value_dim): of the whole context, dtype fmt.dtype, token i in row i.
    train (group, m, head_dim) float32: queries of the context's tokens `train_positions` (m,), at their own
    positions. train_rotated: the same as if they stood at `train_targets` (m,), places where decoding happens, or
    None where the model cannot say.
    decode (group, d, head_dim) float32: queries of the tokens after the context, at `decode_positions` (d,).
    scale: what the model multiplies q.k by.
    """

    layer: int
    kv_head: int
    fmt: Format
    scale: float
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    train: npt.NDArray[np.float32]
    train_rotated: npt.NDArray[np.float32] | None
    train_positions: npt.NDArray[np.int64]
    train_targets: npt.NDArray[np.int64]
    decode: npt.NDArray[np.float32]
    decode_positions: npt.NDArray[np.int64]

    @property
    def name(self) -> str:
        """layer<l>_head<h>: the name of its file."""
        return f"layer{self.layer}_head{self.kv_head}"


@dataclass(frozen=True)
class Recording:
    """Heads recorded in one pass over one text; `meta` says which model and text, and is written as JSON."""

    heads: tuple[HeadRecording, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the recording into a new or empty folder. Training queries are rounded to the keys' format.

        Raises InputDataError if the folder holds something.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputDataError(f"{folder} must be empty to take a recording; name another folder")
        for head in self.heads:
            np.savez(folder / f"{head.name}.npz", allow_pickle=False, **_arrays(head))
        heads = [
            {"layer": head.layer, "kv_head": head.kv_head, "format": head.fmt.value, "scale": head.scale}
            for head in self.heads
        ]
        described = {"version": FORMAT_VERSION, "heads": heads, "about": dict(self.meta)}
        write_atomically(folder / "meta.json", json.dumps(described, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, *, limit: int | None = None) -> Recording:
        """Read a recording, or its first `limit` heads. Raises InputDataError for anything that is none."""
        meta = _read_meta(folder)
        return cls(tuple(_read_head(folder, item) for item in meta["heads"][:limit]), meta["about"])


def _arrays(head: HeadRecording) -> dict[str, npt.NDArray[Any]]:
    found = {name: getattr(head, name) for name in _ARRAYS if getattr(head, name) is not None}
    for name in ("train", "train_rotated"):
        if name in found:
            found[name] = from_float32(found[name], head.fmt)
    return found


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta = parsed(path.read_bytes())
        version, heads, about = meta["version"], meta["heads"], meta["about"]
    except FileNotFoundError as error:
        raise InputDataError(f"{folder} holds no recording (meta.json is missing); make one with `record`") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputDataError(f"{path} is not the description of a recording ({error}); record again") from error
    if version != FORMAT_VERSION or not isinstance(heads, list) or not isinstance(about, dict):
        raise InputDataError(f"{path} must be a recording of version {FORMAT_VERSION}, got {version!r}; record again")
    return dict(meta)


def _read_head(folder: Path, item: dict[str, Any]) -> HeadRecording:
    path = folder / f"layer{item['layer']}_head{item['kv_head']}.npz"
    fmt = Format.from_name(item["format"])
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:  # np.load leaks what it opens
            arrays = {name: file[name] for name in _ARRAYS if name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputDataError(f"{path} is missing or damaged ({error}); record again") from error
    missing = sorted(set(_ARRAYS) - {"train_rotated"} - set(arrays))
    if missing:
        raise InputDataError(f"{path} lacks {', '.join(missing)}; record again")
    train, rotated = arrays.pop("train"), arrays.pop("train_rotated", None)
    return HeadRecording(
        layer=item["layer"],
        kv_head=item["kv_head"],
        fmt=fmt,
        scale=item["scale"],
        train=to_float32(train, fmt),
        train_rotated=None if rotated is None else to_float32(rotated, fmt),
        **arrays,
    )
