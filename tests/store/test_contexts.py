"""Saving, naming, loading, removing: what a store promises when nothing goes wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from retrieval_attn.store import Bundle, ContextStore

IDENTITY = '{"layout":1,"model":"a"}'
IDS = np.arange(300, dtype=np.int32)


def bundle(seed: int) -> Bundle:
    draw = np.random.default_rng(seed)
    storage = draw.standard_normal((2, 3000, 32), np.float32)
    arrays = {
        "0/keys": storage[:, 100:2900],  # rows of a larger storage
        "0/values": storage.transpose(0, 2, 1)[:, ::3],  # nothing of it is contiguous
        "0/index/0/codes": draw.integers(0, 255, 70_000, np.uint8)[::-1],
        "empty": np.zeros((0, 4), np.int64),
        "flag": np.array(True),
        "big_endian": np.arange(5, dtype=">i4"),
    }
    return Bundle({"seed": seed, "text": "é", "nested": {"a": [1, 2.5, None, False]}}, arrays)


def save(store: ContextStore, name: str | None, ids: np.ndarray = IDS, parent: str | None = None, seed: int = 0) -> str:
    with store.writer(IDENTITY, parent, ids, {"index": "flat"}) as writer:
        for layer in range(2):
            writer.add(f"layer-{layer:03}", bundle(seed + layer))
        digest = writer.publish({"seed": seed})
    if name is not None:
        store.name(name, digest, {"template": "x"})
    return digest


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    store = ContextStore(tmp_path / "store")
    digest = save(store, "book")
    named = ContextStore(tmp_path / "store").resolve("book")
    assert (named.name, named.digest, named.plain) == ("book", digest, {"template": "x"})
    node = store.get(digest, IDENTITY)
    assert node.files == ["layer-000", "layer-001"] and node.parent is None
    assert node.options == {"index": "flat"} and node.plain == {"seed": 0}
    np.testing.assert_array_equal(node.ids, IDS)
    for layer, verify in ((0, True), (1, ("keys", "values"))):
        loaded, saved = node.bundle(f"layer-{layer:03}", verify=verify), bundle(layer)
        assert loaded.plain == saved.plain
        assert list(loaded.arrays) == list(saved.arrays)
        for name, array in saved.arrays.items():
            assert loaded.arrays[name].dtype == array.dtype.newbyteorder("=")
            assert loaded.arrays[name].flags.writeable and loaded.arrays[name].flags.c_contiguous
            np.testing.assert_array_equal(loaded.arrays[name], array)
    assert store.verify() == []
