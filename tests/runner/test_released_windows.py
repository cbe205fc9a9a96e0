"""An answer lets go of its windows when it is given, not when Python next looks for circles of objects."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import retrieval_attn as ra
from retrieval_attn.gpu.attention.window import WindowCache
from tests.emulation.emulated import emulated


def windows() -> int:
    """Windows that are alive, of any cache."""
    return sum(type(one) is WindowCache for one in gc.get_objects())


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_an_answer_leaves_only_the_contexts_own_windows(needle_model_path: Path, graph: bool) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(needle_model_path, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(needle_model_path)
    config = ra.Config(sink=8, window=64, retrieve=8, index="flat", graph=graph)
    gc.collect()
    before = windows()
    gc.disable()
    try:
        with emulated():
            context = ra.Context(model, tokenizer, config).read("The grass is green. " * 60, progress=False)
            own = windows() - before
            for _ in range(2):
                context.ask("What is green?", max_new_tokens=4)
                assert windows() - before == own == len(context.cache.layers)
            with context.stream("What is green?", max_new_tokens=50) as pieces:
                next(pieces)
            del pieces
            assert windows() - before == own
    finally:
        gc.enable()
