"""Layers that keep a state in few kernels: which are taken, what they answer and leave behind, what stays modules.

The kernels' stand-ins are plain PyTorch here; `tests/gpu/test_delta.py` has the kernels.
"""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.gpu.delta import DeltaRule, States
from retrieval_attn.model.fused import layers as module
from retrieval_attn.model.fused import states as fused_states
from retrieval_attn.model.fused.layers import fused_layers
from tests.model.test_fused_layers import launches_of, taken
from tests.model.test_hybrid import new_model
from tests.runner.graph_cases import CONFIG, Decoded
from tests.runner.test_graph_runner import Rows
from tests.tiny_models import random_ids

SIZES: dict[str, Any] = {
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
STATES, ATTENDING = (0, 2), (1, 3)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_runs_kernels", lambda model: True)


def hybrid(name: str = "qwen3_5_text", **changes: Any) -> Any:
    """A model of four layers that retrieves; weights of norms that are not what they began as."""
    model = new_model(name, **SIZES, **changes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for own, weight in model.named_parameters():
            if "norm" in own:
                weight += 0.2 * torch.randn(weight.shape, generator=generator)
            elif own.endswith("A_log"):
                weight.copy_(torch.randn(weight.shape, generator=generator))  # states that last some tokens
    return ra.enable(model, CONFIG)


def read(model: Any, ids: torch.Tensor) -> ra.RetrievalCache:
    cache = ra.RetrievalCache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


def states_of(cache: ra.RetrievalCache) -> list[torch.Tensor]:
    layers: list[Any] = [cache.layers[number] for number in STATES]
    return [state for layer in layers for _, state in layer.states()]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_step_gives_what_modules_give(name: str, rows: int) -> None:
    """All layers are taken, those that attend (with gates and a part of a head turned), too; logits and states agree,
    and the states lie where they lay.
    """
    model = hybrid(name)
    ids = random_ids(rows, 9)
    caches = [read(model, ids) for _ in range(2)]
    places = [state.data_ptr() for state in states_of(caches[1])]
    for column in range(3):
        token = ids[:, column : column + 1]
        with torch.no_grad():
            expected = model(token, past_key_values=caches[0]).logits
            with fused_layers(model, rows) as count:
                own = model(token, past_key_values=caches[1]).logits
        assert count == 4
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
    for one, other in zip(*map(states_of, caches), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)
    assert [state.data_ptr() for state in states_of(caches[1])] == places


@pytest.mark.usefixtures("emulated_graphs")
@pytest.mark.parametrize("options", [{}, {"batch": 2, "padded": 5}])
def test_replays_equal_eager_decoding(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The graph's steps go through the kernels' stand-ins, and give the modules' logits."""
    model = hybrid()
    eager = Decoded(model, False, **options)
    with caplog.at_level(logging.INFO, module.__name__):
        graphed = Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5
    assert "4 of 4 layers run in fused kernels" in caplog.text


@pytest.mark.usefixtures("compiled", "one_thread", "emulated_graphs")
def test_rows_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of an engine, whose states lie at places of buffers that all of them share, are as they would be alone."""
    rows = Rows(new_model("qwen3_5_text", initializer_range=0.2, **SIZES), [40, 150, 300])
    for pair in rows.pairs:
        pair.tolerance = 1e-4  # weights so large that states move the logits
    with caplog.at_level(logging.INFO, module.__name__):
        for _ in rows.come_and_go(random.Random(5), 20, {4: 1, 12: 0}, crop=0):
            pass
    assert rows.runner.replays == 20
    assert "rows: 4 of 4 layers run in fused kernels" in caplog.text
    rows.check_books()


def _unmoved(rule: DeltaRule, states: States) -> tuple[DeltaRule, States]:
    return rule, States(states.inputs.clone(), states.memory)


def _forgetful(rule: DeltaRule, states: States) -> tuple[DeltaRule, States]:
    return rule, States(states.inputs, states.memory.clone())


def _of_other_heads(rule: DeltaRule, states: States) -> tuple[DeltaRule, States]:
    return rule._replace(log_decay=rule.log_decay.roll(1)), states


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        pytest.param(_unmoved, "inputs", id="inputs"),
        pytest.param(_forgetful, "state", id="state"),
        pytest.param(_of_other_heads, "output", id="heads"),
    ],
)
def test_wrong_kernels_are_seen(
    wrong: Any, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Inputs or states that do not go on, heads that change places: the layers keep their modules."""
    model, own = hybrid(), fused_states.delta_step
    monkeypatch.setattr(fused_states, "delta_step", lambda asked, *given: own(asked, *wrong(*given)))
    with caplog.at_level(logging.INFO, module.__name__):
        assert taken(model) == len(ATTENDING)
    assert f"layers [0, 2] keep their modules: its {what} differs from that of its kernels" in caplog.text


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_other_states_keep_their_modules(name: str) -> None:
    """Projections in one matrix by heads (Qwen3-Next), short convolutions (LFM2): only what attends is taken."""
    model = ra.enable(new_model(name), CONFIG)
    assert taken(model) == (len(ATTENDING) if name == "qwen3_next" else 0)


def test_heads_that_are_no_tiles_keep_their_modules() -> None:
    model = ra.enable(new_model("qwen3_5_text"), CONFIG)  # heads of 8 numbers
    assert taken(model) == len(ATTENDING)


def test_a_first_token_goes_the_layers_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a state there is nothing to advance; nor is there with another dtype or more tokens."""
    model = hybrid()
    ids = random_ids(1, 4)
    with torch.no_grad():
        expected = model(ids, past_key_values=ra.RetrievalCache(model)).logits[:, -1]
        with fused_layers(model, 1) as count:
            seen = launches_of(monkeypatch)
            cache = ra.RetrievalCache(model)
            model(ids[:, :1], past_key_values=cache)
            assert "delta_step" not in seen
            model(ids[:, 1:3], past_key_values=cache)
            assert "delta_step" not in seen
            own = model(ids[:, 3:], past_key_values=cache).logits[:, -1]
            assert seen.count("delta_step") == len(STATES)
    assert count == 4
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)


def test_what_is_watched_keeps_its_modules() -> None:
    model = hybrid()
    hook = model.model.layers[0].linear_attn.conv1d.register_forward_hook(lambda *given: None)
    assert taken(model) == 3
    hook.remove()
    assert taken(model) == taken(copy.deepcopy(model)) == 4


def test_kernels_of_both_kinds_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid()
    seen = launches_of(monkeypatch)
    module.load_layer_kernels(model)
    state = ["two_products", "two_products", "delta_step", "add_product", "gated", "add_product"]
    assert seen == [*state, "project", "add_product", "gated", "add_product"]
