"""`Sequence`: one row's token ids, its length, and per layer its keys and values on the host. `Batch`: rows that decode
together.

This is the one place that says how long anything is. Layers, windows and the captured step are views of it: they ask
`Batch.columns`, and only `Batch.commit`, `Batch.crop` and `Batch.reset` change a length. Fork, crop, reorder and
repeat are operations on lists of sequences; keys and values are never copied for them.

A *column* counts the tokens of the padded batch from 0; a sequence holds only its real tokens.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrieval_attn.attention.paged_prefix import PagedPrefix
from retrieval_attn.config import QuestionAttention
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.model.image_embedding import PromptImages
from retrieval_attn.model.padding import Padding, join
from retrieval_attn.model.rope import Factors
from retrieval_attn.model.weights import WeightState
from retrieval_attn.offload.staging import brought_together
from retrieval_attn.offload.upload import Uploads, UploadSpan, as_blocks


class Forgotten(NamedTuple):
    """Tokens [start, stop) of every row that nothing attends to any more. Those before are sinks, turned to stand
    directly before `stop`.
    """

    start: int = 0
    stop: int = 0

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


class Sequence:
    """One row. length: tokens that every layer has stored.

    kv: per layer number, the layer's keys and values on the host: immutable segments and one growing tail. Sequences
    of one batch may share these objects; the first to write takes its own (`Batch.writable`).
    token_ids: int64, of the first tokens, as far as a caller has said them: at most `length`. Every fork copies them,
    and every question makes a tensor of them: a list takes fifty times as long.
    """

    def __init__(self) -> None:
        self.length = 0
        self.token_ids: array[int] = array("q")
        self.kv: dict[int, SequenceKV] = {}

    def __len__(self) -> int:
        return self.length

    def copy(self) -> Sequence:
        """A sequence of the same tokens that shares the objects in `kv`."""
        other = Sequence()
        other.length, other.token_ids, other.kv = self.length, self.token_ids[:], dict(self.kv)
        return other

    def crop(self, length: int) -> None:
        """Count only the first `length` tokens. The owner of `kv` truncates that."""
        self.length = length
        del self.token_ids[length:]


class Batch:
    """The rows of one cache. columns: how many columns every layer has stored. epoch: changes with them. rewritten: how
    often columns became others than they were, and did not only become more.

    valid: (batch, some first columns) CPU bool, True for a real token; None: no padding. Columns behind it are real.
    forgotten: what no token attends to from now on; columns count them still. exact: the first columns, where they lie
    in pages and not in the layers; None: they do not.
    devices: per layer number, where the layer computes, as far as it has. uploads: per device, what brings keys back.
    question_attention: how questions attend to earlier tokens; None: as the layers' options say. attends_to_all: new
    tokens of a step attend to every key on the host, and none is estimated.
    factors: rotary factors that the keys were turned with, of a model whose factors depend on the length of the text.
    weights: state of the model's weights that the keys were computed with.
    images: of the one sequence, those that are read next included; None: it has none.
    rows_alone: padding takes no place in a row's sliding windows, as if the row were alone; False: it does, as in
    transformers, whose masks count columns.
    broken: why nothing can follow, a forward failed half-way; "" else. spilled: full windows moved tokens to the host,
    until a reader of it sets False.
    copies: columns after a pass, and by numbers of tokens whether their codes have room, as its first layer found.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.columns = 0
        self.valid: Tensor | None = None
        self.epoch = self.rewritten = 0
        self.forgotten = Forgotten()
        self.paged_prefix: PagedPrefix | None = None
        self.question_attention: QuestionAttention | None = None
        self.attends_to_all = False
        self.devices: dict[int, torch.device] = {}
        self.uploads: dict[torch.device, Uploads] = {}
        self.factors: Factors | None = None
        self.weights: WeightState | None = None
        self.images: PromptImages | None = None
        self.rows_alone = False
        self.broken = ""
        self.spilled = False
        self.copies: tuple[int, dict[int, bool]] = 0, {}

    def start(self, rows: int) -> None:
        """Make the sequences of an empty batch. Raises CacheMismatchError if there are others than `rows`, or if it is
        broken.
        """
        if self.broken:
            raise CacheMismatchError(f"This cache cannot be used any more, a forward failed: {self.broken}")
        if not self.sequences:
            self.sequences = [Sequence() for _ in range(rows)]
        elif len(self.sequences) != rows:
            raise CacheMismatchError(
                f"This cache holds {len(self.sequences)} sequences, the forward has {rows}; use "
                "cache.batch_repeat_interleave(n), or a cache of its own for the other batch."
            )

    @contextlib.contextmanager
    def retrieving(self) -> Iterator[None]:
        """Have new tokens in this context retrieve, however many a forward has."""
        before, self.question_attention = self.question_attention, "retrieval"
        try:
            yield
        finally:
            self.question_attention = before

    # -- columns and padding ------------------------------------------------------------------------

    def note_padding(self, padding: Padding | None, start: int, count: int) -> Tensor | None:
        """Which of the new columns [start, start + count) are real: (batch, count) CPU bool, None for all.

        Every layer of a forward asks; the first answer is kept. Raises CacheMismatchError where the mask contradicts
        what it said of earlier columns.
        """
        seen = None if self.valid is None else self._covering(start)[:, :start]
        new = None if padding is None else padding.columns(start, start + count, seen)
        if new is not None and (self.valid is None or self.valid.shape[1] < start + count):
            self.valid = join(seen, start, new, count, len(self.sequences))
        return new

    def real(self, row: int, stop: int) -> int:
        """Real tokens of `row` among columns [0, stop)."""
        if self.valid is None:
            return stop
        return int(self.valid[row, :stop].sum()) + max(0, stop - self.valid.shape[1])

    def padding(self, start: int, stop: int) -> Tensor | None:
        """(batch, stop - start) CPU bool of these columns; None where there is no padding anywhere."""
        return None if self.valid is None else self._covering(stop)[:, start:stop]

    def commit(self, count: int) -> None:
        """Every layer has stored `count` more columns: from now on they are part of the sequences."""
        before, self.columns, self.epoch = self.columns, self.columns + count, self.epoch + 1
        for row, sequence in enumerate(self.sequences):
            sequence.length += count if self.valid is None else self.real(row, self.columns) - self.real(row, before)

    def crop(self, columns: int) -> None:
        """Forget the columns from `columns` on, also those of a forward that failed. Layers have cropped already."""
        self.columns, self.epoch, self.rewritten = columns, self.epoch + 1, self.rewritten + 1
        if self.valid is not None:
            self.valid = self.valid[:, :columns]
        for row, sequence in enumerate(self.sequences):
            sequence.crop(self.real(row, columns))

    def _covering(self, stop: int) -> Tensor:
        """`valid` over columns [0, stop) at least: columns behind it are real."""
        assert self.valid is not None
        missing = stop - self.valid.shape[1]
        return self.valid if missing <= 0 else nn.functional.pad(self.valid, (0, missing), value=True)

    def reset(self) -> None:
        """No rows and no tokens."""
        self.sequences, self.columns, self.valid, self.epoch = [], 0, None, self.epoch + 1
        self.rewritten += 1
        self.uploads, self.forgotten, self.paged_prefix, self.broken = {}, Forgotten(), None, ""
        self.factors = self.weights = self.images = None

    def snapshot(self) -> dict[str, Any]:
        """The batch as it is, for `restore`."""
        return {**vars(self), "sequences": [sequence.copy() for sequence in self.sequences]}

    def restore(self, state: dict[str, Any]) -> None:
        """Be as when `snapshot` was made. The owner of the paths truncates them."""
        vars(self).update(state, epoch=self.epoch + 1, rewritten=self.rewritten + 1, uploads={})

    # -- rows ---------------------------------------------------------------------------------------

    def select(self, rows: Items[int]) -> None:
        """Continue with these rows, in this order, repeats allowed. The host's part is shared, not copied."""
        self.sequences = [self.sequences[row].copy() for row in rows]
        self.rewritten += 1
        if self.valid is not None:
            self.valid = self.valid[list(rows)]

    def fork(self) -> Batch:
        """An independent batch of the same sequences: segments and indexes are shared, both may go on."""
        other = Batch()
        other.columns, other.valid, other.epoch = self.columns, self.valid, self.epoch
        other.devices, other.forgotten, other.broken = dict(self.devices), self.forgotten, self.broken
        other.paged_prefix, other.factors, other.weights = self.paged_prefix, self.factors, self.weights
        other.images, other.rows_alone = self.images, self.rows_alone
        other.question_attention, other.attends_to_all = self.question_attention, self.attends_to_all
        other.sequences = [sequence.copy() for sequence in self.sequences]
        copies: dict[int, SequenceKV] = {}
        for sequence in other.sequences:
            for number, host in sequence.kv.items():
                if id(host) not in copies:
                    copies[id(host)] = host.fork()
                sequence.kv[number] = copies[id(host)]
        return other

    # -- the host's part of a layer -----------------------------------------------------------------

    def hosts(self, number: int) -> list[SequenceKV]:
        """The paths of layer `number`, one per row, the same object for rows that share one; none for other layers."""
        return [sequence.kv[number] for sequence in self.sequences if number in sequence.kv]

    def writable(self, number: int) -> list[SequenceKV]:
        """The same, after rows that share a path got paths of their own: their next tokens differ."""
        hosts = self.hosts(number)
        taken: set[int] = set()
        for sequence, host in zip(self.sequences, hosts, strict=True):
            if id(host) in taken:
                sequence.kv[number] = host.fork()
            taken.add(id(host))
        return self.hosts(number)

    # -- token ids ----------------------------------------------------------------------------------

    def note_ids(self, ids: Tensor) -> None:
        """ids (batch, columns): tokens of the first columns, set by the caller that fed them."""
        [ids] = brought_together([ids[:, : self.columns]])
        for row, sequence in enumerate(self.sequences):
            real = self.padding(0, ids.shape[1])
            own = ids[row] if real is None else ids[row][real[row]]
            sequence.token_ids = array("q", own.to(torch.int64).numpy().tobytes())

    def known_columns(self) -> int:
        """Columns whose ids are known; 0 if none were set."""
        if not self.sequences or not all(sequence.token_ids for sequence in self.sequences):
            return 0
        return min(self._columns_of(row, len(one.token_ids)) for row, one in enumerate(self.sequences))

    def first_difference(self, ids: Tensor) -> int | None:
        """The first column at which known ids differ from ids (batch, columns); None if they agree."""
        known = min(self.known_columns(), ids.shape[1])
        if not known:
            return None
        differing, padding = torch.zeros(known, dtype=torch.bool), self.padding(0, known)
        [there] = brought_together([ids[:, :known]])
        for row, sequence in enumerate(self.sequences):
            real = torch.ones(known, dtype=torch.bool) if padding is None else padding[row]
            mine = ids_tensor(sequence.token_ids[: int(real.sum())])
            differing[real] |= there[row][real] != mine
        return int(differing.nonzero()[0]) if bool(differing.any()) else None

    def _columns_of(self, row: int, tokens: int) -> int:
        """Columns up to which `row` has `tokens` real ones."""
        padding = self.padding(0, self.columns)
        if padding is None:
            return tokens
        real = padding[row]
        return self.columns if tokens >= int(real.sum()) else int((real.cumsum(0) > tokens).nonzero()[0])


