"""What a path holds as arrays and plain values, for saving, and a path of them: as it was, with nothing built again.

A *state* tells of the spans of a path behind its first few, which the states before it tell of: a chain of them, root
first, makes the path. Segments take the arrays of a state as they are, maps of files too, so that a page is read when
it is needed.

Names of arrays, of the state's span i: "i/keys", "i/values"; "i/index/HEAD/NAME" of one head's index, and
"i/index/all/NAME" (kv_heads, ...) of small ones of all heads. A state that tells the index of span s of those before it
again has "before-s/index/...". `saving/sequence.py` has the names of clusters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.cluster_sums import PAIR, SampledKeys, columns_for
from retrieval_attn.cpu.clusters import ClusterSums, KeyClusters, PathClusters
from retrieval_attn.cpu.segment import HeadCoders, Segment, hole_for, restored_segment
from retrieval_attn.cpu.store import SequenceKV, Span
from retrieval_attn.errors import ConfigError, InputDataError, RetrievalAttentionError
from retrieval_attn.index.base import KeyIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec

ClusterArrays = dict[str, npt.NDArray[Any]]
_SHARED = ("probes", "offsets", "mean_values", "distances")


class ClusterMark(NamedTuple):
    """Clusters of a saved path: the shared ones, and the tokens of each segment in one, for these and for `late`."""

    shared: KeyClusters
    joined: dict[Segment, tuple[int, int]]
    late: dict[Segment, tuple[int, int]]


def cluster_mark(path: SequenceKV) -> ClusterMark | None:
    """Return the clusters that a later `path_state` need not save again after this state; None without clusters."""
    if path.clusters is None:
        return None
    shared = path.clusters.shared
    segments = path.segments
    late = {} if shared.late is None else {segment: shared.late.joined(segment) for segment in segments}
    return ClusterMark(shared, {segment: shared.joined(segment) for segment in segments}, late)


def clusters_state(
    path: SequenceKV, since: int, tokens: Sequence[int], mark: ClusterMark | None
) -> tuple[dict[str, Any] | None, ClusterArrays]:
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
            raise InputDataError(
                "the saved clusters refer to those of an earlier record, which has none; save the context again"
            )
        shared = path.clusters.shared
    else:
        shared = _shared(path, plain, arrays, "clusters/")
    sums = _sums(path, arrays, "clusters/", shared.clusters)
    tokens = sum(span.segment.length for span in path.spans)  # a path may see fewer of a segment than it has
    path.clusters = PathClusters(shared, path.fmt, _cluster_span(plain["span"], tokens), sums)
    if plain.get("late_span") is not None:
        if shared.late is None:
            raise InputDataError(
                "a saved sequence has tokens in late clusters, but no late clusters; save the context again"
            )
        sums = _sums(path, arrays, "clusters/late/", shared.late.clusters)
        path.clusters.restored_late(_cluster_span(plain["late_span"], tokens), sums)
    _restore_members(path, shared, plain["members"], arrays, "members/")
    if shared.late is not None:
        _restore_members(path, shared.late, plain["late_members"], arrays, "late_members/")


def _state(clusters: PathClusters, prefix: str, known: bool) -> tuple[dict[str, Any], ClusterArrays]:
    """known: the shared ones are told elsewhere."""
    plain: dict[str, Any] = {"known": known, "span": [clusters.start, clusters.stop]}
    arrays: ClusterArrays = {f"{prefix}{name}": array for name, array in clusters.shared_sums._asdict().items()}
    late = clusters.begun_late
    if late is not None:
        plain["late_span"] = [late.start, late.stop]
        arrays.update({f"{prefix}late/{name}": array for name, array in late.shared_sums._asdict().items()})
    if not known:
        told, own = _shared_state(clusters.shared, prefix)
        plain.update(told)
        arrays.update(own)
    return plain, arrays


def _shared_state(shared: KeyClusters, prefix: str) -> tuple[dict[str, Any], ClusterArrays]:
    arrays: ClusterArrays = {}
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
        raise InputDataError("the saved clusters of a sequence have no probes or offsets; save the context again")
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
        raise InputDataError(
            f"saved samples {told!r:.80} of {clusters} clusters do not fit an array of {shape}; save the context again"
        )
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


def _cluster_span(told: Any, stop: int) -> tuple[int, int]:
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
    ) -> tuple[list[list[int]], ClusterArrays]:
        """Pieces [span, first, stop] of tokens with their clusters, and the arrays. known: tokens that are left out.

        Those of a span from `since` on have all places of its segment, right where the piece says, so that they can be
        taken as they are.
        """
        pieces: list[list[int]] = []
        arrays: ClusterArrays = {}
        for number, (span, tokens) in enumerate(zip(self.path.spans, self.tokens, strict=True)):
            first, stop = shared.joined(span.segment)
            stop = min(stop, tokens)
            ids = shared.known(span.segment)
            whole = number >= self.since
            low, high = known.get(span.segment, (first, first))
            low, high = (first, first) if whole or low >= high else (low, high)
            for start, end in ((first, low), (high, stop)):
                if start < end:
                    # a copy, a byte per key: the members of neighbouring tokens change when others join
                    arrays[f"{prefix}{len(pieces)}"] = (ids[:, :tokens] if whole else ids[:, start:end]).copy()
                    pieces.append([number, start, end])
        return pieces, arrays


def _restore_members(
    path: SequenceKV, shared: KeyClusters, pieces: list[list[int]], arrays: Mapping[str, Any], prefix: str
) -> None:
    spans = path.spans
    for number, (span, low, high) in enumerate(pieces):
        if type(span) is not int or not 0 <= span < len(spans):
            raise InputDataError(
                f"saved clusters belong to span {span!r:.80}, but there are {len(spans)}; save the context again"
            )
        segment, members = spans[span].segment, arrays[f"{prefix}{number}"]
        if members.dtype != "u1":
            raise InputDataError(
                f"members of saved clusters must be uint8, got {members.dtype}; save the context again"
            )
        shared.restore(segment, _cluster_span([low, high], segment.length), members)


Arrays = Mapping[str, npt.NDArray[Any]]
State = tuple[dict[str, Any], Arrays]
"""Plain JSON values, and arrays of plain numbers by name."""
STACKED_BYTES = 1 << 18
"""Arrays of one head up to this long are saved with those of the other heads: few arrays are found faster than many."""
_ALL = "all"


class PathMark(NamedTuple):
    """State of a saved path. spans: segments and tokens. heads: indexes of each segment. clusters: None without."""

    spans: list[tuple[Segment, int]]
    heads: list[tuple[KeyIndex, ...]]
    clusters: ClusterMark | None


def span_marks(path: SequenceKV) -> list[tuple[Segment, int]]:
    """The segments of a path with how many of their tokens it sees."""
    return [(span.segment, span.length) for span in path.spans]


def path_mark(path: SequenceKV) -> PathMark:
    """Return the state that a later `path_state` can skip. Take it right before saving, or after a load."""
    return PathMark(span_marks(path), [segment.indexes for segment in path.segments], cluster_mark(path))


def spans_since(path: SequenceKV, mark: PathMark) -> int:
    """How many of the first spans of `path` were there at the mark: a state behind these says all that is new."""
    same = [
        span.segment is segment and span.length <= length
        for span, (segment, length) in zip(path.spans, mark.spans, strict=False)
    ]
    # only the last may have been cut: what followed it then was another segment
    return [*same, False].index(False)


def path_state(path: SequenceKV, since: int, mark: PathMark | None = None) -> State:
    """Everything of `path` behind its first `since` spans, its clusters and budgets, and what changed of the first.

    mark: of the path, or of one that it is a fork of, when the first spans were saved (`spans_since` counts them);
    what that has of clusters and of the first spans' indexes is left out. None: all of these are told. Arrays are views
    where they stay as they are: all segments are frozen, as by a fork, and the path may go on at once. Raises
    ConfigError for a kind of index that cannot be saved, and for more spans than the path or the mark has.
    """
    spans = path.spans
    if not 0 <= since <= min(len(spans), len(spans if mark is None else mark.spans)):
        raise ConfigError(
            f"since={since} must be from 0 to {len(spans)}, the number of spans; give the number of spans saved before"
        )
    plain: dict[str, Any] = {"shape": _shape(path), "before": [], "spans": []}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for number, span in enumerate(spans):
        span.segment.freeze()
        if number >= since:
            told, own = _span_state(span, f"{number - since}/")
            plain["spans"].append(told)
        else:
            known = None if mark is None else mark.heads[number]
            told, own = _before_state(span, f"before-{number}/", known)
            plain["before"].append(told)
        arrays.update(own)
    plain["budgets"] = None if path.budgets is None else list(path.budgets.counts)
    tokens = [span.segment.length for span in spans[:since]] + [told["held"] for told in plain["spans"]]
    plain["clusters"], own = clusters_state(path, since, tokens, None if mark is None else mark.clusters)
    return plain, {**arrays, **own}


def path_from_states(states: Sequence[State], path: SequenceKV, coder: HeadCoders | None) -> None:
    """Fill an empty path with what a chain of states tells, root first; it answers and goes on as the saved one does.

    A path that has what the first states of a chain tell (a fork of one that was filled with them) takes the others.
    Arrays are taken as they are: their checksums were compared. coder: takes the codes of indexes that keep some on a
    device, None keeps them in host memory, as a reference. Raises InputDataError for states that do not fit the path or
    each other, ConfigError for a kind of index that is not known, ShapeError for arrays that cannot be written to,
    MemoryPlanError where a device has no room; the path is then of no use.
    """
    for plain, arrays in states:
        try:
            if plain["shape"] != _shape(path):
                raise InputDataError(
                    f"the saved sequence has shape {plain['shape']}, the model needs {_shape(path)}; open it with the "
                    "model and options it was saved with"
                )
            own = {name: np.asarray(array) for name, array in arrays.items()}  # kernels know no other kind of array
            by_place = _by_place(own)
            before = path.spans[: len(plain["before"])]
            if len(before) < len(plain["before"]):
                raise InputDataError(
                    f"{len(plain['before'])} spans must be restored before, got {len(before)}; save the context again"
                )
            spans = [
                _before(span, told, by_place.get(f"before-{number}", {}), coder)
                for number, (span, told) in enumerate(zip(before, plain["before"], strict=True))
            ]
            for number, told in enumerate(plain["spans"]):
                spans.append(_span(told, by_place.get(str(number), {}), path, coder))
            if any(span.length > span.segment.length for span in spans):
                raise InputDataError(
                    f"saved spans of {[span.length for span in spans]} tokens are longer than their keys; save the "
                    "context again"
                )
            path.set_spans(spans)
            restore_clusters(path, plain["clusters"], own)
            path.budgets = None if plain["budgets"] is None else HeadBudgets(tuple(plain["budgets"]))
        except RetrievalAttentionError:
            raise
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputDataError(
                f"the saved state of a sequence is incomplete or malformed ({error!r}); save the context again"
            ) from error


def _shape(path: SequenceKV) -> list[Any]:
    return [path.num_kv_heads, path.head_dim, path.value_dim, path.fmt.value]


def _span_state(span: Span, prefix: str) -> State:
    """Return the state of one span: `held` tokens of its segment, more than `length` if an index covers them."""
    segment = span.segment
    if segment.is_hole:
        return {"length": span.length, "held": segment.length, "hole": True}, {}
    with segment.steady_index() as heads:
        index, arrays = _index_state(heads, segment.indexed[0], prefix)
    held = max([span.length, *(index["first"] + head["keys"] for head in index["heads"])])
    keys, values = segment.read(0, held)
    return {"length": span.length, "held": held, **index}, {f"{prefix}keys": keys, f"{prefix}values": values, **arrays}


def _before_state(span: Span, prefix: str, known: tuple[KeyIndex, ...] | None) -> State:
    """Return the state of a span that was saved: its index if it is not `known`, and later insertions."""
    with span.segment.steady_index() as heads:
        told: dict[str, Any] = {"length": span.length, "grown": list(span.segment.grown)}
        if heads is known or (not heads and known is None):
            return told, {}
        index, arrays = _index_state(heads, span.segment.indexed[0], prefix)
        return {**told, **index}, arrays


def _index_state(heads: Sequence[KeyIndex], first: int, prefix: str) -> State:
    """Return the state of a segment's index; nothing is inserted into it meanwhile."""
    states = [head.state() for head in heads]
    told = [
        {
            "kind": head.kind,
            "note": head.note,
            "keys": len(head),
            "plain": {name: _plain(value) for name, value in state.items() if not isinstance(value, np.ndarray)},
        }
        for head, state in zip(heads, states, strict=True)
    ]
    by_head = [{name: array for name, array in one.items() if isinstance(array, np.ndarray)} for one in states]
    arrays = {}
    for name in list(by_head[0]) if by_head else ():
        every = [one.get(name) for one in by_head]
        if all(_alike(array, every[0]) for array in every):
            arrays[f"{prefix}index/{_ALL}/{name}"] = np.stack([one.pop(name) for one in by_head])
    for head, own in enumerate(by_head):
        arrays.update({f"{prefix}index/{head}/{name}": array for name, array in own.items()})
    return {"first": first, "heads": told}, arrays


