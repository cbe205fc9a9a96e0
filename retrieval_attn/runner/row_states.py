"""States of linear-attention layers of several rows, side by side for one forward (Qwen3-Next, LFM2)."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from retrieval_attn.attention.state import StateLayer
from retrieval_attn.errors import CacheMismatchError


class RowsState(LinearAttentionLayer):
    """The rows' states joined along the batch; transformers updates them in place, `give_back` hands each row its own.

    The rows keep the states from before until then.
    """

    def __init__(self, layers: Items[StateLayer]) -> None:
        """Raises CacheMismatchError where one row has a state and another has none."""
        first = layers[0]
        super().__init__(first.number_of_states)
        self._layers = list(layers)
        states: list[dict[tuple[str, int], Any]] = [layer.confirmed_states() for layer in layers]
        if any(one.keys() != states[0].keys() for one in states):
            raise CacheMismatchError("Some rows have a state of a linear-attention layer and others none: read first.")
        plain = {name: value for name, value in vars(first).items() if name not in ("graph", "number_of_states")}
        vars(self).update({name: dict(value) if isinstance(value, dict) else value for name, value in plain.items()})
        for name, number in states[0]:
            getattr(self, name)[number] = torch.cat([one[name, number] for one in states])

    def give_back(self) -> None:
        """The forward is over: every row's layer has the state that it has come to."""
        for row, layer in enumerate(self._layers):
            for (name, number), own in layer.states():
                own.copy_(getattr(self, name)[number][row : row + 1])