def add_ids(batch: Batch, ids: Tensor) -> None:
    """Append ids (batch, new) of the newest columns to sequences whose earlier ids are all known."""
    start = batch.columns - ids.shape[1]
    [ids] = brought_together([ids])
    real = batch.padding(start, batch.columns)
    for row, sequence in enumerate(batch.sequences):
        if len(sequence.token_ids) == batch.real(row, start):
            sequence.token_ids.extend((ids[row] if real is None else ids[row][real[row]]).tolist())


def known_ids(batch: Batch) -> Tensor:
    """(batch, columns) int64 ids of all columns, 0 for padding; `known_columns` says whether they are known."""
    ids, real = torch.zeros(len(batch.sequences), batch.columns, dtype=torch.int64), batch.padding(0, batch.columns)
    for row, sequence in enumerate(batch.sequences):
        ids[row, slice(None) if real is None else real[row]] = ids_tensor(sequence.token_ids)
    return ids


def attended_columns(batch: Batch) -> int:
    """Columns that later tokens attend to: not those that are forgotten."""
    return batch.columns - batch.forgotten.tokens


def has_position(batch: Batch, most: int | None, tokens: int = 1) -> bool:
    """Whether a model with `most` positions has `tokens` more after a batch; None: no limit."""
    return most is None or attended_columns(batch) + tokens <= most


