"""A sketch as arrays and plain values, for saving, and back, with everything checked that a kernel would follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import InputDataError
from retrieval_attn.index.base import StateValue
from retrieval_attn.index.memory import aligned_empty, usable
from retrieval_attn.index.sketch.blocks import BLOCK, KeyBlocks, key_bytes
from retrieval_attn.index.sketch.leaves import Leaves
from retrieval_attn.index.sketch.search import SketchArguments


def saved_arguments(search: SketchArguments, key_side: npt.NDArray[np.float32]) -> dict[str, StateValue]:
    """What `restored_arguments` makes the same sketch of. Not while keys are inserted."""
    blocks, means = search.keys, search.leaves.means
    rows = search.total + search.total % 2  # a scan takes blocks by twos
    return {
        "wide": blocks.wide,
        "ordered": search.leaves.ordered,
        "share": search.leaves.share,
        "total": search.total,
        "blocks": blocks.blocks[:rows],
        "ids": search.ids[: rows * BLOCK],
        "mean": blocks.mean,
        "step": blocks.step,
        "reach": blocks.reach,
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
    wide, ordered, share = (state.get(name) for name in ("wide", "ordered", "share"))
    rank, rows, coded = (_rows_of(state.get(name)) for name in ("step", "blocks", "leaf_blocks"))
    total = state.get("total", rows)
    if (
        not isinstance(total, int)
        or not 0 <= total <= rows
        or (trusted and rows % 2 + coded % 2)
        or not isinstance(wide, int)
        or not 0 <= wide <= rank
        or not isinstance(ordered, int)
        or not 0 <= ordered <= min(total, coded * BLOCK)
        or not isinstance(share, float)
        or not 0 < share <= 1
    ):
        raise InputDataError("the state is not one of a sketch over such keys; build the index again from its keys")
    width, numbers = key_bytes(wide, rank - wide) * BLOCK, _rows_of(state.get("leaf_step"))
    expected: dict[str, tuple[type, tuple[int, ...]]] = {
        "blocks": (np.uint8, (rows, width)),
        "ids": (np.int32, (rows * BLOCK,)),
        "leaf_blocks": (np.uint8, (coded, key_bytes(numbers, 0) * BLOCK)),
    }
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
    blocks, ids = arrays["blocks"], arrays["ids"]
    if trusted:
        blocks, ids, leaf_blocks = usable(blocks), usable(ids), usable(arrays["leaf_blocks"])
    else:
        if not np.array_equal(np.sort(ids[ids >= 0]), np.arange(num_keys)) or (ids[total * BLOCK :] >= 0).any():
            raise InputDataError(f"the ids of the sketch are not those of {num_keys} keys; build the index again")
        blocks, leaf_blocks = _aligned(blocks), _aligned(arrays["leaf_blocks"])
        ids = np.full(len(blocks) * BLOCK, -1, np.int32)
        ids[: len(arrays["ids"])] = arrays["ids"]
    mean, step, reach = (np.array(arrays[name]) for name in ("mean", "step", "reach"))
    coded_keys = KeyBlocks(blocks, mean, step, reach, wide)
    mean, step, reach = (np.array(arrays[f"leaf_{name}"]) for name in ("mean", "step", "reach"))
    leaves = Leaves(KeyBlocks(leaf_blocks, mean, step, reach, numbers), ordered, share)
    search = SketchArguments(coded_keys, ids, total, np.array(arrays["query_side"]), leaves)
    return search, np.array(arrays["key_side"])


def _rows_of(array: StateValue | None) -> int:
    return len(array) if isinstance(array, np.ndarray) and array.ndim else 0


def _aligned(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy of blocks where kernels want them, an even number."""
    blocks = aligned_empty((len(rows) + len(rows) % 2, rows.shape[1]), np.uint8)
    blocks[: len(rows)] = rows
    return blocks
