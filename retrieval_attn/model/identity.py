"""What keys belong to: a model's shape, positions, dtype, weights, acting adapters and tokenizer, as a line of JSON.

A context that was saved with one identity is refused under another. Weights are sampled, not read whole: 16 places of
256 bytes of every tensor, the same ones each time, which tell apart any two models that were trained, however little.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from retrieval_attn.model.adapters import adapter_state
from retrieval_attn.model.rope import length_rope

LAYOUT = 1
"""Of what the cache saves; another number is another identity."""
PLACES = 16
PLACE_BYTES = 256
SAMPLES_AT_ONCE = 128
"""Tensors whose samples are joined on a device: at 512 KiB torch allocates 2 MiB there, above 1 MiB it needs 20."""
_NAMES_ONLY = (
    "_name_or_path", "_attn_implementation", "architectures", "attn_implementation", "dtype", "torch_dtype",
    "transformers_version", "use_cache", "quantization_config",
)  # fmt: skip
"""Of what differs from the defaults of a model's config, what does not tell what its keys are."""
_tokenizers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def identity_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Canonical JSON of an object; its fields are compared one by one where two differ.

    tokenizer: None for contexts of token ids alone.
    """
    config = model.config.get_text_config(decoder=True)
    shape = {name: value for name, value in config.to_diff_dict().items() if name not in _NAMES_ONLY}
    rope = {name: shape.pop(name) for name in list(shape) if "rope" in name or name == "max_position_embeddings"}
    if length_rope(model) is not None:
        rope["factors of a text"] = "one set"  # earlier releases mixed them within a text
    adapters = adapter_state(model)
    fields = {
        "adapters": _digest(repr(adapters).encode()) if adapters else None,
        "layout": LAYOUT,
        "model type": config.model_type,
        "config": _digest(_plain(shape).encode()),
        "positions": json.loads(_plain(rope)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights_digest(model),
        "tokenizer": None if tokenizer is None else tokenizer_digest(tokenizer),
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def weights_digest(model: torch.nn.Module) -> str:
    """Hexadecimal; of names, shapes, dtypes and sampled bytes of all parameters.

    Weights that lie on no device (the meta device) count by name and shape alone.
    """
    found = hashlib.sha256()
    by_device: dict[torch.device, list[Tensor]] = {}
    for name, tensor in sorted(model.named_parameters(), key=lambda item: item[0]):
        for inner, part in _stored(name, tensor.detach()):
            found.update(f"{inner} {tuple(part.shape)} {part.dtype}\n".encode())
            if part.device.type != "meta" and part.numel():
                by_device.setdefault(part.device, []).append(_sampled(part))
    for samples in by_device.values():  # few copies per device, and nothing is launched for each of hundreds of tensors
        for dims in (1, 2):
            alike = [some for some in samples if some.ndim == dims]
            for start in range(0, len(alike), SAMPLES_AT_ONCE):
                found.update(torch.cat(alike[start : start + SAMPLES_AT_ONCE]).cpu().numpy().tobytes())
    return found.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hexadecimal; of vocabulary, rules and added tokens."""
    known = _tokenizers.get(tokenizer)
    if known is None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        text = _plain(tokenizer.get_vocab()) if backend is None else backend.to_str()
        known = _digest(text.encode())
        _tokenizers[tokenizer] = known
    return known


def _stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that hold a parameter's numbers: those of a quantised one are within it."""
    fixed = getattr(tensor, "fixed_tensors", None)
    if fixed is not None:  # experts move between memories
        for inner_name, part in fixed.items():
            yield from _stored(f"{name}.{inner_name}", part)
    elif hasattr(tensor, "__tensor_flatten__"):
        inner, _ = tensor.__tensor_flatten__()
        for part in inner:
            yield from _stored(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


def _sampled(tensor: Tensor) -> Tensor:
    """uint8: a view of some bytes of a tensor, at places that follow from its size; (n,) all of a small one."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if len(flat) <= PLACES * PLACE_BYTES:
        return flat
    return flat.as_strided((PLACES, PLACE_BYTES), ((len(flat) - PLACE_BYTES) // (PLACES - 1), 1))


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
