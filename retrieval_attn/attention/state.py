"""Layers that keep a state instead of keys: linear attention, short convolutions, state spaces (Qwen3-Next, LFM2).

The state is of constant size and on the device; transformers' own class updates it in place. It cannot be cropped, for
a state does not know the tokens before it: forks copy it, and what must be undone is put back from a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from retrieval_attn.errors import CacheMismatchError

STATE_NAMES = ("conv_states", "recurrent_states")
"""Attributes of a layer that hold its states by number, None where there is none."""


class StateHook(Protocol):
    """A layer's place in a captured decode step (`runner/graph/states.py`), while a cache is bound to it."""

    def confirmed(self) -> dict[tuple[str, int], Tensor]:
        """The states as the last token that counts left them: by name and number. Steps may have gone ahead."""


class StateLayer(LinearAttentionLayer):
    """transformers' layer, with what a `RetrievalCache` asks of its layers.

    graph: set while a captured step decodes with this cache.
    """

    def __init__(self, number_of_states: int = 1, **kwargs: Any) -> None:
        super().__init__(number_of_states, **kwargs)
        self.graph: StateHook | None = None

    def fork(self, *, copied: bool = True) -> StateLayer:
        """Return an independent layer. copied: whether the state is copied, too."""
        other = StateLayer(self.number_of_states)
        other.__dict__.update(self._copied(states=copied))
        return other

    def snapshot(self) -> dict[str, Any]:
        """The layer's attributes, to be put back as they are; the state is copied."""
        return {**self._copied(), "graph": None}

    def mark(self) -> dict[str, Any]:
        """Return the state that `restore` needs to undo later chunks."""
        return self._copied()

    def restore(self, mark: object) -> bool:
        """Be as when `mark` was made."""
        assert isinstance(mark, dict)
        vars(self).update(mark)
        return True

    def select(self, rows: Items[int]) -> None:
        """Keep the states of these rows, in this order, repeats allowed."""
        for (name, number), state in self.confirmed_states().items():
            getattr(self, name)[number] = state.index_select(0, torch.tensor(list(rows), device=state.device))

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
        return sum(state.numel() * state.element_size() for _, state in self.states())

    def states(self) -> Iterator[tuple[tuple[str, int], Tensor]]:
        """The states that there are, each with name and number."""
        for name in STATE_NAMES:
            for number, state in getattr(self, name).items():
                if state is not None:
                    yield (name, number), state

    def confirmed_states(self) -> dict[tuple[str, int], Tensor]:
        """The states as the last token that counts left them, by name and number."""
        return dict(self.states()) if self.graph is None else self.graph.confirmed()

    def _copied(self, *, states: bool = True) -> dict[str, Any]:
        """The attributes but `graph`; dictionaries are copied, and with `states` the tensors in them."""
        copied = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        del copied["graph"]
        for (name, number), state in self.confirmed_states().items():
            copied[name][number] = state.clone() if states else state
        return copied
