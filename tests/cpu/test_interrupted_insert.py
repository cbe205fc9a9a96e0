"""An index whose insertion ended between two heads: it can be cut back, and takes the same keys once more."""

from __future__ import annotations

import numpy as np
import pytest

from retrieval_attn.cpu.segment import Segment
from retrieval_attn.index.flat import FlatIndex
from retrieval_attn.index.formats import Format
from retrieval_attn.index.spec import IndexSpec


@pytest.mark.parametrize("truncate", [True, False])
def test_heads_of_different_lengths_grow_to_the_same(monkeypatch: pytest.MonkeyPatch, truncate: bool) -> None:
    heads, dim = 3, 4
    keys = np.random.default_rng(0).standard_normal((heads, 12, dim)).astype(np.float32)
    segment = Segment(heads, 16, dim, dim, Format.FLOAT32)
    segment.append(keys[:, :8], keys[:, :8])
    segment.build_index(IndexSpec.of("flat"), 2, 8, None)
    segment.append(keys[:, 8:10], keys[:, 8:10])
    second, insert = segment.indexes[1], FlatIndex.insert

    def interrupted(index: FlatIndex, new: np.ndarray) -> None:
        if index is second:
            raise KeyboardInterrupt
        insert(index, new)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(FlatIndex, "insert", interrupted)
        segment.extend_index(10)
    assert [len(index) for index in segment.indexes] == [8, 6, 6]
    if truncate:
        segment.truncate(8)
        assert [len(index) for index in segment.indexes] == [6, 6, 6]
        segment.append(keys[:, 10:], keys[:, 10:])  # others in their place
    stored = segment.read(0, 10)[0]
    segment.extend_index(10)
    assert [len(index) for index in segment.indexes] == [8, 8, 8]
    for head, index in enumerate(segment.indexes):
        query = stored[head, 8:10]
        assert index.search(query, 8).ids[0].max() == 7
        scores = index.search(query, 8).scores
        assert np.allclose(np.sort(scores), np.sort(query @ stored[head, 2:10].T), atol=1e-6)
