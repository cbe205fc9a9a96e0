"""Lists of key ids, one per centroid, in one array; made from training lists, extended, and scanned by code."""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from retrieval_attn.errors import ShapeError
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.codes import Codes, dot_u8_one, encode_keys, prefetch_codes
from retrieval_attn.index.kernels.knn import LOWEST_SUM, training_lists
from retrieval_attn.index.kernels.packed import EMPTY, keep_best, pack_sum

AHEAD = 8
BLOCK = 65536
"""Keys that are given their centroid at once."""


class Lists(NamedTuple):
    """centroids (c, head_dim) float32 of length 1; list i is ids[offsets[i] : offsets[i + 1]], offsets (c + 1,) int64,
    ids int32, each below `listed`. Ids from `listed` on are in no list and are scanned one by one.
    """

    centroids: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    listed: int

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(self.centroids.nbytes + self.offsets.nbytes + self.ids.nbytes)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], length: int, head_dim: int) -> Lists:
        """From "queries", "offsets", "ids" and "listed", copied. Raises ShapeError if they do not fit the keys."""
        centroids, offsets, ids, listed = (state.get(name) for name in ("queries", "offsets", "ids", "listed"))
        arrays = ((centroids, np.float32, 2), (offsets, np.int64, 1), (ids, np.int32, 1))
        for array, dtype, ndim in arrays:
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
                raise ShapeError("the lists of the state are not arrays of the right kind")
        made = cls(np.array(centroids), np.array(offsets), np.array(ids), int(listed or 0))
        ends_fit = (
            len(made.offsets) == len(made.centroids) + 1 and made.offsets[0] == 0 and made.offsets[-1] == len(made.ids)
        )
        ids_fit = 0 <= made.listed <= length and ((made.ids >= 0) & (made.ids < made.listed)).all()
        if not ends_fit or not ids_fit or made.centroids.shape[1] != head_dim or (np.diff(made.offsets) < 0).any():
            raise ShapeError(f"the lists of the state do not fit {length} keys of {head_dim} elements")
        return made


def lists_of_queries(
    centroids: npt.NDArray[np.float32],
    member: npt.NDArray[np.int32],
    named: npt.NDArray[np.int32],
    most: int,
    num_keys: int,
) -> Lists:
    """For each centroid the keys that its queries name, most often named first (then the lower id), at most `most`.

    member (m,): the centroid of each query; named (m, kk): the keys it names, -1 for none.
    """
    pairs = member[:, None].astype(np.int64) * num_keys + named
    pairs, votes = np.unique(pairs[named >= 0], return_counts=True)
    owner = pairs // num_keys
    order = np.lexsort((pairs, -votes, owner))
    starts = np.searchsorted(owner, np.arange(len(centroids)))
    place = np.arange(len(owner)) - starts[owner]
    taken = order[place < most]  # owner is ascending, so position in `order` is position in `owner`
    counts = np.bincount(owner[taken], minlength=len(centroids))
    return Lists(centroids, _offsets(counts), (pairs[taken] % num_keys).astype(np.int32), num_keys)


