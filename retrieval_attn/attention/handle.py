"""The side of a cache layer that transformers sees: `update` notes keys and values and returns handles.

The handles travel through the model's own code to the attention function (`model/hooks.py`), which finds the layer in
them. Rows, lengths and padding are the batch's (`attention/sequence.py`); crop, reorder and repeat are operations of
`RetrievalCache` on all layers together.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from retrieval_attn.attention.sequence import Batch
from retrieval_attn.errors import CacheMismatchError, UnsupportedModelError
from retrieval_attn.model.hooks import AttendingLayer, KVView, MaskSpec


class HandleLayer(CacheLayerMixin, AttendingLayer):
    """transformers' protocol for one layer of a cache, without the attention.

    batch: the rows, shared by all layers. commits: whether the columns of a forward count once this layer has stored
    them: the last layer of a cache.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False
    is_sliding = False

    def __init__(self, batch: Batch | None = None) -> None:
        """batch: None makes one of its own, for a layer that is used alone."""
        super().__init__()
        self.batch = Batch() if batch is None else batch
        self.commits = batch is None
        self._stored = self._epoch = 0
        self._pending: tuple[Tensor, Tensor] | None = None
        self._owner: weakref.ref[nn.Module] | None = None

    @property
    def ahead(self) -> int:
        """Columns of the forward under way that this layer has stored and a later one has not; 0 between forwards."""
        return self._stored if self._epoch == self.batch.epoch else 0

    @property
    def columns(self) -> int:
        """Columns that this layer has stored."""
        return self.batch.columns + self.ahead

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Note the new keys and values (batch, kv_heads, new, dim) and return handles to this layer."""
        self._start(key_states.shape[0])
        self._pending = (key_states, value_states)
        self.is_initialized = True
        return KVView(self, key_states), KVView(self, value_states)

    def _start(self, rows: int) -> None:
        """New tokens of so many rows come. Raises CacheMismatchError where they cannot."""
        if self._pending is not None:
            raise CacheMismatchError(
                "The previous forward stored keys here but never attended to them: it failed half-way, or the "
                'model does not run with attn_implementation="retrieval". Make a new cache, and call '
                "retrieval_attn.enable(model) first."
            )
        self.batch.start(rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.batch.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.batch.columns

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return len(self.batch.sequences) or -1

    def offload(self) -> None:
        """Nothing to do: the bulk of a layer is on the host already."""

    def prefetch(self) -> None:
        """Nothing to do: see `offload`."""

    def _expected_offset(self) -> int:
        """Column of the next new token."""
        return self.columns

    def _take(self, module: nn.Module, query: Tensor, spec: MaskSpec) -> tuple[Tensor, Tensor]:
        """The pending keys and values, after checks that `module` and the mask are this layer's."""
        if self._pending is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends to another layer's keys without storing its own; models that "
                "share keys and values between layers are not served. Use another cache for this model."
            )
        self._belong_to(module)
        if spec.q_offset != self._expected_offset():
            raise CacheMismatchError(
                f"The forward starts at token {spec.q_offset}, this layer holds {self._expected_offset()}: an "
                "earlier forward failed half-way or the cache was edited. Make a new cache."
            )
        pending, self._pending = self._pending, None
        self._require_mask(module, spec)
        return pending

    def _belong_to(self, module: nn.Module) -> None:
        """Raise CacheMismatchError where another model's layer than `module` filled this one."""
        owner = None if self._owner is None else self._owner()
        if owner is module:
            return
        if self._owner is not None:
            raise CacheMismatchError(
                f"This cache was filled by another model (its layer is not this {type(module).__name__}); a cache "
                "holds one model's keys. Make a RetrievalCache for this model."
            )
        self._owner = weakref.ref(module)

    def _require_mask(self, module: nn.Module, spec: MaskSpec) -> None:
        """Raise UnsupportedModelError where the mask's window is not this layer's."""
        if (spec.window is not None) != self.is_sliding:
            raise UnsupportedModelError(
                f"{type(module).__name__} uses a {'sliding' if spec.window else 'full'} causal mask on a layer that "
                f"its config calls {'sliding' if self.is_sliding else 'full'}; check config.layer_types."
            )
