"""What every index over keys promises: the contract of a kind. `spec` makes one by name.

An index covers the keys of ONE key-value head. It returns ids and raw inner products; scaling, soft-capping and the
softmax belong to the attention that follows. It never copies keys that it does not need to rearrange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format, check_queries
from retrieval_attn.index.task.search import SearchedInSteps

MAX_KEYS = 2**31 - 1
"""ids are int32."""
TRAIN_QUERIES = 2048
"""Queries of each query head that a kind trains on, unless it is told otherwise or asks for more."""
TOKENS_PER_QUERY = 16
"""Tokens per query of a kind that trains on more queries."""

Alternatives = tuple[tuple[str, dict[str, Any]], ...]
StateValue = npt.NDArray[Any] | int | float | str


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


@dataclass(frozen=True)
class NoOptions:
    """A kind without options."""


def train_positions(n: int, count: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """min(count, n) distinct positions below n, ascending: half from the last eighth, half from everywhere."""
    count = min(count, n)
    rng = np.random.default_rng((seed, 7))
    tail = min(count // 2, n - n * 7 // 8)
    late = rng.choice(np.arange(n * 7 // 8, n), tail, replace=False) if tail else np.empty(0, np.int64)
    rest = np.setdiff1d(np.arange(n), late, assume_unique=True)
    early = rng.choice(rest, count - tail, replace=False)
    return np.sort(np.concatenate([late, early]).astype(np.int64))


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


class SearchResult(NamedTuple):
    """The best keys for each query, best first; equal scores are ordered by lower id.

    ids: (queries, k) int32, -1 where fewer than k keys exist.
    scores: (queries, k) float32, raw inner products (unscaled), -inf where ids is -1.
    keys_scanned: (query, key) pairs whose score was computed, coded or exact, over all queries; a pair that
    was scored twice (by its code, then exactly) counts once.
    """

    ids: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    keys_scanned: int


class KeyIndex(SearchedInSteps, ABC):
    """Search over the keys of one key-value head. ids count from 0 at the first key of the index."""

    kind: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions
    """A frozen dataclass of plain values with defaults, which checks them when it is made (ConfigError)."""
    planned: ClassVar[bool] = False
    """Whether only `auto` chooses this kind: `available` does not list it."""
    trains: ClassVar[bool] = False
    """Whether `build` learns from queries; callers then sample some while they read."""
    needs_only_lists: ClassVar[bool] = False
    """Whether training lists replace training queries."""
    max_queries: ClassVar[int] = TRAIN_QUERIES
    """A kind that finds more in long contexts the more queries it saw sets a higher number."""
    possible_kinds: ClassVar[Callable[[Any, int | None], Alternatives]] = staticmethod(lambda options, tokens: ())
    """(options, tokens of the context, None: any number): other kinds, and their options, that an index may turn out to
    be, the likeliest first."""
    note: str = ""
    """Why this kind was chosen, where something chose it."""
    exact: bool = False
    """Whether the answer is that of a scan of all stored keys, which a step may run in its place."""

    @classmethod
    def training_queries(cls, tokens: int) -> int:
        """Return the number of training queries per query head to sample from a context of `tokens` tokens."""
        return max(TRAIN_QUERIES, min(tokens // TOKENS_PER_QUERY, cls.max_queries)) if cls.trains else 0

    @classmethod
    def list_length(cls, options: Any, num_keys: int) -> int:
        """Entries that training lists over `num_keys` keys should have; 0: the kind takes none."""
        return 0

    @classmethod
    def host_bytes(cls, options: Any, head: HeadShape) -> tuple[HostBytes, ...]:
        """Return the maximum host memory of an index of one head, one entry for each kind that it may become."""
        return (HostBytes(0, None, "no bytes beyond the keys"),)

    @classmethod
    def device_bytes(cls, options: Any, head_dim: int) -> DeviceBytes:
        """Bytes of device memory for each key."""
        return DeviceBytes()

    @classmethod
    def host_reads(cls, options: Any) -> HostAccess:
        """Return the reads of host memory by a device."""
        return HostAccess()

    @classmethod
    def code_shape(cls, options: Any, head_dim: int, k: int, estimated: bool) -> CodeSizes | None:
        """Sizes of a search of codes on the device for the best k. None: the kind has no codes there. estimated: all
        that are named are attended to, and the others are estimated, so that fewer suffice.
        """
        return None

    @classmethod
    def min_coded_keys(cls, options: Any, k: int) -> int:
        """How many keys a search for the best k of them goes by codes on the device from; 0: none does."""
        return 0

    @classmethod
    def prepare(cls, options: Any, fmt: Format) -> bool:
        """Compile the searches of a step over keys in `fmt`, or load them.

        Returns whether the kind has a compiled search.
        """
        return False

    @classmethod
    def build(
        cls,
        keys: npt.NDArray[Any],
        fmt: Format,
        queries: npt.NDArray[np.float32] | None = None,
        *,
        lists: npt.NDArray[np.int32] | None = None,
        **options: Any,
    ) -> Self:
        """`make` with options by name. Raises ConfigError for a value out of range."""
        made = cls.make(keys, fmt, cls.Options(**options), Training(queries, lists))
        assert isinstance(made, cls)
        return made

    @classmethod
    @abstractmethod
    def make(cls, keys: npt.NDArray[Any], fmt: Format, options: Any, training: Training) -> KeyIndex:
        """The index over keys (n, head_dim) of dtype fmt.dtype, n may be 0; rows contiguous, else ShapeError.

        options: cls.Options. training: ignored by a kind that needs none. A kind that samples makes the same index at
        any number of threads.
        """

    @abstractmethod
    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """The best k keys for each query.

        queries: (n, head_dim) float32, n may be 0. limit: only ids below it may be returned (None: all).
        Scores are exact inner products with the stored keys, whatever the search was guided by.
        Raises ShapeError for another shape or dtype, ConfigError for k < 1 or limit < 0.
        """

    @abstractmethod
    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append keys (n, head_dim) of the index's format, n may be 0.

        They stay the caller's and must not change.
        """

    def truncate(self, length: int) -> bool:
        """Forget all ids >= length, so that other keys may be inserted there. False: this kind cannot."""
        return False

    def state(self) -> dict[str, StateValue]:
        """Return arrays and plain values for saving, from which `from_state` restores the index with its keys.

        Arrays are views where a later insert leaves alone what they hold, else copies: the index may grow while they
        are written. Raises ConfigError if this kind cannot be saved.
        """
        raise ConfigError(f"an index of kind {self.kind!r} cannot be saved; build it again from its keys")

    @classmethod
    def from_state(
        cls,
        keys: npt.NDArray[Any],
        fmt: Format,
        state: Mapping[str, StateValue],
        *,
        coder: Any = None,
        trusted: bool = False,
    ) -> KeyIndex:
        """The index whose `state()` was `state`, over the same keys (n, head_dim). It answers and grows as that does.

        Arrays, the keys too, may be read-only maps of a file: copy what a later insert changes. coder: see `Training`;
        it takes codes that a device kept. trusted: checksums were compared with those of the `state()` that was
        saved, so large arrays are taken as they are (`memory.usable`), not read; they must be writable, as maps that
        copy on write are. Raises ConfigError if this kind cannot be saved, InputDataError for a state that does not
        fit the keys.
        """
        raise ConfigError(
            f"an index of kind {cls.kind!r} cannot be restored from a saved state; build it from its keys"
        )

    @classmethod
    def search_heads(
        cls, indexes: Sequence[KeyIndex], queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None
    ) -> SearchResult:
        """Search the indexes of several heads at once: queries (heads, n, head_dim) -> ids, scores (heads, n, k).

        All of one kind and length. Same answers as one `search` per head; kinds override it to save calls.
        """
        return one_result([index.search(queries[i], k, limit=limit) for i, index in enumerate(indexes)])

    @abstractmethod
    def __len__(self) -> int:
        """Keys in the index."""

    @property
    @abstractmethod
    def head_dim(self) -> int:
        """Elements of one key."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the index holds beyond the caller's keys."""

    @property
    def device_nbytes(self) -> int:
        """Bytes of device memory that the index holds."""
        return 0


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


def one_result(found: Sequence[SearchResult]) -> SearchResult:
    """Results of several heads as one: ids and scores (heads, n, k)."""
    ids, scores = (np.stack([one[i] for one in found]) for i in (0, 1))
    return SearchResult(ids, scores, sum(one.keys_scanned for one in found))


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
