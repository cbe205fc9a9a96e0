"""CacheLayer: the interface of one layer of a cache to transformers and to the rest of the package.

`HandleLayer` is the side that transformers calls: `update` stores keys and values and returns handles, which the model
passes to the attention function (`model/hooks.py`). `CacheLayer` adds attention, passes and rows. `RetrievalLayer`
keeps sinks and window on the device and all tokens on the host, `SlidingLayer` a window.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from copy import copy as shallow_copy
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from retrieval_attn.attention.sequence import Batch
from retrieval_attn.attention.source import TailMass, TokenRange
from retrieval_attn.config import Config
from retrieval_attn.errors import CacheMismatchError, InputDataError, UnsupportedModelError
from retrieval_attn.gpu.attention.flash import attend
from retrieval_attn.gpu.attention.merge import Partial, Scoring, merge, sink_logit_partial
from retrieval_attn.gpu.attention.window import WindowCache
from retrieval_attn.model.hooks import AttendingLayer, KVView, MaskSpec
from retrieval_attn.offload.traffic import LayerStats


class PendingLayer(CacheLayerMixin, AttendingLayer):
    """transformers' protocol for a layer that stores new keys and values in `attend`, not in `update`."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self._pending: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Note the new keys and values (batch, kv_heads, new, dim) and return handles to this layer."""
        self._pending = (key_states, value_states)
        self.is_initialized = True
        return KVView(self, key_states), KVView(self, value_states)

    def take_pending(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the keys and values of `update`, once. Raises UnsupportedModelError if there are none."""
        if self._pending is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends to another layer's keys without storing its own; models that share "
                "keys and values between layers are not supported. Use the model with its own attention and cache."
            )
        pending, self._pending = self._pending, None
        return pending

    def discard_pending(self) -> None:
        """Drop the keys and values of `update` that no attention has taken."""
        self._pending = None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class HandleLayer(PendingLayer):
    """One layer of a cache, without the attention.

    batch: the rows, shared by all layers. commits: whether the columns of a forward count once this layer has stored
    them: the last layer of a cache.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, batch: Batch | None = None) -> None:
        """batch: None makes one of its own, for a layer that is used alone."""
        super().__init__()
        self.batch = Batch() if batch is None else batch
        self.commits = batch is None
        self._stored = self._epoch = 0
        self._owner: weakref.ref[nn.Module] | None = None

    @property
    def ahead(self) -> int:
        """Columns of the forward under way that this layer has stored and a later one has not; 0 between forwards."""
        return self._stored if self._epoch == self.batch.epoch else 0

    @property
    def columns(self) -> int:
        """Columns that this layer has stored."""
        return self.batch.columns + self.ahead

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._start(key_states.shape[0])
        return super().update(key_states, value_states)

    def _start(self, rows: int) -> None:
        """Accept new tokens of `rows` rows. Raises CacheMismatchError after a failed forward or for other rows."""
        if self._pending is not None:
            raise CacheMismatchError(
                "The previous forward stored keys here but never attended to them: it failed half-way, or the "
                'model does not run with attn_implementation="retrieval". Make a new cache, and call '
                "retrieval_attn.enable(model) first."
            )
        self.batch.start(rows)

    def get_seq_length(self) -> int:
        return self.batch.columns

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
        pending = self.take_pending(module)
        self._belong_to(module)
        if spec.q_offset != self._expected_offset():
            raise CacheMismatchError(
                f"The forward starts at token {spec.q_offset}, this layer holds {self._expected_offset()}: an "
                "earlier forward failed half-way or the cache was edited. Make a new cache."
            )
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


class GraphHook(Protocol):
    """A layer's place in a captured decode step (`runner/graph/sequence_slot.py`), while a cache is bound to it."""

    def sync(self) -> None:
        """Tell the cache's windows of the tokens that replays have appended behind their backs."""

    def add_tail(self) -> None:
        """Add to the layer's `tail` what was estimated in replays since the last call. Waits for the device."""

    def invalidate(self) -> None:
        """`sync`, and check the cache again before the next replay: other code is about to change it."""


