"""Experts of a captured step: the batched product on a device, and the user's choice back afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from retrieval_attn.model.layers import experts_of_one_token
from tests.tiny_models import build_model


def ways(model: Any) -> set[str]:
    """What the model's experts, wherever they are, look up when they run."""
    held = (getattr(module, "config", None) for module in model.modules() if "Experts" in type(module).__name__)
    return {str(config._experts_implementation) for config in held if config is not None}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_grouped_product_gives_way_on_a_device(name: str) -> None:
    model = build_model(name).to("meta")
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(KeyError), experts_of_one_token(model, 1):
        assert ways(model) == {"batched_mm"}
        raise KeyError("an interrupt, say")
    assert ways(model) == {"grouped_mm"}


@pytest.mark.parametrize(("rows", "way"), [(1, "batched_mm"), (2, "batched_mm"), (3, "grouped_mm")])
def test_many_rows_copy_no_weights(rows: int, way: str) -> None:
    """Of four experts each row visits two."""
    model = build_model("qwen3_moe").to("meta")
    model.set_experts_implementation("grouped_mm")
    with experts_of_one_token(model, rows):
        assert ways(model) == {way}


@pytest.mark.parametrize(("capability", "way"), [((9, 0), "grouped_mm"), ((8, 9), "batched_mm")])
def test_where_a_graph_holds_groups_they_stay(
    capability: tuple[int, int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 on a data-centre card; float32 there is multiplied one expert after the other."""
    model = build_model("qwen3_moe").to(torch.bfloat16)
    model.set_experts_implementation("grouped_mm")
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with experts_of_one_token(model, 1):
        assert ways(model) == {way}
    model.float()
    with experts_of_one_token(model, 1):
        assert ways(model) == {"batched_mm"}


def test_other_choices_and_models_stay() -> None:
    model = build_model("qwen3_moe")
    model.set_experts_implementation("grouped_mm")
    with experts_of_one_token(model, 1):
        assert ways(model) == {"grouped_mm"}  # on a CPU
    model = model.to("meta")
    model.set_experts_implementation("eager")
    with experts_of_one_token(model, 1):
        assert ways(model) == {"eager"}
    with experts_of_one_token(build_model("qwen2").to("meta"), 1):
        pass
