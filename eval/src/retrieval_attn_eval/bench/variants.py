"""What is compared: index kinds with the knob that trades answers for time, and hnswlib where it is installed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)
from retrieval_attn.errors import ConfigError
from retrieval_attn.index import KeyIndex, available, create
from retrieval_attn.testing import (
    MAX_KEYS,
    CompiledSearch,
    Format,
    HeldMemory,
    IndexSpec,
    SearchRequest,
    StoredKeys,
    Training,
    called_search,
    encode_keys,
    to_float32,
    training_lists,
)
from retrieval_attn_eval.bench.heads import Head

LIST_K = 64
"""Entries of a training list where a kind takes lists."""


@dataclass(frozen=True)
class Variant:
    """An index kind, its options, and values of the option `knob` from cheap to good (None: nothing to turn).

    row_bytes: what is read per scored key: "stored" row, 8-bit "codes" or "float32"; shared: one pass over the keys
    serves the whole group.
    """

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    knob: str | None = None
    values: tuple[int, ...] = ()
    row_bytes: str = "stored"
    shared: bool = False

    def missing(self) -> str | None:
        """Why this variant cannot be measured here, None if it can."""
        if self.kind == "hnswlib":
            return None if importlib.util.find_spec("hnswlib") else "hnswlib is not installed"
        try:
            IndexSpec.of(self.kind, {**self.options, **({self.knob: self.values[0]} if self.knob else {})})
        except ConfigError as error:
            return str(error)
        return None

    def build(self, head: Head, lists: npt.NDArray[np.int32] | None) -> KeyIndex:
        """The index of a head, with the first value of the knob. lists: for kinds that take training lists."""
        options = dict(self.options)
        if self.knob is not None:
            options[self.knob] = self.values[0]
        if self.kind == "hnswlib":
            return HnswlibIndex.build(head.keys, head.fmt, HnswlibOptions(**options), Training())
        return create(
            self.kind, head.keys, fmt=head.fmt, queries=head.train, lists=lists if self.takes_lists else None, **options
        )

    @property
    def takes_lists(self) -> bool:
        """Whether the kind can be given training lists."""
        if self.kind == "hnswlib":
            return False
        return IndexSpec.of(self.kind, self.options).list_length(MAX_KEYS) > 0

    def turn(self, index: KeyIndex, value: int) -> None:
        """Set the knob of a built index."""
        assert self.knob is not None
        options = getattr(index, "options", None)
        if dataclasses.is_dataclass(options) and not isinstance(options, type) and hasattr(options, self.knob):
            index.options = dataclasses.replace(options, **{self.knob: value})  # type: ignore[attr-defined]
        else:
            raise ConfigError(f"index {self.kind!r} cannot change {self.knob} after it was built")

    def bytes_per_key(self, head: Head) -> float:
        """Bytes of keys read per scored (query, key) pair."""
        dim = head.keys.shape[1]
        width = {"stored": dim * head.fmt.bytes, "float32": 4 * dim, "codes": -(-dim // 64) * 64}[self.row_bytes]
        return width / (head.group if self.shared else 1)


BEAMS = (100, 160, 250, 400)
EFS = (100, 200, 400, 800)
VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("flat", "flat", shared=True),
        Variant("flat-int8", "flat", {"codes": "int8"}, row_bytes="codes", shared=True),
        Variant("ivf", "ivf", knob="nprobe", values=(4, 16, 50, 100, 150, 250), row_bytes="float32"),
        Variant("hnsw", "hnsw", {"metric": "l2"}, "ef_search", EFS, "float32"),
        Variant("hnsw-ip", "hnsw", {"metric": "ip"}, "ef_search", EFS, "float32"),
        Variant("hnswlib", "hnswlib", {}, "ef_search", EFS, "float32"),
        Variant("roargraph", "roargraph", {}, "beam", BEAMS, "codes"),
        Variant("sketch-24", "sketch", {"key_bytes": 24}, row_bytes="codes", shared=True),
        Variant("sketch", "sketch", {}, row_bytes="codes", shared=True),
    )
}
DEFAULT = ("flat", "flat-int8", "ivf", "hnsw", "hnswlib", "roargraph", "sketch-24", "sketch")


def choose(text: str) -> tuple[list[Variant], list[str]]:
    """Variants named in a comma list ("all": the default ones), and lines about those that cannot be measured.

    Any other registered kind is a variant of its name, with its default options. Raises ConfigError for a name
    that does not exist, or if nothing is left.
    """
    names = list(DEFAULT) if text == "all" else [name.strip() for name in text.split(",")]
    known = {**{kind: Variant(kind, kind) for kind in available()}, **VARIANTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--kinds {', '.join(unknown)} not known; use all or some of {', '.join(known)}")
    reasons = {name: known[name].missing() for name in dict.fromkeys(names)}
    left = [known[name] for name, reason in reasons.items() if reason is None]
    if not left:
        raise ConfigError(f"--kinds {text}: none can be measured here; registered: {', '.join(available())}")
    return left, [f"{name} left out: {reason}" for name, reason in reasons.items() if reason is not None]


def lists_of(head: Head) -> npt.NDArray[np.int32]:
    """Training lists of a head, (group, m, LIST_K) int32."""
    return training_lists(head.train, head.keys, head.fmt, encode_keys(head.keys, head.fmt), LIST_K)


@dataclass(frozen=True)
class HnswlibOptions:
    """As hnswlib calls them: M, ef_construction and ef."""

    m: int = 16
    ef_construction: int = 100
    ef_search: int = 100


class HnswlibIndex(KeyIndex):
    """hnswlib: a graph built by L2 and searched by inner product (built by inner product it finds far less).

    It does not say how many keys it scored: keys_scanned is 0.
    """

    kind = "hnswlib"
    Options = HnswlibOptions

    def __init__(self, keys: StoredKeys, index: Any, options: HnswlibOptions, nbytes: int) -> None:
        """nbytes: bytes of its saved form, the float32 keys included."""
        self._keys, self._index, self.options, self._nbytes = keys, index, options, nbytes

    @classmethod
    def build(cls, keys: npt.NDArray[Any], fmt: Format, options: HnswlibOptions, training: Training) -> HnswlibIndex:
        """Build on one thread; queries are not used."""
        hnswlib: Any = importlib.import_module("hnswlib")
        dim = keys.shape[1]
        graph = hnswlib.Index(space="l2", dim=dim)
        graph.init_index(
            max_elements=max(1, len(keys)), M=options.m, ef_construction=options.ef_construction, random_seed=0
        )
        graph.add_items(to_float32(keys, fmt), num_threads=1)
        searched = hnswlib.Index(space="ip", dim=dim)
        with tempfile.TemporaryDirectory() as folder:  # the space is chosen when an index is loaded
            path = str(Path(folder) / "graph")
            graph.save_index(path)
            size = Path(path).stat().st_size
            searched.load_index(path)
        searched.set_num_threads(1)
        return cls(StoredKeys(keys, fmt), searched, options, size)

    def task(self, request: SearchRequest) -> CompiledSearch:
        """Search without a limit, which is not supported."""
        return called_search(
            request,
            self._keys.head_dim,
            request.k,
            lambda queries, limit, threads: self._candidates(queries, min(request.k, limit)),
        )

    def _candidates(self, queries: npt.NDArray[np.float32], k: int) -> tuple[npt.NDArray[Any], int]:
        self._index.set_ef(max(k, self.options.ef_search))
        return self._index.knn_query(queries, k=k, num_threads=1)[0], 0

    def insert(self, keys: npt.NDArray[Any]) -> None:
        raise ConfigError("the hnswlib baseline is built once; insert is not measured")

    @property
    def memory(self) -> HeldMemory:
        return HeldMemory(self._nbytes)
