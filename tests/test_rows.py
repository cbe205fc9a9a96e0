"""Rows that each have a cache of their own, in one forward: every row is as it would be alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.batch.rows import step
from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.engine.attention import using_retrieval
from retrieval_attn.engine.decode import forward
from tests.tiny_models import CONFIGS, build_model, random_ids

pytestmark = pytest.mark.usefixtures("compiled")

BASE: dict[str, Any] = {"sink": 4, "window": 24, "spill": 8, "retrieve": 16, "prefill_chunk": 512}
TOLERANCE = 1e-5


def read(model: Any, tokens: int, seed: int, **options: Any) -> RetrievalCache:
    cache = RetrievalCache(model, ra.Config(**{**BASE, **options}))
    feed(model, cache, random_ids(1, tokens, seed))
    return cache


def feed(model: Any, cache: RetrievalCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits (vocabulary,) after ids (1, n), by this cache alone."""
    start = cache.get_seq_length()
    places = torch.arange(start, start + ids.shape[1])[None].to(ids.device)
    with torch.no_grad(), using_retrieval(model, cache.config.prefill_chunk):
        return forward(model, cache, ids, mask=None, position_ids=places)[0]


class Pair:
    """A row, and the same alone: they get the same tokens."""

    def __init__(self, model: Any, cache: RetrievalCache) -> None:
        self.model, self.row, self.alone = model, cache, cache.fork()
        self.token = 5
        self.worst = 0.0

    def expect(self, logits: torch.Tensor) -> None:
        """After a step of the row that gave `logits`: as alone, and go on with the likeliest token."""
        device = logits.device
        wanted = feed(self.model, self.alone, torch.tensor([[self.token]], device=device))
        self.worst = max(self.worst, float((logits - wanted).abs().max() / wanted.abs().max()))
        assert self.worst < TOLERANCE
        assert int(logits.argmax()) == int(wanted.argmax())
        self.token = int(wanted.argmax())

    def crop(self, count: int) -> None:
        self.row.crop(-count)
        self.alone.crop(-count)

    def same_books(self) -> None:
        """Lengths, and what the layers have counted, are as alone."""
        one, other = self.row, self.alone
        assert one.get_seq_length() == other.get_seq_length()
        mine, wanted = one.stats(), other.stats()
        assert (mine.keys_scanned, mine.bytes_read) == (wanted.keys_scanned, wanted.bytes_read)
        for left, right in zip(one.layers, other.layers, strict=True):
            if not hasattr(left, "tail"):
                continue
            assert left.tail.count == right.tail.count
            assert left.tail.means() == pytest.approx(right.tail.means(), abs=1e-5)
            if left.window is not None:
                assert left.window.tail_len == right.window.tail_len


def steps(model: Any, pairs: list[Pair], count: int) -> None:
    for _ in range(count):
        caches = [pair.row for pair in pairs]
        tokens, places = [pair.token for pair in pairs], [cache.get_seq_length() for cache in caches]
        logits = step(model, caches, tokens, places)
        for pair, row in zip(pairs, logits, strict=True):
            pair.expect(row)


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield build_model(request.param)


def test_rows_of_every_model_are_as_alone(model: Any) -> None:
    """Lengths below a window and on both sides of long RoPE's boundary; sliding layers, soft cap, learned sinks."""
    pairs = [Pair(model, read(model, tokens, seed)) for seed, tokens in enumerate([20, 60, 150, 700])]
    steps(model, pairs, 12)
    for pair in pairs:
        pair.same_books()
