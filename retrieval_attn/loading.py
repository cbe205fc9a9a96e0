"""Load a model, tokenizer or config by name, and choose where and in what precision it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from retrieval_attn.errors import ConfigError, InputDataError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The torch device for "auto", "cpu", "cuda" or "cuda:N"; raises ConfigError when it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not a torch device; use auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} was asked for, but torch {torch.__version__} sees no CUDA device; use cpu.")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """What from_pretrained takes as dtype: "auto" is float32 on the CPU, the checkpoint's own elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}.")
    return DTYPES[name]


def load(factory: Any, name_or_path: str | Path, **options: Any) -> Any:
    """factory.from_pretrained with a first message that says what is missing."""
    try:
        return factory.from_pretrained(str(name_or_path), **options)
    except (OSError, ValueError) as error:
        raise InputDataError(
            f"No model could be loaded from {str(name_or_path)!r} ({str(error).strip().splitlines()[0]}). Give a "
            "folder with config.json, weights and tokenizer, or a hub name that is downloaded or reachable."
        ) from error