class RetrievedParts(NamedTuple):
    """The partial results that a layer with retrieval merged, each (batch, q_heads, new, ...).

    static: over sinks, window and pages. retrieved: over keys in host memory; None if no row has any. estimated: the
    share of the weights of `retrieved` that is estimated from clusters; None without an estimate. candidates: the keys
    that the search chose from.
    """

    static: Partial
    retrieved: Partial | None
    estimated: Tensor | None
    candidates: list[TokenRange]


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """One call of `CacheLayer.attend`, for `CacheLayer.on_attention`. The tensors must not be changed.

    query, scale, softcap, sink_logits: as the call received them. key, value: stored by the call before it attended,
    (batch, kv_heads, new, dim). out: its result. parts: None for exact attention and for layers without retrieval.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    scale: float
    softcap: float | None
    sink_logits: Tensor | None
    parts: RetrievedParts | None


class CacheLayer(HandleLayer):
    """One layer of a `RetrievalCache`. graph: set while a captured step decodes with this cache.

    on_attention: called at the end of each `attend`, or None. Forks share it; a step of the cache is then not captured.
    stats, tail: the work done, and the estimated share of attention, since the layer or its fork was made.
    """

    def __init__(self, config: Config, batch: Batch | None = None) -> None:
        super().__init__(batch)
        self.config = config
        self.stats, self.tail = LayerStats(), TailMass()
        self.graph: GraphHook | None = None
        self.on_attention: Callable[[AttentionRecord], None] | None = None
        self._parts: RetrievedParts | None = None  # of the current call, for `on_attention`
        self._announced: int | None = None
        self._alone = False

    @property
    def window(self) -> WindowCache | None:
        """Sinks and recent tokens on the device; None before the first tokens."""
        raise NotImplementedError

    # -- the captured step --------------------------------------------------------------------------

    def sync_graph(self) -> None:
        """Catch up with tokens that a captured graph has appended; `window` is then right."""
        if self.graph is not None:
            self.graph.sync()

    def invalidate_graph(self) -> None:
        """`sync_graph` before a change that a captured graph does not know of."""
        if self.graph is not None:
            self.graph.invalidate()

    def require_capturable(self) -> None:
        """Raise CaptureError if a captured step could not compute this layer's attention."""

    # -- passes -------------------------------------------------------------------------------------

    def begin_pass(self, total: int, alone: bool = False) -> None:
        """Announce that `total` new tokens arrive in several `attend` calls (layer-major prefill).

        alone: the device has room for the keys of one layer only, so those of an earlier one must have left.
        """
        self._announced, self._alone = total, alone

    def end_pass(self, between: Callable[[], object] = lambda: None) -> None:
        """All tokens of the pass have arrived. between: called between the parts of what that takes; raises nothing."""
        self._announced = None
        self._note_stored(0)

    def _note_stored(self, count: int) -> None:
        """This layer has stored `count` more columns. At the end of a pass the last layer commits them for all."""
        self._stored, self._epoch = self.ahead + count, self.batch.epoch
        if self.commits and self._announced is None and self.ahead:
            self.batch.commit(self.ahead)

    def mark(self) -> object:
        """Return the state that `restore` needs to undo later chunks; None if they cannot be undone."""
        return None

    def restore(self, mark: object) -> bool:
        """Be as when `mark` was made, so that the tokens since then may come again. False: it is too late."""
        return False

    def finish_index(self) -> None:
        """Wait for keys that are still on their way to the host or into an index; the base class sends none."""

    def check_index(self) -> bool:
        """Whether no keys are on their way. Raises what has gone wrong so far with them, without waiting."""
        return True

    def abandon(self) -> None:
        """Stop sending keys to the host soon, without waiting: reading was interrupted."""

    # -- rows, called by the cache for all layers together ------------------------------------------

    def select(self, rows: Items[int]) -> None:
        """Keep what the device holds of these rows, in this order, repeats allowed."""
        raise NotImplementedError

    def drop_newest(self, count: int) -> None:
        """Forget the `count` newest columns that this layer has stored. Raises CacheMismatchError where it cannot."""
        raise NotImplementedError

    def snapshot(self) -> dict[str, Any]:
        """The layer's attributes, to be put back as they are; what changes in place is copied."""
        copy = self.fork(self.batch)
        copy.stats.add(self.stats)
        return {**vars(copy), "tail": shallow_copy(self.tail)}

    def fork(self, batch: Batch, *, copied: bool = True) -> Self:
        """Return this layer for a fork of its batch. copied: see `RetrievalCache.view`."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget every token; the layer can then be filled again, by any batch."""
        self.invalidate_graph()
        self._stored, self._announced, self._pending = 0, None, None

    # -- attention ----------------------------------------------------------------------------------

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
        self.invalidate_graph()
        key, value = self._take(module, query, spec)
        part = self._attend(query, key, value, spec, scale, softcap)
        for start, stop in spec.images:
            span = slice(start - spec.q_offset, stop - spec.q_offset)
            if span.start >= 0 and span.stop <= spec.q_length:
                part = _with_later(part, span, query, key, value, Scoring(scale, softcap))
        if sink_logits is not None:
            part = merge([part, sink_logit_partial(sink_logits, query, value.shape[3])])
        if self.on_attention is not None:
            parts, self._parts = self._parts, None
            self.on_attention(AttentionRecord(query, key, value, part.out, scale, softcap, sink_logits, parts))
        return part.out

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, scale: float, softcap: float | None
    ) -> Partial:
        raise NotImplementedError


