"""Adapters of the peft library: the transformers model inside a `PeftModel`, and which adapters act in it now.

peft is not imported: its objects are known by their attributes. Adapters that change layers (LoRA and its kin) act
whenever the inner model runs. What a `PeftModel` does outside the inner model is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from retrieval_attn.errors import UnsupportedModelError


def unwrapped(model: Any) -> Any:
    """The transformers model inside a `PeftModel`, its adapters in place; anything else is returned as it is.

    Raises UnsupportedModelError for adapters that act outside the inner model: they would be lost without a word.
    """
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    for name in _names(getattr(model, "active_adapters", ())):
        reason = _acts_outside(model.peft_config[name])
        if reason is not None:
            raise UnsupportedModelError(
                f"The adapter {name!r} of this {type(model).__name__} {reason}, outside the model that retrieval "
                "attention runs. Use adapters that change layers only, such as LoRA, or the model without it."
            )
    return model.get_base_model()


def _names(active: Any) -> list[str]:
    return [active] if isinstance(active, str) else list(active)


def _acts_outside(config: Any) -> str | None:
    """Describe effects of an adapter of this configuration outside the layers; None without any."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if getattr(config, "is_prompt_learning", False):
        return f"({kind}) puts tokens of its own before every prompt"
    if getattr(config, "is_adaption_prompt", False):
        return f"({kind}) puts attention of its own around the model's"
    if kind in ("POLY", "XLORA"):
        return f"({kind}) mixes its parts anew in every call"
    if getattr(config, "alora_invocation_tokens", None):
        return f"(activated {kind}) begins at a token that it looks for in every prompt"
    return None


def adapter_state(model: nn.Module) -> tuple[Any, ...]:
    """Which adapters act in which modules, merged or separate from the weights, and how strongly. Empty without
    adapters.

    A captured step computes with the adapters that were active when it was recorded.
    """
    found = []
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if not isinstance(active, list | tuple):
            continue
        scaling = getattr(module, "scaling", None)
        strength = tuple(sorted(scaling.items())) if isinstance(scaling, dict) else ()
        merged = tuple(getattr(module, "merged_adapters", ()))
        found.append((name, tuple(active), bool(getattr(module, "disable_adapters", False)), merged, strength))
    return tuple(found)


def acting_adapters(modules: Iterable[tuple[str, nn.Module]]) -> tuple[Any, ...]:
    """Return the adapters that act in each module by name, as separate weights or merged, with their strength.

    Modules in which none acts are left out: a model whose adapters are disabled is the model without them.
    """
    found = []
    for name, module in modules:
        active = getattr(module, "active_adapters", None)
        if not isinstance(active, list | tuple):
            continue
        merged = tuple(getattr(module, "merged_adapters", ()))
        beside = () if bool(getattr(module, "disable_adapters", False)) or merged else tuple(active)
        scaling = getattr(module, "scaling", None)
        strength = scaling if isinstance(scaling, dict) else {}
        acting = tuple((one, strength.get(one)) for one in (*merged, *beside))
        if acting:
            found.append((name, acting, bool(merged)))
    return tuple(found)
