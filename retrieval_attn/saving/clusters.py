"""The clusters of a path as arrays and plain values, and back; `saving/sequence.py` has the rest of the path.

Names of arrays: "clusters/NAME" of what paths share and of this path's sums, "clusters/late/NAME" of the fewer clusters
of tokens that came late; "members/i" (kv_heads, tokens) of the i-th piece of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from retrieval_attn.cpu.clusters import ClusterSums, KeyClusters, PathClusters
from retrieval_attn.cpu.samples import PAIR, SampledKeys, columns_for
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.cpu.store import SequenceKV, path_spans
from retrieval_attn.errors import InputDataError

Arrays = dict[str, npt.NDArray[Any]]
_SHARED = ("probes", "offsets", "mean_values", "distances")


class ClusterMark(NamedTuple):
    """What was known of a path's clusters: those that paths share, and the tokens of each segment that had joined one,
    for these and for their `late`.
    """

    shared: KeyClusters
    joined: dict[Segment, tuple[int, int]]
    late: dict[Segment, tuple[int, int]]


def cluster_mark(path: SequenceKV) -> ClusterMark | None:
    """What a later `path_state` need not tell again, once a state of `path` was saved now; None without clusters."""
    if path.clusters is None:
        return None
    shared = path.clusters.shared
    segments = path.segments
    late = {} if shared.late is None else {segment: shared.late.joined(segment) for segment in segments}
    return ClusterMark(shared, {segment: shared.joined(segment) for segment in segments}, late)


def clusters_state(
    path: SequenceKV, since: int, tokens: Sequence[int], mark: ClusterMark | None
) -> tuple[dict[str, Any] | None, Arrays]:
    """The clusters of a path; of its first `since` spans, what `mark` does not know. None for a path without.

    tokens: of each span's segment, those that are saved.
    """
    clusters = path.clusters
    if clusters is None:
        return None, {}
    if mark is not None and mark.shared is not clusters.shared:
        mark = None
    plain, arrays = _state(clusters, "clusters/", mark is not None)
    shared, late = clusters.shared, clusters.shared.late
    pieces = _Pieces(path, since, tokens)
    plain["members"], members = pieces.of(shared, {} if mark is None else mark.joined, "members/")
    arrays.update(members)
    if late is not None:
        plain["late_members"], members = pieces.of(late, {} if mark is None else mark.late, "late_members/")
        arrays.update(members)
    return plain, arrays


def restore_clusters(path: SequenceKV, plain: Mapping[str, Any] | None, arrays: Mapping[str, Any]) -> None:
    """Give `path`, whose spans were restored, the clusters that a state tells of. Raises InputDataError."""
    if plain is None:
        path.clusters = None
        return
    if plain["known"]:
        if path.clusters is None:
            raise InputDataError("the clusters of a saved path are those of one saved before, which has none")
        shared = path.clusters.shared
    else:
        shared = _shared(path, plain, arrays, "clusters/")
    sums = _sums(path, arrays, "clusters/", shared.clusters)
    tokens = sum(span.segment.length for span in path_spans(path))  # a path may see fewer of a segment than it has
    path.clusters = PathClusters(shared, path.fmt, _span(plain["span"], tokens), sums)
    if plain.get("late_span") is not None:
        if shared.late is None:
            raise InputDataError("a saved path has tokens in clusters that it has not; save the context again")
        sums = _sums(path, arrays, "clusters/late/", shared.late.clusters)
        path.clusters.restored_late(_span(plain["late_span"], tokens), sums)
    _restore_members(path, shared, plain["members"], arrays, "members/")
    if shared.late is not None:
        _restore_members(path, shared.late, plain["late_members"], arrays, "late_members/")


def _state(clusters: PathClusters, prefix: str, known: bool) -> tuple[dict[str, Any], Arrays]:
    """known: the shared ones are told elsewhere."""
    plain: dict[str, Any] = {"known": known, "span": [clusters.start, clusters.stop]}
    arrays: Arrays = {f"{prefix}{name}": array for name, array in clusters.shared_sums._asdict().items()}
    late = clusters.begun_late
    if late is not None:
        plain["late_span"] = [late.start, late.stop]
        arrays.update({f"{prefix}late/{name}": array for name, array in late.shared_sums._asdict().items()})
    if not known:
        told, own = _shared_state(clusters.shared, prefix)
        plain.update(told)
        arrays.update(own)
    return plain, arrays


def _shared_state(shared: KeyClusters, prefix: str) -> tuple[dict[str, Any], Arrays]:
    arrays: Arrays = {}
    for name in _SHARED:
        array = getattr(shared, name)
        if array is not None:
            arrays[f"{prefix}{name}"] = array
    plain: dict[str, Any] = {"samples": None, "late": None}
    if shared.samples is not None:
        arrays[f"{prefix}samples"] = shared.samples.packed
        plain["samples"] = [shared.samples.clusters, shared.samples.number]
    if shared.late is not None:
        plain["late"], own = _shared_state(shared.late, f"{prefix}late/")
        arrays.update(own)
    return plain, arrays


def _shared(path: SequenceKV, plain: Mapping[str, Any], arrays: Mapping[str, Any], prefix: str) -> KeyClusters:
    late = None if plain["late"] is None else _shared(path, plain["late"], arrays, f"{prefix}late/")
    probes, offsets, means, distances = (arrays.get(f"{prefix}{name}") for name in _SHARED)
    if probes is None or offsets is None:
        raise InputDataError("the clusters of a saved path lack their probes; save the context again")
    clusters = probes.shape[1] if probes.ndim == 3 else 0
    heads = path.num_kv_heads
    _require(probes, (heads, clusters, path.head_dim), "probes")
    _require(offsets, (heads, clusters), "offsets")
    if means is not None:
        _require(means, (heads, clusters, path.value_dim), "mean_values")
    if distances is not None:
        _require(distances, (heads,), "distances")
    samples = None
    if plain["samples"] is not None:
        samples = _samples(path, plain["samples"], arrays[f"{prefix}samples"], clusters)
    return KeyClusters(probes, offsets, means, late, distances, samples)


def _samples(path: SequenceKV, told: Any, packed: npt.NDArray[Any], clusters: int) -> SampledKeys:
    known, number = told
    shape = packed.shape
    whole = type(number) is int and number > 0 and known == clusters and packed.ndim == 4 and shape[3] % PAIR == 0
    if not whole or shape[1] * shape[3] != columns_for(clusters * number):
        raise InputDataError(f"{told!r:.80} samples of {clusters} clusters do not fit {shape}; save the context again")
    _require(packed, (path.num_kv_heads, shape[1], path.head_dim, shape[3]), "samples", "<u2")
    return SampledKeys(packed, clusters, number)


def _sums(path: SequenceKV, arrays: Mapping[str, Any], prefix: str, clusters: int) -> ClusterSums:
    shapes = {"key_sums": (path.head_dim,), "value_sums": (path.value_dim,)}
    for name in ClusterSums._fields:
        _require(arrays[f"{prefix}{name}"], (path.num_kv_heads, clusters, *shapes.get(name, ())), name)
    return ClusterSums(*(arrays[f"{prefix}{name}"] for name in ClusterSums._fields))


def _require(array: npt.NDArray[Any], shape: tuple[int, ...], name: str, dtype: str = "<f4") -> None:
    if array.shape != shape or array.dtype != dtype:
        raise InputDataError(
            f"the {name} of saved clusters must be {dtype} of {shape}, got {array.dtype.str} of {array.shape}; save "
            "the context again"
        )


def _span(told: Any, stop: int) -> tuple[int, int]:
    """Two whole numbers in order, from 0 to `stop`. Raises InputDataError."""
    first, last = told
    if not (type(first) is int and type(last) is int and 0 <= first <= last <= stop):
        raise InputDataError(f"tokens {told!r:.80} of saved clusters must lie in 0 to {stop}; save the context again")
    return first, last


class _Pieces(NamedTuple):
    """Which tokens of a path are told of: see `clusters_state`."""

    path: SequenceKV
    since: int
    tokens: Sequence[int]

    def of(
        self, shared: KeyClusters, known: Mapping[Segment, tuple[int, int]], prefix: str
    ) -> tuple[list[list[int]], Arrays]:
        """Pieces [span, first, stop] of tokens with their clusters, and the arrays. known: tokens that are left out.

        Those of a span from `since` on have all places of its segment, right where the piece says, so that they can be
        taken as they are.
        """
        pieces: list[list[int]] = []
        arrays: Arrays = {}
        for number, (span, tokens) in enumerate(zip(path_spans(self.path), self.tokens, strict=True)):
            first, stop = shared.joined(span.segment)
            stop = min(stop, tokens)
            ids = shared.known(span.segment)
            whole = number >= self.since
            low, high = known.get(span.segment, (first, first))
            low, high = (first, first) if whole or low >= high else (low, high)
            for start, end in ((first, low), (high, stop)):
                if start < end:
                    # a copy, a byte per key: what lies beside these tokens changes when others join
                    arrays[f"{prefix}{len(pieces)}"] = (ids[:, :tokens] if whole else ids[:, start:end]).copy()
                    pieces.append([number, start, end])
        return pieces, arrays


def _restore_members(
    path: SequenceKV, shared: KeyClusters, pieces: list[list[int]], arrays: Mapping[str, Any], prefix: str
) -> None:
    spans = path_spans(path)
    for number, (span, low, high) in enumerate(pieces):
        if type(span) is not int or not 0 <= span < len(spans):
            raise InputDataError(f"saved clusters are of span {span!r:.80}, there are {len(spans)}")
        segment, members = spans[span].segment, arrays[f"{prefix}{number}"]
        if members.dtype != "u1":
            raise InputDataError(f"members of saved clusters must be bytes, got {members.dtype}")
        shared.restore(segment, _span([low, high], segment.length), members)
