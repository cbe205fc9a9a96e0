"""What every index over keys promises, and the registry that makes one by name.

An index covers the keys of ONE key-value head. It returns ids and raw inner products; scaling, soft-capping
and the softmax belong to the attention that follows. It never copies keys that it does not need to
rearrange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn.index.formats import Format

MAX_KEYS = 2**31 - 1
"""ids are int32."""


class SearchResult(NamedTuple):
    """The best keys for each query, best first; equal scores are ordered by lower id.

    ids: (queries, k) int32, -1 where fewer than k keys exist.
    scores: (queries, k) float32, raw inner products (unscaled), -inf where ids is -1.
    keys_scanned: (query, key) inner products that were computed, over all queries.
    """

    ids: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    keys_scanned: int


class KeyIndex(ABC):
    """Search over the keys of one key-value head. ids count from 0 at the first key of the index."""

    kind: ClassVar[str]
    option_names: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    @abstractmethod
    def build(
        cls, keys: npt.NDArray[Any], fmt: Format, queries: npt.NDArray[np.float32] | None, **options: Any
    ) -> KeyIndex:
        """Make the index over keys (n, head_dim) of dtype fmt.dtype, n may be 0.

        queries: (m, head_dim) float32 sample to train on, or None; an index that needs no training
        ignores it.
        """

    @abstractmethod
    def search(self, queries: npt.NDArray[np.float32], k: int, *, limit: int | None = None) -> SearchResult:
        """The best k keys for each query.

        queries: (n, head_dim) float32, n may be 0. limit: only ids below it may be returned (None: all).
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
    """Build the index called `kind` over keys (n, head_dim) of dtype fmt.dtype, trained on queries if it
    trains.

    Raises ConfigError for an unknown kind or option, ShapeError for arrays the index cannot take.
    """
    return check_kind(kind, options).build(keys, fmt, queries, **options)
