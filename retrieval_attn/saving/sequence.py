"""What a path holds as arrays and plain values, for saving, and a path of them: as it was, with nothing built again.

A *state* tells of the spans of a path behind its first few, which the states before it tell of: a chain of them, root
first, makes the path. Segments take the arrays of a state as they are, maps of files too, so that a page is read when
it is needed.

Names of arrays, of the state's span i: "i/keys", "i/values"; "i/index/HEAD/NAME" of one head's index, and
"i/index/all/NAME" (kv_heads, ...) of small ones of all heads. A state that tells the index of span s of those before it
again has "before-s/index/...". Replicas choose their own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.cpu.budgets import HeadBudgets
from retrieval_attn.cpu.replica import State, replica_kinds
from retrieval_attn.cpu.segment import HeadCoders, Segment, Span, hole_for, restored_segment
from retrieval_attn.cpu.store import SequenceKV
from retrieval_attn.errors import ConfigError, InputDataError, RetrievalAttentionError
from retrieval_attn.index.auto import notes
from retrieval_attn.index.base import KeyIndex
from retrieval_attn.index.device import FINER, DeviceIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec

Arrays = Mapping[str, npt.NDArray[Any]]
STACKED_BYTES = 1 << 18
"""Arrays of one head up to this long are saved with those of the other heads: few arrays are found faster than many."""
_ALL = "all"
CODES = ("codes", f"{FINER}codes")
"""Arrays of a state with a row for each key."""


class PathMark(NamedTuple):
    """State of a saved path. spans: segments and tokens. heads: indexes of each segment. replicas: marks by kind."""

    spans: list[tuple[Segment, int]]
    heads: list[tuple[KeyIndex, ...]]
    replicas: dict[str, Any]


def span_marks(path: SequenceKV) -> list[tuple[Segment, int]]:
    """The segments of a path with how many of their tokens it sees."""
    return [(span.segment, span.length) for span in path.spans]


def path_mark(path: SequenceKV) -> PathMark:
    """Return the state that a later `path_state` can skip. Take it right before saving, or after a load."""
    marks = {kind: replica.mark(path) for kind, replica in path.replicas.items() if replica is not None}
    return PathMark(span_marks(path), [segment.indexes for segment in path.segments], marks)


def spans_since(path: SequenceKV, mark: PathMark) -> int:
    """How many of the first spans of `path` were there at the mark: a state behind these says all that is new."""
    same = [
        span.segment is segment and span.length <= length
        for span, (segment, length) in zip(path.spans, mark.spans, strict=False)
    ]
    # only the last may have been cut: what followed it then was another segment
    return [*same, False].index(False)


def path_state(path: SequenceKV, since: int, mark: PathMark | None = None) -> State:
    """Everything of `path` behind its first `since` spans, its replicas and budgets, and what changed of the first.

    mark: of the path, or of one that it is a fork of, when the first spans were saved (`spans_since` counts them);
    what that has of replicas and of the first spans' indexes is left out. None: all of these are told. Arrays are views
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
    for kind, replica in path.replicas.items():
        if replica is None:
            plain[kind] = None
            continue
        plain[kind], own = replica.state(path, since, tokens, None if mark is None else mark.replicas.get(kind))
        arrays.update(own)
    return plain, arrays


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
            for cls in replica_kinds(of_segments=False):
                known, state = path.replicas.get(cls.kind), plain[cls.kind]
                path.replicas[cls.kind] = None if state is None else cls.restored(path, state, own, known)
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
    """Return the state of one span: `held` tokens of its segment, more than `length` if a graph covers them."""
    segment = span.segment
    if segment.is_hole:
        return {"length": span.length, "held": segment.length, "hole": True}, {}
    with segment.steady_index() as heads:
        index, arrays = _index_state(span, heads, prefix)
    held = max([span.length, *(index["first"] + head["keys"] for head in index["heads"])])
    keys, values = segment.read(0, held)
    return {"length": span.length, "held": held, **index}, {f"{prefix}keys": keys, f"{prefix}values": values, **arrays}


def _before_state(span: Span, prefix: str, known: tuple[KeyIndex, ...] | None) -> State:
    """Return the state of a span that was saved: its index if it is not `known`, and later insertions."""
    with span.segment.steady_index() as heads:
        told: dict[str, Any] = {"length": span.length, "grown": list(span.segment.grown)}
        if heads is known or (not heads and known is None):
            return told, {}
        index, arrays = _index_state(span, heads, prefix)
        return {**told, **index}, arrays


def _index_state(span: Span, heads: Sequence[KeyIndex], prefix: str) -> State:
    """Return the state of a segment's index; nothing is inserted into it meanwhile.

    Codes of tokens after the span, which another path may overwrite, are omitted.
    """
    first, most = span.segment.indexed[0], None
    if heads and all(isinstance(head, DeviceIndex) for head in heads):
        most = span.length - first
        heads = heads if most > 0 else ()
    states = [head.state() for head in heads]
    for state in states if most is not None else ():
        state.update({name: array[:most] for name, array in state.items() if name in CODES})  # type: ignore[index]
    told = [
        {
            "kind": head.kind,
            "note": notes.get(head, ""),
            "keys": len(head) if most is None else min(len(head), most),
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
        if one["note"]:
            notes[made] = one["note"]
        found.append(made)
    return tuple(found)
