"""An index made from another's saved state answers and grows as that one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.index import Format, KeyIndex, create
from retrieval_attn.index.formats import from_float32

DIM = 16


def data(n: int = 500) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """bfloat16 keys (n, DIM), training queries (2, 60, DIM), queries (5, DIM)."""
    rng = np.random.default_rng(0)
    keys = from_float32(rng.standard_normal((n, DIM), dtype=np.float32), Format.BFLOAT16)
    return keys, rng.standard_normal((2, 60, DIM), dtype=np.float32), rng.standard_normal((5, DIM), dtype=np.float32)


def same_state(one: KeyIndex, other: KeyIndex) -> None:
    mine, theirs = one.state(), other.state()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("kind", ["flat", "sketch", "roargraph", "device"])
def test_a_loaded_index_grows_as_the_saved_one(kind: str, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It codes, orders and links its keys anew at the same insertion, in one array or from maps of a file."""
    keys, train, _ = data(2000)
    monkeypatch.setattr("retrieval_attn.index.roargraph.index.EXACT_BELOW", 0)
    monkeypatch.setattr("retrieval_attn.index.roargraph.index.TAIL", 40)
    options: dict[str, dict[str, Any]] = {"flat": {"codes": "int8"}}
    index = create(kind, keys[:500], fmt=Format.BFLOAT16, queries=train, **options.get(kind, {}))
    index.insert(keys[500:790])
    state = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in index.state().items()}
    before = {name: np.array(value) for name, value in state.items()}
    back = type(index).from_state(keys[:790], Format.BFLOAT16, state, trusted=trusted)
    same_state(index, back)
    for start, stop in ((790, 820), (820, 1010), (1010, 1600), (1600, 1603)):
        for one in (index, back):
            one.insert(keys[start:stop])
        same_state(index, back)
    if not trusted:
        for name, value in state.items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)
