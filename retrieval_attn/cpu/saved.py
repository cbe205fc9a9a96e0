"""What a path holds as arrays and plain values, for saving, and a path of them: as it was, with nothing built again.

A *state* tells of the spans of a path behind its first few, which the states before it tell of: a chain of them, root
first, makes the path. Segments take the arrays of a state as they are, maps of files too, so that a page is read when
it is needed.

Names of arrays, of the state's span i: "i/keys", "i/values"; "i/index/HEAD/NAME" of one head's index, and
"i/index/all/NAME" (kv_heads, ...) of small ones of all heads. `cpu/saved_clusters.py` has those of clusters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.saved_clusters import ClusterMark, clusters_state, restore_clusters
from retrieval_attn.cpu.segment import HeadCoders, Segment, restored_segment, steady_index
from retrieval_attn.cpu.store import SequenceKV, Span, path_spans, take_spans
from retrieval_attn.errors import InputDataError
from retrieval_attn.index.base import KeyIndex
from retrieval_attn.index.spec import IndexSpec

State = tuple[dict[str, Any], Mapping[str, npt.NDArray[Any]]]
"""Plain JSON values, and arrays of plain numbers by name."""
STACKED_BYTES = 1 << 18
"""Arrays of one head up to this long are saved with those of the other heads: few arrays are found faster than many."""
_ALL = "all"


def span_marks(path: SequenceKV) -> list[tuple[Segment, int]]:
    """The segments of a path with how many of their tokens it sees. Of two paths, equal marks from the first on are
    what they share.
    """
    return [(span.segment, span.length) for span in path_spans(path)]


def path_state(path: SequenceKV, since: int, clusters: ClusterMark | None = None) -> State:
    """Everything of `path` behind its first `since` spans, and its clusters and budgets.

    clusters: `cluster_mark` of the path when the first spans were saved; what it knows is left out. None: everything of
    the clusters is told, of the first spans as well. Arrays are views of the path where they stay as they are: all its
    segments are frozen, as by a fork, and the path may go on at once. Raises ConfigError for a kind of index that
    cannot be saved.
    """
    spans = path_spans(path)
    for span in spans:
        span.segment.freeze()
    plain: dict[str, Any] = {"shape": _shape(path), "since": since, "spans": []}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for number, span in enumerate(spans[since:]):
        told, held = _span_state(span, f"{number}/")
        plain["spans"].append(told)
        arrays.update(held)
    # those of the first spans may have taken in tokens of theirs since they were saved
    plain["indexed"] = [span.segment.indexed[1] for span in spans[:since]]
    plain["budgets"] = None if path.budgets is None else list(path.budgets.counts)
    tokens = [span.segment.length for span in spans[:since]] + [told["held"] for told in plain["spans"]]
    plain["clusters"], held = clusters_state(path, since, tokens, clusters)
    return plain, {**arrays, **held}


def path_from_states(states: Sequence[State], path: SequenceKV, coder: HeadCoders | None) -> None:
    """Fill an empty path with what a chain of states tells, root first; it answers and goes on as the saved one does.

    A path that has what the first states of a chain tell (a fork of one that was filled with them) takes the others.
    Arrays are taken as they are: their checksums were compared. coder: takes the codes of indexes that keep some on a
    device, None keeps them in host memory, as a reference. Raises InputDataError for states that do not fit the path or
    each other; the path is then of no use.
    """
    for plain, arrays in states:
        try:
            if plain["shape"] != _shape(path):
                raise InputDataError(f"a saved path of {plain['shape']} does not fit one of {_shape(path)}")
            own = {name: np.asarray(array) for name, array in arrays.items()}  # kernels know no other kind of array
            by_span = _by_span(own)
            added = [
                _span(told, by_span.get(str(number), {}), path, coder) for number, told in enumerate(plain["spans"])
            ]
            for span, stop in zip(path_spans(path), plain["indexed"], strict=False):
                span.segment.extend_index(stop)
            take_spans(path, plain["since"], added)
            restore_clusters(path, plain["clusters"], own)
            path.budgets = None if plain["budgets"] is None else HeadBudgets(tuple(plain["budgets"]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputDataError(f"the state is not one of a path ({error!r}); save the context again") from error


def _shape(path: SequenceKV) -> list[Any]:
    return [path.num_kv_heads, path.head_dim, path.value_dim, path.fmt.value]


def _span_state(span: Span, prefix: str) -> State:
    """Of one span: `held` tokens of its segment, more than `length` where an index covers them."""
    segment = span.segment
    with steady_index(segment) as heads:
        first, _ = segment.indexed
        held = max([span.length, *(first + len(head) for head in heads)])
        states = [head.state() for head in heads]
        told = [{"kind": head.kind, "note": head.note, "keys": len(head)} for head in heads]
    keys, values = segment.read(0, held)
    arrays = {f"{prefix}keys": keys, f"{prefix}values": values}
    for one, state in zip(told, states, strict=True):
        one["plain"] = {name: _plain(value) for name, value in state.items() if not isinstance(value, np.ndarray)}
    by_head = [{name: array for name, array in one.items() if isinstance(array, np.ndarray)} for one in states]
    for name in list(by_head[0]) if by_head else ():
        every = [one.get(name) for one in by_head]
        if all(_alike(array, every[0]) for array in every):
            arrays[f"{prefix}index/{_ALL}/{name}"] = np.stack([one.pop(name) for one in by_head])
    for head, own in enumerate(by_head):
        arrays.update({f"{prefix}index/{head}/{name}": array for name, array in own.items()})
    return {"length": span.length, "held": held, "first": first, "heads": told}, arrays


def _alike(one: npt.NDArray[Any] | None, other: npt.NDArray[Any] | None) -> bool:
    return (
        one is not None
        and other is not None
        and one.nbytes <= STACKED_BYTES
        and (one.shape, one.dtype) == (other.shape, other.dtype)
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _by_span(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Arrays by span, then by the rest of their names."""
    found: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for name, array in arrays.items():
        span, _, rest = name.partition("/")
        found.setdefault(span, {})[rest] = array
    return found


def _span(
    told: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], path: SequenceKV, coder: HeadCoders | None
) -> Span:
    keys, first = arrays["keys"], told["first"]
    if len(keys) != path.num_kv_heads or keys.shape[1] < told["length"]:
        raise InputDataError(f"{told['length']} tokens of {path.num_kv_heads} heads need more keys than {keys.shape}")
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
    heads: list[KeyIndex] = []
    for head, (one, state) in enumerate(zip(told["heads"], states, strict=True)):
        made = IndexSpec.of(one["kind"]).cls.from_state(
            keys[head, first : first + one["keys"]],
            path.fmt,
            state,
            coder=None if coder is None else coder.for_head(head),
            trusted=True,
        )
        made.note = one["note"]
        heads.append(made)
    return Span(restored_segment(keys, arrays["values"], path.fmt, first, tuple(heads)), told["length"])
