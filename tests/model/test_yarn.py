"""More positions by YaRN: as transformers computes them, through every way a model is loaded, and refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

import retrieval_attn as ra
from retrieval_attn.cli import main
from retrieval_attn.errors import ConfigError, ContextLengthError, StoreMismatchError
from retrieval_attn.model.rope import with_yarn
from tests.tiny_models import needle_text

POSITIONS = 131_072
SMALL: dict[str, Any] = {"sink": 8, "window": 64, "retrieve": 20, "device": "cpu"}


def test_the_config_asks_for_it() -> None:
    config: Any = LlamaConfig(max_position_embeddings=4096, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    found = with_yarn(config, 4)
    assert found.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    assert (found.max_position_embeddings, config.max_position_embeddings) == (16_384, 4096)
    assert config.rope_parameters["rope_type"] == "default" and with_yarn(config, None) is config


@pytest.mark.parametrize("factor", [0.5, 0, float("nan"), True, "4"])
def test_what_is_no_factor(factor: Any) -> None:
    with pytest.raises(ConfigError, match="factor of 1 or more"):
        with_yarn(LlamaConfig(), factor)


@pytest.mark.parametrize("config", [with_yarn(LlamaConfig(), 2), Gemma3TextConfig()])
def test_positions_that_are_not_plain(config: Any) -> None:
    with pytest.raises(ConfigError, match="YaRN stretches plain rotary embeddings"):
        with_yarn(config, 2)


def test_logits_are_those_of_a_checkpoint_that_says_so(needle_model_path: Path, tmp_path: Path) -> None:
    """The bundled model; its own positions give others."""
    folder = tmp_path / "stretched"
    shutil.copytree(needle_model_path, folder)
    said = json.loads((folder / "config.json").read_text())
    said["rope_parameters"] |= {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": POSITIONS}
    said["max_position_embeddings"] = 8 * POSITIONS
    (folder / "config.json").write_text(json.dumps(said))
    ids = torch.arange(3, 203)[None]
    with torch.no_grad():
        right = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        found, own = (ra.LLM(needle_model_path, device="cpu", yarn=yarn).model(ids).logits for yarn in (8, None))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
    assert float((own - right).abs().max()) > 0.1


def test_longer_texts_are_allowed_and_answered(needle_model_path: Path) -> None:
    with pytest.raises(ContextLengthError, match="stretch them by yarn"):
        ra.LLM(needle_model_path, max_context=2 * POSITIONS, **SMALL)
    llm = ra.LLM(needle_model_path, max_context=2 * POSITIONS, yarn=2, **SMALL)
    assert llm.max_context == 2 * POSITIONS
    context = llm.read(needle_text(1500), progress=False)
    assert context.cache.max_positions == 2 * POSITIONS
    own = ra.LLM(needle_model_path, **SMALL).read(needle_text(1500), progress=False)
    with pytest.raises(ContextLengthError, match="--yarn FACTOR"):
        own.cache.require_room(POSITIONS)
    context.cache.require_room(POSITIONS)


def test_a_saved_context_keeps_its_positions(needle_model_path: Path, tmp_path: Path) -> None:
    llm = ra.LLM(needle_model_path, yarn=2, **SMALL)
    llm.read(needle_text(600), progress=False, save="text", store=tmp_path)
    assert llm.open("text", store=tmp_path, progress=False).num_tokens > 100
    with pytest.raises(StoreMismatchError, match="positions"):
        ra.LLM(needle_model_path, **SMALL).open("text", store=tmp_path, progress=False)


def test_commands_take_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["needle", "--lengths", "200k", "--depths", "50", "--device", "cpu", "--dry-run"]
    assert main([*asked, "--yarn", "2"]) == 0
    assert "1" in capsys.readouterr().out
    assert main(asked) != 0
