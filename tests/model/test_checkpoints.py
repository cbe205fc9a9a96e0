"""Folders of models that are damaged, incomplete or not a model's: one error of ours, whatever transformers raises."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.errors import InputDataError
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def good(needle_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the bundled one's tokenizer."""
    folder: Path = tmp_path_factory.mktemp("good")
    tiny_model("llama").save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(needle_model_path / name, folder)
    return folder


def config(**changes: Any) -> Callable[[Path], object]:
    """Writes other fields into config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def text(name: str, content: str) -> Callable[[Path], object]:
    """Writes a file."""
    return lambda folder: (folder / name).write_text(content)


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._ran = folder / "ran"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._ran}",)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder)))


CONFIGS: dict[str, Callable[[Path], object]] = {
    "no object": text("config.json", "[]"),
    "no JSON": text("config.json", "{"),
    "layers in words": config(num_hidden_layers="two"),
    "no heads": config(num_attention_heads=0),
    "no key-value heads": config(num_key_value_heads=0),
    "heads null": config(num_attention_heads=None),
    "a negative size": config(hidden_size=-4),
    "a billion layers": config(num_hidden_layers=10**9),
    "rope as text": config(rope_parameters="fast"),
    "an unknown activation": config(hidden_act="none of these"),
}
WEIGHTS: dict[str, Callable[[Path], object]] = {
    "cut weights": cut,
    "empty weights": text("model.safetensors", ""),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "a pickle": pickled,
    "other shapes": config(hidden_size=96),
    "no tokenizer": text("tokenizer.json", "{}"),
    "half a tokenizer": text("tokenizer.json", "["),
    "a generation config that is a list": text("generation_config.json", "[]"),
}


@pytest.mark.parametrize("damage", [*CONFIGS, *WEIGHTS])
def test_damaged_folders_are_named(good: Path, tmp_path: Path, damage: str) -> None:
    """By `plan` where the config is damaged, and by `LLM`, soon; code in a pickle is not run."""
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    {**CONFIGS, **WEIGHTS}[damage](folder)
    if damage in CONFIGS:
        with pytest.raises(InputDataError, match="model"):
            ra.plan(str(folder), context=1024, gpu_memory="1GiB")
    with pytest.raises(InputDataError, match=str(folder)):
        ra.LLM(folder, device="cpu")
    assert not (folder / "ran").exists()


def test_the_undamaged_folder_is_a_model(good: Path) -> None:
    """Or the test above would find nothing."""
    assert ra.plan(str(good), context=1024, gpu_memory="24GiB").fits
    assert ra.LLM(good, device="cpu").model.dtype == torch.float32
