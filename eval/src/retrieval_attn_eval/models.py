"""Models of the evaluation: the bundled one, loading by name, and what tells two model folders apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrieval_attn.errors import InputDataError
from retrieval_attn.model.bundled import BUNDLED as BUNDLED_MODEL
from retrieval_attn.model.bundled import model_path

__all__ = ["BUNDLED_MODEL", "load_description", "load_model", "model_digest", "model_path"]


def load_model(name: str, device: str, dtype: str, yarn: float | None = None) -> Any:
    """A causal language model in evaluation mode with PyTorch's SDPA attention.

    Under torchrun the processes share its heads (transformers' tensor parallel), each on its own GPU.
    device: "auto", "cpu", "cuda" or "cuda:N".  dtype: "auto" is float32 on the CPU and the stored dtype elsewhere.
    yarn: so many times its positions.
    Raises InputDataError if it cannot be loaded, ConfigError for a device that is not there.
    """
    from retrieval_attn.model import loading

    spread = loading.launched_processes() > 1
    options: dict[str, Any] = {"tensor_parallel": spread, "yarn": yarn, "attn_implementation": "sdpa"}
    return loading.load_model(name, device=device, dtype=dtype, **options)


def load_description(name: str, yarn: float | None = None) -> tuple[Any, Any]:
    """Config and tokenizer of a model, without its weights.  Raises InputDataError."""
    from transformers import AutoTokenizer

    from retrieval_attn.model.loading import checkpoint_config, load

    looks_local = name.startswith((".", "/", "~")) or Path(name).exists() or name.count("/") > 1
    path = Path(name).expanduser()
    if looks_local and not path.exists():
        raise InputDataError(f"model {name}: needed a folder with a config.json or a GGUF file; check the path")
    return checkpoint_config(path, yarn), load(AutoTokenizer, path)


def model_digest(name: str) -> str | None:
    """SHA-256 over a local model's files (weights by size and their first MiB); None for a hub id."""
    import hashlib

    folder = Path(name)
    if not folder.exists():
        return None
    kinds = ".json", ".safetensors", ".bin", ".model", ".gguf"
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.suffix in kinds) if folder.is_dir() else [folder]:
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with open(file, "rb") as data:
            digest.update(data.read(1 << 20))
    return digest.hexdigest()
