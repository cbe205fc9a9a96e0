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

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, InputDataError, NotFiniteError
from retrieval_attn.index.base import (
    TRAIN_QUERIES,
    CodeSizes,
    DeviceBytes,
    DeviceSearch,
    HeadShape,
    HeadsTraining,
    HeldMemory,
    HostAccess,
    HostBytes,
    IndexMemory,
    KeyIndex,
    QueryMoment,
    State,
    StateValue,
    Training,
    TrainingNeeds,
    check_training,
)
from retrieval_attn.index.flat import SCAN_SHARE, check_rescore, rescore_count
from retrieval_attn.index.formats import Format, to_float32
from retrieval_attn.index.kernels.key_codes import CodeSpace, code_scores, encode, learn_spaces
from retrieval_attn.index.keys import StoredKeys
from retrieval_attn.index.sketch.index import RESCORE, check_key_bytes, learn_projection, second_moment
from retrieval_attn.index.spec import register
from retrieval_attn.index.task.scans import called_search, candidate_search, compile_candidate_search, exact_search
from retrieval_attn.index.task.search import CompiledSearch, SearchRequest

PLANNED = "device-auto"
"""Kind of index that `auto` chooses if codes are read by a device."""
KEY_SHARE = 0.25
"""Share of the named keys whose int8 rows a device reads, if the user asks for such rows or codes have the usual size.
KL to full attention then equals that with all of them read: 3.90e-4 and 3.68e-4 nats (prose), 5.16e-3 and 5.12e-3
(code), of the bundled model. Codes of five eighths of that size are more than twice as noisy, 6.3e-4 and 3.8e-4
(docs/archive/log.md, 2026-11-27): with those, `auto` reads all keys. Several long texts on one GPU need the share."""
MIN_DEFAULT_BYTES = 16
"""Bytes per key that small heads get if nothing is said."""