def _alike(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    return (
        one is not None
        and other is not None
        and one.nbytes <= STACKED_BYTES
        and (one.shape, one.dtype) == (other.shape, other.dtype)
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _by_place(arrays: Arrays) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Arrays by the first part of their names, then by the rest."""
    found: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for name, array in arrays.items():
        place, _, rest = name.partition("/")
        found.setdefault(place, {})[rest] = array
    return found


def _span(told: Mapping[str, Any], arrays: Arrays, path: SequenceKV, coder: HeadCoders | None) -> Span:
    if told.get("hole"):
        return Span(hole_for(told["held"], path.num_kv_heads, path.head_dim, path.value_dim, path.fmt), told["length"])
    keys, values = arrays["keys"], arrays["values"]
    wanted = (path.num_kv_heads, told["held"])
    if (keys.shape[:2], path.fmt.dim_of(keys), path.fmt.dim_of(values)) != (wanted, path.head_dim, path.value_dim):
        raise InputDataError(
            f"saved keys and values must have {wanted[0]} heads and {wanted[1]} tokens, got shape {keys.shape}; save "
            "the context again"
        )
    heads = _heads(told, arrays, keys, path.fmt, coder)
    return Span(restored_segment(keys, values, path.fmt, told["first"], heads), told["length"])


def _before(span: Span, told: Mapping[str, Any], arrays: Arrays, coder: HeadCoders | None) -> Span:
    """A span that is there already, as a later state has it."""
    segment = span.segment
    if "heads" in told:
        segment.take_index(told["first"], _heads(told, arrays, segment.keys, segment.fmt, coder))
    for stop in told["grown"]:
        if stop > segment.indexed[1]:
            segment.extend_index(stop)
    return Span(segment, told["length"])


def _heads(
    told: Mapping[str, Any], arrays: Arrays, keys: npt.NDArray[Any], fmt: Format, coder: HeadCoders | None
) -> tuple[KeyIndex, ...]:
    first = told["first"]
    states: list[dict[str, Any]] = [dict(head["plain"]) for head in told["heads"]]
    for name, array in arrays.items():
        place, _, rest = name.partition("/")
        if place != "index":
            continue
        which, _, own = rest.partition("/")
        if which != _ALL:
            states[int(which)][own] = array
            continue
        for head, state in enumerate(states):
            state[own] = array[head]
    found: list[KeyIndex] = []
    for head, (one, state) in enumerate(zip(told["heads"], states, strict=True)):
        made = IndexSpec.of(one["kind"]).cls.from_state(
            keys[head, first : first + one["keys"]],
            fmt,
            state,
            coder=None if coder is None else coder.for_head(head),
            trusted=True,
        )
        made.note = one["note"]
        found.append(made)
    return tuple(found)
