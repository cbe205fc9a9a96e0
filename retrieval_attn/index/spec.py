"""Kinds of index by name, and one kind with its checked options: the interface of this folder to other folders.

A kind is a class (`KeyIndex`), a frozen dataclass of options (`KeyIndex.Options`) whose values are checked when it is
made, and facts (`KindFacts`). `IndexSpec.of` is the one place that turns the user's name and mapping into a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn.index.base import (
    CodeSizes,
    DeviceBytes,
    HeadShape,
    HeadsTraining,
    HostAccess,
    HostBytes,
    KeyIndex,
    KindFacts,
    Training,
)
from retrieval_attn.index.formats import Format

_kinds: dict[str, tuple[type[KeyIndex], KindFacts]] = {}
_ELSEWHERE = {name: "retrieval_attn_eval.baselines.faiss_index" for name in ("hnsw", "ivf")}
"""Kinds that are registered when another module is imported."""
_Index = TypeVar("_Index", bound=type[KeyIndex])


def register(**facts: Any) -> Callable[[_Index], _Index]:
    """Return a class decorator that registers a kind under cls.kind, with its `KindFacts`.

    Raises ConfigError if another class has the name.
    """

    def decorate(cls: _Index) -> _Index:
        known, _ = _kinds.setdefault(cls.kind, (cls, KindFacts(**facts)))
        if known is not cls:
            raise ConfigError(f"index kind {cls.kind!r} is already {known.__qualname__}; choose another name")
        return cls

    return decorate


def available() -> tuple[str, ...]:
    """Return the names of the registered kinds that a user may choose, sorted."""
    return tuple(sorted(name for name, (_, facts) in _kinds.items() if facts.listed))


@dataclass(frozen=True)
class IndexSpec:
    """A kind of index and its options, checked. Holds plain values only; two equal ones build the same index.

    Its methods are facts of the kind (`KindFacts`, `TrainingNeeds`) for these options.
    """

    cls: type[KeyIndex]
    options: Any

    @classmethod
    def of(cls, kind: str, options: Mapping[str, Any] | None = None) -> IndexSpec:
        """Return the kind called `kind` with these options, and the kind's defaults for all others.

        Raises ConfigError for an unknown kind or option, or a value that the kind refuses.
        """
        if kind not in _kinds:
            where = f"; import {_ELSEWHERE[kind]} first, which registers it" if kind in _ELSEWHERE else ""
            raise ConfigError(f"index={kind!r} is not a known kind{where}; use one of {', '.join(available())}")
        return cls(_kinds[kind][0], checked_options(_kinds[kind][0], options or {}))

    @property
    def kind(self) -> str:
        return self.cls.kind

    @property
    def _facts(self) -> KindFacts:
        return _kinds[self.kind][1]

    @property
    def trains(self) -> bool:
        return self.cls.training.max_queries > 0

    @property
    def keeps_device_keys(self) -> bool:
        return self._facts.keeps_device_keys

    def training_queries(self, tokens: int) -> int:
        return self.cls.training.queries(tokens)

    def list_length(self, num_keys: int) -> int:
        """Return the entries of training lists over `num_keys` keys; 0 if the kind takes none."""
        needs = self.cls.training
        return needs.list_length if num_keys >= needs.lists_from else 0

    def host_bytes(self, head: HeadShape) -> tuple[HostBytes, ...]:
        return self._facts.memory(self.options, head).host

    def device_bytes(self, head_dim: int) -> DeviceBytes:
        return self._facts.memory(self.options, HeadShape(head_dim, head_dim, 1, False)).device

    @property
    def host_reads(self) -> HostAccess:
        return self._facts.host_access(self.options)

    def keeps_codes(self, head_dim: int) -> bool:
        """Return True if a device scans codes of the keys for as long as the index lives."""
        return self.code_shape(head_dim, 1) is not None

    def code_shape(self, head_dim: int, k: int, estimated: bool = False) -> CodeSizes | None:
        sizes = self._facts.code_sizes
        return None if sizes is None else sizes(self.options, head_dim, k, estimated)

    def min_coded_keys(self, k: int) -> int:
        return self._facts.min_coded_keys(self.options, k)

    def possible_kinds(self, tokens: int | None = None) -> tuple[IndexSpec, ...]:
        """Return the kinds that an index over `tokens` tokens (None: any number) may become, most likely first."""
        return tuple(IndexSpec.of(kind, options) for kind, options in self._facts.possible_kinds(self.options, tokens))

    def compile_tasks(self, fmt: Format) -> None:
        """Compile the search tasks of the kind over keys in `fmt`, or load them."""
        self._facts.compile_tasks(self.options, fmt)

    def build(
        self,
        keys: npt.NDArray[Any],
        fmt: Format,
        queries: npt.NDArray[np.float32] | None = None,
        *,
        lists: npt.NDArray[np.int32] | None = None,
        coder: Any = None,
    ) -> KeyIndex:
        """Build the index over keys (n, head_dim); see `KeyIndex.build` and `Training`."""
        return self.cls.build(keys, fmt, self.options, Training(queries, lists, coder))

    def build_heads(self, keys: npt.NDArray[Any], fmt: Format, training: HeadsTraining) -> Sequence[KeyIndex]:
        """Build the indexes over keys (heads, n, head_dim); see `KeyIndex.build_heads`."""
        return self.cls.build_heads(keys, fmt, self.options, training)


def checked_options(cls: type[KeyIndex], options: Mapping[str, Any]) -> Any:
    """Return `options` as cls.Options. Raises ConfigError for an unknown name or a value out of range."""
    known = sorted(field.name for field in fields(cls.Options))
    unknown = sorted(set(options) - set(known))
    if unknown:
        names = ", ".join(known) or "none"
        raise ConfigError(f"index {cls.kind!r} has no option {', '.join(unknown)}; its options: {names}")
    return cls.Options(**options)


def create(
    kind: str,
    keys: npt.NDArray[Any],
    *,
    fmt: Format,
    queries: npt.NDArray[np.float32] | None = None,
    lists: npt.NDArray[np.int32] | None = None,
    **options: Any,
) -> KeyIndex:
    """Build the index called `kind` over keys (n, head_dim) of dtype fmt.dtype; queries, lists as in `Training`.

    Raises ConfigError for an unknown kind or option, ShapeError for arrays the index cannot take.
    """
    return IndexSpec.of(kind, options).build(keys, fmt, queries, lists=lists)
