"""The measure of experts in host memory, on a CPU with a tiny shape."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from retrieval_attn.gpu.expert_blocks import PlacedExperts
from retrieval_attn.model.experts import has_packed_experts
from retrieval_attn_eval.bench.random_model import RANDOM_SHAPES, random_model
from tools.card import experts


def test_rows_of_a_tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniform routing visits experts in host memory by their share; moved ones are visited less by Zipf's law."""
    words = "--shape tiny-experts --device cpu --length 300 --tokens 24 --host-experts 5 --exponent 2"
    monkeypatch.setattr(sys, "argv", ["experts", *words.split(), "--out", str(tmp_path)])
    assert experts.main() == 0
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["routing"]: row for row in found["rows"]}
    assert list(rows) == ["uniform", "zipf", "zipf, moved", "router"] and found["host_experts"] == 5
    assert all(row["token_ms"] > 0 and row["least_gb_per_second"] > 0 for row in rows.values())
    assert abs(rows["uniform"]["host_share"] - 5 / 8) < 0.1
    assert rows["zipf, moved"]["moved"] and rows["zipf, moved"]["host_share"] < rows["zipf"]["host_share"]
    assert rows["zipf, moved"]["host_share"] < 0.4


def test_models_with_random_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both kinds, whole experts never made: in a device's own form, or with some in host memory."""
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for name, count in (("qwen3-30b-a3b", "num_experts"), ("gpt-oss-120b", "num_local_experts")):
        monkeypatch.setitem(RANDOM_SHAPES, name, {**RANDOM_SHAPES[name], **small, count: 8, "intermediate_size": 64})
        for on_host in (0, 3):
            model = random_model(name, torch.float32, 0, "cpu", host_experts=on_host)
            held = [one.down_proj.held for one in model.modules() if has_packed_experts(one)]
            assert len(held) == 2 and all(isinstance(one, PlacedExperts) == bool(on_host) for one in held)
            with torch.no_grad():
                logits = model(torch.arange(40)[None]).logits
            assert bool(logits.isfinite().all()) and float(logits.std()) > 0
