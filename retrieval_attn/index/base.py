"""The contract of a kind of index, `KeyIndex`, and the records that a kind gives to memory plans and steps.

An index covers the keys of ONE key-value head. It returns ids and raw inner products; scaling, soft-capping and the
softmax belong to the attention that follows. `spec.py` registers kinds and builds an index by the name of its kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format, check_queries
from retrieval_attn.index.keys import MAX_KEYS as MAX_KEYS
from retrieval_attn.index.keys import StoredKeys
from retrieval_attn.index.task.run import SearchResult, search_range
from retrieval_attn.index.task.search import CompiledSearch, SearchRequest

TRAIN_QUERIES = 2048
"""Default number of training queries of each query head."""
TOKENS_PER_QUERY = 16
"""Tokens per query of a kind that trains on more queries."""

Alternatives = tuple[tuple[str, dict[str, Any]], ...]
StateValue = npt.NDArray[Any] | int | float | str
State = Mapping[str, StateValue]


class HostBytes(NamedTuple):
    """Bytes per key of one head, of how many keys at most (None: of all), what they are, and bytes of all others."""

    each: int
    limit: int | None
    text: str
    other: int = 0

    def bytes(self, tokens: int) -> int:
        """Return the bytes of one head with `tokens` tokens."""
        held = tokens if self.limit is None else min(tokens, self.limit)
        return self.each * held + self.other * (tokens - held)


class DeviceBytes(NamedTuple):
    """Bytes of device memory per key: held; building, more for the keys of one head at a time while an index is built;
    staged, for those of a layer that is searched, or is about to be.
    """

    held: int = 0
    building: int = 0
    staged: int = 0


class HostAccess(NamedTuple):
    """Reads of host memory by a device. codes: the codes that it scans. rows: int8 copies of keys and values
    (`offload/int8_rows.py`). key_share: share of the candidates whose int8 keys are read; of the rest only values are.
    """

    codes: bool = False
    rows: bool = False
    key_share: float = 1.0


class CodeSizes(NamedTuple):
    """Sizes of a search of codes: bytes per key, keys to select; bytes of finer codes that keep `kept`, 0: all."""

    key_bytes: int
    k: int
    finer_bytes: int = 0
    kept: int = 0


class HeadShape(NamedTuple):
    """Dimensions of a key and of a value, query heads of the group, and whether keys are stored as int8."""

    head_dim: int
    value_dim: int
    group: int
    int8: bool


class IndexMemory(NamedTuple):
    """Maximum memory of an index of one head. host: one entry for each kind that the index may become."""

    host: tuple[HostBytes, ...] = (HostBytes(0, None, "no bytes beyond the keys"),)
    device: DeviceBytes = DeviceBytes()


class HeldMemory(NamedTuple):
    """Bytes that an index holds beyond the caller's keys, in host memory and in device memory."""

    host: int
    device: int = 0


@dataclass(frozen=True)
class NoOptions:
    """A kind without options."""


