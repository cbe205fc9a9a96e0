"""Codes of all keys on a device, which names candidates; the host gives those their exact scores and attends to them.

For a device whose memory holds the codes but not the keys: it reads them 20 to 50 times faster than the host could, so
it scans every one, and the host reads twice as many keys as are wanted and nothing else. Where the codes lie is the
`coder`'s matter; this module knows no device, and without one keeps them in host memory, as a reference.

Codes of few bytes tell little, so that many more keys must be named than are wanted, and each is eight lines of the
host's memory. Finer codes of all keys, in host memory that the device reads in place, are one line each: it reads those
of the keys that it would name, and names the best of them.

A captured step's host then does little but wait for its memory. With int8 rows of all keys and values, in such memory,
the device reads those that it names as well, and does not ask the host for more than keys that have no codes yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import InputDataError, NotFiniteError
from retrieval_attn.index.base import (
    CodeSizes,
    DeviceBytes,
    HeadShape,
    HostAccess,
    HostBytes,
    SearchResult,
    StateValue,
    Training,
    check_search,
    check_training,
)
from retrieval_attn.index.code_layout import PLANNED, CodeLayout, DeviceOptions, Laid
from retrieval_attn.index.device_task import candidate_search, prepare_candidates
from retrieval_attn.index.flat import SCAN_SHARE, answer_lost, rescore_count, search_runs
from retrieval_attn.index.flat_task import exact_search
from retrieval_attn.index.formats import Format, to_float32
from retrieval_attn.index.kernels.key_codes import SIGN, CodeSpace, code_scores, encode, learn_spaces
from retrieval_attn.index.kernels.packed import EMPTY
from retrieval_attn.index.runs import KeyRuns, RunsIndex
from retrieval_attn.index.sketch.blocks import sum_of_squares
from retrieval_attn.index.sketch.index import RESCORE, learn_projection
from retrieval_attn.index.spec import register
from retrieval_attn.index.task.search import CompiledSearch, SearchedInSteps, SearchRequest

CODE_ALIGNED = 16
"""Bytes on a multiple of which a device begins to read codes."""
LEARNED_KEYS = 4096
"""Of a head, that its codes are learned from. Twice as many find no more: recall .9702 and .9704 of the best 100 among
400 named, on five heads of the bundled model over 16K of prose."""
FINER = "finer_"
"""What the names of a state begin with that tell of finer codes."""
ROW_STEPS_BYTES = 8
"""On the device, of an int8 row of a key and its value."""
SPARE_TOKENS = 4096
"""Room that a device has for codes of keys that come later, before codes move."""


class CodeRows(NamedTuple):
    """Codes (n, key_bytes) uint8 of n keys, and finer ones, if there are any."""

    codes: npt.NDArray[np.uint8]
    finer: npt.NDArray[np.uint8] | None = None


class KeyCodes(Protocol):
    """The codes of one head's keys, wherever they lie."""

    @property
    def device_nbytes(self) -> int:
        """Bytes of codes in device memory, and of room for more."""

    @property
    def host_nbytes(self) -> int:
        """The same of host memory: of finer codes, and of all where a device reads them there."""

    def add(self, keys: npt.NDArray[Any]) -> None:
        """Code keys (n, head_dim), as stored, behind the others. Raises NotFiniteError for NaN or infinity."""

    def cut(self, length: int) -> None:
        """Forget the codes from `length` on."""

    def rows(self) -> CodeRows:
        """The codes in host memory: views, or what holds until the calling thread's next call."""

    def find(self, queries: npt.NDArray[np.float32], count: int, stop: int) -> npt.NDArray[np.int32]:
        """Ids (m, count or a few more) of the keys below `stop` whose codes promise queries (m, head_dim) most.

        -1 behind the last of more; all -1 for a query whose scores are not finite. count <= stop <= number of keys.
        """


class Coder(Protocol):
    """Makes the codes of one head."""

    def __call__(self, space: CodeSpace, fmt: Format, expected: int, finer: CodeSpace | None = None) -> KeyCodes:
        """Empty codes of a space for keys in a format, of which `expected` are expected. finer: space of finer ones."""

    def restored(self, space: CodeSpace, fmt: Format, rows: CodeRows, finer: CodeSpace | None = None) -> KeyCodes:
        """The codes whose `rows` were these; they are copied."""


