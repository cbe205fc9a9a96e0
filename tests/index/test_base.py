"""The registry of index kinds, and the default search over several heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index import FlatIndex, Format, KeyIndex, available, create, register
from retrieval_attn.index.base import check_search, check_training


def test_flat_is_there_and_unknown_names_list_what_is() -> None:
    """A misspelt kind or option must not fall back to anything."""
    keys = np.zeros((3, 4), np.float32)
    assert "flat" in available()
    assert isinstance(create("flat", keys, fmt=Format.FLOAT32), FlatIndex)
    with pytest.raises(ConfigError, match="'flatt'.*flat"):
        create("flatt", keys, fmt=Format.FLOAT32)
    with pytest.raises(ConfigError, match="no option degree; its options: codes"):
        create("flat", keys, fmt=Format.FLOAT32, degree=3)


def test_a_name_is_taken_once() -> None:
    """Two classes under one name would make `create` depend on the order of imports."""

    class Other(FlatIndex):
        kind = "flat"

    with pytest.raises(ConfigError, match="already FlatIndex"):
        register()(Other)
    assert register()(FlatIndex) is FlatIndex


def test_a_kind_without_state_says_so() -> None:
    """Saving must not write a file that nothing can load."""

    class Stateless(FlatIndex):
        kind = "stateless"
        state = KeyIndex.state
        from_state: Any = classmethod(KeyIndex.__dict__["from_state"].__func__)

    keys = np.zeros((3, 4), np.float32)
    with pytest.raises(ConfigError, match="'stateless' cannot be saved"):
        Stateless(keys, Format.FLOAT32).state()
    with pytest.raises(ConfigError, match="'stateless' cannot be restored"):
        Stateless.from_state(keys, Format.FLOAT32, {})


def test_search_arguments_come_out_contiguous() -> None:
    """A strided batch of queries is a fair thing to pass."""
    queries = np.arange(24, dtype=np.float32).reshape(6, 4)[::2]
    three: Any = np.int64(3)
    checked, k = check_search(queries, 4, three, 0)
    assert checked.flags.c_contiguous and k == 3
    np.testing.assert_array_equal(checked, queries)


@pytest.mark.parametrize(
    ("queries", "lists"),
    [
        (np.zeros((3, 4), np.float32), None),
        (np.zeros((2, 3, 5), np.float32), None),
        (np.zeros((2, 3, 4), np.float16), None),
        (None, np.zeros((2, 3, 7), np.int64)),
        (None, np.zeros((3, 7), np.int32)),
        (np.zeros((2, 3, 4), np.float32), np.zeros((2, 4, 7), np.int32)),
        (None, np.full((1, 1, 2), 10, np.int32)),
        (None, np.full((1, 1, 2), -2, np.int32)),
    ],
)
def test_training_arguments_are_checked(queries: Any, lists: Any) -> None:
    """Lists of another segment's keys would make edges to nowhere."""
    with pytest.raises(ShapeError):
        check_training(queries, lists, 4, 10)


def test_training_arguments_may_be_absent() -> None:
    """No queries and no lists is how an untrained index is built."""
    assert check_training(None, None, 4, 0) == (None, None)
    lists = np.array([[[9, 0, -1]]], np.int32)
    queries, kept = check_training(np.zeros((1, 1, 4), np.float32), lists, 4, 10)
    assert queries is not None and kept is not None
    np.testing.assert_array_equal(kept, lists)
