"""The registry of index kinds, and the default search over several heads."""

from __future__ import annotations

import numpy as np
import pytest

from retrieval_attn.errors import ConfigError
from retrieval_attn.index import FlatIndex, Format, KeyIndex, available, create, register
from tests.cpu.reference import strided


def test_flat_is_there_and_unknown_names_list_what_is() -> None:
    """A misspelt kind or option must not fall back to anything."""
    keys = np.zeros((3, 4), np.float32)
    assert "flat" in available()
    assert isinstance(create("flat", keys, fmt=Format.FLOAT32), FlatIndex)
    with pytest.raises(ConfigError, match="'flatt'.*flat"):
        create("flatt", keys, fmt=Format.FLOAT32)
    with pytest.raises(ConfigError, match="no option degree; its options: none"):
        create("flat", keys, fmt=Format.FLOAT32, degree=3)


def test_a_name_is_taken_once() -> None:
    """Two classes under one name would make `create` depend on the order of imports."""

    class Other(FlatIndex):
        kind = "flat"

    with pytest.raises(ConfigError, match="already FlatIndex"):
        register(Other)
    assert register(FlatIndex) is FlatIndex


def test_default_search_of_heads_equals_the_flat_one() -> None:
    """The generic loop and flat's single kernel call must agree, counts included."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3, 500, 16), dtype=np.float32)
    queries = rng.standard_normal((3, 2, 16), dtype=np.float32)
    indexes = [FlatIndex(strided(head), Format.FLOAT32) for head in keys]
    one_by_one = KeyIndex.search_heads.__func__(FlatIndex, indexes, queries, 7, limit=400)  # type: ignore[attr-defined]
    for found in (FlatIndex.search_heads(indexes, queries, 7, limit=400), one_by_one):
        np.testing.assert_array_equal(found.ids, one_by_one.ids)
        np.testing.assert_array_equal(found.scores, one_by_one.scores)
        assert found.keys_scanned == 3 * 2 * 400