def _offsets(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def add_to_lists(lists: Lists, codes: Codes, ids: npt.NDArray[np.int32], listed: int) -> Lists:
    """New lists with each of `ids` (n,) at the end of one: that of the centroid with the largest product with its code.

    From then on `listed` keys count as being in lists.
    """
    best = np.empty(len(ids), np.int32)
    coded = encode_keys(lists.centroids, Format.FLOAT32)
    dim = lists.centroids.shape[1]
    for first in range(0, len(ids), BLOCK):
        # a key as a query: its steps from the mean, in which all channels count alike, as in the centroids
        steps = codes.codes[ids[first : first + BLOCK], :dim].astype(np.float32) - np.float32(128)
        best[first : first + BLOCK] = training_lists(steps[None], lists.centroids, Format.FLOAT32, coded, 1)[0, :, 0]
    owners = np.concatenate([np.repeat(np.arange(len(lists.centroids)), np.diff(lists.offsets)), best])
    together = np.concatenate([lists.ids, ids])
    order = np.argsort(owners, kind="stable")
    counts = np.bincount(owners, minlength=len(lists.centroids))
    return Lists(lists.centroids, _offsets(counts), together[order].astype(np.int32), listed)


def drop_from_lists(lists: Lists, length: int) -> Lists:
    """New lists without ids >= length."""
    kept = lists.ids < length
    owners = np.repeat(np.arange(len(lists.centroids)), np.diff(lists.offsets))[kept]
    counts = np.bincount(owners, minlength=len(lists.centroids))
    return Lists(lists.centroids, _offsets(counts), lists.ids[kept], min(length, lists.listed))


@njit(nogil=True, cache=True)
def scan_lists(codes, planes, query, probes, offsets, ids, listed, stop, kept, pool, seen):
    """Score by code the keys below `stop` of the lists `probes` names, and those in no list; returns their number.

    codes (at least stop, width) uint8; planes (at least query + 1, 1, width) int8; probes (p,) int32, -1 for none.
    The kept best are left packed by their sums in pool[:kept] (capacity > kept), unordered, EMPTY where there are
    fewer; each id once. seen: uint64 words, a bit for each key, all zero; zero again at the end. Allocates nothing.
    """
    width = codes.shape[1]
    count = 0
    scanned = 0
    bound = np.int32(LOWEST_SUM)
    capacity = len(pool)
    for number in range(len(probes) + 1):
        if number < len(probes):
            if probes[number] < 0:
                continue
            start = offsets[probes[number]]
            end = offsets[probes[number] + 1]
        else:
            start = np.int64(listed)
            end = np.int64(stop)
        for i in range(start, end):
            if number < len(probes):
                if i + AHEAD < end:
                    prefetch_codes(codes, np.int64(ids[i + AHEAD]))
                key_id = np.int64(ids[i])
                bit = np.uint64(1) << np.uint64(key_id & 63)
                if key_id >= stop or seen[key_id >> 6] & bit:
                    continue
                seen[key_id >> 6] |= bit
            else:
                key_id = np.int64(i)
            total = dot_u8_one(codes, key_id, planes, query, width)
            scanned += 1
            if total < bound:
                continue
            pool[count] = pack_sum(total, key_id)
            count += 1
            if count == capacity:
                keep_best(pool, capacity, kept)
                count = kept
                bound = np.int32(pool[kept - 1] >> 32)
    for probe in probes:
        if probe >= 0:
            for i in range(offsets[probe], offsets[probe + 1]):
                seen[ids[i] >> 6] = 0
    if count > kept:
        keep_best(pool, count, kept)
        count = kept
    pool[count:kept] = EMPTY
    return scanned


@njit(nogil=True, cache=True)
def _scan_rows(codes, planes, probes, offsets, ids, listed, stop, kept, pool, seen, best, scanned):
    for query in range(len(probes)):
        scanned[query] = scan_lists(codes, planes, query, probes[query], offsets, ids, listed, stop, kept, pool, seen)
        best[query] = pool[:kept]


def scan_rows(
    codes: npt.NDArray[np.uint8],
    planes: npt.NDArray[np.int8],
    probes: npt.NDArray[np.int32],
    lists: Lists,
    stop: int,
    kept: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`scan_lists` of every row of probes (n, p): candidates (n, kept) packed by sums, and keys scored (n,)."""
    best = np.full((len(probes), kept), EMPTY, np.int64)
    scanned = np.zeros(len(probes), np.int64)
    if kept:
        pool = np.empty(2 * kept + 64, np.int64)
        seen = np.zeros((max(stop, lists.listed) >> 6) + 1, np.uint64)
        _scan_rows(codes, planes, probes, lists.offsets, lists.ids, lists.listed, stop, kept, pool, seen, best, scanned)
    return best, scanned
