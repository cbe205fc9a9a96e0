"""What every cache layer shares: the handle protocol, the owner, columns and padding.

One layer per decoder layer, and each answers `attend(queries)` for everything it has seen. `RetrievalLayer`
(`cache/retrieval.py`) keeps sinks and window on the device and all tokens on the host, `SlidingLayer`
(`cache/sliding.py`) a window.
Positions: a *column* counts the padded batch from 0; a row's host path holds only its real tokens.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from retrieval_attn.config import Config
from retrieval_attn.errors import CacheMismatchError, UnsupportedModelError
from retrieval_attn.gpu.attention.merge import Partial, merge, sink_logit_partial
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.model.hooks import KVView, MaskSpec


@dataclass
class LayerStats:
    """What one layer did since the cache was made. Seconds are wall clock, bytes are host memory read.

    host_seconds: retrieved attention as a whole; search_seconds and attend_seconds: its phases inside.
    copy_seconds, index_seconds: copying keys to the host and building indexes (beside a GPU: in threads, while it
    computes); lists_seconds: the GPU's time for training lists; wait_seconds: prefill waiting for the host.
    mass, mass_count: sum and number of the shares of attention that were measured (`Config.mass_heads`).
    """

    index_seconds: float = 0.0
    copy_seconds: float = 0.0
    lists_seconds: float = 0.0
    wait_seconds: float = 0.0
    host_seconds: float = 0.0
    search_seconds: float = 0.0
    attend_seconds: float = 0.0
    mass: float = 0.0
    mass_count: int = 0
    keys_scanned: int = 0
    bytes_read: int = 0

    def add(self, other: LayerStats) -> None:
        for name in vars(other):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class GraphHook(Protocol):
    """A layer's place in a captured decode step (`engine/graph.py`), while a cache is bound to it."""

    @property
    def recording(self) -> bool:
        """Whether a step is being recorded: attention then goes through `attend`."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Record, in place of `CacheLayer.attend`, the attention of one new token per row."""

    def settle(self) -> None:
        """Tell the cache's layers of the tokens that replays have appended behind their backs."""

    def leave(self) -> None:
        """`settle`, and look at the cache anew before the next replay: something else is about to change it."""