@dataclass(frozen=True)
class CodeLayout:
    """Where codes of a head's keys are stored and how many keys they name. `auto` chooses it by the free memory.

    key_bytes, rescore, int8_rows: see `DeviceOptions`. finer_bytes: bytes per key of finer codes in host memory, by
    which fewer keys are named; 0: none. key_share: of the int8 rows that the device reads, the share whose keys are
    read too, the best by their codes; of the others it reads values, and codes give their weight. codes_on_host: codes
    are stored in host memory as well, and the bus brings all of them to the device for every token, those of the next
    layer during the computation of one.

    Raises ConfigError for other values.
    """

    key_bytes: int | None = None
    rescore: int = RESCORE
    finer_bytes: int = 0
    int8_rows: bool = False
    key_share: float = 1.0
    codes_on_host: bool = False

    def __post_init__(self) -> None:
        check_key_bytes(self.key_bytes)
        check_rescore(self.rescore)
        if self.finer_bytes:
            check_key_bytes(self.finer_bytes)
            if self.key_bytes is None or self.finer_bytes <= self.key_bytes:
                raise ConfigError(f"finer_bytes={self.finer_bytes} must be more than key_bytes={self.key_bytes}")
        for name in ("int8_rows", "codes_on_host"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        share = self.key_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(f"key_share must be more than 0 and at most 1, got {share!r}")

    @property
    def layout(self) -> CodeLayout:
        """The layout itself: options of a layout and of a user are read in one way."""
        return self

    def bytes_for(self, head_dim: int) -> int:
        """Bytes per key, at most one per number."""
        value = max(MIN_DEFAULT_BYTES, head_dim // 2) if self.key_bytes is None else int(self.key_bytes)
        return min(value, head_dim)

    def finer_for(self, head_dim: int) -> int:
        """Bytes per key of finer codes; 0: there are none, or others tell as much."""
        value = min(int(self.finer_bytes), head_dim)
        return value if value > self.bytes_for(head_dim) else 0


@dataclass(frozen=True)
class DeviceOptions:
    """key_bytes: bytes of codes per key, at least 8; None: head_dim / 2, at least 16. rescore: keys named by codes per
    key wanted. int8_rows: the host stores keys and values once more, as int8 rows, which the device reads in captured
    steps instead of the host attending; with estimates alone (`Config.tail`). It reads the keys of a KEY_SHARE of them.

    Raises ConfigError for other values.
    """

    key_bytes: int | None = None
    rescore: int = RESCORE
    int8_rows: bool = False

    def __post_init__(self) -> None:
        assert self.layout is not None  # it checks the values

    @property
    def layout(self) -> CodeLayout:
        """Codes on the device."""
        return CodeLayout(self.key_bytes, self.rescore, int8_rows=self.int8_rows, key_share=KEY_SHARE)


Laid = DeviceOptions | CodeLayout
"""Options of the two kinds below."""


CODE_ALIGNED = 16
"""Bytes on a multiple of which a device begins to read codes."""
LEARNED_KEYS = 4096
"""Of a head, that its codes are learned from. Twice as many find no more: recall .9702 and .9704 of the best 100 among
400 named, on five heads of the bundled model over 16K of prose."""
FINER = "finer_"
"""What the names of a state begin with that tell of finer codes."""
ROW_STEPS_BYTES = 8
"""On the device, of an int8 row of a key and its value."""
CANDIDATE_ROOM = 256
"""Candidates of a query that a device may return in addition to twice those that are asked for."""
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

    def add_heads(self, heads: Sequence[Any], keys: npt.NDArray[Any]) -> None:
        """`add` for the codes of several heads of a layer, of this kind, keys (heads, n, head_dim): all or none."""

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


Spaces = tuple[CodeSpace, CodeSpace | None]
"""Of codes, and of finer ones."""


class HeadsCoder(Protocol):
    """Makes the codes of several heads."""

    def __call__(self, spaces: Sequence[Spaces], fmt: Format, keys: npt.NDArray[Any], first: int) -> Sequence[KeyCodes]:
        """Codes of keys (heads, n, head_dim), of the heads from `first` on in their layer. Raises NotFiniteError."""


class HostCodes:
    """Codes in host memory, scanned by NumPy: what a device's are checked against."""

    def __init__(self, space: CodeSpace, fmt: Format, expected: int, finer: CodeSpace | None = None) -> None:
        self._space, self._fmt = space, fmt
        self._codes = np.empty((0, space.key_bytes), np.uint8)
        self._finer = None if finer is None else HostCodes(finer, fmt, expected)

    @classmethod
    def restored(cls, space: CodeSpace, fmt: Format, rows: CodeRows, finer: CodeSpace | None = None) -> HostCodes:
        """The codes that had these rows, taken as they are: they are never written to."""
        codes = cls(space, fmt, len(rows.codes))
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

    def add_heads(self, heads: Sequence[HostCodes], keys: npt.NDArray[Any]) -> None:
        if not np.isfinite(to_float32(keys, self._fmt)).all():
            raise NotFiniteError(NOT_FINITE)
        for one, own in zip(heads, keys, strict=True):
            one.add(own)

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


def _memory(options: Laid, head: HeadShape) -> IndexMemory:
    layout = options.layout
    finer, rows = layout.finer_for(head.head_dim), layout.int8_rows * (head.head_dim + head.value_dim)
    codes, steps = layout.bytes_for(head.head_dim), layout.int8_rows * ROW_STEPS_BYTES
    on_host = layout.codes_on_host * codes
    texts = ["codes"] * bool(on_host) + ["finer codes"] * bool(finer) + ["int8 rows"] * bool(rows)
    text = f"{', '.join(texts)}: read by the GPU" if texts else "none: the index is on the GPU"
    device = DeviceBytes(steps, staged=codes) if layout.codes_on_host else DeviceBytes(codes + steps)
    return IndexMemory((HostBytes(on_host + finer + rows, None, text),), device)


def _host_access(options: Laid) -> HostAccess:
    layout = options.layout
    return HostAccess(layout.codes_on_host, layout.int8_rows, layout.key_share)


def _code_sizes(options: Laid, head_dim: int, k: int, estimated: bool) -> CodeSizes:
    layout = options.layout
    picked, kept = (named_count(rescore, k, estimated) for rescore in (layout.rescore, RESCORE))
    finer = layout.finer_for(head_dim)
    return CodeSizes(layout.bytes_for(head_dim), picked, *((finer, kept) if finer and kept < picked else (0, 0)))


def _compile_tasks(options: Laid, fmt: Format) -> None:
    compile_candidate_search(fmt)
    exact_search(fmt)


_FACTS: dict[str, Any] = {
    "keeps_device_keys": True,
    "memory": _memory,
    "host_access": _host_access,
    "compile_tasks": _compile_tasks,
    "code_sizes": _code_sizes,
    "min_coded_keys": lambda options, k: SCAN_SHARE * rescore_count(int(options.rescore), k),
}


@register(**_FACTS)
class DeviceIndex(KeyIndex, DeviceSearch):
    """See the module. A query that is not finite gets the exact answer, and so does a search for a large part."""

    kind: ClassVar[str] = "device"
    Options: ClassVar[type[Any]] = DeviceOptions
    training: ClassVar[TrainingNeeds] = TrainingNeeds(TRAIN_QUERIES, only_moment=True)
    built_together: ClassVar[int] = 4

    def __init__(self, keys: StoredKeys, codes: KeyCodes, spaces: Spaces, rescore: int) -> None:
        """spaces: of codes, and of finer ones. Callers use `build`."""
        self._keys, self._rescore = keys, rescore
        self.codes, (self.space, self.finer_space) = codes, spaces

    @classmethod
    def build(cls, keys: npt.NDArray[Any], fmt: Format, options: Laid, training: Training) -> DeviceIndex:
        """Build codes. Without finite training queries codes keep what keys differ in most.

        Raises NotFiniteError for keys that are not finite.
        """
        stored, dim = StoredKeys(keys, fmt), fmt.dim_of(keys)
        queries, _ = check_training(training.queries, None, dim, len(keys))
        [(space, finer)] = cls.learn(keys[None], fmt, options, None if queries is None else queries[None])
        codes = _coder(training.coder)(space, fmt, len(keys), finer)
        codes.add(keys)
        return DeviceIndex(stored, codes, (space, finer), int(options.rescore))

    @classmethod
    def build_heads(
        cls, keys: npt.NDArray[Any], fmt: Format, options: Laid, training: HeadsTraining
    ) -> list[DeviceIndex]:
        """Build codes of several heads, whose queries are not checked. Raises NotFiniteError."""
        spaces = cls.learn(keys, fmt, options, training.queries)
        coder: HeadsCoder = _host_codes if training.coder is None else training.coder.code
        made = zip(keys, coder(spaces, fmt, keys, training.first), spaces, strict=True)
        return [DeviceIndex(StoredKeys(own, fmt), codes, both, int(options.rescore)) for own, codes, both in made]

    @classmethod
    def learn(
        cls, keys: npt.NDArray[Any], fmt: Format, options: Laid, queries: npt.NDArray[np.float32] | QueryMoment | None
    ) -> list[Spaces]:
        """Spaces of codes, and of finer ones, of each head. Raises NotFiniteError."""
        heads, dim = len(keys), fmt.dim_of(keys)
        moment = queries if isinstance(queries, QueryMoment) else _moment(queries, heads, dim)
        sample = to_float32(keys[:, :: max(1, keys.shape[1] // LEARNED_KEYS)], fmt)
        if not np.isfinite(sample).all():
            raise NotFiniteError(NOT_FINITE)
        # head_dim queries more, which ask for all numbers alike: what few queries did not ask for may be asked for
        energy = np.where(moment.known, np.trace(moment.product, axis1=1, axis2=2), 1.0)
        alike = np.eye(dim) * np.minimum(energy, float(np.finfo(np.float32).max) ** 2)[:, None, None]
        count = moment.known[:, None, None]
        asked = (moment.product * count + alike) / (count + dim)
        known = sample if sample.shape[1] else np.tile(np.eye(dim, dtype=np.float32), (heads, 1, 1))
        sizes = options.layout.bytes_for(dim), options.layout.finer_for(dim)
        spaces = learn_spaces(learn_projection(asked, known, dim), known, [size for size in sizes if size])
        return [(space, more[0] if more else None) for space, *more in spaces]

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys, coded as the first ones were; see KeyIndex.insert. Raises ShapeError."""
        self._keys.check(keys)
        self.codes.add(keys)
        self._keys.add(keys)

    @classmethod
    def insert_heads(cls, heads: Sequence[KeyIndex], keys: npt.NDArray[Any]) -> None:
        """Append keys (heads, n, head_dim): to all heads, or to none. Raises as `insert`."""
        some = [one for one in heads if isinstance(one, DeviceIndex)]
        for one, own in zip(some, keys, strict=True):
            one._keys.check(own)
        some[0].codes.add_heads([one.codes for one in some], keys)
        for one, own in zip(some, keys, strict=True):
            one._keys.add(own)

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length. Always possible."""
        self._keys.cut(length)
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
        cls, keys: npt.NDArray[Any], fmt: Format, state: State, *, coder: Any = None, trusted: bool = False
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
        return cls(StoredKeys(keys, fmt), codes, (known[0], finer[0]), rescore)

    def serves(self, k: int, visible: int) -> bool:
        """Whether a device search for the best k of `visible` keys pays off."""
        return visible >= SCAN_SHARE * rescore_count(self._rescore, k)

    def task(self, request: SearchRequest) -> CompiledSearch:
        """Return exact scores for the candidates in the request; without them the codes are scanned when it runs."""
        if request.hidden or not self.serves(request.k, request.visible):
            return exact_search(request.fmt)
        needed = rescore_count(self._rescore, request.k)
        if request.candidates is None:
            return called_search(
                request,
                self._keys.head_dim,
                2 * needed + CANDIDATE_ROOM,
                lambda queries, limit, threads: self._candidates(queries, needed, limit),
            )
        if request.named:
            return candidate_search(request, request.candidates, request.named, keeps_all=True)
        if self.finer_space is not None:
            needed = min(needed, rescore_count(RESCORE, request.k))
        return candidate_search(request, request.candidates, needed)

    def _candidates(
        self, queries: npt.NDArray[np.float32], count: int, limit: int
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Return ids whose codes promise most, none for a query that lacks some, and their number."""
        found = self.codes.find(queries, count, limit)
        ids = np.where((found[:, :count] < 0).any(axis=1, keepdims=True), np.int32(-1), found)
        return ids, int(np.count_nonzero(ids >= 0))

    def batch_key(self, k: int, visible: int) -> Hashable:
        count = rescore_count(self._rescore, k)  # once: a plan asks every head
        return (self.kind, count) if visible >= SCAN_SHARE * count else "exact"

    def device_codes(self, k: int, visible: int) -> Any:
        return getattr(self.codes, "device", None) if self.serves(k, visible) else None

    def tail(self, first: int) -> DeviceTail | None:
        return DeviceTail(self, first) if first * self.space.key_bytes % CODE_ALIGNED == 0 else None

    @property
    def memory(self) -> HeldMemory:
        """Bytes of the codes, by the memory that holds them, and of keys that had to be copied."""
        return HeldMemory(self._keys.nbytes + self.codes.host_nbytes, self.codes.device_nbytes)


@register(listed=False, **_FACTS)
class PlannedDeviceIndex(DeviceIndex):
    """Codes in the layout that `auto` chose for the free memory (`memory/index_choice.py`)."""

    kind: ClassVar[str] = PLANNED
    Options = CodeLayout


def named_count(rescore: int, k: int, estimated: bool) -> int:
    """Keys that codes name where `rescore` of them per key wanted get an exact score; of finer codes RESCORE, as of
    codes of the usual size.
    """
    return rescore_count(max(1, rescore // 2) if estimated else rescore, k)


def _space_and_rows(state: State, keys: int, head_dim: int) -> tuple[CodeSpace, npt.NDArray[np.uint8]] | None:
    """Return the codes of `keys` keys in a state, and their space; None if the state does not fit."""
    space, rows = _space_of(state, head_dim), state.get("codes")
    if space is None or not isinstance(rows, np.ndarray) or rows.dtype != np.uint8:
        return None
    if rows.shape != (keys, space.key_bytes):
        return None
    return space, rows


def _moment(queries: npt.NDArray[np.float32] | None, heads: int, dim: int) -> QueryMoment:
    """The moment of queries (heads, group, m, dim); of none without any."""
    rows = np.zeros((heads, 0, dim), np.float32) if queries is None else queries.reshape(heads, -1, dim)
    finite = np.asarray(np.isfinite(rows).all(axis=2))
    if finite.all() and rows.shape[1]:
        return QueryMoment(second_moment(rows), np.full(heads, float(rows.shape[1])))
    own = [one[which] for one, which in zip(rows, finite, strict=True)]
    products = [second_moment(one[None])[0] if len(one) else np.zeros((dim, dim)) for one in own]
    return QueryMoment(np.array(products), finite.sum(axis=1).astype(np.float64))


def _host_codes(spaces: Sequence[Spaces], fmt: Format, keys: npt.NDArray[Any], first: int) -> Sequence[KeyCodes]:
    """A `HeadsCoder` without a device."""
    made = [HostCodes(space, fmt, keys.shape[1], finer) for space, finer in spaces]
    for codes, own in zip(made, keys, strict=True):
        codes.add(own)
    return made


def _coder(given: Coder | None) -> Coder:
    return HostCodes if given is None else given


def _space_of(state: State, head_dim: int) -> CodeSpace | None:
    """Return the space of a state, None if it does not fit keys of `head_dim` numbers."""
    wide, narrow, thin = (state.get(name) for name in ("wide", "narrow", "thin"))
    if not isinstance(wide, int) or not isinstance(narrow, int) or not isinstance(thin, int):
        return None
    rank = wide + narrow + thin
    if min(wide, narrow, thin) < 0 or narrow % 2 or thin % 4 or not 0 < rank <= head_dim:
        return None
    sides = [state.get(name) for name in CodeSpace._fields[:4]]
    arrays = [side for side in sides if isinstance(side, np.ndarray) and side.dtype == np.float32]
    shapes = [array.shape for array in arrays]
    if shapes != [(head_dim, head_dim), (head_dim, head_dim), (head_dim,), (2, head_dim)]:
        return None
    return CodeSpace(arrays[0], arrays[1], arrays[2], arrays[3], wide, narrow, thin)


class DeviceTail(DeviceSearch):
    """The keys of a `DeviceIndex` from `first` on, for steps: codes of others are not read."""

    def __init__(self, whole: DeviceIndex, first: int) -> None:
        """first: of a key whose codes begin where a device may begin to read."""
        self._whole, self._first = whole, first

    def __len__(self) -> int:
        return len(self._whole) - self._first

    def task(self, request: SearchRequest) -> CompiledSearch:
        return exact_search(request.fmt) if request.candidates is None else self._whole.task(request)

    def batch_key(self, k: int, visible: int) -> Hashable:
        return self._whole.batch_key(k, visible)

    def device_codes(self, k: int, visible: int) -> Any:
        codes = self._whole.device_codes(k, visible)
        return None if codes is None else codes.behind(self._first)
