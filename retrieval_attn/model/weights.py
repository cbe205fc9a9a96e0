"""Whether a model computes with the weights it had: a cheap look at acting adapters and at addresses and versions of
weights, for keys that were computed with them.

A tensor's version counter sees writes in place (`load_state_dict`, optimizers, `copy_` under `no_grad`), not those to
its `.data`. Adapters that do not act do not count, nor do their weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from retrieval_attn.errors import CacheMismatchError
from retrieval_attn.model.adapters import acting_adapters
from retrieval_attn.model.quantization import plain_tensors

_WATCH = "_retrieval_attn_weights"


@dataclass(frozen=True)
class WeightState:
    """adapters: those that act, by module and strength. weights: hash of the tensors that take part."""

    adapters: tuple[Any, ...] = field(repr=False)
    weights: int

    @property
    def acting(self) -> str:
        """The names of acting adapters, for messages."""
        return ", ".join(sorted({repr(name) for one in self.adapters for name, _ in one[1]})) or "no adapter"


class WeightWatch:
    """Looks at the weights of one model; walks its modules again only if some came or went. Lives in the model."""

    def __init__(self) -> None:
        self._children: list[dict[str, Any]] = []
        self._shape: tuple[int, ...] = ()
        self._adapted: list[tuple[str, nn.Module]] = []
        self._settings: list[Any] | None = None
        self._adapters: tuple[Any, ...] = ()
        self._parameters: list[dict[str, Any]] = []

    def look(self, model: nn.Module) -> WeightState:
        """The state now."""
        if not self._children or self._now() != self._shape:
            named = list(model.named_modules())
            self._children = [module._modules for _, module in named]
            self._shape = self._now()
            self._adapted = [
                (name, one) for name, one in named if isinstance(getattr(one, "active_adapters", None), list | tuple)
            ]
            self._settings = None
        settings = [_settings(one) for _, one in self._adapted]
        if self._settings is None or settings != self._settings:
            self._settings, self._adapters = settings, acting_adapters(self._adapted)
            self._parameters = [one._parameters for one in _taking_part(model)]
        found = [one for own in self._parameters for one in own.values() if one is not None]
        return WeightState(self._adapters, hash(tuple(map(_seen, plain_tensors(found)))))

    def _now(self) -> tuple[int, ...]:
        return tuple(map(id, chain.from_iterable(map(dict.values, self._children))))

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightWatch, ()


def weight_state(model: nn.Module) -> WeightState:
    """The state of a model's weights and adapters now."""
    watch: Any = model.__dict__.get(_WATCH)
    if watch is None:
        watch = model.__dict__[_WATCH] = WeightWatch()
    found: WeightState = watch.look(model)
    return found


def require_same(before: WeightState, now: WeightState, what: str) -> None:
    """Raise CacheMismatchError if the model's weights changed. what: what was computed with the earlier ones."""
    if before == now:
        return
    if before.adapters != now.adapters:
        changed = f"adapters that act changed from {before.acting} to {now.acting}, or their strength did"
        back = "Switch the adapters back"
    else:
        changed = "weights changed in place, or moved to other memory"
        back = "Load the weights that it was read with into a new model"
    raise CacheMismatchError(
        f"{what} with other weights than the model has now: its {changed}. Cached keys depend on the weights that "
        f"computed them. {back}, or read the text again."
    )


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return the settings that decide on a module's adapters, without the slow properties of peft's layers."""
    own = vars(module)
    active = own["_active_adapter"] if "_active_adapter" in own else getattr(module, "active_adapters", ())
    disabled = own["_disable_adapters"] if "_disable_adapters" in own else getattr(module, "disable_adapters", False)
    scaling = own.get("scaling")
    strength = tuple(scaling.items()) if isinstance(scaling, dict) else None
    return (
        active if isinstance(active, str) else tuple(active),
        disabled,
        tuple(own.get("merged_adapters", ())),
        strength,
    )


def _seen(tensor: Tensor) -> tuple[int, int]:
    if isinstance(tensor, FakeTensor):  # of `torch.compile` and tests: it has no memory
        return id(tensor), 0
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _taking_part(module: nn.Module) -> Iterator[nn.Module]:
    """The modules whose weights take part: without those of adapters that do not act.

    Nor those that accelerate brings from the host for each forward: they have another address in every one.
    """
    hook = getattr(module, "_hf_hook", None)
    if getattr(hook, "offload", False):
        if getattr(hook, "place_submodules", False):
            return
    else:
        yield module
    own = getattr(module, "adapter_layer_names", ()) if hasattr(module, "active_adapters") else ()
    acting = {name for _, found, _ in acting_adapters([("", module)]) for name, _ in found} if own else set()
    for name, child in module._modules.items():
        if child is None:
            continue
        if name in own and isinstance(child, nn.ModuleDict):
            for one in sorted(acting & set(child)):
                yield from _taking_part(child[one])
        else:
            yield from _taking_part(child)