def retrieval_start(batch: Batch) -> int:
    """Return the first column after sinks that layers attend to themselves: after forgotten ones and pages."""
    return batch.forgotten.stop if batch.paged_prefix is None else batch.paged_prefix.tokens


def ids_tensor(ids: Items[int]) -> Tensor:
    """ids as int64 (tokens,), a copy."""
    return torch.frombuffer(array("q", ids), dtype=torch.int64) if ids else torch.empty(0, dtype=torch.int64)


def distinct(hosts: Iterable[SequenceKV]) -> list[SequenceKV]:
    """Each path once, in order."""
    return list({id(host): host for host in hosts}.values())


def rows_by_path(hosts: Items[SequenceKV]) -> list[tuple[SequenceKV, list[int]]]:
    """hosts: the path of each row. Each path once, in order, with its rows, ascending."""
    found: dict[int, tuple[SequenceKV, list[int]]] = {}
    for row, host in enumerate(hosts):
        found.setdefault(id(host), (host, []))[1].append(row)
    return list(found.values())


def stacked(query: Tensor, rows: Items[int]) -> Tensor:
    """query (batch, q_heads, new, head_dim) of these rows, ascending: (q_heads, rows * new, head_dim).

    A view for a batch of one row.
    """
    own = query if len(rows) == len(query) else query[list(rows)]  # indices would have to cross to the device
    return own.transpose(0, 1).flatten(1, 2)


