"""Decoder layers of a transformers model, the modules next to them, and its experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from retrieval_attn.model.multimodal import text_decoder


class DecoderParts(NamedTuple):
    """Decoder layers and the modules next to them, found in one walk through a model.

    layers: with their cache layer index, in order. holders: what has the lists of decoder layers, transformers' models
    without their output. norms, rotaries: the holders' normalisations, which over a whole prompt are prefill's hidden
    memory peak, and what makes cosines and sines.
    """

    layers: list[tuple[nn.Module, int]]
    holders: list[nn.Module]
    norms: list[nn.Module]
    rotaries: list[nn.Module]


def decoder_parts(model: nn.Module) -> DecoderParts:
    """The parts of a model; of one for text and images the text's."""
    modules = modules_of(text_decoder(model))
    lists = {module for module in modules if _is_layer_list(module)}
    holders = [module for module in modules if not lists.isdisjoint(module._modules.values())]
    children = [child for holder in holders for child in holder.children()]
    return DecoderParts(
        [found for module in modules if module in lists for found in _indexed(module)],
        holders,
        [child for child in children if _is_norm(child)],
        [child for child in children if _is_rotary(child)],
    )


def decoder_layers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The model's decoder layers with their cache layer index, in order.

    A decoder layer is a member of a ModuleList that has a direct child with an integer `layer_idx`. Of a model for
    text and images these are the text's.
    """
    return decoder_parts(model).layers


def first_decoder_layer(model: nn.Module) -> nn.Module | None:
    """The first of `decoder_layers`, without a walk through the others; None where there is none."""
    lists = (module for module in _walk(text_decoder(model)) if _is_layer_list(module))
    return next((layer for module in lists for layer, _ in _indexed(module)), None)


def layer_index(layer: nn.Module) -> int | None:
    """The cache layer index of a decoder layer; None for a module that is none."""
    for child in layer.children():
        index = getattr(child, "layer_idx", None)
        if isinstance(index, int) and not isinstance(index, bool):
            return index
    return None


def modules_of(root: nn.Module) -> list[nn.Module]:
    """List root.modules() without nested generators, which take a millisecond: a question calls this 20 times."""
    return list(_walk(root))


def _walk(root: nn.Module) -> Iterator[nn.Module]:
    found: set[nn.Module] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            yield module
            waiting += [child for child in reversed(module._modules.values()) if child is not None]


def unknown_beside_layers(model: nn.Module, known: nn.Module | None) -> list[str]:
    """Names of the modules outside of the decoder layers that are no norm, no rotary embedding and not `known`."""
    return [
        name
        for holder in decoder_parts(model).holders
        for name, child in holder.named_children()
        if child is not known and not any(is_one(child) for is_one in (_is_layer_list, _is_norm, _is_rotary))
    ]


def _indexed(layers: nn.Module) -> list[tuple[nn.Module, int]]:
    """The decoder layers in a list of modules."""
    found = ((member, layer_index(member)) for member in layers._modules.values() if member is not None)
    return [(member, index) for member, index in found if index is not None]


def _is_layer_list(module: nn.Module | None) -> bool:
    return isinstance(module, nn.ModuleList) and any(layer_index(member) is not None for member in module)


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not list(module.children())


def _is_rotary(module: nn.Module) -> bool:
    return "Rotary" in type(module).__name__


GROUPED, BATCHED = "grouped_mm", "batched_mm"


@contextmanager
def experts_of_one_token(model: PreTrainedModel, rows: int) -> Iterator[None]:
    """Multiply each of `rows` tokens by copies of its experts' weights on a GPU, so that a graph can be captured.

    transformers' grouped product reads group borders on the CPU except for bfloat16 on data-centre cards, and cannot be
    captured then. It is kept if it can be captured, if the rows visit more experts than a layer has (copies would be
    slower than no graph), and if the user chose another implementation. Copies take the bytes of the experts that a
    token visits, per row.
    """
    chosen: dict[str, str | None] = getattr(model, "get_experts_implementation", dict)()
    if GROUPED not in chosen.values() or not _copies(model, rows):
        yield
        return
    model.set_experts_implementation({part: BATCHED if way == GROUPED else way for part, way in chosen.items()})
    try:
        yield
    finally:
        model.set_experts_implementation(chosen)


def _copies(model: PreTrainedModel, rows: int) -> bool:
    """Return True if weights are to be copied."""
    device = model.device
    if device.type == "cpu":
        return False
    # as PyTorch chooses between its kernel of groups and one product after the other
    if (
        device.type == "cuda"
        and model.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device)[0] in (9, 10)
    ):
        return False
    visited, experts = expert_counts(model.config.get_text_config(decoder=True))
    return rows == 1 or rows * (visited or 1) <= (experts or visited or 1)


def expert_counts(text: PreTrainedConfig) -> tuple[int | None, int | None]:
    """Return the number of experts that a token visits and of experts per layer; None: not in the config."""
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    visited = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
    return visited, experts
