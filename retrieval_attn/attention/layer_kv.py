"""What a retrieval layer holds of its batch: sinks and recent window on the device, all tokens on the host.

The window's tail runs ahead of the host: tokens gather there, and a block of them moves to the host when the tail is
full. Retrieval covers what lies between sinks and tail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrieval_attn.attention.paged_prefix import PagedLayers, PagedSpan
from retrieval_attn.attention.sequence import Batch, Forgotten, LayerUploads, retrieval_start, rows_by_path
from retrieval_attn.config import Config
from retrieval_attn.cpu.segment import room_for
from retrieval_attn.cpu.store import SequenceKV, join_clusters, keep_no_memory
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.gpu.attention.window import Slide, WindowCache, sinks_of
from retrieval_attn.index.base import MAX_KEYS
from retrieval_attn.index.flat import FULL_ROOM, kept_tokens
from retrieval_attn.index.formats import Format
from retrieval_attn.index.threads import uninterrupted
from retrieval_attn.model.padding import join
from retrieval_attn.offload.clusters import cluster_stored
from retrieval_attn.offload.staging import host_format, to_device
from retrieval_attn.offload.traffic import LayerStats
from retrieval_attn.offload.upload import UploadSpan
from retrieval_attn.offload.work import HostWork


class TailSize(NamedTuple):
    """kept: tokens that stay when others move to the host. spill: tokens that gather behind them before they do.
    grows: none moves to the host, see index "full": the tail's memory grows. least: slots that it has until they are
    used up; 0: it keeps more than it uses.
    """

    kept: int
    spill: int
    grows: bool
    least: int = 0

    @classmethod
    def of(cls, config: Config) -> TailSize:
        """Return the sizes that the options give."""
        return cls(MAX_KEYS if config.keeps_all else config.window, config.spill, config.keeps_all)

    def slots(self, tail: int) -> int:
        """Return the window's slots for `tail` tokens."""
        if not self.grows:
            return self.kept + self.spill
        return self.least if tail < self.least else kept_tokens(tail)

    def fit(self, window: WindowCache, tail: int) -> None:
        """Resize a window to the slots of a tail that has, or will have, `tail` tokens."""
        slots = self.slots(tail)
        if self.grows:
            window.make_room(slots - window.tail_len)
        window.shrink(slots)


CLUSTERED_FROM = 512
"""Keys between sinks and window from which on a path that has no clusters gets some."""
GENERATION_ROOM = 16384
"""Tokens a sequence may gain after its prompt before its host memory continues in a second segment."""


