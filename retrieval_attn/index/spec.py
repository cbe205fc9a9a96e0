"""Kinds of index by name, and one kind with its checked options: what everybody outside this folder asks.

A kind is a class (`KeyIndex`) and a frozen dataclass of options (`KeyIndex.Options`) whose values are checked when it
is made. `IndexSpec.of` is the one place where the user's name and mapping become both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn.index.base import CodeSizes, DeviceBytes, HeadShape, HostAccess, HostBytes, KeyIndex, Training
from retrieval_attn.index.formats import Format

_kinds: dict[str, type[KeyIndex]] = {}
_ELSEWHERE = {name: "retrieval_attn_eval.baselines.faiss_index" for name in ("hnsw", "ivf")}
"""Kinds that are registered when another module is imported."""
_Index = TypeVar("_Index", bound=type[KeyIndex])


def register(cls: _Index) -> _Index:
    """Class decorator: make `cls` known under cls.kind. Raises ConfigError if another class has the name."""
    known = _kinds.setdefault(cls.kind, cls)
    if known is not cls:
        raise ConfigError(f"index kind {cls.kind!r} is already {known.__qualname__}; choose another name")
    return cls


def available() -> tuple[str, ...]:
    """Names of the registered kinds that a user may choose, sorted."""
    return tuple(sorted(name for name, kind in _kinds.items() if not kind.planned))


@dataclass(frozen=True)
class IndexSpec:
    """A kind of index and its options, checked. Holds plain values only; two equal ones build the same index.

    Its properties and methods are those of `KeyIndex`, with these options.
    """

    cls: type[KeyIndex]
    options: Any

    @classmethod
    def of(cls, kind: str, options: Mapping[str, Any] | None = None) -> IndexSpec:
        """The kind called `kind` with these options; what is left out keeps its default.

        Raises ConfigError for an unknown kind or option, or a value that the kind refuses.
        """
        if kind not in _kinds:
            where = f"; import {_ELSEWHERE[kind]} first, which registers it" if kind in _ELSEWHERE else ""
            raise ConfigError(f"index={kind!r} is not a known kind{where}; use one of {', '.join(available())}")
        return cls(_kinds[kind], checked_options(_kinds[kind], options or {}))

    @property
    def kind(self) -> str:
        """Name of the kind."""
        return self.cls.kind

    @property
    def trains(self) -> bool:
        return self.cls.trains

    @property
    def keeps_device_keys(self) -> bool:
        return self.cls.keeps_device_keys

    def training_queries(self, tokens: int) -> int:
        return self.cls.training_queries(tokens)

    def list_length(self, num_keys: int) -> int:
        return self.cls.list_length(self.options, num_keys)

    def host_bytes(self, head: HeadShape) -> tuple[HostBytes, ...]:
        return self.cls.host_bytes(self.options, head)

    def device_bytes(self, head_dim: int) -> DeviceBytes:
        return self.cls.device_bytes(self.options, head_dim)

    @property
    def host_reads(self) -> HostAccess:
        return self.cls.host_reads(self.options)

    def keeps_codes(self, head_dim: int) -> bool:
        """Whether a device scans codes of the keys, for as long as the index lives."""
        return self.code_shape(head_dim, 1) is not None

    def code_shape(self, head_dim: int, k: int, estimated: bool = False) -> CodeSizes | None:
        return self.cls.code_shape(self.options, head_dim, k, estimated)

    def min_coded_keys(self, k: int) -> int:
        return self.cls.min_coded_keys(self.options, k)

    def possible_kinds(self, tokens: int | None = None) -> tuple[IndexSpec, ...]:
        """Other kinds that an index over `tokens` tokens (None: any number) may become, the likeliest first."""
        return tuple(IndexSpec.of(kind, options) for kind, options in self.cls.possible_kinds(self.options, tokens))

    def prepare(self, fmt: Format) -> bool:
        return self.cls.prepare(self.options, fmt)

    def build(
        self,
        keys: npt.NDArray[Any],
        fmt: Format,
        queries: npt.NDArray[np.float32] | None = None,
        *,
        lists: npt.NDArray[np.int32] | None = None,
        coder: Any = None,
    ) -> KeyIndex:
        """The index over keys (n, head_dim); see `KeyIndex.make` and `Training`."""
        return self.cls.make(keys, fmt, self.options, Training(queries, lists, coder))


def checked_options(cls: type[KeyIndex], options: Mapping[str, Any]) -> Any:
    """`options` as cls.Options. Raises ConfigError for an unknown name or a value out of range."""
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
