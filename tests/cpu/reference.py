"""Attention and top-k in float64 NumPy, written from the definitions, and data for comparing with them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.cpu.attend import Partial
from retrieval_attn.cpu.gather import attend_rows
from retrieval_attn.index.formats import Format, from_float32, kernel_view
from retrieval_attn.index.kernels.dots import score_gathered
from retrieval_attn.index.sketch import front as fit
from retrieval_attn.index.sketch import index as sketch_index
from retrieval_attn.index.threads import kernel_threads

EPS = float(np.finfo(np.float32).eps)
Floats = npt.NDArray[np.floating]


def attention(
    queries: Floats,
    keys: Floats,
    values: Floats,
    taken: npt.NDArray[np.bool_],
    scale: float,
    softcap: float | None = None,
    dtype: type[np.floating] = np.float64,
) -> tuple[Floats, Floats]:
    """queries (n, d) over keys (t, d) and values (t, dv) where taken (n, t) is true, computed in dtype."""
    scores = queries.astype(dtype) @ keys.astype(dtype).T * dtype(scale)
    if softcap is not None:
        scores = dtype(softcap) * np.tanh(scores / dtype(softcap))
    scores = np.where(taken, scores, dtype(-np.inf))
    top = scores.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(top), dtype(0), top))
    total = weights.sum(axis=1, keepdims=True)
    out = weights @ values.astype(dtype) / np.where(total == 0, dtype(1), total)
    with np.errstate(divide="ignore"):
        return out, (top + np.log(total))[:, 0]


def assert_attention(
    got: tuple[Floats, Floats],
    queries: Floats,
    keys: Floats,
    values: Floats,
    taken: npt.NDArray[np.bool_],
    scale: float,
    softcap: float | None = None,
) -> None:
    """At most twice the error of the same computation in float32 NumPy, or of rounding the scores alone.

    The error of one float32 computation is a matter of luck when few numbers are compared: the worst of four
    orders of summation is taken, and never less than what half an ulp of the largest score does.
    """
    exact = attention(queries, keys, values, taken, scale, softcap)
    rng = np.random.default_rng(0)
    scores = np.where(taken, queries.astype(np.float64) @ keys.astype(np.float64).T * scale, 0.0)
    half_ulp = EPS / 2 * np.abs(scores).max(initial=1.0)
    errors = [half_ulp * np.ptp(values, axis=0).max(initial=0.0), half_ulp]
    for _ in range(4):
        dims, tokens = rng.permutation(keys.shape[1]), rng.permutation(len(keys))
        shuffled = queries[:, dims], keys[tokens][:, dims], values[tokens], taken[:, tokens]
        single = attention(*shuffled, scale, softcap, np.float32)
        errors = [max(error, largest(a, b)) for error, a, b in zip(errors, single, exact, strict=True)]
    for name, mine, right, numpy32 in zip(("out", "lse"), got, exact, errors, strict=True):
        assert mine.dtype == np.float32 and mine.shape == right.shape, name
        infinite = ~np.isfinite(right)
        np.testing.assert_array_equal(mine[infinite], right[infinite], err_msg=name)
        allowed = 2 * max(numpy32, EPS * np.abs(right[~infinite]).max(initial=1.0))
        error = largest(mine, right)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def largest(a: Floats, b: Floats) -> float:
    """Largest difference where b is finite; 0 if nowhere."""
    finite = np.isfinite(b)
    return float(np.abs(a[finite] - b[finite]).max(initial=0.0))


def best_ids(scores: Floats, k: int) -> npt.NDArray[np.int64]:
    """ids (n, k) of the k largest of scores (n, t), best first, equal scores by lower id; -1 padded."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.pad(order, ((0, 0), (0, k - order.shape[1])), constant_values=-1)


def strided(array: npt.NDArray) -> npt.NDArray:
    """The same numbers with a gap after every row: the layout that a slice of a larger store has."""
    room = np.zeros((*array.shape[:-1], array.shape[-1] + 8), array.dtype)
    room[..., : array.shape[-1]] = array
    return room[..., : array.shape[-1]]


def whole_numbers(rng: np.random.Generator, shape: tuple[int, ...], most: int = 3) -> npt.NDArray[np.float32]:
    """Small whole numbers: their products are exact in every format, and many of them tie."""
    return rng.integers(-most, most + 1, shape).astype(np.float32)


def normal(rng: np.random.Generator, shape: tuple[int, ...], fmt: Format) -> npt.NDArray:
    """Normal numbers in storage format."""
    return from_float32(rng.standard_normal(shape, dtype=np.float32), fmt)


def uneven(seed: int, n: int, dim: int) -> npt.NDArray[np.float32]:
    """Keys whose channels differ in mean and size, as attention keys do."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, dim)) * rng.uniform(0.1, 3, dim) + 3 * rng.standard_normal(dim)).astype(np.float32)


def recall(found: npt.NDArray[Any], right: npt.NDArray[Any]) -> float:
    """Share of the ids in each row of `right` that the same row of `found` has."""
    return float(np.mean([np.isin(b, a).mean() for a, b in zip(found, right, strict=True)]))


def at_every_thread_count(work: Callable[[], Any]) -> Any:
    """What `work` returns, a tuple of arrays or numbers or one array, checked to be the same bits on any threads."""
    results = []
    for threads in range(1, numba.get_num_threads() + 1):
        with kernel_threads(threads):
            results.append(work())
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, same)
    return results[0]


def in_threads(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, all at once; raises the first error."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def look_at_share(patch: pytest.MonkeyPatch, share: float) -> None:
    """Sketches that are built from now on look at this share of their leaves."""
    for name, choose in (("best_way", fit.best_way), ("way_for_few", fit.way_for_few)):
        patch.setattr(sketch_index, name, lambda *given, choose=choose: choose(*given)._replace(share=share))


def attend_ids_heads(
    queries: npt.NDArray[np.float32],
    keys: npt.NDArray[Any],
    values: npt.NDArray[Any],
    ids: npt.NDArray[np.int32],
    fmt: Format,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """Attend to ids (heads, n, k) by the kernels of one query; other arrays as of `attend_range_heads`."""
    heads, count, width = ids.shape
    out = np.empty((heads, count, fmt.dim_of(values)), np.float32)
    keys, values = kernel_view(keys, fmt), kernel_view(values, fmt)
    lse = np.empty((heads, count), np.float32)
    rows, scores = np.empty(width, np.int64), np.empty(width, np.float32)
    options = np.float32(scale), np.float32(softcap or 0)
    for head, row in np.ndindex(heads, count):
        chosen = ids[head, row][ids[head, row] >= 0]
        rows[: len(chosen)] = chosen
        score_gathered(queries[head], row, keys[head], rows, len(chosen), scores)
        rows[: len(chosen)] = values[head].ctypes.data + chosen * np.int64(values[head].strides[0])
        lse[head, row] = attend_rows(values[head], rows, scores, len(chosen), *options, out[head, row])
    return out, lse
