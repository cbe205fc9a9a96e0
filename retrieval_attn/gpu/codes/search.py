"""The scan of a layer's codes: which keys the host should score for each query of a step, or of a question.

Where the codes lie and how many there are is read from a table in device memory, so one graph serves whatever context
is bound. Three kernels (`search_triton.py`): queries are projected to whole numbers; all codes are scored, and the best
score of every group of neighbours is kept; the groups that may hold one of the k best keys are picked, and of those the
keys. A threshold is found by cutting its range, so a few keys more than k are named, `room` at most, and the same ones
at every run. Queries of one key-value head go through the kernels in blocks and, where scratch memory has no room for
the scores of all, in turns: the kernels are compiled alike for any number of queries.

Where keys have finer codes in host memory, two kernels more read those of the keys that were
picked, over the bus, and name the best of them: a line of memory for each tells what the host would need many for.

Where Triton does not run, plain PyTorch does the same: what the kernels are tested against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.codes.codes import ALIGNED, DeviceCodes, estimated, lacking
from retrieval_attn.gpu.codes.streamer import Source, StreamedCodes
from retrieval_attn.gpu.codes.table import BoundEntries, SharedTables, new_table
from retrieval_attn.gpu.decode.kernels import kernels_for


class QueryTiles:
    """Tables int64 (1 + tiles, width): how many tiles there are, and of each the numbers of its queries, -1: no more.

    tables: one for each width. Queries over the same codes are in tiles of the largest width, the last of them in one
    of the least width that holds them.
    """

    def __init__(
        self,
        entries: int,
        members: int,
        widths: tuple[int, ...],
        device: torch.device,
        shared: SharedTables | None = None,
    ) -> None:
        """entries: key-value heads of all rows. members: queries of each. widths: of tiles, rising, powers of 2.
        shared: where the tables lie, see `CodeSearch`.
        """
        self._members, self._widths = members, widths
        # as many as there are where no two entries share codes
        sizes = [(1 + entries * -(-members // width), width) for width in widths]
        taken = [new_table(*size, device, shared) for size in sizes]
        self.tables = tuple(table for table, _ in taken)
        self._writers = [writer for _, writer in taken]
        self.write([])

    def write(self, groups: Sequence[Sequence[int]]) -> None:
        """groups: entries that search the same codes, those without codes left out."""
        made: list[list[list[int]]] = [[] for _ in self._widths]
        for group in groups:
            for number, queries in self._tiles([e * self._members + i for e in group for i in range(self._members)]):
                made[number].append(queries)
        for table, writer, tiles in zip(self.tables, self._writers, made, strict=True):
            width = table.shape[1]
            rows = [[len(tiles)] + [-1] * (width - 1), *tiles]
            writer.write(rows + [[-1] * width] * (len(table) - len(rows)))

    def _tiles(self, queries: list[int]) -> Iterator[tuple[int, list[int]]]:
        """The tiles of queries over the same codes: number of the width, and the queries, filled up."""
        widest = self._widths[-1]
        for first in range(0, len(queries), widest):
            some = queries[first : first + widest]
            number = next(number for number, width in enumerate(self._widths) if len(some) <= width)
            yield number, some + [-1] * (self._widths[number] - len(some))


TABLE_WORDS = 5
"""Words of a row of the table: bytes from the table itself to the codes, address of query_projection, how many codes
count, address of estimate, and how a key's bytes are split: `wide`, `narrow / 2` and `thin / 4`, 16 bits each.

