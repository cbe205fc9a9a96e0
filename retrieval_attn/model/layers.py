"""Where a transformers model has its decoder layers and what stands beside them."""

from __future__ import annotations

from torch import nn

from retrieval_attn.model.multimodal import text_decoder


def decoder_layers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """The model's decoder layers with their cache layer index, in order.

    A decoder layer is a member of a ModuleList that has a direct child with an integer `layer_idx`. Of a model for
    text and images these are the text's.
    """
    found = []
    for module in modules_of(text_decoder(model)):
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


def layer_holders(model: nn.Module) -> list[nn.Module]:
    """The modules that have the lists of decoder layers: transformers' models without their output."""
    holders = modules_of(text_decoder(model))
    return [module for module in holders if any(map(_is_layer_list, module._modules.values()))]


def modules_of(root: nn.Module) -> list[nn.Module]:
    """As root.modules(), whose generators within generators take a millisecond: every question asks some 20 times."""
    found: dict[nn.Module, None] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found)


def final_norms(model: nn.Module) -> list[nn.Module]:
    """Normalisations beside the decoder layers; over a whole prompt they are prefill's hidden memory peak."""
    return [child for holder in layer_holders(model) for child in holder.children() if _is_norm(child)]


def rotary_embeddings(model: nn.Module) -> list[nn.Module]:
    """What makes cosines and sines beside the decoder layers."""
    return [child for holder in layer_holders(model) for child in holder.children() if _is_rotary(child)]


def unknown_beside_layers(model: nn.Module, known: nn.Module | None) -> list[str]:
    """Names of the modules beside the decoder layers that are no norm, no rotary embedding and not `known`."""
    return [
        name
        for holder in layer_holders(model)
        for name, child in holder.named_children()
        if child is not known and not any(is_one(child) for is_one in (_is_layer_list, _is_norm, _is_rotary))
    ]


def _is_layer_list(module: nn.Module | None) -> bool:
    return isinstance(module, nn.ModuleList) and any(layer_index(member) is not None for member in module)


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not list(module.children())


def _is_rotary(module: nn.Module) -> bool:
    return "Rotary" in type(module).__name__
