"""PackedWork: one layer's new keys and values of several rows on their way to the host, as one copy.

A copy per row would be a host work per row, for each of which the device is waited for. Here a kernel puts the keys and
values of all rows side by side, one copy brings them, and one host work fills the paths of all rows. What goes wrong
with one row is that row's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.index.formats import Format
from retrieval_attn.offload import work as host_work
from retrieval_attn.offload.build import event_now
from retrieval_attn.offload.staging import CopyChunk, pack, packed_to_host, staging
from retrieval_attn.offload.threads import run_for, settle
from retrieval_attn.offload.traffic import LayerStats, traffic
from retrieval_attn.offload.work import HostWork


class RowWork(HostWork):
    """A row's part of a `PackedWork`: asked for, waited for and given up as if it were alone.

    Who has it calls nothing that begins: the pack does. span: the row's new tokens among those of all.
    """

    def __init__(
        self, span: slice, number: int, fmt: Format, threads: int | None, stats: LayerStats, kv: tuple[Tensor, Tensor]
    ) -> None:
        """number, fmt, threads, stats, kv: see `HostWork`."""
        super().__init__(number, fmt, threads, stats, kv)
        self.span = span
        self._error: Exception | None = None  # from the copy, later from what is brought for the builds
        self._began = 0.0

    def append(self, row: int, host: SequenceKV, real: np.ndarray | None) -> None:
        """See `KVCopy.append`."""
        self._copy.append(row, host, real, replicates=False)

    def start_copy(self) -> None:
        """The pack copies."""

    def start_build(self) -> None:
        """All that is wanted was asked for; the pack builds."""
        self._complete = True

    @property
    def complete(self) -> bool:
        """Whether all was asked for."""
        return self._complete

    def expect_copy(self, ready: torch.cuda.Event | None) -> None:
        """From now on the copy is waited for. ready: keys and values lie on the device then."""
        self._ready = ready
        self._futures["copy"] = Future()

    def begin_copy(self) -> bool:
        """Whether the row still wants it."""
        self._began = time.perf_counter()
        return self._futures["copy"].set_running_or_notify_cancel()

    def fill(self, keys: np.ndarray, values: np.ndarray) -> None:
        """The row's next tokens (kv_heads, tokens, width) go to its path."""
        if self._error is None and not self._stop.is_set():
            try:
                self._named(functools.partial(self._copy.fill, keys, values))
            except Exception as error:
                self._error = error

    def end_copy(self, problem: BaseException | None) -> None:
        """Tell who waits. problem: what went wrong with the copy as a whole."""
        settle(self._futures["copy"], self._end_copy, problem)

    def _end_copy(self, problem: BaseException | None) -> None:
        self._stats.copy_seconds += time.perf_counter() - self._began
        problem = problem or self._error
        if problem is not None:
            raise problem
        if self._stop.is_set():
            raise CancelledError
        self._copy.filled()

    def expect_build(self) -> bool:
        """From now on the indexes are waited for; False where there are none to build."""
        try:
            wanted = self._start_fetch()
        except Exception as error:
            wanted, self._error = True, error
        if wanted:
            self._futures["build"] = Future()
        return wanted

    def build(self) -> None:
        """Build them and tell who waits."""
        run_for(self._futures["build"], self._built)

    def _built(self) -> None:
        if self._error is not None:
            raise self._error
        self._named(self._build_after_copy)


class PackedWork:
    """Copies the new keys and values of several rows into their paths and builds their indexes.

    Order: `row` for each, `append` to what that makes, `start_copy`; what each row asks for, `start_build`; rows are
    then finished by themselves, and what goes wrong with one is told there.
    """

    def __init__(self, fmt: Format, device: torch.device) -> None:
        """fmt: what hosts store. device: of the keys."""
        self.device = device
        self._fmt, self._overlaps = fmt, host_work.overlaps(device)
        self._rows: list[RowWork] = []
        self._builds: Future[None] | None = None
        self._complete = False

    def row(self, span: slice) -> Callable[..., RowWork]:
        """Return a function that creates the work of a row with these new tokens; arguments as of `HostWork`."""

        def make(*given: Any) -> RowWork:
            self._rows.append(RowWork(span, *given))
            return self._rows[-1]

        return make

    def start_copy(self, key: Tensor, value: Tensor) -> None:
        """Begin to copy, or copy now on the CPU. key, value (1, kv_heads, tokens, dim): of all rows, side by side."""
        if not self._rows:
            return
        low, high = min(one.span.start for one in self._rows), max(one.span.stop for one in self._rows)
        # token by token, as linear layers write them: one kernel, and pieces of tokens are runs of memory
        parts = [pack(part[0, :, low:high].transpose(0, 1), self._fmt) for part in (key, value)]
        side_by_side, width = torch.cat(parts, dim=-1), parts[0].shape[-1]
        ready = event_now(self.device)
        for one in self._rows:
            one.expect_copy(ready)
        if self._overlaps:
            traffic(self.device).add(self)
            host_work.copier().submit(self._copy, side_by_side, width, low, ready)
        else:
            self._copy(side_by_side, width, low, ready)

    def start_build(self) -> None:
        """Begin to build what rows asked for as soon as keys are copied, or build now on the CPU."""
        wanted = [one for one in self._rows if one.complete and one.expect_build()]
        if wanted and self._overlaps:
            self._builds = host_work.layers().submit(self._build, wanted)
        else:
            self._build(wanted)
        self._complete = True

    @property
    def done(self) -> bool:
        """See `Leaving`."""
        return self._complete and not self.leaving() and not self.building()

    def leaving(self) -> list[Future[None]]:
        """See `Leaving`."""
        return [future for one in self._rows for future in one.leaving()]

    def building(self) -> list[Future[None]]:
        """See `Leaving`."""
        return [self._builds] if self._builds is not None and not self._builds.done() else []

    def _copy(self, tokens: Tensor, width: int, first: int, ready: torch.cuda.Event | None) -> None:
        """tokens (tokens, kv_heads, width of a key and a value), the first of them number `first`. width: of a key."""
        rows = [one for one in self._rows if one.begin_copy()]
        problem: BaseException | None = None
        try:
            if self._overlaps:
                staging(self.device).bring(_pieces(rows, tokens, width, first), ready)
            else:
                _fill(rows, width, first, *packed_to_host([tokens], self._fmt))
        except BaseException as error:
            problem = error
        for one in rows:
            one.end_copy(problem)

    def _build(self, rows: list[RowWork]) -> None:
        for one in rows:
            one.build()


def _pieces(rows: list[RowWork], tokens: Tensor, width: int, first: int) -> Iterator[CopyChunk]:
    """Yield chunks of as many tokens as fit a buffer: mostly all."""
    step = max(1, (staging(tokens.device).size - 128) // max(1, tokens[:1].nbytes))
    for start in range(0, len(tokens), step):
        yield [tokens[start : start + step]], functools.partial(_fill, rows, width, first + start)


def _fill(rows: list[RowWork], width: int, first: int, tokens: np.ndarray) -> None:
    """Give each row its own of tokens (tokens, kv_heads, width of both), the first of them number `first`."""
    by_head = tokens.transpose(1, 0, 2)
    for one in rows:
        own = slice(max(one.span.start - first, 0), max(one.span.stop - first, 0))
        if own.start < min(own.stop, len(tokens)):
            one.fill(by_head[:, own, :width], by_head[:, own, width:])
