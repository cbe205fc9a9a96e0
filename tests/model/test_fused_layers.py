"""Decoder layers in few kernels: which are taken, that no family's answers change, and what keeps its modules.

The kernels' stand-ins are plain PyTorch here; `tests/gpu/test_products.py` has the kernels.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import retrieval_attn as ra
from retrieval_attn.model.fused import attention_parts as fused_attending
from retrieval_attn.model.fused import layers as module
from retrieval_attn.model.fused import parts as fused_parts
from retrieval_attn.model.fused import states as fused_states
from retrieval_attn.model.fused.layers import fused_layers
from tests.runner.graph_cases import MODELS, Decoded, enabled
from tests.tiny_models import CONFIGS, LAYERS, build_model, random_ids

KEPT = ("gemma2", "gemma3", "gemma4", "gemma4_moe", "gpt_oss")
"""Norms that add 1 to their weights, or four of them in a layer; cosines of half a head."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_runs_kernels", lambda model: True)


@pytest.fixture
def llama() -> Any:
    return enabled("llama")


def taken(model: Any, rows: int = 1) -> int:
    """Layers of a model that run in kernels; all is as it was afterwards."""
    before = [layer.__dict__.get("forward") for layer in model.model.layers]
    with fused_layers(model, rows) as count:
        pass
    assert [layer.__dict__.get("forward") for layer in model.model.layers] == before
    return count


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_families(name: str, rows: int) -> None:
    """Merged projections (Phi-3), biases (Qwen2), norms of heads (Qwen3), experts, whose part stays a module."""
    model = enabled(name)
    assert taken(model, rows) == (0 if name in KEPT else LAYERS)
    assert taken(model, 17) == 0


