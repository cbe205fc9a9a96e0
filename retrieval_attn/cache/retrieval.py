"""RetrievalLayer: sinks and window on the device, all tokens on the host behind an index.

Positions: a *column* counts the padded batch from 0; a row's host path holds only its real tokens.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from retrieval_attn.cache.exact import ExactPass
from retrieval_attn.cache.layer import CacheLayer, LayerStats
from retrieval_attn.config import Config
from retrieval_attn.cpu.store import HostPath, attend_paths, held_bytes
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.gpu.attention.merge import Partial, merge
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.gpu.codes.search import CodeShape
from retrieval_attn.index.base import KeyIndex
from retrieval_attn.memory.device_room import IndexChoice
from retrieval_attn.model.hooks import MaskSpec
from retrieval_attn.model.padding import count_real, join
from retrieval_attn.offload.queries import TrainingQueries
from retrieval_attn.offload.transfer import host_format, to_device, to_queries
from retrieval_attn.offload.work import HostWork, make_room

_Asked = tuple[HostPath, list[int], "np.ndarray[Any, Any]", tuple[int, int]]
"""A path, the rows that share it, their queries (q_heads, rows * count, head_dim), the range of tokens."""

# Tokens a sequence may gain after its prompt before its host memory continues in a second segment.
GENERATION_ROOM = 16384


class RetrievalLayer(CacheLayer):
    """A full-attention layer: sinks and window on the device, everything on the host behind an index.

    hosts: one HostPath per row; rows of a fork or a beam share one object until their tails differ on the
    host (copy on write), so a prompt's keys are held once however many sequences continue it.
    """

    def __init__(self, config: Config, index: IndexChoice, model: nn.Module | None = None, number: int = 0) -> None:
        """index: of all layers of the cache. model: the model the layer belongs to; without it training queries stay at
        their own positions. number: of the layer in the model, for error messages.
        """
        super().__init__(config)
        self._number = number
        self._model = None if model is None else weakref.ref(model)
        self._index, self._spec = index, index.spec
        self._sample: TrainingQueries | None = None
        self._work: HostWork | None = None
        self.hosts: list[HostPath] = []
        self.host_columns = 0  # columns [0, host_columns) are on the host; the tail may be ahead of it
        self.tail_start = 0  # columns [tail_start, columns) are in the window's tail
        self._sinks = [0]  # sink tokens per row
        self._middle = [0]  # real tokens per row before tail_start: retrieval covers [sinks, middle)
        self._pass: ExactPass | None = None
        self._expect_total: int | None = None

    def reset(self) -> None:
        self.abandon()
        self._work = None
        super().reset()
        self._sample = None
        self.hosts = []
        self.host_columns = self.tail_start = 0
        self._pass = None
        self._expect_total = None

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory for keys, values and indexes, shared paths counted once."""
        self.finish_index()
        return held_bytes(self.hosts)

    @property
    def coded_indexes(self) -> dict[int, KeyIndex]:
        """Indexes that keep codes of keys in device memory, each once, by identity."""
        self.finish_index()
        indexes = [index for host in self.hosts for one in host.segments for index in one.indexes]
        return {id(index): index for index in indexes if index.keeps_device_keys}

    @property
    def coded_nbytes(self) -> int:
        """Bytes of device memory for codes of keys, each index's once."""
        return sum(index.device_nbytes for index in self.coded_indexes.values())

    def index_kinds(self) -> Counter[str]:
        """Kinds of the indexes over this layer's host keys, and how many heads have each."""
        self.finish_index()
        kinds: Counter[str] = Counter()
        for host in _distinct(self.hosts):
            kinds.update(host.index_kinds)
        return kinds

    def index_notes(self) -> list[str]:
        """Why each head has the index it has, where something chose it."""
        self.finish_index()
        return [note for host in _distinct(self.hosts) for note in host.index_notes]

    def begin_pass(self, total: int) -> None:
        self._expect_total = total

    def end_pass(self) -> None:
        self._expect_total = None
        if self._pass is not None:
            self._commit(self._pass)
            self._pass = None

    def _expected_offset(self) -> int:
        return self.columns + (self._pass.filled if self._pass is not None else 0)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float, softcap: float | None
    ) -> Partial:
        self.finish_index()
        if self.window is None:
            self._spec = self._index.decide(self._expect_total or key.shape[2], key.shape[0])
            self._start(key, value)
        total = self._expect_total if self._expect_total is not None else key.shape[2]
        if self._pass is None and self.columns > 0 and not self._appends_exactly(total):
            return self._decode(query, key, value, spec, scale, softcap)
        if self._pass is None:
            self._pass = self._open_pass(total)
            count = self._spec.training_queries(total, self.config.train_queries)
            self._sample = TrainingQueries(total, count) if self._spec.trains else None
        if self._sample is not None:
            self._sample.take(query, self._pass.filled)
        seen = join(self.valid, self.columns, self._pass.valid, self._pass.filled, key.shape[0])
        valid = self._new_columns(spec, key.shape[2], seen)
        part = self._pass.step(query, key, value, valid, scale, softcap)
        if self._expect_total is None:
            self.end_pass()
        return part

    def _start(self, key: Tensor, value: Tensor) -> None:
        """First tokens ever: shapes, dtypes and device are known now."""
        self.fmt = host_format(self.config.host_dtype, key.dtype)
        self.window = WindowCache(key, value, self.config.window + self.config.spill, self.config.sink)
        rows = key.shape[0]
        self.hosts = [self._new_host(key, value.shape[3]) for _ in range(rows)]
        self._sinks = [0] * rows
        self._middle = [0] * rows

    def _new_host(self, key: Tensor, value_dim: int) -> HostPath:
        return HostPath(
            key.shape[1],
            key.shape[3],
            value_dim,
            self.fmt,
            index=self._spec,
            threads=self.config.threads,
            layer=self._number,
        )

    # -- prefill and exact append -------------------------------------------------------------------

    def _appends_exactly(self, total: int) -> bool:
        """Whether so many tokens after others attend to all of them exactly."""
        return self.config.exact_append and total > self.config.decode_tokens

    def _open_pass(self, total: int) -> ExactPass:
        """Bring this layer's past to its device: the pass attends to it exactly, one layer at a time."""
        assert self.window is not None
        self.stats.wait_seconds += make_room(self.window.tail()[0].device)
        if self.columns > self.host_columns:
            self._flush()
        tail_key, tail_value = self.window.tail()
        past: dict[int, tuple[Tensor, Tensor]] = {}
        if self.columns > 0:
            for host in _distinct(self.hosts):
                key, value = host.read(0, len(host))
                past[id(host)] = (
                    to_device(key, self.fmt, tail_key)[None],
                    to_device(value, self.fmt, tail_value)[None],
                )
        return ExactPass(total, [past.get(id(host)) for host in self.hosts])

    def _commit(self, done: ExactPass) -> None:
        """Move a finished pass to its places: host, window, sinks, index."""
        assert self.window is not None and done.key is not None and done.value is not None
        if done.filled != done.total:
            raise CacheMismatchError(f"A pass announced {done.total} tokens and brought {done.filled}.")
        first_tokens = self.columns == 0
        self.valid = join(self.valid, self.columns, done.valid, done.total, self.window.batch)
        work = self._work = self._host_work(done.key, done.value, done.valid)
        work.start_copy()
        self.columns += done.total
        self.host_columns = self.columns
        recent = min(done.total, self.config.window)
        self.window.drop_oldest(self.window.tail_len - min(self.window.tail_len, self.config.window - recent))
        span = slice(done.total - recent, done.total)
        window_valid = None if done.valid is None else done.valid[:, span].to(done.key.device)
        self.window.append(done.key[:, :, span], done.value[:, :, span], window_valid)
        self._move_tail_start(done if first_tokens else None)
        for row, host in _distinct_rows(self.hosts):
            start, stop = self._sinks[row], self._middle[row]
            if stop <= start:
                continue
            if not first_tokens and 2 * host.indexed_tokens >= stop - start:
                work.extend(host, stop)
            else:
                work.index(host, start, stop, self._training_queries(row, done), functools.partial(done.keys_of, row))
        self._sample = None
        work.start_build()

    def _host_work(self, key: Tensor, value: Tensor, valid: Tensor | None) -> HostWork:
        """New columns (batch, kv_heads, new, dim) that are to go to each row's path; shared paths split first."""
        work = HostWork(self._number, self.fmt, self.config.threads, self.stats, (key, value))
        owned: set[int] = set()
        for row, host in enumerate(self.hosts):
            if self.hosts.count(host) > 1 and id(host) not in owned:
                host = self.hosts[row] = host.fork()
            owned.add(id(host))
            if len(host) == 0:
                # address space only; memory is taken as tokens come
                host.reserve(key.shape[2] + key.shape[2] // 2 + GENERATION_ROOM)
            work.append(row, host, None if valid is None else valid[row].numpy())
        return work

    def _training_queries(self, row: int, done: ExactPass) -> Tensor | None:
        module = None if self._owner is None else self._owner()
        if self._sample is None or module is None:
            return None
        model = None if self._model is None else self._model()
        return self._sample.on_device(model, module, row, None if done.valid is None else done.valid[row])

    def finish_index(self) -> None:
        """Keys that are still being copied or indexed must be ready before anything else happens to the layer.

        Raises what went wrong with them, with the layer named.
        """
        work, self._work = self._work, None
        if work is not None:
            try:
                work.finish()
            except BaseException:
                self._work = work  # what failed, or was interrupted, is not forgotten
                raise

    def check_index(self) -> None:
        """Raise what has gone wrong so far with keys that are being copied or indexed, without waiting."""
        if self._work is not None:
            self._work.check()

    def abandon(self) -> None:
        """Stop copying and indexing soon, without waiting: reading was interrupted, and the cache is of no more use."""
        if self._work is not None:
            self._work.abandon()

    def mark(self) -> object:
        if self._pass is None:
            decodes = self.columns > 0 and not self._appends_exactly(self._expect_total or 0)
            return None if decodes else _Mark(self.columns)
        sampled = 0 if self._sample is None else self._sample.mark()
        return _Mark(self.columns, self._pass.mark(), sampled)

    def restore(self, mark: object) -> bool:
        if not isinstance(mark, _Mark) or self.columns != mark.columns:
            return False
        self._pending = None
        if self._pass is not None and mark.filled is not None:
            self._pass.restore(mark.filled)
            if self._sample is not None:
                self._sample.restore(mark.sampled)
        else:
            self._pass = self._sample = None
        return True

    def _move_tail_start(self, first: ExactPass | None) -> None:
        """Recompute what the tail starts at, the sinks, and the range that retrieval covers, per row."""
        assert self.window is not None
        self.tail_start = self.columns - self.window.tail_len
        rows = range(self.window.batch)
        self._middle = [count_real(self.valid, row, self.tail_start) for row in rows]
        wanted = [min(self.config.sink, middle) for middle in self._middle]
        if wanted == self._sinks and max(wanted) == self.window.sink_len:
            return
        self._sinks = wanted
        size = max(wanted)
        tail_key, tail_value = self.window.tail()
        keys, values = [], []
        for row, count in enumerate(wanted):
            if first is not None:
                # straight from the model: no rounding even when the host stores a smaller dtype
                key, value = first.first_of(row, count)
            else:
                if self._work is not None:
                    self._work.finish_copy()
                key_host, value_host = self.hosts[row].read(0, count)
                key, value = (
                    to_device(key_host, self.fmt, tail_key),
                    to_device(value_host, self.fmt, tail_value),
                )
            keys.append(nn.functional.pad(key, (0, 0, 0, size - count)))
            values.append(nn.functional.pad(value, (0, 0, 0, size - count)))
        valid = None
        if min(wanted) < size:
            valid = torch.arange(size)[None] < torch.tensor(wanted)[:, None]
            valid = valid.to(tail_key.device)
        self.window.set_sinks(torch.stack(keys), torch.stack(values), valid)

    # -- decode -------------------------------------------------------------------------------------

    def code_shape(self, head_dim: int) -> CodeShape | None:
        """What a captured step searches codes on the device by; None where the index has none there."""
        retrieve = self.config.retrieve
        shape = None if isinstance(retrieve, float | str) else self._spec.code_shape(head_dim, retrieve)
        return None if shape is None else CodeShape(*shape)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Per row, the tokens of its host path that retrieval covers: those between sinks and tail."""
        return list(zip(self._sinks, self._middle, strict=True))

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float, softcap: float | None
    ) -> Partial:
        """Sinks and window exactly on the device, the middle through the index on the host, one merge."""
        assert self.window is not None
        count = key.shape[2]
        valid = self._new_columns(spec, count, self.valid)
        if self.window.room < count:
            self.spill()
        self.window.append(key, value, None if valid is None else valid.to(key.device))
        self.valid = join(self.valid, self.columns, valid, count, key.shape[0])
        self.columns += count
        static = self.window.attend(query, scale=scale, softcap=softcap)
        if all(middle <= sinks for middle, sinks in zip(self._middle, self._sinks, strict=True)):
            return static
        return merge([static, self._retrieve(query, static.lse, value.shape[3], scale, softcap)])

    def _retrieve(
        self, query: Tensor, static_lse: Tensor, value_dim: int, scale: float, softcap: float | None
    ) -> Partial:
        """Retrieved attention for every row, in one call; rows that share a path ask it together."""
        started = time.perf_counter()
        batch, q_heads, count, _ = query.shape
        out = torch.zeros(batch, q_heads, count, value_dim, dtype=torch.float32)
        lse = torch.full((batch, q_heads, count), -torch.inf, dtype=torch.float32)
        queries = to_queries(query)  # (batch, q_heads, count, head_dim) float32 on the CPU
        asked = []
        for host in _distinct(self.hosts):
            rows = [row for row, other in enumerate(self.hosts) if other is host]
            start, stop = self._sinks[rows[0]], self._middle[rows[0]]
            if stop > start:
                stacked = queries[rows].transpose(1, 0, 2, 3).reshape(q_heads, len(rows) * count, -1)
                asked.append((host, rows, stacked, (start, stop)))
        for retrieve, group in self._by_count(asked):
            hosts, all_rows, stacks, ranges = zip(*group, strict=True)
            found = attend_paths(hosts, stacks, ranges, retrieve, scale=scale, softcap=softcap)
            for rows, part in zip(all_rows, found, strict=True):
                shape = (q_heads, len(rows), count)
                out[rows] = torch.from_numpy(part.out).reshape(*shape, value_dim).transpose(0, 1)
                lse[rows] = torch.from_numpy(part.lse).reshape(shape).transpose(0, 1)
                self.stats.keys_scanned += part.keys_scanned
                self.stats.bytes_read += part.bytes_read
                self.stats.search_seconds += part.search_seconds
                self.stats.attend_seconds += part.attend_seconds
        self.stats.host_seconds += time.perf_counter() - started
        if self.config.mass_heads:
            self._measure_mass(asked, static_lse.cpu(), lse, scale, softcap)
        return Partial(out.to(query.device), lse.to(query.device))

    def _by_count(self, asked: list[_Asked]) -> list[tuple[int | None, list[_Asked]]]:
        """Paths that retrieve as many keys can be searched in one call; a share of the keys differs by length."""
        groups: dict[int | None, list[_Asked]] = {}
        for one in asked:
            start, stop = one[3]
            groups.setdefault(self.config.retrieve_count(stop - start), []).append(one)
        return list(groups.items())

    def _measure_mass(
        self, asked: list[_Asked], static: Tensor, retrieved: Tensor, scale: float, softcap: float | None
    ) -> None:
        """Add the share of exact attention's weight that sinks, window and retrieved keys have, for some heads.

        static, retrieved: log-sum-exp (batch, q_heads, count). The heads take turns from step to step.
        """
        q_heads, count = retrieved.shape[1:]
        first = self.stats.mass_count
        heads = [(first + i) % q_heads for i in range(min(self.config.mass_heads, q_heads))]
        for host, rows, stacked, (start, stop) in asked:
            exact = host.exact_lse(stacked, start, stop, heads, scale=scale, softcap=softcap)
            shape = (len(heads), len(rows), count)
            middle = torch.from_numpy(exact).reshape(shape).transpose(0, 1)
            near = static[rows][:, heads]
            share = torch.logaddexp(near, retrieved[rows][:, heads]) - torch.logaddexp(near, middle)
            self.stats.mass += float(share.exp().sum())
            self.stats.mass_count += share.numel()

    def _flush(self) -> None:
        """Copy the tail's columns that are not yet on the host there."""
        assert self.window is not None
        behind = self.columns - self.host_columns
        if behind == 0:
            return
        key, value = self.window.tail()
        valid = None if self.valid is None else self.valid[:, self.host_columns : self.columns]
        self._host_work(key[:, :, -behind:], value[:, :, -behind:], valid).copy_now()
        self.host_columns = self.columns

    def spill(self) -> None:
        """The tail is full: everything beyond the window moves to the host."""
        assert self.window is not None
        self._flush()
        self.window.drop_oldest(max(0, self.window.tail_len - self.config.window))
        self._move_tail_start(None)

    # -- rows and cropping --------------------------------------------------------------------------

    def _select(self, rows: Tensor) -> None:
        self.finish_index()
        if self.window is None:
            return
        picked = rows.tolist()
        self.window.select(rows)
        self.hosts = [self.hosts[row] for row in picked]
        self._sinks = [self._sinks[row] for row in picked]
        self._middle = [self._middle[row] for row in picked]
        if self.valid is not None:
            self.valid = self.valid[picked]

    def fork(self) -> RetrievalLayer:
        """An independent continuation that shares all host memory and index with this layer."""
        self.finish_index()
        self.settle()
        other = RetrievalLayer(self.config, self._index)
        other.__dict__.update(self.__dict__)
        other.graph = None
        other.stats = LayerStats()
        other.window = None if self.window is None else self.window.clone()
        copies = {id(host): host.fork() for host in _distinct(self.hosts)}
        other.hosts = [copies[id(host)] for host in self.hosts]
        other._sinks, other._middle = list(self._sinks), list(self._middle)
        return other

    def _crop(self, count: int) -> None:
        self.finish_index()
        assert self.window is not None
        columns = self.columns - count
        if columns == 0:
            self.reset()
            return
        # A tail that keeps at least half a window is good enough; a shorter one is read back from the host.
        inside_tail = self.tail_start == 0 or columns - self.tail_start >= max(1, self.config.window // 2)
        if not inside_tail:
            self._flush()
        if columns < self.host_columns:
            for row, host in _distinct_rows(self.hosts):
                host.truncate(count_real(self.valid, row, columns))
            self.host_columns = columns
        self.columns = columns
        if self.valid is not None:
            self.valid = self.valid[:, :columns]
        if inside_tail:
            self.window.truncate(count)
        else:
            self._reload_tail()

    def _reload_tail(self) -> None:
        """The crop went past the window: read a new one back from the host."""
        assert self.window is not None
        tail_key, tail_value = self.window.tail()
        start = max(0, self.columns - self.config.window)
        width = self.columns - start
        keys, values = [], []
        for row, host in enumerate(self.hosts):
            key_host, value_host = host.read(count_real(self.valid, row, start), len(host))
            key, value = to_device(key_host, self.fmt, tail_key), to_device(value_host, self.fmt, tail_value)
            if self.valid is not None:
                real = self.valid[row, start:]
                key, value = _spread(key, real, width), _spread(value, real, width)
            keys.append(key)
            values.append(value)
        valid = None if self.valid is None else self.valid[:, start:].to(tail_key.device)
        self.window = WindowCache(tail_key, tail_value, self.config.window + self.config.spill, self.config.sink)
        self.window.append(torch.stack(keys), torch.stack(values), valid)
        self._sinks = [0] * len(self.hosts)
        self._move_tail_start(None)


class _Mark(NamedTuple):
    """How far a layer is: columns stored, and what of a pass under way was filled (None: there is none), sampled."""

    columns: int
    filled: object = None
    sampled: int = 0


def _distinct(hosts: list[HostPath]) -> list[HostPath]:
    return list({id(host): host for host in hosts}.values())


def _distinct_rows(hosts: list[HostPath]) -> list[tuple[int, HostPath]]:
    """One representative row per distinct path."""
    first: dict[int, tuple[int, HostPath]] = {}
    for row, host in enumerate(hosts):
        first.setdefault(id(host), (row, host))
    return list(first.values())


def _spread(tokens: Tensor, real: Tensor, width: int) -> Tensor:
    """(kv_heads, real tokens, dim) -> (kv_heads, width, dim) with zeros in padded columns."""
    spread = tokens.new_zeros(tokens.shape[0], width, tokens.shape[2])
    spread[:, real.to(tokens.device)] = tokens
    return spread