Not the codes' address: only where a kernel adds a multiple of 16 to a pointer it was given does the compiler know that
the sum is aligned, and loads 16 bytes at once.
"""
MIN_GROUP = 16
"""Neighbouring keys that share one best score, at least."""
MIN_CLASS = 4096
"""Keys that scratch memory is made for, at least."""
MIN_WIDTH = 32
"""Numbers that a matrix instruction of bytes takes at a time."""

SMALL_BLOCK, BLOCK = 4, 32
"""Queries of a key-value head that a program scores at a time: of one token, where they are that few, and of many. The
two planes of the fewest are as many columns as a matrix instruction has."""
PAIR_BLOCK = 8
"""The same, where two rows over one text have few each."""
WIDE_KEY = 192
"""Bytes per key from which on a program has room for the smaller block only."""
FINE = 254
"""Steps of the second plane of a query in one of the first: the first is off by half a step at most."""
MAX_NUMBERS = 1 << 16
"""Numbers among which a kernel can find a threshold: it counts in 16 bits."""
QUESTION_SCORES = 512 << 20
"""Bytes of scores at most, of the queries that are searched at once outside a captured step."""

CodeRange = tuple[DeviceCodes, int]
"""Codes and how many of them count."""


class CodeShape(NamedTuple):
    """Sizes of compiled kernels: bytes per key, keys per query; bytes of finer codes, which select `kept` (0: all)."""

    key_bytes: int
    k: int
    finer_bytes: int = 0
    kept: int = 0

    @property
    def named(self) -> int:
        """Keys named per query at least, where there are as many."""
        return self.kept or self.k

    @property
    def room(self) -> int:
        """Most keys named per query."""
        return _room_for(self.named)

    @property
    def picked_room(self) -> int:
        """Most keys picked per query by their codes on the device."""
        return _room_for(self.k)


class EstimatedLogits(NamedTuple):
    """Estimated logits of the selected keys: products (queries, room) float32, in the places of their ids.

    Of each query q . k, with half the variance of what codes lack as a logit has it; inf for the `best` of its keys, or
    a few more: those are to be read. Where there is no key, anything.
    """

    products: Tensor
    best: int

    @classmethod
    def of(cls, queries: int, shape: CodeShape, share: float, device: torch.device) -> EstimatedLogits | None:
        """Allocate key estimates for a search after which `share` of the keys are read; None: all are read."""
        best = math.ceil(share * shape.named)
        if best >= shape.named:
            return None
        return cls(torch.full((queries, shape.room), torch.inf, device=device), best)


def _room_for(k: int) -> int:
    """An eighth more than k: the threshold need not be found to the key."""
    return -(-(k + k // 8 + 8) // 32) * 32


class SearchScratch:
    """Scratch memory between the kernels of one layer; layers take turns.

    Rows are those of one turn. scores (queries, max_keys) float16, -inf for the keys that were named; least (queries,)
    float32, of those; best (queries, max_keys / group) float16, of every group; groups (queries, picked) int32, those
    that were picked; hits (queries, room) int32, of their keys, numbered group by group, those that were picked. Where
    there are finer codes, keys (queries, room) int32: these keys; said (queries, picked) float32: what codes say of
    them.
    """

    def __init__(
        self, queries: int, max_keys: int, room: int, device: torch.device, *, has_memory: bool = True
    ) -> None:
        """max_keys: per query, a power of 2 as `size_class` gives it. room: `CodeShape.picked_room`.

        has_memory: False for a search to which nothing is bound: it compiles the same kernels, which touch none of what
        grows with keys.
        """
        self.queries, self.max_keys = queries, max_keys
        self.picked = _power(room)
        self.group = MIN_GROUP
        while self.group**2 * self.picked < max_keys // 2:  # both the groups and the keys of those picked fit a tile
            self.group *= 2
        while self.group > 1 and self.picked * self.group >= MAX_NUMBERS:
            self.group //= 2
        rows = queries if has_memory else 0
        self.scores = torch.empty(rows, max_keys, dtype=torch.float16, device=device)
        self.least = torch.empty(queries, dtype=torch.float32, device=device)  # written whatever is bound
        self.best = torch.empty(rows, max_keys // self.group, dtype=torch.float16, device=device)
        self.groups = torch.empty(rows, self.picked, dtype=torch.int32, device=device)
        self.hits = torch.empty(rows, room, dtype=torch.int32, device=device)
        self.keys = torch.empty(queries, room, dtype=torch.int32, device=device)  # written whatever is bound, and read
        self.said = torch.empty(queries, self.picked, dtype=torch.float32, device=device)

    @property
    def suits_kernels(self) -> bool:
        """Whether kernels can select among `max_keys` keys: the groups' best scores, and all keys of their groups."""
        return max(self.max_keys // self.group, self.picked * self.group) < MAX_NUMBERS

    def turns(self, entries: int, members: int) -> Iterator[QueryGroup]:
        """All `members` queries of each of `entries` key-value heads, as many at a time as there is room for."""
        if self.queries >= members:
            at_once = self.queries // members
            for entry in range(0, entries, at_once):
                yield QueryGroup(entry, min(at_once, entries - entry), 0, members)
            return
        for entry in range(entries):
            for member in range(0, members, self.queries):
                yield QueryGroup(entry, 1, member, min(self.queries, members - member))


class QueryGroup(NamedTuple):
    """Queries that are searched at once: `members` from `first_member` on of each of `entries` key-value heads."""

    first_entry: int
    entries: int
    first_member: int
    members: int


def size_class(keys: int) -> int:
    """Keys that scratch memory and kernels for `keys` are made for: a power of 2."""
    return max(MIN_CLASS, _power(keys))


class CodedHeads:
    """Codes of key-value heads as kernels find them, and the queries that were projected for them.

    table: see TABLE_WORDS. planes (queries, 8, width) int8, centres and factors (queries,) float32: projected queries,
    see `search_triton.py`. units, bases, variances (queries,) float32: unit * score + base is near q . k for a score
    that kernels left, and how far off it is (`codes.estimated`).
    """

    def __init__(
        self,
        entries: int,
        queries: int,
        key_bytes: int,
        device: torch.device,
        tables: SharedTables | None,
        *,
        waits: bool = True,
    ) -> None:
        """tables: where its table lies, which are then uploaded before `run`; None: in memory of its own."""
        self.table, self._writer = new_table(entries, TABLE_WORDS, device, tables, waits=waits)
        self.planes = torch.zeros(queries, 8, max(MIN_WIDTH, _power(key_bytes)), dtype=torch.int8, device=device)
        # memory of their own: where the second of two rows begins depends on the number of queries, and with it what
        # kernels are compiled for
        self.centres, self.factors, self.units, self.bases, self.variances = (
            torch.ones(queries, device=device) for _ in range(5)
        )

    def write(self, entries: Sequence[CodeRange | None], first: int) -> list[tuple[int, ...]]:
        """Write rows of the table from `first` on, and return them; None: nothing is named. Raises BackendError."""
        rows = self.rows(entries)
        self._writer.write(rows, first)
        return rows

    def rows(self, entries: Sequence[CodeRange | None]) -> list[tuple[int, ...]]:
        """Rows of the table for these. Raises BackendError."""
        here = self.table.data_ptr()
        rows = [(0,) * TABLE_WORDS if entry is None else _words(*entry, here) for entry in entries]
        if any(row[0] % ALIGNED for row in rows):
            raise BackendError(f"codes must start at multiples of {ALIGNED} bytes; copy them to aligned memory")
        return rows


class CodeSearch(CodedHeads, BoundEntries[CodeRange]):
    """The search of one layer: `bind` says which codes, `run` is recorded, or called outside a capture.

    block: queries that a program scores at a time. tiles: of the queries, by their codes; None: of one row, whose
    entries have codes of their own. finer: None: all keys that are picked are named. staged: codes in host memory are
    brought, and `place` says where to, before `run`; otherwise they are scanned where they lie. told: what `run` writes
    in addition to ids; None: nothing.
    """

    staged = False
    told: EstimatedLogits | None = None

    def __init__(
        self,
        batch: int,
        q_heads: int,
        kv_heads: int,
        shape: CodeShape,
        device: torch.device,
        *,
        block: int | None = None,
        tables: SharedTables | None = None,
        waits: bool = True,
    ) -> None:
        """q_heads: queries of a row at most, a multiple of kv_heads. block: None: chosen by their number. tables: see
        `CodedHeads`. waits: `bind` waits for the device, which otherwise must be done with the search before the next
        `bind`; not with tables.
        """
        sizes = batch * kv_heads, batch * q_heads
        CodedHeads.__init__(self, *sizes, shape.key_bytes, device, tables, waits=waits)
        BoundEntries.__init__(self, batch * kv_heads)
        self.shape, self.kv_heads = shape, kv_heads
        self.finer = CodedHeads(*sizes, shape.finer_bytes, device, tables, waits=waits) if shape.kept else None
        self._codes: list[tuple[int, ...]] = [(0,) * TABLE_WORDS] * len(self.entries)  # the table, as it was written
        width = self.planes.shape[2]
        chosen = min(BLOCK, max(SMALL_BLOCK, _power(q_heads // kv_heads))) if block is None else block
        self.block = SMALL_BLOCK if width > WIDE_KEY else chosen
        self.tiles: QueryTiles | None = None
        if batch > 1:
            widths = {self.block} if width > WIDE_KEY else {self.block, max(self.block, PAIR_BLOCK), BLOCK}
            self.tiles = QueryTiles(batch * kv_heads, q_heads // kv_heads, tuple(sorted(widths)), device, tables)

    def bind(self, entries: Sequence[CodeRange | None], first: int = 0, *, tiled: bool = True) -> None:
        """Codes of key-value head h of row b, at b * kv_heads + h; None: nothing is named for its queries.

        first: where the entries begin, in shared tables: others stay as they are. tiled: False where `write_tiles` is
        called afterwards, for several of these. Raises BackendError.
        """
        if self.finer is not None:
            self.finer.write([None if entry is None else _finer_of(entry) for entry in entries], first)
        self._codes[first : first + len(entries)] = self.rows(entries) if self.staged else self.write(entries, first)
        self.entries[first : first + len(entries)] = entries
        if tiled:
            self.write_tiles()

    def write_tiles(self) -> None:
        """Tell the device who searches the same codes, once all that is to be bound is."""
        if self.tiles is not None:
            same: dict[tuple[int, ...], list[int]] = {}
            for number, row in enumerate(self._codes):
                same.setdefault(row, []).append(number)
            self.tiles.write([group for row, group in same.items() if row[2]])

    def sources(self) -> list[Source | None]:
        """See `streamer.Staged`."""
        return [
            Source(entry[0].codes.data_ptr(), entry[1] * entry[0].codes.shape[1])
            if entry is not None and entry[0].on_host
            else None
            for entry in self.entries
        ]

    def place(self, addresses: Sequence[int | None]) -> None:
        """See `streamer.Staged`."""
        here, rows = self.table.data_ptr(), zip(self._codes, self.entries, addresses, strict=True)
        placed = [
            (row[0] if address is None else address - here, *row[1:]) if entry is not None else (0,) * TABLE_WORDS
            for row, entry, address in rows
        ]
        self._writer.write(placed)

    @property
    def max_keys(self) -> int:
        """Most keys of a head."""
        return max((entry[1] for entry in self.entries if entry is not None), default=0)

    def run(
        self,
        query: Tensor,
        ids: Tensor,
        places: Tensor | None,
        scratch: SearchScratch,
        opaque: Callable[..., None],
        after: Callable[[SearchScratch, QueryGroup], None] | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        """Name keys for query (batch, q_heads, 1, head_dim) in ids (batch * q_heads, room) int32; -1: no more.

        Fewer q_heads than it was made for will do, if they are a multiple of kv_heads.
        places: int64, the row of ids for query head h of row b, at b * q_heads + h; None: that one. opaque: runs a
        function that finds its arguments again at every replay. after: called behind the kernels of each turn, while
        `scratch` has what they left; not where plain PyTorch names the keys. scale: of logits, which what is left of
        keys that were picked, but not named, will be taken for, and what is told of those that are.
        """
        kernels = kernels_for(query, "codes.search_triton") if scratch.suits_kernels else None
        if kernels is not None:
            kernels.search(self, query, ids, places, scratch, after, scale)
        else:
            opaque(self._run_plainly, query, ids, places, self.told, scale)

    def _run_plainly(
        self, query: Tensor, ids: Tensor, places: Tensor | None, told: EstimatedLogits | None, scale: float
    ) -> None:
        batch, q_heads, _, dim = query.shape
        group = q_heads // self.kv_heads
        ids.fill_(-1)
        rows = range(batch * q_heads) if places is None else places.tolist()
        flat = query.reshape(-1, group, dim).float()
        for number, entry in enumerate(self.entries):
            if entry is None or not entry[1]:
                continue
            codes, stop = entry
            hits, known = codes.find(flat[number], min(self.shape.k, stop), stop), codes
            if codes.finer is not None and self.shape.kept:
                known = codes.finer
                hits = known.best_of(flat[number], hits, min(self.shape.kept, stop))
            for i in range(group):
                row = rows[number * group + i]
                ids[row, : hits.shape[1]] = hits[i]
                if told is not None:
                    told.products[row, : hits.shape[1]] = _told_of(known, flat[number, i], hits[i], told.best, scale)


def _told_of(codes: DeviceCodes, query: Tensor, ids: Tensor, best: int, scale: float) -> Tensor:
    """See `EstimatedLogits`: of the keys with ids (n,) for query (head_dim,)."""
    _, variances = estimated(codes.space, query[None])
    products = codes.scores_of(query[None], ids[None])[0]
    to_be_read = products.topk(min(best, len(products))).indices
    products += lacking(variances, scale) / scale
    return products.index_fill(0, to_be_read, torch.inf)


def _words(codes: DeviceCodes, count: int, here: int) -> tuple[int, ...]:
    """A row of the table, which lies `here`."""
    space = codes.space
    split = space.num_8bit | space.num_4bit // 2 << 16 | space.num_2bit // 4 << 32
    return codes.codes.data_ptr() - here, space.query_projection.data_ptr(), count, space.estimate.data_ptr(), split


def _finer_of(entry: CodeRange) -> CodeRange:
    """The finer codes of an entry's keys. Raises BackendError where there are none."""
    codes, count = entry
    if codes.finer is None:
        raise BackendError(
            "a search with finer codes needs finer codes of all keys, but these keys have none; build the index again"
        )
    return codes.finer, count


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def select_candidates(codes: DeviceCodes, queries: Tensor, k: int, stop: int) -> Tensor:
    """Outside a captured step: what `CodeSearch` names for queries (m, head_dim) of one head, int32 (m, room).

    The ids below `stop` whose codes promise most, at least `k` <= stop of them, -1 behind the last; none for a
    query whose scores are not finite.
    """
    shape = CodeShape(codes.codes.shape[1], k)
    ids = torch.empty((len(queries), shape.room), dtype=torch.int32, device=queries.device)
    search = QuestionSearch(1, len(queries), shape, queries.device)
    search.bind([(codes, stop)])
    search.name(queries, ids)
    return ids


class QuestionSearch(CodeSearch):
    """The search for queries of many tokens, outside a capture: `name` in place of `run`.

    `bind` does not wait for the device, which must be done with the search before the next `bind`.
    """

    def __init__(self, kv_heads: int, members: int, shape: CodeShape, device: torch.device) -> None:
        """members: queries of each key-value head at most."""
        super().__init__(1, kv_heads * members, kv_heads, shape, device, block=BLOCK, waits=False)
        self._brought: StreamedCodes | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def bind(self, entries: Sequence[CodeRange | None], first: int = 0, *, tiled: bool = True) -> None:
        """See `CodeSearch.bind`. Codes in host memory are brought once for all blocks of queries. Raises
        torch.OutOfMemoryError, too.
        """
        self.staged = any(entry is not None and entry[0].on_host for entry in entries)
        super().bind(entries, first, tiled=tiled)
        if self.staged:
            if self._brought is None:
                self._brought = StreamedCodes(self.kv_heads, self.table.device)
            self._memory = self._memory.new_empty(self._brought.find(self))
            self._brought.settle(self, self._memory.data_ptr())
            self._brought.bring()

    def forget(self, own: slice = slice(None)) -> None:
        """See `CodeSearch.forget`."""
        super().forget(own)
        self._memory = self._memory.new_empty(0)

    def name(
        self,
        queries: Tensor,
        ids: Tensor,
        after: Callable[[SearchScratch, QueryGroup], None] | None = None,
        *,
        scale: float = 1.0,
    ) -> bool:
        """Name keys for queries (kv_heads * m, head_dim), the m of a key-value head together, in ids as `run` does.

        Returns whether kernels did it, and so called `after`.
        """
        scratch = question_scratch(len(queries), self.max_keys, self.shape.picked_room, queries.device)
        query = queries[None, :, None]
        self.run(query, ids, None, scratch, lambda function, *arguments: function(*arguments), after, scale=scale)
        return kernels_for(query, "codes.search_triton") is not None and scratch.suits_kernels


def question_scratch(queries: int, keys: int, room: int, device: torch.device) -> SearchScratch:
    """Scratch memory for `queries` queries over `keys` keys each, or for as many as may be searched at once.

    Fewer where the device has no room for more.
    """
    max_keys = size_class(keys)
    at_once = min(queries, max(1, QUESTION_SCORES // (2 * max_keys)))
    while True:
        try:
            return SearchScratch(at_once, max_keys, room, device)
        except torch.OutOfMemoryError:
            if at_once == 1:
                raise
            at_once = -(-at_once // 2)


def shared_scratch(
    kept: dict[Any, SearchScratch], queries: int, max_keys: int, room: int, device: torch.device
) -> SearchScratch:
    """The scratch memory of these sizes out of `kept`, or new."""
    key = queries, max_keys, room
    if key not in kept:
        kept[key] = SearchScratch(queries, max_keys, room, device)
    return kept[key]
