"""What layers that run in few kernels are made of, whatever they mix tokens by, and how they are compared."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from retrieval_attn.gpu.products import AnyWeights, Gated, LinearWeights, Norm, add_product, alike, fits, gated
from retrieval_attn.model.fused.norms import counts_from_one, eps_of, is_rms_norm
from retrieval_attn.model.quantization import packed_weights

TRIED_SIZES = 1.0, 1e-3
"""Of the numbers that layers are compared on: small ones show what a norm adds, and a part next to its residual."""


class Different(Exception):
    """Why a layer keeps its modules."""


class Feed(NamedTuple):
    """The gated feed-forward part of a layer, behind its norm."""

    gated: Gated
    down: AnyWeights

    def load(self) -> None:
        """Compile and load what a step of one row will launch."""
        weights = self.gated.gate
        hidden = torch.zeros(1, weights.shape[1], dtype=weights.dtype, device=weights.device)
        add_product(hidden, gated(hidden, self.gated), self.down)


class LayerParts(Protocol):
    """Parts of a decoder layer that run in kernels. feed: None if its second norm and `mlp` stay modules."""

    @property
    def feed(self) -> Feed | None: ...

    def without_feed(self) -> Self:
        """The others."""

    def compared(self, layer: Any, index: int, rows: int) -> Any:
        """Return data for steps if the layer's kernels and modules give the same results. Raises Different.

        No weights: they would stay in memory after the model was moved.
        """

    def fused(self, layer: Any, index: int, found: Any) -> Callable[..., Any]:
        """A forward of the layer. found: what `compared` gave."""

    def load(self) -> None:
        """Compile and load what a step of one row will launch."""


def feed_of(layer: Any, rows: int) -> Feed | None:
    """The parts of a gated feed-forward module, of two projections or of one that holds both (Phi-3)."""
    mlp, norm = getattr(layer, "mlp", None), norm_of(getattr(layer, "post_attention_layernorm", None))
    down = weights_of(getattr(mlp, "down_proj", None), rows)
    merged = weights_of(getattr(mlp, "gate_up_proj", None), rows)
    gate: AnyWeights | None
    up: AnyWeights | None
    if merged is None:
        gate, up = (weights_of(getattr(mlp, name, None), rows) for name in ("gate_proj", "up_proj"))
    else:
        gate, up = merged.split([merged.shape[0] // 2] * 2)
    if norm is None or gate is None or up is None or down is None:
        return None
    return Feed(Gated(norm, gate, up), down) if gate.shape == up.shape and alike(gate, up) else None


def fed(layer: Any, hidden: Tensor, feed: Feed | None) -> Tensor:
    """Compute a layer's output (rows, 1, dim) from hidden (rows, dim), which includes the attention output."""
    if feed is not None:
        return add_product(hidden, gated(hidden, feed.gated), feed.down).unsqueeze(1)
    residual = hidden.unsqueeze(1)
    found = layer.mlp(layer.post_attention_layernorm(residual))
    return residual + (found[0] if isinstance(found, tuple) else found)


def weights_of(module: Any, rows: int) -> AnyWeights | None:
    """Those of a linear module that can be multiplied; None: it is something else, or holds them in another way."""
    if type(module) is not nn.Linear:
        return None
    weights: AnyWeights | None = packed_weights(module)
    if weights is None and type(module.weight) is nn.Parameter:
        weights = LinearWeights(module.weight.detach(), None if module.bias is None else module.bias.detach())
    return weights if weights is not None and fits(weights, rows) else None


_counts: weakref.WeakKeyDictionary[type[nn.Module], bool | None] = weakref.WeakKeyDictionary()
"""By class, how norms count (`counts_from_one`). That all of a class do alike is seen when layers are compared."""


def norm_of(module: Any) -> Norm | None:
    """Return the parameters of an RMS norm; None for another module."""
    if not isinstance(module, nn.Module) or not is_rms_norm(module):
        return None
    kind, weight = type(module), module.weight
    assert isinstance(weight, Tensor)
    if kind not in _counts:
        _counts[kind] = counts_from_one(module)
    from_one = _counts[kind]
    return None if from_one is None else Norm(weight.detach(), eps_of(module), from_one)


def numbers_for(weights: AnyWeights, seed: int) -> Callable[..., Tensor]:
    """Gives random numbers of a shape, that are multiplied with such weights."""
    generator = torch.Generator(weights.device).manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=weights.device).to(weights.dtype)

    return numbers


def returned_by(layer: nn.Module, hidden: Tensor, **options: Any) -> Tensor:
    """Return the output of a layer's own forward. Raises Different if it is not a tensor."""
    forward: Any = type(layer).forward
    try:
        returned = forward(layer, hidden, **options)
    except Exception as error:  # whatever a module raises that is called in another way than it expects
        raise Different(f"it cannot be tried: {type(error).__name__}: {error}") from error
    if not isinstance(returned, Tensor):
        raise Different("it returns more than its hidden states")
    return returned


def require_same(own: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Raise Different, with its name, where a tensor is not what it should be but for rounding."""
    for name, right in own.items():
        if others[name].shape != right.shape or others[name].dtype != right.dtype:
            raise Different(f"its {name} has another shape or dtype than that of its kernels")
    pairs = [(right.float(), others[name].float()) for name, right in own.items()]
    shares = torch.stack([(right - other).norm() / right.norm() for right, other in pairs]).tolist()  # one wait for all
    for (name, right), share in zip(own.items(), shares, strict=True):
        if not share <= rounding_of(right.dtype):  # it may be no number
            raise Different(f"its {name} differs from that of its kernels")


def rounding_of(dtype: torch.dtype) -> float:
    """Return the largest relative difference of two roundings: half of the last place each, some twice.

    float32: what sums of some thousand terms in another order differ by. Weights of 4 bits are no reason to allow more:
    a module rounds each of them to bfloat16, and kernels do not, which is .001 of a product.
    """
    return max(4 * torch.finfo(dtype).eps, 1e-5)
