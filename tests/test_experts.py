"""Experts of a captured step: the batched product on a device, and the user's choice back afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from retrieval_attn.model.experts import experts_of_one_token
from tests.tiny_models import build_model


def ways(model: Any) -> set[str]:
    """What the model's experts, wherever they are, look up when they run."""
    held = (getattr(module, "config", None) for module in model.modules() if "Experts" in type(module).__name__)
    return {str(config._experts_implementation) for config in held if config is not None}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_grouped_product_gives_way_on_a_device(name: str) -> None:
    model = build_model(name).to("meta")
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(KeyError), experts_of_one_token(model):
        assert ways(model) == {"batched_mm"}
        raise KeyError("an interrupt, say")
    assert ways(model) == {"grouped_mm"}


def test_other_choices_and_models_stay() -> None:
    model = build_model("qwen3_moe")
    model.set_experts_implementation("grouped_mm")
    with experts_of_one_token(model):
        assert ways(model) == {"grouped_mm"}  # on a CPU
    model = model.to("meta")
    model.set_experts_implementation("eager")
    with experts_of_one_token(model):
        assert ways(model) == {"eager"}
    with experts_of_one_token(build_model("qwen2").to("meta")):
        pass