class PassTokens:
    """Keys and values of a pass of one layer, which come chunk by chunk. total: of all chunks; filled: so far.

    valid: (batch, filled) CPU bool, True for real tokens; None: all are.
    """

    def __init__(self, held: LayerKV, total: int) -> None:
        """held: tokens before the pass, all of them on the host."""
        self.total = total
        self._before = [(host, len(host)) for host in held.hosts]
        self._like = held.window.buffers[0]
        self.filled = 0
        self.valid: Tensor | None = None
        self._new: tuple[Tensor, Tensor] | None = None

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the pass, (batch, kv_heads, total, dim). Raises CacheMismatchError before the first."""
        if self._new is None:
            raise CacheMismatchError(f"A pass announced {self.total} tokens and brought none.")
        return self._new

    def take(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Store a chunk: key and value (batch, kv_heads, chunk, dim), valid (batch, chunk) its real tokens."""
        batch, count = key.shape[0], key.shape[2]
        start = self.filled
        self._store(key, value, start)
        self.valid = join(self.valid, start, valid, count, batch)
        self.filled += count

    def new_of(self, row: int, which: int) -> Tensor:
        """The real new keys (which 0) or values (1) of a row (kv_heads, tokens, dim)."""
        return self.new[which][row][:, self.real(row, 0, self.filled)]

    def count(self, row: int) -> int:
        """Return how many new tokens of a row are real."""
        return self.filled if self.valid is None else int(self.valid[row, : self.filled].sum())

    def rows_of(self, row: int, which: int) -> Tensor:
        """Return the real keys (which 0) or values (1) of a row, earlier and new: (kv_heads, tokens, dim).

        May be a view. Forgotten tokens, and sinks before them, are as they are stored; tokens in pages are undefined.
        """
        new, (host, before) = self.new_of(row, which), self._before[row]
        if not before:
            return new
        earlier = to_device(host.read(0, before)[which], host.fmt, self._like)
        return torch.cat([earlier.to(new.dtype), new], dim=1)

    def first_of(self, row: int, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` real new tokens of a row: keys and values (kv_heads, count, dim)."""
        key, value = self.new
        if self.valid is None:
            return key[row, :, :count], value[row, :, :count]
        first = self.valid[row].nonzero().squeeze(1)[:count].to(key.device)
        return key[row][:, first], value[row][:, first]

    def mark(self) -> tuple[int, Tensor | None]:
        """Return the state that `restore` needs to undo later chunks."""
        return self.filled, self.valid

    def restore(self, mark: tuple[int, Tensor | None]) -> None:
        """Restore the state of `mark`; the next chunk overwrites the rows after it."""
        self.filled, self.valid = mark

    def real(self, row: int, start: int, stop: int) -> Tensor | slice:
        """Index of a row's real tokens among new columns [start, stop), relative to `start`."""
        if self.valid is None:
            return slice(None)
        return self.valid[row, start:stop].nonzero().squeeze(1).to(self.new[0].device)

    def _store(self, key: Tensor, value: Tensor, start: int) -> None:
        count = key.shape[2]
        if start == 0 and count == self.total:
            self._new = key, value
            return
        if start + count > self.total:
            raise CacheMismatchError(f"A pass announced {self.total} tokens and brought {start + count}.")
        if self._new is None:
            shapes = ((*tensor.shape[:2], self.total, tensor.shape[3]) for tensor in (key, value))
            self._new = key.new_empty(next(shapes)), value.new_empty(next(shapes))
        for held, tensor in zip(self._new, (key, value), strict=True):
            held[:, :, start : start + count] = tensor


class LayerKV:
    """Tokens of one layer. Made when the first ones come: their shapes, dtypes and device are known then.

    window: sinks and tail. The columns [tail_start, tail_start + window.tail_len) are in the tail, the columns
    [0, host_columns) are on the host; the tail may be ahead of the host.
    """

    def __init__(
        self, config: Config, batch: Batch, number: int, stats: LayerStats, key: Tensor, value: Tensor
    ) -> None:
        """Nothing held yet. key (batch, kv_heads, *, head_dim), value: what tokens of this layer look like."""
        self._config, self.batch, self.number, self.stats = config, batch, number, stats
        self.fmt = host_format(config.host_dtype, key.dtype)
        self.window, self._size = _new_window(config, key, value), TailSize.of(config)
        self.tail_start = self.host_columns = 0
        self.unturned_sinks: Tensor | None = None
        """Keys of the sinks (batch, kv_heads, sinks, head_dim), on the host, as they stand at their own positions, once
        tokens behind them are forgotten: the window has them turned."""
        self._sinks = [0] * key.shape[0]  # sink tokens per row
        self._retrieve_stops = [0] * key.shape[0]  # real tokens per row before tail_start
        batch.devices[number] = key.device

    @property
    def columns(self) -> int:
        """Columns held."""
        return self.tail_start + self.window.tail_len

    @property
    def device(self) -> torch.device:
        """Where sinks and window lie."""
        return self.window.buffers[0].device

    @property
    def uploads(self) -> LayerUploads:
        """Uploads of its keys and values to its device."""
        return LayerUploads(self.batch, self.number, self.device)

    @property
    def hosts(self) -> list[SequenceKV]:
        """The path of each row; rows that share one have the same object."""
        return self.batch.hosts(self.number)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Per row, the tokens of its host path that retrieval covers: those between sinks and tail, not forgotten."""
        start = retrieval_start(self.batch)
        starts = [start] * len(self._sinks) if start else self._sinks
        return list(zip(starts, self._retrieve_stops, strict=True))

    @property
    def retrieves(self) -> bool:
        """Whether there is anything between sinks and tail, in any row."""
        return any(stop > start for start, stop in self.ranges)

    # -- tokens come ---------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Put new columns (batch, kv_heads, new, dim) into the tail; a block moves to the host where it is full."""
        if self.window.room < key.shape[2]:
            self.spill()
        self.window.append(key, value, None if valid is None else valid.to(key.device))

    def spill(self, *, flush: bool = True) -> None:
        """Move everything beyond the window to the host; a buffer that has grown is as large as ever again.

        A captured graph is for windows of one size, and for one of another it would be captured again. flush: the host
        gets the whole tail, too; otherwise only what it needs now, and the caller does the rest later: `prepare_spill`.
        """
        moved = max(0, self.window.tail_len - self._size.kept)
        self.batch.spilled |= moved > 0
        if flush or self.host_columns < self.tail_start + moved:
            self.flush()
        self.window.drop_oldest(moved)
        self.tail_start += moved
        self._size.fit(self.window, self.window.tail_len)
        self.place_sinks(None)
        # paths that were too short for clusters when they were read
        for host, (row, *_) in rows_by_path(self.hosts) if self._config.estimates else []:
            start, stop = self.ranges[row]
            if host.clusters is None and stop - start >= CLUSTERED_FROM:
                cluster_stored(host, start, stop)

    def flush(self) -> None:
        """Copy the tail's columns that are not yet on the host there."""
        behind = self.columns - self.host_columns
        if behind:
            key, value = self.window.tail()
            valid = self.batch.padding(self.host_columns, self.columns)
            work = self.host_work(key[:, :, -behind:], value[:, :, -behind:], valid)
            with uninterrupted():  # or the next time the host would get them twice
                work.copy_now()
                self.host_columns = self.columns

    def host_work(
        self, key: Tensor, value: Tensor, valid: Tensor | None, make: Callable[..., HostWork] = HostWork
    ) -> HostWork:
        """New columns (batch, kv_heads, new, dim) that are to go to each row's path; shared paths split first."""
        work = make(self.number, self.fmt, self._config.threads, self.stats, (key, value))
        for row, host in enumerate(self.batch.writable(self.number)):
            if len(host) == 0:
                # address space only; memory is taken as tokens come
                tokens = key.shape[2]
                coded = host.spec.keeps_codes(host.head_dim)
                tokens = room_for(tokens) if coded else tokens + tokens // 2
                host.reserve(tokens + GENERATION_ROOM, sure=key.shape[2])
            work.append(row, host, None if valid is None else valid[row].numpy())
        return work

    def slide_of(self, tokens: slice) -> Slide | None:
        """Return how the window moves when a pass of these tokens of a batch ends; None if it moves by itself."""
        new = tokens.stop - tokens.start
        recent, found = min(new, self._size.kept), None
        if not self._size.grows and self.columns:
            found = Slide(self.window, self._dropped_by(recent), tokens.stop - recent, tokens.stop)
        return found if found is not None and found.is_plain else None

    def _dropped_by(self, recent: int) -> int:
        """Return the tokens that leave the tail when `recent` new ones come by a pass."""
        return max(0, self.window.tail_len - (self._size.kept - recent))

    def take_pass(self, done: PassTokens, work: HostWork, *, slid: bool = False) -> None:
        """The tokens of a pass are on their way to the host by `work`: put the last of them into the window.

        slid: the window has them already, see `slide_of`.
        """
        first = done if self.columns == 0 else None
        total = done.total + (self.host_columns if slid else self.columns)
        if not slid:
            self._take_recent(done)
        self.tail_start, self.host_columns = total - self.window.tail_len, total
        self.place_sinks(first, work)

    def _take_recent(self, done: PassTokens) -> None:
        recent = min(done.total, self._size.kept)
        dropped = self._dropped_by(recent)
        if self._size.grows:
            self._size.fit(self.window, self.window.tail_len + recent - dropped)
        span = slice(done.total - recent, done.total)
        key, value = done.new if recent == done.total else (part[:, :, span] for part in done.new)
        valid = None if done.valid is None else done.valid[:, span].to(key.device)
        self.window.slide(dropped, key, value, valid)

    def place_sinks(self, first: PassTokens | None, work: HostWork | None = None) -> None:
        """The tail has moved: compute sinks and the range that retrieval covers per row, and load missing sinks.

        first: the pass that brought the sequences' first tokens. work: on its way to the host; waited for if needed.
        """
        rows = range(self.window.batch)
        self._retrieve_stops = [self.batch.real(row, self.tail_start) for row in rows]
        forgotten = self.batch.forgotten
        most = forgotten.start if forgotten.tokens else self._config.sink
        if self.batch.paged_prefix is not None:  # the first tokens are attended to there
            most = 0
        counts = [min(most, middle) for middle in self._retrieve_stops]
        if counts == self._sinks and max(counts) == self.window.sink_len:
            return
        self._sinks = counts
        size = max(counts)
        keys, values = [], []
        if first is None and work is not None:
            work.finish_copy()
        for row, count in enumerate(counts):
            # straight from the model where possible: no rounding even when the host stores a smaller dtype
            key, value = first.first_of(row, count) if first is not None else self._read_host(self.hosts[row], 0, count)
            keys.append(nn.functional.pad(key, (0, 0, 0, size - count)))
            values.append(nn.functional.pad(value, (0, 0, 0, size - count)))
        valid = None
        if min(counts) < size:
            valid = torch.arange(size)[None] < torch.tensor(counts)[:, None]
            valid = valid.to(self.device)
        self.window.set_sinks(torch.stack(keys), torch.stack(values), valid)

    def in_window(self, row: int, start: int, stop: int) -> tuple[int, int] | None:
        """Return the tokens of a row, out of [start, stop), that the tail has; without any, those of the sinks.

        None if the window has none of them.
        """
        tail = max(start, self._retrieve_stops[row])
        if tail < stop:
            return tail, stop
        sinks = min(stop, self._sinks[row])
        return (start, sinks) if start < sinks else None

    def _read_host(self, host: SequenceKV, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values (kv_heads, tokens, dim) of tokens [start, stop), on the device in the model's dtype."""
        key, value = host.read(start, stop)
        tail_key, tail_value = self.window.tail()
        return to_device(key, self.fmt, tail_key), to_device(value, self.fmt, tail_value)

    def forget(self, span: Forgotten, turn: Callable[[Tensor], Tensor]) -> None:
        """Keep span.start sinks, their keys turned: turn(keys (batch, kv_heads, span.start, head_dim) at their own
        positions). The batch counts `span` as forgotten from then on.
        """
        key, value = sinks_of(self.window)
        plain = key.cpu() if self.unturned_sinks is None else self.unturned_sinks
        self.unturned_sinks = plain[:, :, : span.start].clone()
        turned = turn(self.unturned_sinks.to(self.device))
        self.window.set_sinks(turned, value[:, :, : span.start].clone(), None)
        self._sinks = [span.start] * self.window.batch

    # -- rows and cropping ---------------------------------------------------------------------------

    def select(self, rows: list[int]) -> None:
        """Keep the windows of these rows, in this order, repeats allowed."""
        self.window.select(torch.tensor(rows, dtype=torch.int64))
        if self.unturned_sinks is not None:
            self.unturned_sinks = self.unturned_sinks[rows]
        self._sinks = [self._sinks[row] for row in rows]
        self._retrieve_stops = [self._retrieve_stops[row] for row in rows]

    def fork(self, batch: Batch, stats: LayerStats, *, copied: bool = True) -> LayerKV:
        """The same tokens for a fork of the batch: the host's are shared, the window is copied.

        copied: see `RetrievalCache.view`.
        """
        other = object.__new__(LayerKV)
        other.__dict__.update(self.__dict__)
        other.batch, other.stats = batch, stats
        # what a fork continues may have kept no room: it is made again, of the size that captured graphs know
        if copied:
            other.window = self.window.clone(self._size.slots(self.window.tail_len), self._config.sink)
        other._sinks, other._retrieve_stops = list(self._sinks), list(self._retrieve_stops)
        return other

    def drop_newest(self, count: int) -> None:
        """Forget the `count` newest columns, at most all but one."""
        columns = self.columns - count
        # A tail that keeps at least half a window is good enough; a shorter one is read back from the host.
        inside_tail = self.tail_start == 0 or columns - self.tail_start >= max(1, self._config.window // 2)
        if not inside_tail:
            self.flush()
        if columns < self.host_columns:
            for host, (row, *_) in rows_by_path(self.hosts):
                host.truncate(self.batch.real(row, columns))
            self.host_columns = columns
        if inside_tail:
            self.window.truncate(count)
        else:
            self._reload_tail(columns)

    def _reload_tail(self, columns: int) -> None:
        """The crop to `columns` columns went past the window: read a new tail back from the host."""
        forgotten, sinks = self.batch.forgotten, sinks_of(self.window)
        start = max(retrieval_start(self.batch), columns - self._size.kept)
        padding = self.batch.padding(start, columns)
        keys, values = [], []
        for row, host in enumerate(self.hosts):
            key, value = self._read_host(host, self.batch.real(row, start), len(host))
            if padding is not None:
                key, value = _spread(key, padding[row]), _spread(value, padding[row])
            keys.append(key)
            values.append(value)
        tail_key, tail_value = self.window.tail()
        self.window = _new_window(self._config, tail_key, tail_value)
        self.window.append(torch.stack(keys), torch.stack(values), None if padding is None else padding.to(self.device))
        self.tail_start = start
        if forgotten.tokens:
            self.window.set_sinks(*sinks, None)  # turned ones
        else:
            self._sinks = [0] * len(keys)
        self.place_sinks(None)

    def begin_column(self) -> None:
        """Count one more column of real tokens, whose slot at the end of the tail the caller writes.

        Spills a block to the host first if the tail is full.
        """
        if self.window.room < 1:
            self.spill()
        self.window.make_room(1)
        self.window.note_appended(1)

    def first_row(self) -> tuple[SequenceKV, tuple[int, int]]:
        """Return the path of the first row and its entry of `ranges`."""
        start = retrieval_start(self.batch)
        return self.batch.sequences[0].kv[self.number], (start or self._sinks[0], self._retrieve_stops[0])

    def prepare_spill(self) -> None:
        """Do the work of the next spill ahead: flush, and assign clusters to the tokens that it moves.

        Search and estimate cover the same tokens as before.
        """
        self.flush()
        for host, (row, *_) in rows_by_path(self.hosts) if self._config.estimates else []:
            stop = self._retrieve_stops[row]
            if host.clusters is not None:
                join_clusters(host, stop, min(stop + self._config.spill, len(host)))

    def take_paged(self, total: int) -> None:
        """Count `total` more columns that are stored in pages, not in the window or on the host."""
        self.tail_start = self.host_columns = self.tail_start + total
        self._retrieve_stops = [self.tail_start] * self.window.batch
        for host in self.batch.writable(self.number):
            keep_no_memory(host, self.tail_start)

    def edge(self) -> tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the device's part of one row without padding: its start as numbers, and views of keys and values.

        Keys and values of the sinks and of the tail, each (1, kv_heads, tokens, dim).
        """
        window = self.window
        low, sinks = window.span[0], window.sink_len
        numbers = {"tail_start": self.tail_start, "sinks": self._sinks[0], "stop": self._retrieve_stops[0]}
        return numbers, (*(part[:, :, low : low + sinks] for part in window.buffers), *window.tail())  # type: ignore[return-value]

    def restore_edge(self, numbers: dict[str, Any], sinks: tuple[Tensor, Tensor], tail: tuple[Tensor, Tensor]) -> None:
        """Restore the state that `edge` returned. The layer has no tokens but those of its path on the host."""
        self.window.append(*tail, None)
        self.window.set_sinks(*sinks, None)
        self.tail_start, self.host_columns = int(numbers["tail_start"]), len(self.hosts[0])
        self._sinks, self._retrieve_stops = [int(numbers["sinks"])], [int(numbers["stop"])]

    def bring_to_pages(self, layers: PagedLayers, span: PagedSpan, first: int) -> None:
        """Copy the tokens of one row from `first` to its tail from the host to the pages of `span`.

        No token may be padding, forgotten or in another row's pages.
        """
        dtype, cut = self.window.buffers[0].dtype, functools.partial(UploadSpan.of, stop=span.tokens, start=first)
        stored = self.fmt is Format.INT8
        for _, key, value in self.uploads.walk([cut(self.hosts[0])], None if stored else dtype, last=True, cut=cut):
            layers.write(self.number, span, key, value, dtype, first)
            first += key.shape[2]

    def keep_the_rest(self, new: int) -> None:
        """Keep all later tokens in the tail: the earlier ones, sinks included, are in pages and none is retrieved.

        new: maximum number of later tokens, as far as it is known.
        """
        least = kept_tokens(self.window.tail_len + max(0, new - FULL_ROOM))
        self._size = self._size._replace(kept=MAX_KEYS, grows=True, least=least)
        self._size.fit(self.window, self.window.tail_len)
        self.place_sinks(None)

    def retrieves_after(self, total: int) -> bool:
        """Predict `retrieves` after a pass of `total` tokens, see `take_pass`; with padding, maybe True in error."""
        tail = min(self.window.tail_len + total, self._size.kept)
        first = retrieval_start(self.batch) or (0 if self.batch.paged_prefix is not None else self._config.sink)
        return self.columns + total - tail > first


def _new_window(config: Config, key: Tensor, value: Tensor) -> WindowCache:
    return WindowCache(key, value, TailSize.of(config).slots(0), config.sink)


def _spread(tokens: Tensor, real: Tensor) -> Tensor:
    """(kv_heads, real tokens, dim) -> (kv_heads, columns, dim) with zeros in padded columns."""
    spread = tokens.new_zeros(tokens.shape[0], len(real), tokens.shape[2])
    spread[:, real.to(tokens.device)] = tokens
    return spread
