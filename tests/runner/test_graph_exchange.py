"""Decoders whose device and host lose each other: the error names the layer, only the token is lost."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from retrieval_attn.cpu import serve
from retrieval_attn.errors import BackendError
from retrieval_attn.runner.decode import DecodeSteps
from retrieval_attn.runner.graph.decoder import GraphDecoder
from retrieval_attn.runner.graph.support import runtime_for
from tests.emulation.emulated import emulated
from tests.emulation.runtime import EmulatedRuntime
from tests.gpu.test_polling import Careless
from tests.runner.graph_cases import Decoded, decoder_of, enabled
from tests.runner.test_decode_graph_cuda import on_device


@pytest.fixture(autouse=True)
def _float32_is_float32(fresh_decoders: None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


class Two:
    """A cache that decodes by graphs, and one with the same tokens that decodes eagerly."""

    def __init__(self, model: Any, new: int = 10) -> None:
        self.model, self.device = model, model.device
        decoded = Decoded(model, True, new=new)
        self.cache, self.eager = decoded.cache, decoded.cache.fork()
        self.steps = DecodeSteps(model, self.cache, True)
        self.others = DecodeSteps(model, self.eager, False)

    def step(self, steps: DecodeSteps, token: int) -> Tensor:
        cache = self.cache if steps is self.steps else self.eager
        place = torch.tensor([cache.get_seq_length()], device=self.device)
        logits = steps.step(torch.tensor([token], device=self.device), place, None).clone()
        logits.tolist()
        steps.confirm()
        return logits

    def check(self, token: int) -> None:
        with torch.no_grad():
            assert (self.step(self.steps, token) - self.step(self.others, token)).abs().max() <= 2e-5

    @property
    def decoder(self) -> GraphDecoder:
        decoder: GraphDecoder = decoder_of(self.steps)
        return decoder

    @property
    def replay(self) -> Any:
        (captured,) = self.decoder.graphs.values()
        return captured.replay


@torch.no_grad()
def test_a_layer_that_is_not_answered_costs_its_token() -> None:
    """And keeps the cache: emulated."""
    runtime = EmulatedRuntime(Careless)
    with emulated(runtime):
        two = Two(enabled("llama"))
        two.check(5)
        runtime.patience, two.replay.server.mistake = 0.3, "skip"
        before = two.cache.get_seq_length()
        with pytest.raises(BackendError, match="layer 1: the device gave up waiting"):
            two.step(two.steps, 6)
        assert two.cache.get_seq_length() == before
        two.replay.server.mistake = ""
        for token in (6, 7, 8):
            two.check(token)
        two.steps.close()


@emulated()
@torch.no_grad()
def test_a_replay_that_is_not_served_costs_its_token() -> None:
    """The step itself raises, with nothing launched left over: emulated."""
    two = Two(enabled("llama"))
    two.check(5)
    work, two.replay.work = two.replay.work, lambda: None
    before = two.cache.get_seq_length()
    with pytest.raises(BackendError, match="layer 0: the device finished without a request"):
        two.step(two.steps, 6)
    two.replay.work = work
    assert two.cache.get_seq_length() == before
    for token in (6, 7, 8):
        two.check(token)
    two.steps.close()


@pytest.mark.parametrize("where", ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
@torch.no_grad()
def test_decoders_share_a_runtime(where: str) -> None:
    """Two models' steps in turn."""
    make = enabled if where == "emulated" else on_device
    with emulated() if where == "emulated" else contextlib.nullcontext():
        pairs = [Two(make("llama")), Two(make("qwen3"))]
        for token in range(5, 17):
            for two in pairs:
                two.check(token)
    assert pairs[0].decoder.runtime is pairs[1].decoder.runtime
    for two in pairs:
        two.steps.close()


@pytest.mark.cuda
@pytest.mark.parametrize(
    "word, reason", [(serve.ANSWER, "gave up waiting"), (serve.REQUEST, "finished without a request")]
)
@torch.no_grad()
def test_what_is_lost_on_the_device_costs_its_token(word: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's answer that goes elsewhere is reported after the step, a request that does not come by the step."""
    model = on_device("llama")
    runtime: Any = runtime_for(model)
    monkeypatch.setattr(runtime.exchange, "polls", 200_000)
    two = Two(model)
    two.check(5)
    elsewhere = torch.zeros(4, dtype=torch.int64)
    rows, before = two.replay.server.rows, two.cache.get_seq_length()
    kept = int(rows[1, word])
    rows[1, word] = elsewhere.data_ptr()
    began = time.monotonic()
    with pytest.raises(BackendError, match=f"layer 1: the device {reason}"):
        two.step(two.steps, 6)
    assert time.monotonic() - began < 4 and two.cache.get_seq_length() == before
    rows[1, word] = kept
    for token in range(6, 30):
        two.check(token)
    two.steps.close()
