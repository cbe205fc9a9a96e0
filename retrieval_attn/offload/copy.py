"""KVCopy: one layer's new keys and values on their way into the host's paths."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.index.formats import Format
from retrieval_attn.offload.codes import beside
from retrieval_attn.offload.int8_rows import Int8RowMirror, new_rows, rows_behind, write_rows
from retrieval_attn.offload.page_lock import lock_pages
from retrieval_attn.offload.staging import CopyChunk, staging
from retrieval_attn.offload.threads import ThreadPool
from retrieval_attn.offload.transfer import all_to_host, pack

FILLERS = 4
"""Threads that write copied keys and values to their places."""
SHARED_COPY = 4 << 20
"""Bytes of keys from which they do it together."""


class KVCopy:
    """Keys and values (batch, kv_heads, new, dim) of a pass. They must not be written to any more, and are let go when
    they are copied.
    """

    def __init__(self, fmt: Format, key: Tensor, value: Tensor, stop: threading.Event) -> None:
        """stop: when it is set, what has not begun is not copied: CancelledError."""
        self.device = key.device
        self._fmt, self._stop = fmt, stop
        self._kv = [(key.detach(), value.detach())]  # empty once they are copied
        self._rows: list[tuple[int, SequenceKV, np.ndarray | None]] = []
        self._whole: set[int] = set()
        self._empty_rows: dict[int, Int8RowMirror | None] = {}

    def append(self, row: int, host: SequenceKV, real: np.ndarray | None) -> None:
        """Row `row` goes to the end of `host`; real: (new,) bool, the columns that are tokens, None = all."""
        self._rows.append((row, host, real))
        if real is None and len(host) == 0:
            self._whole.add(id(host))
        if host.spec.host_reads.rows and all(one.is_hole for one in host.segments):
            key, value = (tensor[row] for tensor in self._kv[0])
            self._empty_rows[id(host)] = new_rows(key, value)

    def is_whole(self, host: SequenceKV) -> bool:
        """Whether `host` holds nothing but this pass: its keys then lie on the device as they are."""
        return id(host) in self._whole

    def staged(self, ready: torch.cuda.Event | None) -> None:
        """Copy through the device's ring of pinned buffers, once `ready` is over."""
        for key, value in self._kv:
            staging(self.device).bring(self._pieces(key, value), ready)
        self._round(ready)
        self.filled()

    def fill(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Tokens of the one row that is copied with those of others, in order, (kv_heads, tokens, width) as stored.

        `filled` behind the last.
        """
        [(_, host, real)] = self._rows
        _append(host, real, keys, values)

    def filled(self) -> None:
        """All tokens are there."""
        self._kv.clear()  # the device has read them: whoever takes their memory next may write to it at once
        if self.device.type != "cuda":
            return  # nothing brings them back from page-locked memory
        for segment in {id(one): one for _, host, _ in self._rows for one in host.segments}.values():
            lock_pages(segment)

    def direct(self) -> None:
        """Copy row by row, on this thread and the device's current stream."""
        for kv in self._kv:
            for row, host, real in self._rows:
                key, value = all_to_host([tensor[row] for tensor in kv], self._fmt)
                _append(host, real, key, value)
        self._round(None)
        self._kv.clear()

    def _round(self, ready: torch.cuda.Event | None) -> None:
        """Rows that the device will read, of tokens that have come to a segment, once `ready` is over."""
        for key, value in self._kv:
            for row, host, real in self._rows:
                if not host.spec.host_reads.rows or not host.segments:
                    continue
                segment, tokens = host.segments[-1], key.shape[2] if real is None else int(real.sum())
                rounded = rows_behind(segment, tokens, self._empty_rows.get(id(host)))
                if rounded is None:
                    continue
                with beside(self.device):
                    if ready is not None:
                        torch.cuda.current_stream(self.device).wait_event(ready)
                    kept = slice(None) if real is None else torch.from_numpy(real).to(self.device)
                    write_rows(segment, rounded, key[row][:, kept], value[row][:, kept])

    def _pieces(self, key: Tensor, value: Tensor) -> Iterator[CopyChunk]:
        """As many tokens of a row as fit a buffer, keys and values together."""
        heads, count = key.shape[1:3]
        bytes_of = heads * (self._fmt.row_bytes(key.shape[3]) + self._fmt.row_bytes(value.shape[3]))
        step = max(1, (staging(self.device).size - 128) // bytes_of)
        for row, host, real in self._rows:
            for start in range(0, count, step):
                if self._stop.is_set():
                    raise CancelledError
                span = slice(start, min(start + step, count))
                tensors = pack(key[row, :, span], self._fmt), pack(value[row, :, span], self._fmt)
                yield tensors, functools.partial(_append, host, None if real is None else real[span])


@functools.cache
def _fillers() -> ThreadPool:
    return ThreadPool(FILLERS, "retrieval_attn-fill")


def _append(host: SequenceKV, real: np.ndarray | None, keys: np.ndarray, values: np.ndarray) -> None:
    """By several threads where there is much: memory that is written for the first time is slow to be had."""
    if real is not None:
        keys, values = keys[:, real], values[:, real]
    if keys.nbytes < SHARED_COPY:
        host.append(keys, values)
    else:
        host.append(keys, values, _fillers().map)
