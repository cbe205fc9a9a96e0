"""A sketch as arrays and plain values, for saving, and back, with everything checked that a kernel would follow.

Before keys were in rows they were in blocks of 16, four bytes of each in turn, and had no front: such states are taken,
too. What queries asked for is not in them, so the front is that of a head of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import InputDataError
from retrieval_attn.index.base import StateValue
from retrieval_attn.index.memory import aligned_empty, usable
from retrieval_attn.index.sketch.blocks import BLOCK, PAIR, WIDE_STEP, BlockSteps, NumberBlocks
from retrieval_attn.index.sketch.fit import OLD_PASSING, sizes_for
from retrieval_attn.index.sketch.front import THINNEST, Front, empty_front, plan_front, write_front
from retrieval_attn.index.sketch.leaves import Leaves
from retrieval_attn.index.sketch.rows import KeyRows, decoded, key_bytes, row_width
from retrieval_attn.index.sketch.search import SketchArguments

PLANNED_KEYS = 2048
"""Keys of an old state that its front's steps are taken from."""


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
    old = "blocks" in state
    wide, ordered, share, narrow = (state.get(name) for name in ("wide", "ordered", "share", "front_narrow"))
    passing, whole = state.get("passing", OLD_PASSING if old else None), state.get("whole", 0)
    rank, numbers, front_rank = (_rows_of(state.get(name)) for name in ("step", "leaf_step", "front_step"))
    coded = _rows_of(state.get("leaf_blocks"))
    blocks = _rows_of(state.get("blocks")) if old else _rows_of(state.get("rows")) // BLOCK
    total = state.get("total", blocks)
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
        or not (old or _is_layout(narrow, front_rank))
    ):
        raise InputDataError(
            "the saved state is not one of a sketch over these keys; build the index again from its keys"
        )
    expected: dict[str, tuple[type, tuple[int, ...]]] = {
        "ids": (np.int32, (blocks * BLOCK,)),
        "leaf_blocks": (np.uint8, (coded, numbers * BLOCK)),
    }
    if old:
        expected["blocks"] = np.uint8, (blocks, key_bytes(wide, rank - wide) * BLOCK)
    else:
        assert isinstance(narrow, int)
        expected["rows"] = np.uint8, (blocks * BLOCK, row_width(wide, rank - wide))
        front_bytes = narrow // 2 + (front_rank - narrow) // THINNEST
        expected["front"] = np.uint8, (blocks, front_bytes * BLOCK)
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
    if old:
        keys = KeyRows(_rows_of_blocks(arrays["blocks"], row_width(wide, rank - wide)), *steps, wide=wide)
        front = _front_of(keys, total * BLOCK)
    else:
        assert isinstance(narrow, int)
        keys = KeyRows(usable(arrays["rows"]) if trusted else _padded(arrays["rows"], PAIR), *steps, wide=wide)
        front = Front(own(arrays["front"]), np.array(arrays["front_step"]), narrow)
    means = NumberBlocks(own(leaf_blocks), *(np.array(arrays[f"leaf_{name}"]) for name in BlockSteps._fields))
    leaves = Leaves(means, ordered, share)
    search = SketchArguments(keys, front, ids, total, np.array(arrays["query_side"]), leaves, passing, num_keys, whole)
    return search, np.array(arrays["key_side"])


def _is_layout(narrow: StateValue | None, rank: int) -> bool:
    return isinstance(narrow, int) and 0 <= narrow <= rank and narrow % 8 + (rank - narrow) % 16 == 0 and rank > 0


def _rows_of(array: StateValue | None) -> int:
    return len(array) if isinstance(array, np.ndarray) and array.ndim else 0


def _padded(rows: npt.NDArray[Any], multiple: int = 2, value: int = 0) -> npt.NDArray[Any]:
    """Copy rows to aligned memory, padded with `value` to a multiple of `multiple` rows."""
    copied = aligned_empty((-(-len(rows) // multiple) * multiple, *rows.shape[1:]), rows.dtype)
    copied[: len(rows)], copied[len(rows) :] = rows, value
    return copied


def _rows_of_blocks(blocks: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint8]:
    """The rows of keys in blocks: four bytes of 16 keys, then the next four."""
    words = blocks.shape[1] // (BLOCK * WIDE_STEP)
    rows = aligned_empty((-(-len(blocks) * BLOCK // PAIR) * PAIR, width), np.uint8)
    rows[:] = 0
    own = rows[: len(blocks) * BLOCK, : words * WIDE_STEP].reshape(len(blocks), BLOCK, words, WIDE_STEP)
    own[...] = blocks.reshape(len(blocks), words, BLOCK, WIDE_STEP).transpose(0, 2, 1, 3)
    return rows


def _front_of(keys: KeyRows, count: int) -> Front:
    """The largest front that is tried, of rows whose queries are not known."""
    size = sizes_for(len(keys.step))[-1]
    numbers = decoded(keys, np.arange(0, count, max(1, count // PLANNED_KEYS)))
    front = empty_front(plan_front(numbers, keys.mean, [size])[size], len(keys.rows))
    write_front(front, keys, 0, count)
    return front
