"""What the tests of the store save."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrieval_attn.store import Bundle, ContextStore

IDENTITY = '{"layout":1,"model":"a"}'
OPTIONS = {"index": "flat"}
IDS = np.arange(300, dtype=np.int32)


def bundle(seed: int) -> Bundle:
    """Arrays of all layouts, some larger than a block."""
    draw = np.random.default_rng(seed)
    storage = draw.standard_normal((2, 3000, 32), np.float32)
    arrays: dict[str, npt.NDArray[Any]] = {
        "0/index/0/codes": draw.integers(0, 255, 70_000, np.uint8)[::-1],
        "0/index/0/order": draw.permutation(5000),
        "0/keys": storage[:, 100:2900],  # rows of a larger storage
        "0/values": storage.transpose(0, 2, 1)[:, ::3],  # nothing of it is contiguous
        "empty": np.zeros((0, 4), np.int64),
        "flag": np.array(True),
        "big_endian": np.arange(5, dtype=">i4"),
    }
    return Bundle({"seed": seed, "text": "é", "nested": {"a": [1, 2.5, None, False]}}, arrays)


def save(
    store: ContextStore,
    name: str | None,
    ids: npt.NDArray[np.int32] = IDS,
    parent: str | None = None,
    seed: int = 0,
    layers: int = 2,
) -> str:
    """Save a node with bundles of seed, seed + 1, ...; name it; return its digest."""
    with store.writer(IDENTITY, parent, ids, OPTIONS) as writer:
        for layer in range(layers):
            writer.add(f"layer-{layer:03}", bundle(seed + layer))
        digest = writer.publish({"seed": seed})
    if name is not None:
        store.name(name, digest, {"template": "x"})
    return digest


def check_equal(found: Bundle, wanted: Bundle) -> None:
    """The same values, and arrays of the same names, order, types and numbers."""
    assert found.plain == wanted.plain
    assert list(found.arrays) == list(wanted.arrays)
    for name, array in wanted.arrays.items():
        assert found.arrays[name].dtype == array.dtype.newbyteorder("=")
        assert found.arrays[name].flags.writeable and found.arrays[name].flags.c_contiguous
        np.testing.assert_array_equal(found.arrays[name], array)