def unstacked(part: Tensor, rows: int) -> Tensor:
    """Split results (q_heads, rows * new, ...) of queries from `stacked` by row: a view (rows, q_heads, new, ...)."""
    if rows == 1:  # mostly, and for every layer of a token: one operation in place of two
        return part.unsqueeze(0)
    return part.unflatten(1, (rows, part.shape[1] // rows)).transpose(0, 1)


Cutter = Callable[[SequenceKV], UploadSpan]
"""How a path is cut into blocks."""


class LayerUploads:
    """Uploads of keys and values of layer `number` of a batch to its device, block by block."""

    def __init__(self, batch: Batch, number: int, device: torch.device) -> None:
        self._batch, self._number, self._device = batch, number, device

    def walk(
        self, stretches: Items[UploadSpan], dtype: torch.dtype | None, *, last: bool, cut: Cutter = UploadSpan.of
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the blocks of `Uploads.walk`, or without CUDA those of `as_blocks`.

        last: whether the layer walks no more in this pass; the next layer's keys, cut by `cut`, are then sent ahead.
        """
        if self._device.type != "cuda":
            like = torch.empty(0, dtype=dtype, device=self._device)
            return as_blocks(stretches, like, stored=dtype is None)
        return self._uploads().walk(stretches, dtype, self._next(cut) if last else stretches)

    def reserve(self, one: UploadSpan) -> bool:
        """Whether the device has the memory of a walk over `one`: it is held until the last layer's walk ends."""
        return self._device.type != "cuda" or self._uploads().reserve(one)

    def clear(self) -> None:
        """Forget what was sent ahead for this layer: it takes another way."""
        if self._device in self._batch.uploads:
            self._batch.uploads[self._device].clear()

    def _uploads(self) -> Uploads:
        if self._device not in self._batch.uploads:
            self._batch.uploads[self._device] = Uploads(self._device)
        return self._batch.uploads[self._device]

    def _next(self, cut: Cutter) -> list[UploadSpan]:
        """Return the spans that the next layer with tokens on the host will upload to the same device."""
        later = [number for sequence in self._batch.sequences for number in sequence.kv if number > self._number]
        if not later or self._batch.devices.get(min(later)) != self._device:
            return []
        return [cut(host) for host in distinct(self._batch.hosts(min(later))) if len(host)]