class CacheLayer(CacheLayerMixin):
    """What both kinds of layer share: the handle protocol, the owner, columns and padding."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False
    is_sliding = False

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.columns = 0  # columns this layer has stored
        self.valid: Tensor | None = None  # (batch, columns) CPU bool; None = no padding anywhere
        self.stats = LayerStats()
        self.window: WindowCache | None = None
        self.graph: GraphHook | None = None  # set while a captured graph decodes with this cache
        self._pending: tuple[Tensor, Tensor] | None = None
        self._owner: weakref.ref[nn.Module] | None = None

    # -- transformers' cache layer protocol ---------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Note the new keys and values (batch, kv_heads, new, dim) and hand out handles to this layer."""
        if self._pending is not None:
            raise CacheMismatchError(
                "The previous forward stored keys here but never attended to them: it failed half-way, or the "
                'model does not run with attn_implementation="retrieval". Make a new cache, and call '
                "retrieval_attn.enable(model) first."
            )
        if self.window is not None and key_states.shape[0] != self.window.batch:
            raise CacheMismatchError(
                f"This cache holds {self.window.batch} sequences, the forward has {key_states.shape[0]}; use "
                "cache.batch_repeat_interleave(n), or a cache of its own for the other batch."
            )
        self._pending = (key_states, value_states)
        self.is_initialized = True
        return KVView(self, key_states), KVView(self, value_states)

    def settle(self) -> None:
        """Catch up with tokens that a captured graph has appended; `columns` and `window` are then right."""
        if self.graph is not None:
            self.graph.settle()

    def leave_graph(self) -> None:
        """`settle` before a change that a captured graph does not know of."""
        if self.graph is not None and not self.graph.recording:
            self.graph.leave()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.settle()
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        self.settle()
        return self.columns

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return -1 if self.window is None else self.window.batch

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.leave_graph()
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.leave_graph()
        if self.window is not None:
            self._select(torch.arange(self.window.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(1)
        self.leave_graph()
        self._select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens. Negative: that many. Positive (deprecated in transformers): keep that many."""
        self.leave_graph()
        given = int(tokens_to_remove)  # assisted decoding passes a tensor
        count = self.columns - min(given, self.columns) if given > 0 else -given
        if count > self.columns:
            raise CacheMismatchError(f"cannot remove {count} tokens from a cache of {self.columns}.")
        if count:
            self._crop(count)

    def reset(self) -> None:
        """Forget every token; the layer can then be filled again, by any batch."""
        self.leave_graph()
        self.columns = 0
        self.valid = None
        self.window = None
        self._pending = None

    def offload(self) -> None:
        """Nothing to do: the bulk of a layer is on the host already."""

    def prefetch(self) -> None:
        """Nothing to do: see `offload`."""

    # -- attention ----------------------------------------------------------------------------------

    def begin_pass(self, total: int) -> None:
        """Announce that `total` new tokens arrive in several `attend` calls (layer-major prefill)."""
        raise NotImplementedError

    def end_pass(self) -> None:
        """All tokens of the pass have arrived."""
        raise NotImplementedError

    def finish_index(self) -> None:
        """Wait for keys that are still on their way to the host or into an index; the base class sends none."""

    def check_index(self) -> None:
        """Raise what has gone wrong so far with keys on their way, without waiting."""

    def abandon(self) -> None:
        """Stop sending keys to the host soon, without waiting: reading was interrupted."""

    def mark(self) -> object:
        """What `restore` needs to undo the chunks that follow; None where that cannot be done."""
        return None

    def restore(self, mark: object) -> bool:
        """Be as when `mark` was made, so that the tokens since then may come again. False: it is too late."""
        return False

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        spec: MaskSpec,
        *,
        scale: float,
        softcap: float | None,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Store the pending tokens and attend `query` (batch, q_heads, new, head_dim) to all stored ones.

        Returns (batch, q_heads, new, value_dim) float32. Raises CacheMismatchError when the cache belongs to
        another model or has seen other tokens than the mask says.
        """
        self.leave_graph()
        key, value = self._take(module, query, spec)
        if self.graph is not None and self.graph.recording:
            return self.graph.attend(query, key, value, scale, softcap, sink_logits)
        part = self._attend(query, key, value, spec, scale, softcap)
        if sink_logits is not None:
            part = merge([part, sink_logit_partial(sink_logits, query, value.shape[3])])
        return part.out

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float, softcap: float | None
    ) -> Partial:
        raise NotImplementedError

    def _select(self, rows: Tensor) -> None:
        raise NotImplementedError

    def _crop(self, count: int) -> None:
        raise NotImplementedError

    def _expected_offset(self) -> int:
        return self.columns

    def _take(self, module: nn.Module, query: Tensor, spec: MaskSpec) -> tuple[Tensor, Tensor]:
        if self._pending is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends to another layer's keys without storing its own; models that "
                "share keys and values between layers are not served. Use another cache for this model."
            )
        if self._owner is not None and self._owner() is not module:
            raise CacheMismatchError(
                f"This cache was filled by another model (its layer is not this {type(module).__name__}); a cache "
                "holds one model's keys. Make a RetrievalCache for this model."
            )
        self._owner = weakref.ref(module)
        if spec.q_offset != self._expected_offset():
            raise CacheMismatchError(
                f"The forward starts at token {spec.q_offset}, this layer holds {self._expected_offset()}: an "
                "earlier forward failed half-way or the cache was edited. Make a new cache."
            )
        pending, self._pending = self._pending, None
        if (spec.window is not None) != self.is_sliding:
            raise UnsupportedModelError(
                f"{type(module).__name__} uses a {'sliding' if spec.window else 'full'} causal mask on a layer that "
                f"its config calls {'sliding' if self.is_sliding else 'full'}; check config.layer_types."
            )
        return pending

    def _new_columns(self, spec: MaskSpec, count: int, seen: Tensor | None) -> Tensor | None:
        if spec.padding is None:
            return None
        return spec.padding.columns(spec.q_offset, spec.q_offset + count, seen)