@pytest.mark.usefixtures("emulated_graphs")
@pytest.mark.parametrize("options", [{}, {"batch": 2, "padded": 5}])
@pytest.mark.parametrize("name", MODELS)
def test_replays_equal_eager_decoding(name: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The graph's steps go through the kernels' stand-ins, and give the modules' logits."""
    model = enabled(name)
    eager = Decoded(model, False, **options)
    assert not caplog.messages
    with caplog.at_level(logging.INFO, module.__name__):
        graphed = Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5
    assert f"{0 if name in KEPT else LAYERS} of {LAYERS} layers run in fused kernels" in caplog.text


@pytest.mark.usefixtures("emulated_graphs")
def test_wrong_kernels_are_seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A part that is off by a hundredth: the layer keeps its modules, and the log says what differs."""
    add = fused_attending.add_product
    monkeypatch.setattr(fused_attending, "add_product", lambda hidden, *rest: add(hidden, *rest) + 0.01 * hidden)
    with caplog.at_level(logging.INFO, module.__name__):
        assert taken(enabled("llama")) == 0
    assert "0 of 2 layers run in fused kernels" in caplog.text
    assert "layers [0, 1] keep their modules: its output differs from that of its kernels" in caplog.text
    monkeypatch.setattr(fused_attending, "add_product", lambda hidden, *rest: add(hidden, *rest) * torch.nan)
    assert taken(enabled("llama")) == 0


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda layer: setattr(layer.self_attn, "scaling", 0.5), id="scale"),
        pytest.param(lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 1e-3), id="eps"),
        pytest.param(lambda layer: layer.mlp.down_proj.weight.data.mul_(1.5), id="weight"),
    ],
)
def test_what_a_layer_says_of_itself_is_taken(changed: Any) -> None:
    """Its own scale, eps and weights are used: no assumption about its family."""
    model = enabled("llama")
    changed(model.model.layers[0])
    assert taken(model) == LAYERS


class _Halved(nn.Module):
    """A feed-forward part like another, but for a factor (Granite's residual multiplier)."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate = nn.functional.silu(self.gate_proj(hidden))
        return 0.5 * self.down_proj(gate * self.up_proj(hidden))


def test_a_part_that_only_looks_alike_stays_a_module(llama: Any) -> None:
    """Attention runs in kernels, the odd feed-forward part as itself."""
    ids = random_ids(1, 1)
    layer = llama.model.layers[1]
    layer.mlp = _Halved(layer.mlp)
    fused: Any = module._fused(layer, 1, 1)
    assert fused._parts.feed is None
    other: Any = module._fused(llama.model.layers[0], 0, 1)
    assert other._parts.feed is not None
    with torch.no_grad():
        expected = llama(ids, past_key_values=ra.RetrievalCache(llama)).logits
        with fused_layers(llama, 1) as count:
            own = llama(ids, past_key_values=ra.RetrievalCache(llama)).logits
    assert count == LAYERS
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)


def test_what_is_watched_or_held_in_another_way_keeps_its_modules(llama: Any) -> None:
    """Hooks, a forward of one's own, a subclass of Linear (adapters)."""
    layers = llama.model.layers
    hook = layers[0].mlp.down_proj.register_forward_hook(lambda *given: None)
    assert taken(llama) == LAYERS - 1
    hook.remove()
    assert taken(llama) == LAYERS
    llama(random_ids(1, 5), output_hidden_states=True)  # transformers leaves hooks of its own
    assert taken(llama) == LAYERS
    layers[1].self_attn.q_proj.forward = lambda hidden: hidden
    assert taken(llama) == LAYERS - 1
    del layers[1].self_attn.q_proj.forward

    class Adapted(nn.Linear):
        """As peft's."""

    adapted = copy.deepcopy(layers[1].self_attn.o_proj)
    adapted.__class__ = Adapted
    layers[1].self_attn.o_proj = adapted
    assert taken(llama) == LAYERS - 1


def test_other_ways_of_attending_keep_their_modules() -> None:
    """Without retrieval attention there is nothing to ask; a model that never was asked stays as it is."""
    assert taken(build_model("llama")) == 0


def test_longer_forwards_go_the_layers_own_way(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_ids(1, 5)
    with torch.no_grad():
        expected = llama(ids, past_key_values=ra.RetrievalCache(llama)).logits
        with fused_layers(llama, 1) as count:
            monkeypatch.setattr(fused_attending, "project", None)
            own = llama(ids, past_key_values=ra.RetrievalCache(llama)).logits
    assert count == LAYERS
    assert torch.equal(own, expected)


def trials_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the layers that are tried from now on."""
    trials: list[int] = []
    trial = module._trial

    def counted(layer: Any, index: int, *rest: Any) -> Any:
        trials.append(index)
        return trial(layer, index, *rest)

    monkeypatch.setattr(module, "_trial", counted)
    return trials


def test_trials_are_kept_but_no_weights(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is tried once for one row and once for several, and again after its weights moved."""
    trials = trials_of(monkeypatch)
    assert taken(llama) == taken(llama) == LAYERS and trials == [0, 1]
    assert taken(llama, 2) == taken(llama, 3) == taken(llama) == LAYERS and trials == [0, 1] * 2
    layer = llama.model.layers[0]
    _, known = module._tried[layer]
    assert known == dict.fromkeys(
        (False, True), module._Trial(True, fused_attending.LayerScoring(layer.self_attn.scaling, None, None))
    )
    weight = layer.mlp.up_proj.weight
    weight.data = weight.data.clone()
    assert taken(llama) == LAYERS and trials == [0, 1, 0, 1, 0]


def test_an_error_puts_all_back(llama: Any) -> None:
    before = [layer.forward for layer in llama.model.layers]
    with pytest.raises(KeyError), fused_layers(llama, 1):
        assert [layer.forward for layer in llama.model.layers] != before
        raise KeyError("an interrupt, say")
    assert [layer.forward for layer in llama.model.layers] == before


def launches_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of layers that are called from now on."""
    seen: list[str] = []
    places: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (fused_attending, ("project", "add_product")), (fused_parts, ("gated", "add_product")),
        (fused_states, ("two_products", "delta_step", "add_product")),
    )  # fmt: skip
    for place, kernels in places:
        for kernel in kernels:
            own = getattr(place, kernel)

            def call(*given: Any, own: Any = own, kernel: str = kernel) -> Any:
                seen.append(kernel)
                return own(*given)

            monkeypatch.setattr(place, kernel, call)
    return seen


@pytest.mark.parametrize(("name", "calls"), [("llama", 4), ("qwen3_moe", 2), ("gemma2", 4), ("gpt_oss", 2)])
def test_kernels_are_loaded_without_a_step(name: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a layer of this make launches, once; nothing where Triton does not run."""
    seen = launches_of(monkeypatch)
    module.load_layer_kernels(enabled(name))
    assert len(seen) == calls
    monkeypatch.setattr(module, "_runs_kernels", lambda model: False)
    module.load_layer_kernels(enabled(name))
    assert len(seen) == calls
