"""The needle command's two methods come from the registry, with its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import retrieval_attn as ra
from retrieval_attn.eval import baselines, methods
from retrieval_attn.eval.baselines.full import FullAttention
from retrieval_attn.eval.baselines.retrieval import RetrievalAttention
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    from transformers import AutoTokenizer

    from retrieval_attn.eval.needle.options import BUNDLED_MODEL

    return AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))


def test_one_set_of_classes() -> None:
    """A second Reply or FullAttention under another name would make results of the two commands differ."""
    assert methods.Reply is baselines.Reply
    assert methods.FullAttention is FullAttention and methods.RetrievalAttention is RetrievalAttention
    assert set(methods.METHODS) <= set(baselines.METHODS)


def test_needle_methods_get_the_needle_options(tokenizer: Any) -> None:
    """The configuration of the command line reaches the method whole, and the baseline gets a model of its own."""
    model = tiny_model("llama")
    config = ra.Config(index="flat", retrieve=7, sink=3, window=5, train_queries=9)
    made: dict[str, Any] = dict(methods.build_methods(("retrieval", "full"), model, tokenizer, config, "exact"))
    assert list(made) == ["full", "retrieval"]
    assert made["retrieval"].options == {**config.to_dict(), "append": "exact", "inside": "prompt"}
    assert made["retrieval"]._model is model and made["full"]._model is not model
    alone: dict[str, Any] = dict(methods.build_methods(("retrieval",), model, tokenizer, config, "exact"))
    assert alone["retrieval"]._model is model
    more: dict[str, Any] = dict(
        methods.build_methods(
            ("snapkv", "retrieval"),
            model,
            tokenizer,
            config,
            "exact",
            {"snapkv": {"capacity": 99}, "retrieval": {"inside": "context"}},
        )
    )
    assert list(more) == ["snapkv", "retrieval"] and more["snapkv"].options["capacity"] == 99
    assert more["retrieval"].options == {**config.to_dict(), "append": "exact", "inside": "context"}


def test_model_digest(tmp_path: Path) -> None:
    """A changed weight file changes the digest; a hub id has none."""
    (tmp_path / "config.json").write_text("{}")
    first = methods.model_digest(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"1")
    assert first != methods.model_digest(str(tmp_path))
    assert methods.model_digest("nobody/nothing") is None
