"""An identity tells apart models whose keys differ, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.identity import identity_of
from tests.tiny_models import build_model, tiny_model


def fields(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(identity_of(model, tokenizer))
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]


@torch.no_grad()
def one_layer_is_trained(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.mul_(1.001)


@torch.no_grad()
def one_layer_is_another(model: Any) -> None:
    first, second = model.model.layers
    first.mlp.up_proj.weight, second.mlp.up_proj.weight = second.mlp.up_proj.weight, first.mlp.up_proj.weight


def other_positions(model: Any) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e6}


def other_epsilon(model: Any) -> None:
    model.config.rms_norm_eps = 1e-3


@pytest.mark.parametrize(
    "change,field",
    [
        (one_layer_is_trained, "weights"),
        (one_layer_is_another, "weights"),
        (other_positions, "positions"),
        (other_epsilon, "config"),
    ],
)
def test_a_change_is_seen_and_named(change: Callable[[Any], None], field: str) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    before = fields(model)
    change(model)
    assert differing(before, fields(model)) == [field]


def test_what_is_no_difference() -> None:
    """Where a model lies, what attends, its path; another copy of it."""
    model = build_model("llama")
    before = fields(model)
    model.config._name_or_path = "elsewhere"
    model.set_attn_implementation("eager")
    assert fields(model) == before == fields(build_model("llama"))
    assert differing(before, fields(copy.deepcopy(model).to(torch.bfloat16))) == ["dtype", "weights"]


def test_the_adapter_that_acts() -> None:
    """Both are loaded, with the same weights in memory; one acts, or the other, or none."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    options: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"]}
    model = peft.get_peft_model(copy.deepcopy(tiny_model("llama")), peft.LoraConfig(**options))
    model.add_adapter("other", peft.LoraConfig(**options))
    found = [fields(unwrapped(model))]
    model.set_adapter("other")
    found.append(fields(unwrapped(model)))
    with model.disable_adapter():
        found.append(fields(unwrapped(model)))
    assert differing(found[0], found[1]) == differing(found[1], found[2]) == ["adapters"]
    assert fields(tiny_model("llama"))["adapters"] is None
