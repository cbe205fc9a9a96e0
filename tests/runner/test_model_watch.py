"""A model that was looked at closely: any change that a graph depends on is seen; rows that join look no closer."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import retrieval_attn as ra
from retrieval_attn.errors import CaptureError
from retrieval_attn.runner.graph import signature
from retrieval_attn.runner.graph.signature import ModelWatch
from tests.runner.graph_cases import CONFIG, Decoded
from tests.runner.test_graph_runner import Rows
from tests.tiny_models import build_model


def first_layer(model: Any) -> Any:
    return model.model.layers[0]


def replace_weight(model: Any) -> None:
    first_layer(model).mlp.up_proj.weight = nn.Parameter(first_layer(model).mlp.up_proj.weight.clone())


def move_weight(model: Any) -> None:
    first_layer(model).mlp.up_proj.weight.data = first_layer(model).mlp.up_proj.weight.data.clone()


def wrap_module(model: Any) -> None:
    first_layer(model).mlp.up_proj = nn.Sequential(first_layer(model).mlp.up_proj)


def hook(model: Any) -> None:
    first_layer(model).mlp.register_forward_hook(lambda *_: None)


def exchange_hook(model: Any) -> None:
    kept = first_layer(model).input_layernorm.register_forward_pre_hook(lambda *_: None)
    kept.remove()
    first_layer(model).input_layernorm.register_forward_hook(lambda *_: None)


def offload(model: Any) -> None:
    first_layer(model)._hf_hook = object()  # as accelerate does


CHANGES = [replace_weight, move_weight, wrap_module, hook, exchange_hook, offload]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: Callable[[Any], None]) -> None:
    model = build_model("llama31")
    known = ModelWatch(model)
    model(torch.tensor([[1, 2, 3]]))
    assert known.unchanged()
    change(model)
    assert not known.unchanged() and ModelWatch(model).unchanged()


@pytest.mark.usefixtures("compiled", "one_thread", "emulated_graphs")
def test_rows_that_join_look_closely_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again once somebody put a hook into the model, which a graph would not call."""
    seen: list[Any] = []
    close = signature.model_refusal

    def looked(model: Any) -> str | None:
        seen.append(model)
        return close(model)

    monkeypatch.setattr(signature, "model_refusal", looked)
    rows = Rows(build_model("llama31"), [60, 150, 90, 120])
    rows.steps(rows.pairs[:1], 2)
    rows.steps(rows.pairs[:3], 2)
    assert (len(seen), rows.runner.replays) == (1, 4)
    kept = first_layer(rows.model).mlp.register_forward_hook(lambda *_: None)
    rows.steps(rows.pairs, 2)  # the graph's rows replay; who joins is stepped beside it
    assert len(seen) == 2 and rows.runner.replays == 6
    kept.remove()
    rows.check_books()


def test_a_model_that_is_dropped_is_freed() -> None:
    """What was looked at stays alive for as long as the model."""
    model = ra.enable(build_model("llama31"), CONFIG)
    look = signature.look_at(model)
    assert signature.look_at(model) is look and signature.look_at(copy.deepcopy(model)) is not look
    weight, alive = weakref.ref(first_layer(model).mlp.up_proj.weight), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and weight() is None


@pytest.mark.usefixtures("compiled", "one_thread", "emulated_graphs")
def test_answers_look_closely_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is bound to a graph finds the model as it was; a hook that came since is seen."""
    seen: list[Any] = []
    close = signature.model_signature

    def looked(model: Any) -> tuple[Any, ...]:
        seen.append(model)
        return close(model)

    monkeypatch.setattr(signature, "model_signature", looked)
    model = ra.enable(build_model("llama31"), CONFIG)
    assert [Decoded(model, True, new=3).steps.replays for _ in range(3)] == [3, 3, 3] and len(seen) == 1
    first_layer(model).mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="forward hook"):
        Decoded(model, True, new=3)
    assert len(seen) == 2
