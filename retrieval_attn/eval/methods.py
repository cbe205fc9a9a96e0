"""The methods of the needle test, and loading of models.  All methods are in `eval.baselines`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrieval_attn.eval.baselines.full import FullAttention
from retrieval_attn.eval.baselines.registry import METHODS
from retrieval_attn.eval.baselines.registry import build_methods as build
from retrieval_attn.eval.baselines.reply import POSITIONS, Method, Reply
from retrieval_attn.eval.baselines.retrieval import RetrievalAttention

__all__ = [
    "METHODS",
    "POSITIONS",
    "FullAttention",
    "Method",
    "Reply",
    "RetrievalAttention",
    "build_methods",
    "load_model",
    "model_digest",
]


def load_model(name: str, device: str, dtype: str) -> Any:
    """A causal language model in evaluation mode with PyTorch's SDPA attention.

    Under torchrun the processes share its heads (transformers' tensor parallel), each on its own GPU.
    device: "auto", "cpu", "cuda" or "cuda:N".  dtype: "auto" is float32 on the CPU and the stored dtype elsewhere.
    Raises InputDataError if it cannot be loaded, ConfigError for a device that is not there.
    """
    from retrieval_attn.model import loading

    spread = loading.launched_processes() > 1
    return loading.load_model(name, device=device, dtype=dtype, tensor_parallel=spread, attn_implementation="sdpa")


def build_methods(
    names: Sequence[str],
    model: Any,
    tokenizer: Any,
    config: Any,
    append: str,
    others: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Method]:
    """Methods by name, the baseline first.

    config, append: of the method retrieval.  others: options by name, of retrieval on top.
    A small model on the CPU is copied, so that nothing ever touches the baseline's; otherwise the methods share the
    weights, and retrieval leaves the model as it found it after every answer.
    """
    options = {name: dict((others or {}).get(name, {})) for name in METHODS if name in names}
    if "full" in options:
        options["full"] = {"keep_context": False, **options["full"]}
    if "retrieval" in options:
        options["retrieval"] = {"append": append, **config.to_dict(), **options["retrieval"]}
    return dict(build(tuple(options), model, tokenizer, options))


def model_digest(name: str) -> str | None:
    """SHA-256 over what a local model folder holds (weights by size and their first MiB); None for a hub id."""
    import hashlib

    folder = Path(name)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".bin", ".model")):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with open(file, "rb") as data:
            digest.update(data.read(1 << 20))
    return digest.hexdigest()
