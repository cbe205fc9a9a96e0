"""Where a transformers model has its decoder layers and what stands beside them."""

from __future__ import annotations

from torch import nn


def decoder_layers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The model's decoder layers with their cache layer index, in order.

    A decoder layer is a member of a ModuleList that has a direct child with an integer `layer_idx`.
    """
    found = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        for member in module:
            index = layer_index(member)
            if index is not None:
                found.append((member, index))
    return found


def layer_index(layer: nn.Module) -> int | None:
    """The cache layer index of a decoder layer; None for a module that is none."""
    for child in layer.children():
        index = getattr(child, "layer_idx", None)
        if isinstance(index, int) and not isinstance(index, bool):
            return index
    return None


def final_norms(model: nn.Module) -> list[nn.Module]:
    """Normalisations beside the decoder layers; over a whole prompt they are prefill's hidden memory peak."""
    found = []
    for module in model.modules():
        holds_layers = any(
            isinstance(child, nn.ModuleList) and any(layer_index(member) is not None for member in child)
            for child in module.children()
        )
        if holds_layers:
            found += [
                child for child in module.children() if "Norm" in type(child).__name__ and not list(child.children())
            ]
    return found
