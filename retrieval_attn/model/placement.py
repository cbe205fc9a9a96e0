"""Devices of a model's parts: `device_map` by layers, tensor parallel by heads, tables and hidden states on the host.

Nothing here moves anything: transformers and accelerate have placed the model, and these functions read the placement.
A table that was moved to host memory after that (`offload/managed.py`) is marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from retrieval_attn.model.layers import decoder_layers, decoder_parts, modules_of, unknown_beside_layers
from retrieval_attn.model.multimodal import is_multimodal

_HOST_TABLE = "_retrieval_attn_host_table"


def input_device(model: Any) -> torch.device:
    """Where token ids and positions go: the device on which the model's input embedding runs.

    `model.device` is not that for a model with offloaded weights: those are on the meta device between calls.
    """
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return execution_device(model if embedding is None else embedding)


def execution_device(module: nn.Module) -> torch.device:
    """Where a module computes: as accelerate's hooks say, else where its first parameter is, else the CPU."""
    for part in modules_of(module):
        for hook in _hooks(part):
            device = getattr(hook, "execution_device", None)
            if device is not None and not isinstance(device, dict):
                return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return next((weight.device for weight in module.parameters()), torch.device("cpu"))


def devices(model: nn.Module) -> tuple[torch.device, ...]:
    """The devices that the decoder layers run on, each once, in the order of the layers."""
    return tuple(dict.fromkeys(execution_device(layer) for layer, _ in decoder_layers(model)))


def is_hooked(model: nn.Module) -> bool:
    """Whether accelerate moves tensors between devices or loads weights while the model runs (`device_map`)."""
    return any(hook is not None for part in modules_of(model) for hook in _hooks(part))


def _hooks(module: nn.Module) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", (hook,)))


def tensor_ranks(model: Any) -> int:
    """How many processes hold parts of each of this model's layers (tensor parallel); 1 for an ordinary model."""
    mesh = getattr(model, "_device_mesh", None)
    return 1 if mesh is None else int(mesh.size())


def is_spread(model: Any) -> bool:
    """Whether more than one device holds the model, or its weights move while it runs."""
    return len(devices(model)) > 1 or is_hooked(model) or tensor_ranks(model) > 1


def agreed(chosen: Tensor, model: Any) -> Tensor:
    """`chosen` as the first of the model's ranks has it. Random choices must be the same on all, or they part ways."""
    if tensor_ranks(model) == 1:
        return chosen
    group = model._device_mesh.get_group()
    shared = chosen.contiguous()
    torch.distributed.broadcast(shared, src=torch.distributed.get_global_rank(group, 0), group=group)
    return shared


def cuda_devices(device_map: str | Mapping[str, Any]) -> list[torch.device]:
    """The CUDA devices that a device map names, in order; all of the machine's for "auto" and its like."""
    if isinstance(device_map, str):
        return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    named = (f"cuda:{place}" if isinstance(place, int) else str(place) for place in device_map.values())
    numbers = {torch.device(place).index or 0 for place in named if place.startswith("cuda")}
    return [torch.device("cuda", number) for number in sorted(numbers)]


def offloads(device_map: str | Mapping[str, Any] | None) -> bool:
    """Whether a device map keeps weights off the GPUs. "auto" may turn out to; that is not known beforehand."""
    return isinstance(device_map, Mapping) and bool({"cpu", "disk"} & {str(place) for place in device_map.values()})


def mark_host_table(weight: Tensor) -> None:
    """`weight`, a tensor of a GPU, lies in host memory."""
    setattr(weight, _HOST_TABLE, weight.data_ptr())


def is_host_table(weight: Tensor) -> bool:
    """Whether `weight` was marked, and lies where it lay then: moved or copied, it is as others."""
    address = getattr(weight, _HOST_TABLE, None)
    return address is not None and address == weight.data_ptr()


_SPLIT_TYPES = ("full_attention", "sliding_attention", "linear_attention", "conv")
"""Layer types that read a prompt in chunks: with keys, or with a state that is passed from chunk to chunk."""


def why_not_on_host(model: Any) -> str | None:
    """Return the reason why hidden states of a prompt must stay on the model's device; None if host memory will do."""
    if is_spread(model):
        return "it runs on several devices, or its weights move"
    return why_never_on_host(model)


def why_never_on_host(model: Any) -> str | None:
    """Return the reason of `why_not_on_host` apart from placement; the model may be on the meta device."""
    if not isinstance(model, PreTrainedModel) or not isinstance(model.get_output_embeddings(), nn.Linear):
        return "it has no linear output"
    if is_multimodal(model):
        return "it embeds images and text before its text decoder begins"
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or not decoder_parts(model).rotaries:
        return "it has no token embedding, or no rotary embedding beside its layers"
    if unknown := unknown_beside_layers(model, embedding):
        return f"{', '.join(unknown)} beside its layers may look at them"
    types, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    if others := sorted(set(types) - set(_SPLIT_TYPES)):
        return f"its layers of type {', '.join(others)} are not known to read a prompt in chunks"
    return None
