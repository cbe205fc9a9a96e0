"""The baseline whose keys lie on the host: copies there and back come in order, however far the device is behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from retrieval_attn_eval.bench.baselines import OrderedOffload
from tests.tiny_models import tiny_model

STEPS = 8


class Copying:
    """A stream that brings layers back, beside one that computes and is behind: that one's copies to the host, `late`,
    are made when this one waits for them.
    """

    def __init__(self) -> None:
        self.late: list[Callable[[], object]] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def wait_stream(self, stream: object) -> None:
        for copy in self.late:
            copy()
        self.late.clear()


class LateLayer(DynamicLayer):
    """Its memory on the host holds NaN until the copy there is made."""

    def __init__(self, stream: Copying) -> None:
        super().__init__()
        self._stream = stream

    def offload(self) -> None:
        for name in ("keys", "values"):
            left = getattr(self, name)
            there = torch.full_like(left, torch.nan)
            self._stream.late.append(functools.partial(there.copy_, left))
            setattr(self, name, there)

    def prefetch(self) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.clone(), self.values.clone()


def updates(cache: Any, first: int, device: str, before: Callable[[], object]) -> list[Tensor]:
    """What the two layers of a cache attend to: `first` tokens, then one at a time. before: called before each step."""
    generator, seen = torch.Generator(device).manual_seed(0), []
    for step in range(STEPS):
        before()
        for layer in range(2):
            shape = 1, 2, 1 if step else first, 64
            key, value = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
            seen += cache.update(key, value, layer)
    return seen


@pytest.mark.parametrize("ordered", [True, False], ids=["ours", "transformers' own"])
def test_a_layer_comes_back_after_it_has_left(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated. Once transformers' own cache passes, too, ours has no purpose any more."""
    stream, config = Copying(), tiny_model("llama").config
    with monkeypatch.context() as patch:
        patch.setattr(torch, "Stream", lambda: stream)
        patch.setattr(torch.accelerator, "current_stream", lambda: None)
        patch.setattr(torch.cuda, "default_stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
        cache = OrderedOffload(config) if ordered else DynamicCache(config=config, offloading=True)
        cache.layers = [LateLayer(stream) for _ in range(2)]
        found = updates(cache, 5, "cpu", lambda: None)
    wanted = updates(DynamicCache(config=config), 5, "cpu", lambda: None)
    same = all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert same == ordered


@pytest.mark.cuda
def test_a_device_that_is_behind_reads_no_memory_too_early() -> None:
    """It begins each step milliseconds after it was launched."""
    config, tokens = tiny_model("llama").config, 4000

    def late() -> None:
        torch.cuda._sleep(20_000_000)

    # memory that is at hand, so that nothing waits for the device to get some; on the host it holds no right numbers
    held = [torch.full((1, 2, tokens, 64), torch.nan, pin_memory=True) for _ in range(4 * (STEPS + 1))]
    held.append(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))
    del held
    wanted = updates(DynamicCache(config=config), tokens, "cuda", lambda: None)
    torch.cuda.synchronize()
    found = updates(OrderedOffload(config), tokens, "cuda", late)
    wrong = [(one != other).sum() for one, other in zip(found, wanted, strict=True)]
    assert not any(map(int, wrong))