@dataclass(frozen=True)
class TrainingNeeds:
    """Samples that `KeyIndex.build` learns from; none by default.

    max_queries: maximum training queries of each query head, 0 for a kind that does not train; more than TRAIN_QUERIES
    for a kind that finds more in long contexts the more queries it saw. list_length: entries of a training list, 0 if
    the kind takes none. lists_from: fewest keys for which lists are used. only_lists: lists replace the queries.
    only_moment: so does their `QueryMoment`, where queries lie on a device.
    """

    max_queries: int = 0
    list_length: int = 0
    lists_from: int = 1
    only_lists: bool = False
    only_moment: bool = False

    def queries(self, tokens: int) -> int:
        """Return the number of queries per query head to sample from a context of `tokens` tokens."""
        return max(TRAIN_QUERIES, min(tokens // TOKENS_PER_QUERY, self.max_queries)) if self.max_queries else 0


@dataclass(frozen=True)
class KindFacts:
    """Facts of a kind that memory plans, steps and compilation ask for; registered with it (`spec.register`).

    Functions take the kind's options first. listed: a user may choose the kind; else only `auto` does.
    keeps_device_keys: keys are coded on the device, so callers leave a layer's keys there until its indexes are built.
    memory: (options, head) -> IndexMemory. host_access: (options) -> HostAccess of a device. possible_kinds:
    (options, tokens of the context or None for any number) -> kinds, with options, that an index may become instead,
    most likely first. compile_tasks: (options, format) compiles the kind's search tasks, or loads them. code_sizes:
    (options, head_dim, k, estimated) -> CodeSizes of a search on the device for the best k; estimated: all candidates
    are attended and the other keys are estimated, so fewer candidates suffice; None: no codes on a device.
    min_coded_keys: (options, k) -> fewest keys that a device searches by codes; 0: it searches none.
    """

    listed: bool = True
    keeps_device_keys: bool = False
    memory: Callable[[Any, HeadShape], IndexMemory] = lambda options, head: IndexMemory()
    host_access: Callable[[Any], HostAccess] = lambda options: HostAccess()
    possible_kinds: Callable[[Any, int | None], Alternatives] = lambda options, tokens: ()
    compile_tasks: Callable[[Any, Format], None] = lambda options, fmt: None
    code_sizes: Callable[[Any, int, int, bool], CodeSizes] | None = None
    min_coded_keys: Callable[[Any, int], int] = lambda options, k: 0


def train_positions(n: int, count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """min(count, n) distinct positions below n, ascending: half from the last eighth, half from everywhere."""
    count = min(count, n)
    rng = np.random.default_rng((seed, 7))
    tail = min(count // 2, n - n * 7 // 8)
    late = rng.choice(np.arange(n * 7 // 8, n), tail, replace=False) if tail else np.empty(0, np.int64)
    rest = np.setdiff1d(np.arange(n), late, assume_unique=True)
    early = rng.choice(rest, count - tail, replace=False)
    return np.sort(np.concatenate([late, early]).astype(np.int64))


class QueryMoment(NamedTuple):
    """Second moments of the training queries of some key-value heads; queries that are not finite are left out.

    product (heads, head_dim, head_dim) float64: the mean of q q^T, 0 without a query. known (heads,) float64: how many
    there are.
    """

    product: npt.NDArray[np.float64]
    known: npt.NDArray[np.float64]

    def heads(self, which: slice) -> QueryMoment:
        """Return those of some heads."""
        return QueryMoment(self.product[which], self.known[which])


class Training(NamedTuple):
    """Optional inputs of building an index, in addition to its keys.

    queries: (query heads of the group, m, head_dim) float32 to train on, at the position where decoding happens (the
    caller rotates them there), or None. lists: int32 (query heads, m, kk), the best kk keys of each training query,
    best first, computed elsewhere, -1 where there is none; or None. coder: makes the codes of this head on a device
    (`device.Coder`, `sketch.coding.RowCoder`), for a kind that has some made there; None makes them on the host.
    """

    queries: npt.NDArray[np.float32] | None = None
    lists: npt.NDArray[np.int32] | None = None
    coder: Any = None


class HeadsTraining(NamedTuple):
    """`Training` of some key-value heads: arrays have them as first axis. queries: also the moment of them.

    coder: makes codes of a layer's heads (`cpu.segment.HeadCoders`). first: of these heads in the layer.
    """

    queries: npt.NDArray[np.float32] | QueryMoment | None = None
    lists: npt.NDArray[np.int32] | None = None
    coder: Any = None
    first: int = 0

    def of(self, head: int) -> Training:
        """Return the training of one of the heads, without a moment."""
        rows = None if self.queries is None or isinstance(self.queries, QueryMoment) else self.queries[head]
        lists = None if self.lists is None else self.lists[head]
        return Training(rows, lists, None if self.coder is None else self.coder.for_head(self.first + head))

    def some(self, heads: slice) -> HeadsTraining:
        """Return the training of some of the heads."""
        queries, lists = self.queries, self.lists
        if queries is not None:
            queries = queries.heads(heads) if isinstance(queries, QueryMoment) else queries[heads]
        return HeadsTraining(queries, None if lists is None else lists[heads], self.coder, self.first + heads.start)


class Searchable(Protocol):
    """Keys that a step can search: an index, or the end of one."""

    def __len__(self) -> int: ...

    def task(self, request: SearchRequest) -> CompiledSearch: ...


class KeyIndex(ABC):
    """Search over the keys of one key-value head. ids count from 0 at the first key of the index.

    A kind sets `_keys`, and needs `build`, `task` and `insert`; the other methods have defaults.
    """

    kind: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions
    """A frozen dataclass of plain values with defaults, which checks them when it is made (ConfigError)."""
    training: ClassVar[TrainingNeeds] = TrainingNeeds()
    _keys: StoredKeys

    @classmethod
    @abstractmethod
    def build(cls, keys: npt.NDArray[Any], fmt: Format, options: Any, training: Training) -> KeyIndex:
        """Build the index over keys (n, head_dim) of dtype fmt.dtype, n may be 0; rows contiguous, else ShapeError.

        options: cls.Options. training: ignored by a kind that needs none. A kind that samples builds the same index at
        any number of threads.
        """

    built_together: ClassVar[int] = 1
    """Heads of one call of `build_heads`."""

    @classmethod
    def build_heads(
        cls, keys: npt.NDArray[Any], fmt: Format, options: Any, training: HeadsTraining
    ) -> Sequence[KeyIndex]:
        """Build the indexes of keys (heads, n, head_dim); by default one by one.

        Calls of NumPy and PyTorch for several heads take long, and other threads run meanwhile: head by head they are
        short, and each of them holds up the thread that drives a GPU.
        """
        return [cls.build(own, fmt, options, training.of(head)) for head, own in enumerate(keys)]

    @abstractmethod
    def task(self, request: SearchRequest) -> CompiledSearch:
        """Return the compiled search of this index for `request`, as tasks of a step or of `search`.

        If a scan of the stored keys is faster, or the first keys are hidden and the kind cannot leave them out, that
        is `flat.exact_search`. A kind without compiled code returns `candidates.called_search`.
        """

    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """Search for the best k keys of each query, on the threads that Numba uses.

        queries: (n, head_dim) float32, n may be 0. limit: only ids below it may be returned; None for all keys.
        Scores are exact inner products with the stored keys. The result does not depend on the number of threads.
        Raises ShapeError for another shape or dtype, ConfigError for k < 1 or limit < 0.
        """
        queries, k = check_search(queries, self._keys.head_dim, k, limit)
        keys = self._keys.whole
        return search_range(keys if limit is None else keys[: int(limit)], self._keys.fmt, queries, k, self.task)

    @abstractmethod
    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys (n, head_dim) of the index's format, n may be 0. The caller must not change them afterwards."""

    @classmethod
    def insert_heads(cls, heads: Sequence[KeyIndex], keys: npt.NDArray[Any]) -> None:
        """Append keys (heads, n, head_dim), the same number to each head's index of this kind."""
        for one, own in zip(heads, keys, strict=True):
            one.insert(own)

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length, so that other keys may be inserted there. Return False if the kind cannot."""
        return False

    def state(self) -> dict[str, StateValue]:
        """Return arrays and plain values for saving, from which `from_state` restores the index with its keys.

        Arrays are views if a later insert does not change them, else copies: the index may grow while they are
        written. Raises ConfigError if this kind cannot be saved.
        """
        raise ConfigError(f"an index of kind {self.kind!r} cannot be saved; build it again from its keys")

    @classmethod
    def from_state(
        cls, keys: npt.NDArray[Any], fmt: Format, state: State, *, coder: Any = None, trusted: bool = False
    ) -> KeyIndex:
        """Restore the index whose `state()` was `state`, over the same keys (n, head_dim), to the same behaviour.

        Arrays, the keys too, may be read-only maps of a file: copy arrays that a later insert changes. coder: see
        `Training`; it takes codes that a device kept. trusted: checksums were compared with those of the saved
        `state()`, so large arrays are used without a look at their values (`memory.usable`); they must be writable, as
        maps that copy on write are. Raises ConfigError if this kind cannot be saved, InputDataError for a state that
        does not fit the keys.
        """
        raise ConfigError(
            f"an index of kind {cls.kind!r} cannot be restored from a saved state; build it from its keys"
        )

    @property
    def memory(self) -> HeldMemory:
        """Bytes that the index holds beyond the caller's keys."""
        return HeldMemory(self._keys.nbytes)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._keys)


class DeviceSearch(ABC):
    """Keys with codes on a device, which selects candidates before a step runs."""

    @abstractmethod
    def device_codes(self, k: int, visible: int) -> Any:
        """Return the codes that a device scans for the best k of `visible` keys; None if it scans none."""

    @abstractmethod
    def batch_key(self, k: int, visible: int) -> Hashable:
        """Return a key that is equal for indexes whose `task` is the same for the best k of `visible` keys."""

    def tail(self, first: int) -> Searchable | None:
        """Return the search of the keys from `first` on, as the index grows; its ids count from there.

        None if the codes of these keys cannot be read alone.
        """
        return None


def check_search(
    queries: npt.NDArray[np.float32], head_dim: int, k: int, limit: int | None
) -> tuple[npt.NDArray[np.float32], int]:
    """Arguments of `search`, checked: queries as C-contiguous float32 (n, head_dim), and k as an int.

    Raises ShapeError for queries of another shape or dtype, ConfigError for k < 1 or limit < 0.
    """
    queries = check_queries("queries", queries, 2)
    if queries.shape[1] != head_dim:
        raise ShapeError(f"queries must be (n, {head_dim}) as the keys are, got {queries.shape}")
    check_wanted(k, limit)
    return queries, int(k)


def check_wanted(k: int, limit: int | None) -> None:
    """Raise ConfigError unless k is a whole number >= 1 and limit one >= 0, or None."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ConfigError(f"k={k!r} must be a whole number >= 1")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | np.integer) or limit < 0):
        raise ConfigError(f"limit={limit!r} must be a whole number >= 0, or None for all keys")


def check_training(
    queries: npt.NDArray[np.float32] | None, lists: npt.NDArray[np.int32] | None, head_dim: int, num_keys: int
) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.int32] | None]:
    """Training queries (group, m, head_dim) float32 and lists (group, m, kk) int32, checked, C-contiguous.

    Raises ShapeError for other shapes or dtypes, or for lists that name a key outside -1 .. num_keys - 1.
    """
    if queries is not None:
        queries = check_queries("queries", queries, 3)
        if queries.shape[2] != head_dim:
            raise ShapeError(f"training queries must be (heads, m, {head_dim}) as the keys are, got {queries.shape}")
    if lists is None:
        return queries, None
    if not isinstance(lists, np.ndarray) or lists.dtype != np.int32 or lists.ndim != 3:
        given = f"{lists.dtype} {lists.shape}" if isinstance(lists, np.ndarray) else type(lists).__name__
        raise ShapeError(f"lists must be int32 (heads, m, kk), got {given}")
    if queries is not None and lists.shape[:2] != queries.shape[:2]:
        raise ShapeError(
            f"lists must be ({queries.shape[0]}, {queries.shape[1]}, kk) as queries are, got {lists.shape}"
        )
    if lists.size and (int(lists.min()) < -1 or int(lists.max()) >= num_keys):
        raise ShapeError(
            f"lists must name keys 0 .. {num_keys - 1} or -1, got {int(lists.min())} to {int(lists.max())}; "
            "pass the lists of these keys"
        )
    return queries, np.require(lists, requirements=("C", "A"))