def _with_later(part: Partial, image: slice, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Partial:
    """Add the later tokens of an image to the causal attention of its tokens.

    part: of all queries. query, key, value: of the new tokens. image: the image's tokens among them.
    """
    early, late = slice(image.start, image.stop - 1), slice(image.start + 1, image.stop)
    count = late.stop - late.start
    if count < 1:
        return part
    later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu()
    own = Partial(part.out[:, :, early], part.lse[:, :, early])
    more = attend(
        query[:, :, early], key[:, :, late], value[:, :, late],
        scale=scoring.scale, softcap=scoring.softcap, mask=later[None, None],
    )  # fmt: skip
    found, (out, lse) = merge([own, more]), part
    return Partial(
        torch.cat((out[:, :, : early.start], found.out, out[:, :, early.stop :]), dim=2),
        torch.cat((lse[:, :, : early.start], found.lse, lse[:, :, early.stop :]), dim=2),
    )


class LayeredCache(Cache):
    """Cache methods of layer-major prefill. on_layer: called after each decoder layer of a forward, or None.

    on_chunk: called before each chunk of each decoder layer, of which a short forward has one, with the most tokens
    that it may have; returns how many it has at most. None: all of these. on_end: called behind a layer's last chunk,
    before what ends its pass (True), and between the parts of that (False), or None. on_image: called before each layer
    of the vision tower, or None.
    """

    config: Config
    window_lock: AbstractContextManager[object] = nullcontext()
    """Held while windows move to other buffers: their keys are copied a moment later."""
    on_layer: Callable[[], object] | None = None
    on_chunk: Callable[[int], int] | None = None
    on_end: Callable[[bool], object] | None = None
    on_image: Callable[[], object] | None = None

    def fork(self) -> Self:
        """An independent continuation."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return `fork()`: `copy.deepcopy` of a prefix cache, as transformers' documentation has it, copies no keys."""
        return self.fork()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputDataError(
            "A RetrievalCache cannot be pickled, or copied with copy.copy: its keys lie in host memory that indexes "
            "and threads share. Call cache.fork() for an independent copy in this process, or save a Context: "
            "LLM.read(text, save=NAME), then LLM.open(NAME)."
        )