class HostCodes:
    """Codes in host memory, scanned by NumPy: what a device's are checked against."""

    def __init__(self, space: CodeSpace, fmt: Format, expected: int = 0, finer: CodeSpace | None = None) -> None:
        self._space, self._fmt = space, fmt
        self._codes = np.empty((0, space.key_bytes), np.uint8)
        self._finer = None if finer is None else HostCodes(finer, fmt)

    @classmethod
    def restored(cls, space: CodeSpace, fmt: Format, rows: CodeRows, finer: CodeSpace | None = None) -> HostCodes:
        """The codes that had these rows, taken as they are: they are never written to."""
        codes = cls(space, fmt)
        codes._codes = rows.codes
        if finer is not None and rows.finer is not None:
            codes._finer = cls.restored(finer, fmt, CodeRows(rows.finer))
        return codes

    @property
    def device_nbytes(self) -> int:
        return 0

    @property
    def host_nbytes(self) -> int:
        return self._codes.nbytes + (0 if self._finer is None else self._finer.host_nbytes)

    def add(self, keys: npt.NDArray[Any]) -> None:
        numbers = to_float32(keys, self._fmt)
        if not np.isfinite(numbers).all():
            raise NotFiniteError(NOT_FINITE)
        self._codes = np.concatenate([self._codes, encode(self._space, numbers)])
        if self._finer is not None:
            self._finer.add(keys)

    def cut(self, length: int) -> None:
        self._codes = self._codes[:length]
        if self._finer is not None:
            self._finer.cut(length)

    def rows(self) -> CodeRows:
        return CodeRows(self._codes, None if self._finer is None else self._finer._codes)

    def find(self, queries: npt.NDArray[np.float32], count: int, stop: int) -> npt.NDArray[np.int32]:
        with np.errstate(over="ignore", invalid="ignore"):
            scores = code_scores(self._space, self._codes[:stop], queries)
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :count].astype(np.int32)
        ids[~np.isfinite(scores).all(axis=1)] = -1
        return ids


NOT_FINITE = "keys to be coded must be finite, got NaN or infinity; remove these keys or use index='flat'"


