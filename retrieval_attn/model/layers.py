"""Where a transformers model has its decoder layers and what stands beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from retrieval_attn.model.multimodal import text_decoder


class DecoderParts(NamedTuple):
    """Decoder layers and what stands beside them, found in one walk through a model.

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
    """As root.modules(), whose generators within generators take a millisecond: every question asks some 20 times."""
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
    """Names of the modules beside the decoder layers that are no norm, no rotary embedding and not `known`."""
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
