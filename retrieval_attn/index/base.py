"""What every index over keys promises, and the registry that makes one by name.

An index covers the keys of ONE key-value head. It returns ids and raw inner products; scaling, soft-capping
and the softmax belong to the attention that follows. It never copies keys that it does not need to
rearrange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format, check_queries

MAX_KEYS = 2**31 - 1
"""ids are int32."""
TRAIN_QUERIES = 2048
"""Queries of each query head that a kind trains on, unless it is told otherwise or asks for more."""
TOKENS_PER_QUERY = 16
"""A kind that asks for more gets one query of so many tokens."""

StateValue = npt.NDArray[Any] | int | float | str


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


class KeyIndex(ABC):
    """Search over the keys of one key-value head. ids count from 0 at the first key of the index."""

    kind: ClassVar[str]
    option_names: ClassVar[frozenset[str]] = frozenset()
    trains: ClassVar[bool] = False
    """Whether `build` learns from queries; callers then sample some while they read."""
    note: str = ""
    """Why this kind was chosen, where something chose it."""

    most_queries: ClassVar[int] = TRAIN_QUERIES
    """A kind that finds more in long contexts the more queries it saw asks for so many there."""

    @classmethod
    def training_queries(cls, tokens: int, told: int | None = None) -> int:
        """Queries of each query head to sample from a context of so many tokens; told: what the user asked for."""
        if told is None:
            told = max(TRAIN_QUERIES, min(tokens // TOKENS_PER_QUERY, cls.most_queries))
        return told if cls.trains else 0

    @classmethod
    @abstractmethod
    def build(
        cls, keys: npt.NDArray[Any], fmt: Format, queries: npt.NDArray[np.float32] | None, **options: Any
    ) -> KeyIndex:
        """Make the index over keys (n, head_dim) of dtype fmt.dtype, n may be 0; rows contiguous, else
        ShapeError.

        queries: (query heads of the group, m, head_dim) float32 to train on, at the position where decoding
        happens (the caller rotates them there), or None; a kind that needs no training ignores them.
        options: names in `option_names`. A kind that samples takes `seed` (default 0) and makes the same
        index for it at any number of threads. A kind that trains may take `lists`: int32 (query heads, m,
        kk), the best kk keys of each training query, best first, computed elsewhere; -1 where there is none.
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
        """What `from_state` needs besides the keys: arrays and plain values, for saving to a file.

        Raises ConfigError if this kind cannot be saved.
        """
        raise ConfigError(f"an index of kind {self.kind!r} cannot be saved; build it again from its keys")

    @classmethod
    def from_state(cls, keys: npt.NDArray[Any], fmt: Format, state: Mapping[str, StateValue]) -> KeyIndex:
        """The index whose `state()` was `state`, over the same keys (n, head_dim).

        Arrays, the keys too, may be read-only maps of a file: copy what a later insert changes.
        Raises ConfigError if this kind cannot be saved, InputDataError for a state that does not fit the keys.
        """
        raise ConfigError(f"an index of kind {cls.kind!r} cannot be loaded; build it from its keys")

    @classmethod
    def search_heads(
        cls,
        indexes: Sequence[KeyIndex],
        queries: npt.NDArray[np.float32],
        k: int,
        *,
        limit: int | None = None,
    ) -> SearchResult:
        """Search the indexes of several heads at once: queries (heads, n, head_dim) -> ids, scores (heads,
        n, k).

        All of one kind and length. Same answers as one `search` per head; kinds override it to save calls.
        """
        found = [index.search(queries[i], k, limit=limit) for i, index in enumerate(indexes)]
        return SearchResult(
            np.stack([one.ids for one in found]),
            np.stack([one.scores for one in found]),
            sum(one.keys_scanned for one in found),
        )

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


_kinds: dict[str, type[KeyIndex]] = {}
_Index = TypeVar("_Index", bound=type[KeyIndex])


def register(cls: _Index) -> _Index:
    """Class decorator: make `cls` known to `create` under cls.kind. Raises ConfigError if another class has
    the name.
    """
    known = _kinds.setdefault(cls.kind, cls)
    if known is not cls:
        raise ConfigError(f"index kind {cls.kind!r} is already {known.__qualname__}; choose another name")
    return cls


def available() -> tuple[str, ...]:
    """Names of the registered kinds, sorted."""
    return tuple(sorted(_kinds))


def check_kind(kind: str, options: dict[str, Any]) -> type[KeyIndex]:
    """The class registered as `kind`; raises ConfigError for an unknown kind or an unknown option name."""
    if kind not in _kinds:
        raise ConfigError(f"index={kind!r} is not a known kind; use one of {', '.join(available())}")
    cls = _kinds[kind]
    unknown = sorted(set(options) - cls.option_names)
    if unknown:
        known = ", ".join(sorted(cls.option_names)) or "none"
        raise ConfigError(f"index {kind!r} has no option {', '.join(unknown)}; its options: {known}")
    return cls


def create(
    kind: str,
    keys: npt.NDArray[Any],
    *,
    fmt: Format,
    queries: npt.NDArray[np.float32] | None = None,
    **options: Any,
) -> KeyIndex:
    """Build the index called `kind` over keys (n, head_dim) of dtype fmt.dtype; queries as in `KeyIndex.build`.

    Raises ConfigError for an unknown kind or option, ShapeError for arrays the index cannot take.
    """
    return check_kind(kind, options).build(keys, fmt, queries, **options)


def check_search(
    queries: npt.NDArray[np.float32], head_dim: int, k: int, limit: int | None
) -> tuple[npt.NDArray[np.float32], int]:
    """Arguments of `search`, checked: queries as C-contiguous float32 (n, head_dim), and k as an int.

    Raises ShapeError for queries of another shape or dtype, ConfigError for k < 1 or limit < 0.
    """
    queries = check_queries("queries", queries, 2)
    if queries.shape[1] != head_dim:
        raise ShapeError(f"queries must be (n, {head_dim}) as the keys are, got {queries.shape}")
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ConfigError(f"k={k!r} must be a whole number >= 1")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | np.integer) or limit < 0):
        raise ConfigError(f"limit={limit!r} must be a whole number >= 0, or None for all keys")
    return queries, int(k)


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
            "they belong to other keys"
        )
    return queries, np.require(lists, requirements=("C", "A"))