@register
class DeviceIndex(RunsIndex):
    """See the module. A query that is not finite gets the exact answer, and so does a search for a large part."""

    kind: ClassVar[str] = "device"
    trains: ClassVar[bool] = True
    keeps_device_keys: ClassVar[bool] = True
    Options: ClassVar[type[Any]] = DeviceOptions

    def __init__(
        self, keys: KeyRuns, codes: KeyCodes, spaces: tuple[CodeSpace, CodeSpace | None], rescore: int
    ) -> None:
        """spaces: of codes, and of finer ones. Callers use `build`."""
        self._keys, self._rescore = keys, rescore
        self.codes, (self.space, self.finer_space) = codes, spaces

    @classmethod
    def host_bytes(cls, options: Laid, head: HeadShape) -> tuple[HostBytes, ...]:
        layout = options.layout
        finer, rows = layout.finer_for(head.head_dim), layout.int8_rows * (head.head_dim + head.value_dim)
        codes = layout.codes_on_host * layout.bytes_for(head.head_dim)
        texts = ["codes"] * bool(codes) + ["finer codes"] * bool(finer) + ["int8 rows"] * bool(rows)
        text = f"{', '.join(texts)}: read by the GPU" if texts else "none: the index is on the GPU"
        return (HostBytes(codes + finer + rows, None, text),)

    @classmethod
    def device_bytes(cls, options: Laid, head_dim: int) -> DeviceBytes:
        layout = options.layout
        codes, steps = layout.bytes_for(head_dim), layout.int8_rows * ROW_STEPS_BYTES
        return DeviceBytes(steps, staged=codes) if layout.codes_on_host else DeviceBytes(codes + steps)

    @classmethod
    def host_reads(cls, options: Laid) -> HostAccess:
        layout = options.layout
        return HostAccess(layout.codes_on_host, layout.int8_rows, layout.key_share)

    @classmethod
    def code_shape(cls, options: Laid, head_dim: int, k: int, estimated: bool) -> CodeSizes:
        layout = options.layout
        picked, kept = (named_count(rescore, k, estimated) for rescore in (layout.rescore, RESCORE))
        finer = layout.finer_for(head_dim)
        return CodeSizes(layout.bytes_for(head_dim), picked, *((finer, kept) if finer and kept < picked else (0, 0)))

    @classmethod
    def min_coded_keys(cls, options: Laid, k: int) -> int:
        return SCAN_SHARE * rescore_count(int(options.rescore), k)

    @classmethod
    def make(cls, keys: npt.NDArray[Any], fmt: Format, options: Laid, training: Training) -> DeviceIndex:
        """See KeyIndex.make. Without finite training queries codes keep what keys differ in most.

        Raises NotFiniteError for keys that are not finite.
        """
        runs = KeyRuns(keys, fmt)
        dim = fmt.dim_of(keys)
        queries, _ = check_training(training.queries, None, dim, len(keys))
        rows = np.zeros((0, dim), np.float32) if queries is None else queries.reshape(-1, dim)
        energy = sum_of_squares(rows)
        if not np.isfinite(energy):
            rows = rows[np.isfinite(rows).all(axis=1)]
            energy = sum_of_squares(rows)
        # head_dim queries more, which ask for all numbers alike: what few queries did not ask for may be asked for
        energy = energy / len(rows) if len(rows) else 1.0
        length = np.float32(min(np.sqrt(energy), np.finfo(np.float32).max))
        rows = np.concatenate([rows, np.eye(dim, dtype=np.float32) * length])
        sample = to_float32(keys[:: max(1, len(keys) // LEARNED_KEYS)], fmt)
        if not np.isfinite(sample).all():
            raise NotFiniteError(NOT_FINITE)
        known = sample if len(sample) else np.eye(dim, dtype=np.float32)
        sides = learn_projection(rows, known, dim)
        sizes = options.layout.bytes_for(dim), options.layout.finer_for(dim)
        space, *more = learn_spaces(sides, known, [size for size in sizes if size])
        finer = more[0] if more else None
        codes = _coder(training.coder)(space, fmt, len(keys), finer)
        codes.add(keys)
        return DeviceIndex(runs, codes, (space, finer), int(options.rescore))

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys, coded as the first ones were; see KeyIndex.insert. Raises ShapeError."""
        self._keys.check(keys)
        self.codes.add(keys)
        self._keys.add(keys)

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible."""
        super().truncate(length)
        self.codes.cut(length)
        return True

    def state(self) -> dict[str, StateValue]:
        """The space and the codes, which a device is asked for: one copy from there."""
        rows = self.codes.rows()
        state: dict[str, StateValue] = {"rescore": self._rescore, "codes": np.array(rows.codes), **self.space._asdict()}
        if self.finer_space is not None and rows.finer is not None:
            finer = {FINER + name: value for name, value in self.finer_space._asdict().items()}
            state = {**state, FINER + "codes": np.array(rows.finer), **finer}
        return state

    @classmethod
    def from_state(
        cls,
        keys: npt.NDArray[Any],
        fmt: Format,
        state: Mapping[str, StateValue],
        *,
        coder: Any = None,
        trusted: bool = False,
    ) -> DeviceIndex:
        """See KeyIndex.from_state. Codes are not made again; without a coder they stay in host memory, as a reference.

        Raises MemoryPlanError where the device has no room.
        """
        dim, own = fmt.dim_of(keys), {name: value for name, value in state.items() if not name.startswith(FINER)}
        more = {name.removeprefix(FINER): value for name, value in state.items() if name.startswith(FINER)}
        rescore, known = state.get("rescore"), _space_and_rows(own, len(keys), dim)
        finer = _space_and_rows(more, len(keys), dim) if more else (None, None)
        if known is None or finer is None or not isinstance(rescore, int):
            raise InputDataError(
                f"the saved state is not one of codes of {len(keys)} keys with head_dim={dim}; build the index again"
            )
        rows = CodeRows(known[1], finer[1])
        codes = _coder(coder).restored(known[0], fmt, rows, finer[0])
        return cls(KeyRuns(keys, fmt), codes, (known[0], finer[0]), rescore)

    def serves(self, k: int, visible: int) -> bool:
        """Whether a device search for the best k of `visible` keys pays off."""
        return visible >= SCAN_SHARE * rescore_count(self._rescore, k)

    @classmethod
    def prepare(cls, options: Laid, fmt: Format) -> bool:
        """See KeyIndex.prepare. What a device does for a search, `gpu/codes/search.py` says."""
        prepare_candidates(fmt)
        exact_search(fmt)
        return True

    def compiled_search(self, request: SearchRequest) -> CompiledSearch | None:
        if not self.serves(request.k, request.visible):
            return exact_search(request.fmt)
        if request.candidates is None:
            return None
        if request.named:
            return candidate_search(request, request.candidates, request.named, keeps_all=True)
        needed = rescore_count(self._rescore, request.k)
        if self.finer_space is not None:
            needed = min(needed, rescore_count(RESCORE, request.k))
        return candidate_search(request, request.candidates, needed)

    def search_batch_key(self, k: int, visible: int) -> Hashable | None:
        count = rescore_count(self._rescore, k)  # once: a plan asks every head
        return (self.kind, count) if visible >= SCAN_SHARE * count else "exact"

    def device_codes(self, k: int, visible: int) -> Any:
        return getattr(self.codes, "device", None) if self.serves(k, visible) else None

    def behind(self, first: int) -> DeviceTail | None:
        return DeviceTail(self, first) if first * self.space.key_bytes % CODE_ALIGNED == 0 else None

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """The best k of the keys that the codes put first; see KeyIndex.search."""
        queries, k = check_search(queries, self.head_dim, k, limit)
        stop = len(self) if limit is None else min(int(limit), len(self))
        if not self.serves(k, stop) or not len(queries):
            return search_runs(self._keys.within(stop), queries, k, self._keys.fmt)
        wanted = rescore_count(self._rescore, k)
        found = self.codes.find(queries, wanted, stop).astype(np.int64)
        ids, scores = self._keys.best(np.where(found < 0, EMPTY, 0xFFFFFFFF - found), queries, k)
        lost = np.asarray((found[:, :wanted] < 0).any(axis=1))
        answer_lost(self._keys, stop, queries, k, lost, ids, scores)
        return SearchResult(ids, scores, int(np.count_nonzero(found >= 0)))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory: codes that a device does not hold."""
        return self.codes.host_nbytes

    @property
    def device_nbytes(self) -> int:
        """Bytes of device memory."""
        return self.codes.device_nbytes


@register
class PlannedDeviceIndex(DeviceIndex):
    """Codes in the layout that `auto` chose for the free memory (`memory/index_choice.py`)."""

    kind: ClassVar[str] = PLANNED
    planned: ClassVar[bool] = True
    Options = CodeLayout


def named_count(rescore: int, k: int, estimated: bool) -> int:
    """Keys that codes name where `rescore` of them per key wanted get an exact score; of finer codes RESCORE, as of
    codes of the usual size.
    """
    return rescore_count(max(1, rescore // 2) if estimated else rescore, k)


def _space_and_rows(
    state: Mapping[str, StateValue], keys: int, head_dim: int
) -> tuple[CodeSpace, npt.NDArray[np.uint8]] | None:
    """Return the codes of `keys` keys in a state, and their space; None if the state does not fit."""
    space, rows = _space_of(state, head_dim), state.get("codes")
    if space is None or not isinstance(rows, np.ndarray) or rows.dtype != np.uint8:
        return None
    if rows.shape != (keys, space.key_bytes):
        return None
    if "thin" not in state:  # saved when the numbers in upper halves of bytes had no sign either
        rows = np.concatenate([rows[:, : space.wide], rows[:, space.wide :] ^ SIGN], axis=1)
    return space, rows


def _coder(given: Coder | None) -> Coder:
    return HostCodes if given is None else given


def _space_of(state: Mapping[str, StateValue], head_dim: int) -> CodeSpace | None:
    """The space that a state tells of, None where it does not fit keys of `head_dim` numbers."""
    wide, narrow, thin = (state.get(name, 0) for name in ("wide", "narrow", "thin"))
    if not isinstance(wide, int) or not isinstance(narrow, int) or not isinstance(thin, int):
        return None
    rank = wide + narrow + thin
    if min(wide, narrow, thin) < 0 or narrow % 2 or thin % 4 or not 0 < rank <= head_dim:
        return None
    sides = [state.get(name) for name in CodeSpace._fields[:4]]
    arrays = [side for side in sides if isinstance(side, np.ndarray) and side.dtype == np.float32]
    shapes = [array.shape for array in arrays]
    rows, more = (head_dim, 0) if "thin" in state else (rank, head_dim - rank)  # without: saved before there were any
    if shapes != [(rows, head_dim), (rows, head_dim), (rows,), (2 + more, head_dim)]:
        return None
    if "thin" not in state:
        arrays = _widened(arrays[0], arrays[1], arrays[2], arrays[3], narrow // 2)
    return CodeSpace(arrays[0], arrays[1], arrays[2], arrays[3], wide, narrow, thin)


def _widened(
    query_side: npt.NDArray[np.float32],
    key_side: npt.NDArray[np.float32],
    shift: npt.NDArray[np.float32],
    estimate: npt.NDArray[np.float32],
    signed: int,
) -> list[npt.NDArray[np.float32]]:
    """The sides of a space, with a row for every number, of sides with rows for those stored; the last `signed` of
    these counted from their least level, too.
    """
    rank, dim = query_side.shape
    variances = np.ones(dim, np.float32)
    variances[:rank] = estimate[1, :rank]
    return [
        np.concatenate([query_side, estimate[2:]]),
        np.pad(key_side, ((0, dim - rank), (0, 0))),
        np.pad(shift, (0, dim - rank)),
        np.stack([estimate[0] + 8 * query_side[rank - signed :].sum(axis=0), variances]),
    ]


class DeviceTail(SearchedInSteps):
    """The keys of a `DeviceIndex` from `first` on, for steps: codes of others are not read."""

    keeps_device_keys: ClassVar[bool] = True

    def __init__(self, whole: DeviceIndex, first: int) -> None:
        """first: of a key whose codes begin where a device may begin to read."""
        self._whole, self._first = whole, first

    def __len__(self) -> int:
        return len(self._whole) - self._first

    def compiled_search(self, request: SearchRequest) -> CompiledSearch | None:
        return self._whole.compiled_search(request)

    def search_batch_key(self, k: int, visible: int) -> Hashable | None:
        return self._whole.search_batch_key(k, visible)

    def device_codes(self, k: int, visible: int) -> Any:
        codes = self._whole.device_codes(k, visible)
        return None if codes is None else codes.behind(self._first)
