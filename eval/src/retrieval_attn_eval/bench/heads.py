"""The heads that indexes are measured on: recorded from a model, or synthetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.testing import Format, aligned_empty, from_float32, to_float32
from retrieval_attn_eval.bench.synthetic import LEVELS, synthetic_head
from retrieval_attn_eval.recording.files import HeadRecording, Recording

SINK, WINDOW = 128, 512
"""Tokens at both ends of a context that attention takes exactly; an index never holds them."""


@dataclass(frozen=True)
class Head:
    """Keys of one key-value head as an index gets them, and the queries of its group.

    keys (n, head_dim) of fmt.dtype. train (group, m, head_dim) float32: moved to where decoding happens; own: the same
    at their own positions. decode (group, d, head_dim) float32. scale: logit = scale * q.k.
    """

    name: str
    fmt: Format
    keys: npt.NDArray[Any]
    train: npt.NDArray[np.float32]
    own: npt.NDArray[np.float32]
    decode: npt.NDArray[np.float32]
    scale: float

    @property
    def group(self) -> int:
        """Query heads that share the keys."""
        return int(self.decode.shape[0])

    def plain_keys(self) -> npt.NDArray[np.float32]:
        """The keys as float32."""
        return to_float32(self.keys, self.fmt)


@dataclass(frozen=True)
class Source:
    """Where heads come from. name: "bundled", a model, "synthetic:LEVEL" or the folder of a recording.

    train: training queries per query head at most. cache: folder where new recordings are kept.
    """

    name: str
    train: int
    head_dim: int
    seed: int
    cache: Path
    task: str = "niah_multikey_1"

    @property
    def is_synthetic(self) -> bool:
        return self.name.startswith("synthetic:")

    @property
    def is_folder(self) -> bool:
        return (Path(self.name) / "meta.json").is_file()

    def check(self) -> None:
        """Raise ConfigError for a level that does not exist."""
        level = self.name.removeprefix("synthetic:")
        if self.is_synthetic and level not in LEVELS:
            raise ConfigError(f"--source {self.name} must be synthetic: and one of {', '.join(LEVELS)}")

    def heads(self, length: int, limit: int | None, progress: bool = False) -> Iterator[Head]:
        """Up to `limit` heads of a context of `length` tokens. A recording of a folder has the length it has."""
        if self.is_synthetic:
            for number in range(limit or 4):
                yield self._synthetic(length, number)
            return
        for head in _spread(self._recording(length, progress).heads, limit):
            yield from_recording(head, self.train)

    def _synthetic(self, length: int, number: int) -> Head:
        level = self.name.removeprefix("synthetic:")
        made = synthetic_head(
            length, head_dim=self.head_dim, level=level, train=self.train, decode=32, seed=self.seed + number
        )
        keys = _placed(from_float32(made.keys, Format.BFLOAT16))
        scale = self.head_dim**-0.5
        name = f"{level}{number}"
        return Head(name, Format.BFLOAT16, keys, made.train_rotated, made.train, made.decode, scale)

    def _recording(self, length: int, progress: bool) -> Recording:
        if self.is_folder:
            return Recording.load(Path(self.name))
        folder = self.cache / f"{self.name.replace('/', '_')}-{self.task}-{length}-{self.train}-{self.seed}"
        if not (folder / "meta.json").is_file():
            from retrieval_attn_eval.recording.command import record_text
            from retrieval_attn_eval.recording.options import RecordOptions, TextSource

            options = RecordOptions(train=self.train, seed=self.seed)
            made = record_text(self.name, TextSource(length, self.task), options, progress=progress)
            made.save(folder)
        return Recording.load(folder)


def from_recording(head: HeadRecording, train: int, sink: int = SINK, window: int = WINDOW) -> Head:
    """The indexed part of a recorded head, with `train` of its training queries at most.

    Raises InputDataError if the context is not longer than sinks and window.
    """
    stop = len(head.keys) - window
    if stop <= sink:
        raise InputDataError(
            f"a recording must have more than {sink + window} tokens to index any, {head.name} has {len(head.keys)}"
        )
    rows = slice(None)
    if head.train.shape[1] > train:
        picked = np.random.default_rng(0).choice(head.train.shape[1], train, replace=False)
        rows = np.sort(picked)  # type: ignore[assignment]
    own = np.ascontiguousarray(head.train[:, rows])
    rotated = own if head.train_rotated is None else np.ascontiguousarray(head.train_rotated[:, rows])
    return Head(head.name, head.fmt, _placed(head.keys[sink:stop]), rotated, own, head.decode, head.scale)


def _placed(keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy of the keys as the engine holds them: on a cache line, in large pages if they are many."""
    placed = aligned_empty(keys.shape, keys.dtype)
    placed[:] = keys
    return placed


def _spread(heads: tuple[HeadRecording, ...], limit: int | None) -> list[HeadRecording]:
    """`limit` of the heads, from all layers."""
    if limit is None or limit >= len(heads):
        return list(heads)
    return [heads[i] for i in np.linspace(0, len(heads) - 1, limit).round().astype(int)]
