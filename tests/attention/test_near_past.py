"""A short past is attended to where it lies beside the model, and what will not be indexed needs no queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import retrieval_attn as ra
from retrieval_attn.attention.exact import ExactPass, UploadSource
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import LayerUploads
from retrieval_attn.attention.source import SourcePlan
from retrieval_attn.runner.decode import forward
from tests.tiny_models import build_model, random_ids

CONFIG = ra.Config(index="flat", sink=8, window=32, retrieve=8)


class Conversation:
    """A model and a cache that reads part after part."""

    def __init__(self, config: ra.Config = CONFIG, device: str = "cpu") -> None:
        self.model = ra.enable(build_model("llama").to(device), config)
        self.cache = ra.RetrievalCache(self.model, config)
        self.seed = 0

    def read(self, tokens: int) -> Tensor:
        """The last one's logits."""
        self.seed += 1
        device = self.model.device
        places = torch.arange(tokens, device=device)[None] + self.cache.get_seq_length()
        with torch.no_grad():
            return forward(
                self.model, self.cache, random_ids(1, tokens, self.seed).to(device), mask=None, position_ids=places
            )

    @property
    def held(self) -> list[LayerKV]:
        return [one.held for one in self.cache.layers if isinstance(one, RetrievalLayer) and one.held is not None]


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that brought tokens from the host."""
    found: list[int] = []
    usual = LayerUploads.walk

    def walk(self: LayerUploads, *args: Any, **options: Any) -> Iterator[tuple[int, Tensor, Tensor]]:
        found.append(self._number)
        return usual(self, *args, **options)

    monkeypatch.setattr(LayerUploads, "walk", walk)
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("first,second", [(1, 20), (5, 30), (31, 9), (32, 40), (40, 17), (40, 100)])
def test_a_short_past_stays_where_it_is(
    first: int, second: int, device: str, walks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to sinks and window, with the bits of what comes from the host."""
    near, far = Conversation(device=device), Conversation(device=device)
    near.read(first)
    logits = near.read(second)
    assert not walks
    monkeypatch.setattr(UploadSource, "_near", property(lambda self: None, lambda self, near: None), raising=False)
    far.read(first)
    assert torch.equal(far.read(second), logits) and walks


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace(host_dtype="int8")])
def test_a_longer_or_rounded_past_comes_from_the_host(config: ra.Config, walks: list[int]) -> None:
    talk = Conversation(config)
    talk.read(41 if config is CONFIG else 20)
    talk.read(20)
    assert walks


@pytest.mark.parametrize(
    "parts", [(1,), (40,), (41,), (32, 8), (32, 9), (20, 20, 1), (50, 3), (10, 1, 1, 1, 30), (100, 50)]
)
@pytest.mark.parametrize("crop", [0, 1, 15])
def test_queries_are_kept_where_something_will_be_indexed(
    parts: tuple[int, ...], crop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is expected of a pass comes true, also behind tokens that were decoded or taken back."""
    expected: list[bool] = []
    usual = ExactPass.__init__

    def begin(self: ExactPass, plan: SourcePlan, total: int) -> None:
        expected.append(plan.request.held.retrieves_after(total))
        usual(self, plan, total)
        assert (self._metric_sample is None and self._sample is None) or expected[-1]

    monkeypatch.setattr(ExactPass, "__init__", begin)
    talk = Conversation()
    for number, part in enumerate(parts):
        expected.clear()
        talk.read(part)
        if expected:  # a pass, and no steps
            assert expected == [held.retrieves for held in talk.held]
        if number == 0 and crop and part > crop:
            talk.cache.crop(part - crop)
