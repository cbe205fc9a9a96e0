"""The exact index: every key is scored, in one pass for all queries of a head's group (keys are read once).

It needs no training and no memory, and is the reference that approximate kinds are measured against. With
codes="int8" it scores one byte per channel instead and gives only the best of those their exact scores: half the
bytes of bfloat16 or less, and a recall of .99 and more, for one byte of memory per channel. Keys that are stored as
int8 are such bytes themselves: only the query is rounded, and nothing is held in addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.index.base import (
    HeadShape,
    HeldMemory,
    HostBytes,
    IndexMemory,
    KeyIndex,
    SearchResult,
    State,
    StateValue,
    Training,
)
from retrieval_attn.index.formats import Format, row_steps
from retrieval_attn.index.kernels.codes import (
    Codes,
    check_finite,
    code_width,
    codes_from_state,
    encode_keys,
    extend_codes,
)
from retrieval_attn.index.keys import StoredKeys
from retrieval_attn.index.spec import register
from retrieval_attn.index.task.run import search_range
from retrieval_attn.index.task.scans import coded_search, compile_coded_search, exact_search
from retrieval_attn.index.task.search import CompiledSearch, SearchRequest

RESCORE = 1
"""Keys scored exactly per key wanted; the spare ones alone (57 for 100) give recall@100 of 1.000 where tried."""
MIN_SPARE = 32
SCAN_SHARE = 4
"""If more than one key in SCAN_SHARE would be scored again, all are scored exactly instead."""


def search_exact(keys: npt.NDArray[Any], queries: npt.NDArray[np.float32], k: int, fmt: Format) -> SearchResult:
    """Scan keys (n, head_dim) in `fmt` for the exact best k of queries (m, head_dim) float32. The caller checks shapes.

    Both arrays are C-contiguous.
    """
    return search_range(keys, fmt, queries, k, lambda request: exact_search(request.fmt))


@dataclass(frozen=True)
class FlatOptions:
    """codes: "none" (an exact scan) or "int8" (a scan of coded keys, then exact scores of the best).

    Raises ConfigError for another value.
    """

    codes: str = "none"

    def __post_init__(self) -> None:
        if self.codes not in ("none", "int8"):
            raise ConfigError(f"codes={self.codes!r} must be 'none' or 'int8'")


def _memory(options: FlatOptions, head: HeadShape) -> IndexMemory:
    """A scan searches the stored keys themselves; int8 keys are codes already."""
    if options.codes == "none" or head.int8:
        return IndexMemory()
    return IndexMemory((HostBytes(code_width(head.head_dim), None, "a code per key"),))


def _compile_tasks(options: FlatOptions, fmt: Format) -> None:
    exact_search(fmt)
    if options.codes == "int8":
        compile_coded_search(fmt)


@register(memory=_memory, compile_tasks=_compile_tasks)
class FlatIndex(KeyIndex):
    """Search of all keys, over views of the caller's.

    A NaN score ranks below -inf; infinities rank as numbers do. A query that is not finite gets the exact answer
    with codes, too.
    """

    kind: ClassVar[str] = "flat"
    Options = FlatOptions

    def __init__(
        self, keys: npt.NDArray[Any], fmt: Format, codes: Codes | None = None, measured: int | None = None
    ) -> None:
        """keys (n, head_dim) of dtype fmt.dtype, rows contiguous; n may be 0. codes: of these keys, or None for an
        exact scan. measured: how many keys their range was taken from, None: all. Raises ShapeError.
        """
        self._keys = StoredKeys(keys, fmt)
        self._codes = codes
        self._measured = len(keys) if measured is None else measured

    @classmethod
    def build(cls, keys: npt.NDArray[Any], fmt: Format, options: FlatOptions, training: Training) -> FlatIndex:
        """Build without training. Raises ShapeError for codes="int8" and keys that are not finite."""
        codes = None
        if options.codes == "int8":
            codes = _no_codes(keys, fmt, 0) if fmt is Format.INT8 else encode_keys(keys, fmt)
        return cls(keys, fmt, codes)

    @property
    def codes(self) -> Codes | None:
        """The coded keys, rows [0, len(self)) written; None for an exact scan. See `scans_stored`."""
        return self._codes

    @property
    def scans_stored(self) -> bool:
        """Whether the stored int8 keys serve as codes; `codes` then has no rows, and what a query is coded against."""
        return self._codes is not None and self._keys.fmt is Format.INT8

    def task(self, request: SearchRequest) -> CompiledSearch:
        kept = rescore_count(RESCORE, request.k)
        if self._codes is None or request.visible < SCAN_SHARE * kept:
            return exact_search(request.fmt)
        return coded_search(request, self._codes, self.scans_stored, kept)

    def insert(self, keys: npt.NDArray[Any]) -> None:
        """Append a view of keys (n, head_dim).

        Raises ShapeError for another shape, dtype or more than 2**31 - 1, and for coded keys that are not finite.
        All keys are coded again when there are twice as many as the range was taken from, or a far larger one comes.
        """
        self._keys.check(keys)
        fmt, length = self._keys.fmt, len(self)
        if self.scans_stored:
            _no_codes(keys, fmt, length)
        elif self._codes is not None:
            self._codes, self._measured = extend_codes(
                self._codes, keys, fmt, length, self._measured, lambda: self._keys.extended(keys)
            )
        self._keys.add(keys)

    def truncate(self, length: int) -> bool:
        self._keys.cut(length)
        return True

    def state(self) -> dict[str, StateValue]:
        if self._codes is None:
            return {"codes": "none"}
        if self.scans_stored:
            return {"codes": "int8"}
        codes = self._codes
        rows: dict[str, StateValue] = {"rows": codes.codes[: len(self)], "mean": codes.mean, "scale": codes.scale}
        return {"codes": "int8", "measured": self._measured, **rows}

    @classmethod
    def from_state(
        cls, keys: npt.NDArray[Any], fmt: Format, state: State, *, coder: Any = None, trusted: bool = False
    ) -> FlatIndex:
        measured = state.get("measured")
        if state.get("codes") not in ("none", "int8") or not isinstance(measured, int | None):
            raise InputDataError("the saved state is not one of a flat index; build the index again from its keys")
        codes = None
        if state["codes"] == "int8" and fmt is Format.INT8:
            codes = _no_codes(keys[:0] if trusted else keys, fmt, 0)
        elif state["codes"] == "int8":
            codes = codes_from_state(state, len(keys), fmt.dim_of(keys), trusted)
        return cls(keys, fmt, codes, measured)

    @property
    def memory(self) -> HeldMemory:
        """Bytes of the codes, and of keys that had to be copied."""
        codes = 0 if self._codes is None or self.scans_stored else self._codes.nbytes
        return HeldMemory(self._keys.nbytes + codes)


def scans_exactly(index: object) -> bool:
    """Return True if a step may scan the stored keys in place of the index, with the same result."""
    return isinstance(index, FlatIndex) and index.codes is None


def _no_codes(keys: npt.NDArray[np.int8], fmt: Format, start: int) -> Codes:
    """Return the space of queries if stored int8 keys serve as codes. Raises ShapeError unless all are finite."""
    bad = ~np.isfinite(row_steps(keys))
    check_finite((int(bad.sum()), int(bad.argmax()) if len(bad) else 0), start)
    dim = fmt.dim_of(keys)
    return Codes(np.empty((0, code_width(dim)), np.uint8), np.zeros(dim, np.float32), np.ones(dim, np.float32))


def check_rescore(rescore: object) -> None:
    """Raise ConfigError unless `rescore` is a whole number >= 1."""
    if isinstance(rescore, bool) or not isinstance(rescore, int | np.integer) or rescore < 1:
        raise ConfigError(f"rescore={rescore!r} must be a whole number >= 1, the candidates per retrieved key")


def rescore_count(rescore: int, k: int) -> int:
    """How many of the best by code get an exact score: `rescore` per key wanted, at least a quarter and 32 more."""
    return max(rescore * k, k + k // 4 + MIN_SPARE)


FULL_ROOM = 512
"""Tokens that a window has room for behind those that it holds, at least."""
STEPS = 8
"""Sizes of windows between a power of two and the next: graphs are captured for each, and an eighth is empty at most
but for the room."""


@register()
class FullIndex(FlatIndex):
    """See the module. Options as those of `flat`."""

    kind: ClassVar[str] = "full"


def kept_tokens(tokens: int) -> int:
    """Tokens that a window which keeps them all has room for, if it holds `tokens`."""
    least = tokens + FULL_ROOM
    step = max(FULL_ROOM, (1 << (least.bit_length() - 1)) // STEPS)
    return -(-least // step) * step
