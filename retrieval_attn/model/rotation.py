"""Move queries from one position to another with a model's own rotary embedding.

Rotations add, so a query recorded after RoPE at position t becomes the query that the same token would have made at
position p by undoing the rotation of t and applying that of p. The model's tables and its own `apply_rotary_pos_emb`
are used, so scaling rules, partial rotation and both pair layouts come out as the model has them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_attn.errors import UnsupportedModelError
from retrieval_attn.model.multimodal import text_decoder
from retrieval_attn.model.rope import uncounted

_APPLY = "apply_rotary_pos_emb"
_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class RotationTables:
    """Tables (1, m, width) that turn queries back from where they are, forth again, and to where they shall be.

    size: how many of a head's numbers they turn.
    """

    back: tuple[Tensor, Tensor]
    forth: tuple[Tensor, Tensor]
    away: tuple[Tensor, Tensor]
    size: int


class Rotation:
    """The rotary embedding of one attention layer of one model. kind: equal for layers that share their tables."""

    def __init__(
        self, tables: Callable[..., tuple[Tensor, Tensor]], apply: Callable[..., Any], kind: tuple[object, ...]
    ) -> None:
        self._tables, self._apply, self.kind = tables, apply, kind
        self._takes_one = list(inspect.signature(apply).parameters)[1:3] == ["cos", "sin"]  # Gemma 4's

    @classmethod
    def of(cls, model: nn.Module, attention: nn.Module) -> Rotation:
        """The rotation of `attention`, a layer of `model`.

        Raises UnsupportedModelError for a model without rotary embedding, or with one that is written otherwise
        than transformers' models have it.
        """
        apply = getattr(sys.modules[type(attention).__module__], _APPLY, None)
        rotary = _rotary(model)
        if apply is None or rotary is None:
            missing = f"no module rotary_emb in {type(model).__name__}" if rotary is None else f"no {_APPLY} beside it"
            raise UnsupportedModelError(
                f"{type(attention).__name__}: queries cannot be moved to another position ({missing}); use them at "
                "their own positions."
            )
        extra = {}
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            extra["layer_type"] = _layer_type(model, attention)

        # models for images turn by time, height and width; for text these are one number
        axes = (3, 1, -1) if hasattr(rotary, "mrope_section") else (1, -1)

        def tables(positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
            unused = torch.zeros(1, dtype=dtype, device=positions.device)
            with uncounted():
                cos, sin = rotary(unused, positions.expand(axes), **extra)
            # of a model on several devices, the tables live with its first layers
            return cos.to(positions.device, dtype), sin.to(positions.device, dtype)

        return cls(tables, apply, (rotary, apply, *extra.values()))

    def move(self, queries: Tensor, positions: Tensor, to: int | Tensor, check: bool = True) -> Tensor:
        """queries (heads, m, head_dim), rotated at `positions` (m,) int64, as if they stood at position(s) `to`.

        to: one position for all, or one for each (m,) int64.

        float32 in and out, or float64. Raises UnsupportedModelError if the model's rotation cannot be undone;
        check=False does not look (looking waits for the device).
        """
        if not queries.shape[1]:
            return queries.clone()
        return self.moved(queries, self.turn(positions, to, queries.shape[-1], queries.dtype), check=check)

    def turn(
        self, positions: Tensor, to: int | Tensor, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> RotationTables:
        """Return tables for `moved`, for queries of any heads and layers of this `kind`; otherwise as `move`. m > 0."""
        # one call for all positions: some scaling rules depend on the longest
        count = len(positions)
        targets = positions.new_tensor([to]) if isinstance(to, int) else to
        cos, sin = self._tables(torch.cat([positions, targets]), dtype)
        size = self._width(cos, sin, head_dim)
        forth = cos[:, :count], sin[:, :count]
        scale = forth[0].square() + forth[1].square()  # of the whole rotation, squared (attention scaling of long RoPE)
        return RotationTables((forth[0] / scale, -forth[1] / scale), forth, (cos[:, count:], sin[:, count:]), size)

    def moved(self, queries: Tensor, turn: RotationTables, *, check: bool = True) -> Tensor:
        """See `move`."""
        own = queries[..., : turn.size]
        plain = self._rotate(own, *turn.back)
        if check:
            error = float((self._rotate(plain, *turn.forth) - own).abs().max() / queries.abs().max().clamp_min(1e-30))
            if not error <= _TOLERANCE:
                raise UnsupportedModelError(
                    f"undoing the model's rotary embedding leaves a relative error of {error:.1e}; its {_APPLY} is "
                    "not a rotation. Use the queries at their own positions."
                )
        return torch.cat([self._rotate(plain, *turn.away), queries[..., turn.size :]], dim=-1)

    def _width(self, cos: Tensor, sin: Tensor, head_dim: int) -> int:
        """How many of a head's numbers the rotation turns: as many as a table has, or twice (GPT-OSS's have halves)."""
        tried = []
        for size in (cos.shape[-1], 2 * cos.shape[-1]):
            if size > head_dim:
                break
            try:
                if self._rotate(cos.new_zeros(1, 1, size), cos[:, :1], sin[:, :1]).shape[-1] == size:
                    return size
            except (RuntimeError, TypeError, ValueError) as error:
                tried.append(str(error))
        raise UnsupportedModelError(
            f"the model's {_APPLY} takes no queries of head_dim {head_dim} with tables of {cos.shape[-1]} "
            f"({'; '.join(tried) or 'the tables are wider'}). Use the queries at their own positions."
        )

    def _rotate(self, queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._takes_one:
            one: Tensor = self._apply(queries[None], cos, sin)[0]
            return one
        rotated: Tensor = self._apply(queries[None], queries[None], cos, sin)[0][0]
        return rotated


_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""What a model's first rotary embedding is called: to walk all modules takes .5 ms, and each layer of a read asks."""


def _rotary(model: nn.Module) -> nn.Module | None:
    """The model's rotary embedding as it is now; None: it has none."""
    decoder = text_decoder(model)
    if model in _names:
        with contextlib.suppress(AttributeError):  # the model was rebuilt since
            return decoder.get_submodule(_names[model])
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] == "rotary_emb":
            _names[model] = name
            return module
    return None


def rope_types(options: Any) -> set[str]:
    """The kinds of rotary embedding that a config names, given as a dictionary."""
    if not isinstance(options, dict):
        return set()
    own = {str(options[name]) for name in ("rope_type", "type") if isinstance(options.get(name), str)}
    return own.union(*(rope_types(value) for value in options.values()))


def _layer_type(model: Any, attention: Any) -> str:
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return str(kinds[attention.layer_idx]) if kinds else "full_attention"
