"""A kind of attention source in one file: the class below and its registration are all of it, and layers use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.attention import retrieval
from retrieval_attn.attention.host_attention import HostSource
from retrieval_attn.attention.retrieval import register_source
from retrieval_attn.attention.sequence import stacked
from retrieval_attn.attention.source import AttentionRequest, AttentionSource, RangeResult, SourceResult, TokenRange
from retrieval_attn.errors import BackendError, CaptureError
from retrieval_attn.gpu.attention.merge import Partial
from retrieval_attn.index.formats import to_float32
from retrieval_attn.runner.rows import step
from tests.runner.graph_cases import SMALL, Decoded, enabled
from tests.runner.test_rows import feed
from tests.tiny_models import random_ids

NEAR = 24
"""Newest tokens before the window that the toy source covers."""


class NearSource(AttentionSource[TokenRange]):
    """Attend to all of the newest host tokens, in float64."""

    retrieves = True

    @classmethod
    def covers(cls, request: AttentionRequest, tokens: TokenRange) -> TokenRange | None:
        first, recent = max(tokens.start, tokens.stop - NEAR), request.held.ranges[tokens.rows[0]][1]
        return None if request.exact or tokens.stop < recent else tokens.cut(first, tokens.stop)

    def finish(self) -> SourceResult:
        found = []
        for one in self.ranges:
            keys, values = (
                torch.from_numpy(to_float32(part, one.host.fmt)) for part in one.host.read(one.start, one.stop)
            )
            queries = stacked(self.query, one.rows).double()
            group = len(queries) // one.host.num_kv_heads
            keys, values = (part.double().repeat_interleave(group, dim=0) for part in (keys, values))
            logits = queries @ keys.transpose(1, 2) * self.scoring.scale
            partial = Partial((logits.softmax(-1) @ values).float(), logits.logsumexp(-1).float())
            found.append(RangeResult(one, partial))
        return self.assembled(found, self.ranges[0].host.value_dim)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retrieval, "SOURCES", list(retrieval.SOURCES))
    register_source(NearSource, before=HostSource)
    yield


CONFIG = ra.Config(**SMALL, tail=False, question_attention="retrieval")
ALL = CONFIG.replace(retrieve="all")


def logits_of(model: Any, config: ra.Config, parts: list[int]) -> torch.Tensor:
    cache = ra.RetrievalCache(model, config, check=False)
    return torch.stack([feed(model, cache, random_ids(1, count, seed)) for seed, count in enumerate(parts)])


@pytest.mark.parametrize("parts", [[200, 1, 1], [200, 12, 1, 9]])
def test_layers_attend_by_it(parts: list[int], near: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside full attention to the rest it changes nothing; beside retrieval it adds its keys to the retrieved ones."""
    model = enabled("llama")
    with pytest.MonkeyPatch.context() as usual:
        usual.setattr(retrieval, "SOURCES", [one for one in retrieval.SOURCES if one is not NearSource])
        full, without = logits_of(model, ALL, parts), logits_of(model, CONFIG, parts)
    torch.testing.assert_close(logits_of(model, ALL, parts), full, rtol=0, atol=2e-5)
    own = logits_of(model, CONFIG, parts)
    assert float((own - without)[1:].abs().max()) > 1e-4
    # all of a middle of NEAR tokens is retrieved, one token before the window spills
    short = [CONFIG.sink + CONFIG.window + NEAR, 1]
    torch.testing.assert_close(logits_of(model, CONFIG, short), logits_of(model, ALL, short), rtol=0, atol=2e-5)
    monkeypatch.setattr(NearSource, "covers", lambda request, tokens: None)
    assert float((logits_of(model, CONFIG, short) - logits_of(model, ALL, short)).abs().max()) > 1e-4
    ra.disable(model)


def test_rows_of_several_caches_attend_by_it(near: None) -> None:
    """The shared step of a CPU has no place for it: such rows go through their own layers, and get the same."""
    model = enabled("llama")
    caches = [ra.RetrievalCache(model, CONFIG, check=False) for _ in range(2)]
    for seed, cache in enumerate(caches):
        feed(model, cache, random_ids(1, 100 + seed, seed))
    alone = [cache.fork() for cache in caches]
    found = step(model, caches, [5, 6], [100, 101])
    for row, cache in enumerate(alone):
        torch.testing.assert_close(found[row], feed(model, cache, torch.tensor([[5 + row]])), rtol=0, atol=2e-5)
    ra.disable(model)


@pytest.mark.usefixtures("emulated_graphs")
def test_a_captured_step_refuses_it(near: None) -> None:
    model = enabled("llama")
    with pytest.raises(CaptureError, match="layer 0: NearSource attends"):
        Decoded(model, True, config=CONFIG, prompt=200, new=1)
    ra.disable(model)


def test_tokens_that_no_source_covers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enabled("llama")
    monkeypatch.setattr(retrieval, "SOURCES", [one for one in retrieval.SOURCES if one is not HostSource])
    with pytest.raises(BackendError, match=r"layer 0: no attention source covers tokens 4 to 184"):
        logits_of(model, CONFIG, [200, 1])
    ra.disable(model)
