"""Layers that keep a state instead of keys: linear attention, short convolutions, state spaces (Qwen3-Next, LFM2).

The state is of constant size and on the device; transformers' own class updates it in place. It cannot be cropped, for
a state does not know the tokens before it: forks copy it, and what must be undone is put back from a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from retrieval_attn.errors import CacheMismatchError

_TENSORS = ("conv_states", "recurrent_states")


class StateLayer(LinearAttentionLayer):
    """transformers' layer, with what a `RetrievalCache` asks of its layers."""

    def fork(self) -> StateLayer:
        """An independent copy, the state too."""
        other = StateLayer(self.number_of_states)
        other.__dict__.update(self._copied())
        return other

    def snapshot(self) -> dict[str, Any]:
        """The layer's attributes, to be put back as they are; the state is copied."""
        return self._copied()

    def mark(self) -> dict[str, Any]:
        """What `restore` needs to undo the chunks that follow."""
        return self._copied()

    def restore(self, mark: object) -> bool:
        """Be as when `mark` was made."""
        assert isinstance(mark, dict)
        vars(self).update(mark)
        return True

    def select(self, rows: Items[int]) -> None:
        """Keep the states of these rows, in this order, repeats allowed."""
        for states in self._states():
            for number, state in states.items():
                if state is not None:
                    states[number] = state.index_select(0, torch.tensor(list(rows), device=state.device))

    def drop_newest(self, count: int, columns: int) -> None:
        """Forget the `count` newest of `columns` columns. Raises CacheMismatchError unless these are none or all."""
        if count == columns:
            self.__init__(self.number_of_states)  # type: ignore[misc]  # as new
        elif count and self.nbytes:
            raise CacheMismatchError(
                f"{count} of {columns} tokens cannot be removed: linear-attention layers keep a state, which does not "
                "know earlier ones. Fork the cache before tokens that may be removed, or read the text again."
            )

    def reset(self) -> None:
        """Forget every token; the layer can then be filled again, by any batch."""
        self.drop_newest(0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        held = (state for states in self._states() for state in states.values() if state is not None)
        return sum(state.numel() * state.element_size() for state in held)

    def _states(self) -> Iterator[dict[int, Tensor | None]]:
        return (getattr(self, name) for name in _TENSORS)

    def _copied(self) -> dict[str, Any]:
        """The attributes; dictionaries are copied, and the tensors in them."""
        copied = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        for name in _TENSORS:
            copied[name] = {number: None if state is None else state.clone() for number, state in copied[name].items()}
        return copied
