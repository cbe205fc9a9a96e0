"""Indexes of a class by keyword options, as tests write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from retrieval_attn.index.base import KeyIndex, Training
from retrieval_attn.index.kernels import key_codes
from retrieval_attn.index.kernels.key_codes import CodeSpace

Index = TypeVar("Index", bound=KeyIndex)


def built(cls: type[Index], keys: Any, fmt: Any, queries: Any = None, *, lists: Any = None, **options: Any) -> Index:
    """The index of `cls` over keys (n, head_dim), trained on queries or lists."""
    index = cls.build(keys, fmt, cls.Options(**options), Training(queries, lists))
    assert isinstance(index, cls)
    return index


def learn_spaces(
    sides: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], keys: np.ndarray[Any, Any], sizes: Sequence[int]
) -> list[CodeSpace]:
    """`key_codes.learn_spaces` of one head: sides (head_dim, head_dim), keys (n, head_dim)."""
    return key_codes.learn_spaces((sides[0][None], sides[1][None]), keys[None], sizes)[0]
