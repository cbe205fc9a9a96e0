"""Indexes of a class by keyword options, as tests write them."""

from __future__ import annotations

from typing import Any, TypeVar

from retrieval_attn.index.base import KeyIndex, Training

Index = TypeVar("Index", bound=KeyIndex)


def built(cls: type[Index], keys: Any, fmt: Any, queries: Any = None, *, lists: Any = None, **options: Any) -> Index:
    """The index of `cls` over keys (n, head_dim), trained on queries or lists."""
    index = cls.build(keys, fmt, cls.Options(**options), Training(queries, lists))
    assert isinstance(index, cls)
    return index
