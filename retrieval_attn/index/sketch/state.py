"""A sketch as arrays and plain values for saving, and back, with all values checked that a kernel would follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import InputDataError
from retrieval_attn.index.base import StateValue
from retrieval_attn.index.memory import aligned_empty, usable
from retrieval_attn.index.sketch.front import THINNEST, Front
from retrieval_attn.index.sketch.rows import BLOCK, PAIR, BlockSteps, KeyRows, NumberBlocks, row_width
from retrieval_attn.index.sketch.scan import Leaves
from retrieval_attn.index.sketch.task import SketchArguments


def saved_arguments(search: SketchArguments, key_side: npt.NDArray[np.float32]) -> dict[str, StateValue]:
    """Return the state from which `restored_arguments` makes the same sketch. Not while keys are inserted."""
    keys, front, means = search.keys, search.front, search.leaves.means
    blocks = search.total + search.total % 2  # a scan takes blocks by twos
    return {
        "wide": keys.wide,
        "ordered": search.leaves.ordered,
        "share": search.leaves.share,
        "total": search.total,
        "passing": search.passing,
        "whole": search.whole,
        "rows": keys.rows[: blocks * BLOCK],
        "front": front.blocks[:blocks],
        "front_step": front.step,
        "front_narrow": front.narrow,
        "ids": search.ids[: blocks * BLOCK],
        "mean": keys.mean,
        "step": keys.step,
        "reach": keys.reach,
        "query_side": search.query_side,
        "key_side": key_side,
        "leaf_blocks": means.blocks,
        "leaf_mean": means.mean,
        "leaf_step": means.step,
        "leaf_reach": means.reach,
    }


def restored_arguments(
    state: Mapping[str, StateValue], num_keys: int, head_dim: int, trusted: bool = False
) -> tuple[SketchArguments, npt.NDArray[np.float32]]:
    """The sketch of `num_keys` keys and the projection of keys that were saved. Raises InputDataError.

    trusted: see `KeyIndex.from_state`; numbers are not looked at then, and arrays are not copied.
    """
    wide, ordered, share, narrow = (state.get(name) for name in ("wide", "ordered", "share", "front_narrow"))
    passing, whole = state.get("passing"), state.get("whole")
    rank, numbers, front_rank = (_rows_of(state.get(name)) for name in ("step", "leaf_step", "front_step"))
    coded = _rows_of(state.get("leaf_blocks"))
    blocks, total = _rows_of(state.get("rows")) // BLOCK, state.get("total")
    if (
        not isinstance(total, int)
        or not 0 <= total <= blocks
        or (trusted and blocks % 2 + coded % 2)
        or not isinstance(wide, int)
        or not 0 <= wide <= rank
        or not isinstance(ordered, int)
        or not 0 <= ordered <= min(total, coded * BLOCK)
        or not isinstance(share, float)
        or not 0 < share <= 1
        or not isinstance(passing, float)
        or not 0 < passing < np.inf
        or not isinstance(whole, int)
        or not 0 <= whole <= total
        or not isinstance(narrow, int)
        or not (0 <= narrow <= front_rank and narrow % 8 + (front_rank - narrow) % 16 == 0 and front_rank > 0)
    ):
        raise InputDataError(
            "the saved state is not one of a sketch over these keys; build the index again from its keys"
        )
    expected: dict[str, tuple[type, tuple[int, ...]]] = {
        "ids": (np.int32, (blocks * BLOCK,)),
        "leaf_blocks": (np.uint8, (coded, numbers * BLOCK)),
    }
    expected["rows"] = np.uint8, (blocks * BLOCK, row_width(wide, rank - wide))
    expected["front"] = np.uint8, (blocks, (narrow // 2 + (front_rank - narrow) // THINNEST) * BLOCK)
    expected["front_step"] = np.float32, (front_rank,)
    expected |= {name: (np.float32, (rank,)) for name in ("mean", "step", "reach")}
    expected |= {f"leaf_{name}": (np.float32, (numbers,)) for name in ("mean", "step", "reach")}
    expected |= {name: (np.float32, (rank, head_dim)) for name in ("query_side", "key_side")}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, (dtype, shape) in expected.items():
        array = state.get(name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
            given = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "nothing"
            raise InputDataError(
                f"{name} of the sketch must be {np.dtype(dtype)} {shape}, got {given}; build the index again"
            )
        if not trusted and not np.isfinite(array).all():
            raise InputDataError(f"{name} of the sketch must be finite; build the index again")
        arrays[name] = array
    ids, leaf_blocks = arrays["ids"], arrays["leaf_blocks"]
    if not trusted and (
        not np.array_equal(np.sort(ids[ids >= 0]), np.arange(num_keys))
        or (ids[total * BLOCK :] >= 0).any()
        or (ids[: whole * BLOCK] < 0).any()
    ):
        raise InputDataError(f"the ids of the saved sketch do not cover {num_keys} keys; build the index again")
    own = usable if trusted else _padded
    ids = usable(ids) if trusted else _padded(ids, PAIR, -1)
    steps = BlockSteps(*(np.array(arrays[name]) for name in BlockSteps._fields))
    keys = KeyRows(usable(arrays["rows"]) if trusted else _padded(arrays["rows"], PAIR), *steps, wide=wide)
    front = Front(own(arrays["front"]), np.array(arrays["front_step"]), narrow)
    means = NumberBlocks(own(leaf_blocks), *(np.array(arrays[f"leaf_{name}"]) for name in BlockSteps._fields))
    leaves = Leaves(means, ordered, share)
    search = SketchArguments(keys, front, ids, total, np.array(arrays["query_side"]), leaves, passing, num_keys, whole)
    return search, np.array(arrays["key_side"])


def _rows_of(array: StateValue | None) -> int:
    return len(array) if isinstance(array, np.ndarray) and array.ndim else 0


def _padded(rows: npt.NDArray[Any], multiple: int = 2, value: int = 0) -> npt.NDArray[Any]:
    """Copy rows to aligned memory, padded with `value` to a multiple of `multiple` rows."""
    copied = aligned_empty((-(-len(rows) // multiple) * multiple, *rows.shape[1:]), rows.dtype)
    copied[: len(rows)], copied[len(rows) :] = rows, value
    return copied
