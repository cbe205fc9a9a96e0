"""RetrievalCache: the `past_key_values` object that makes a transformers model run retrieval attention."""

from __future__ import annotations

import copy
import logging
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from retrieval_attn.attention.coded_clusters import join_ahead
from retrieval_attn.attention.layer import CacheLayer, LayeredCache
from retrieval_attn.attention.reread import note_factors, read_again_in_generate
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import Batch, distinct, retrieval_start
from retrieval_attn.attention.sliding import SlidingLayer
from retrieval_attn.attention.source import TailMass
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.config import Config, resolve
from retrieval_attn.cpu.store import SequenceKV, held_memory, replicas_of, segments_of
from retrieval_attn.errors import CacheMismatchError, ContextLengthError, UnsupportedModelError
from retrieval_attn.gpu.attention.window import WindowCache, copy_to_host
from retrieval_attn.index.base import DeviceSearch, KeyIndex
from retrieval_attn.index.threads import check_threads, refuse_forked, use_threads
from retrieval_attn.memory.device_room import IndexChoice
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.rope import context_limit, counted_length, length_rope
from retrieval_attn.model.weights import require_same, weight_state
from retrieval_attn.offload.codes import HeadCodes
from retrieval_attn.offload.staging import brought_together
from retrieval_attn.offload.traffic import LayerStats
from retrieval_attn.runner.support import require_supported


class RetrievalCache(LayeredCache):
    """Keys and values of one batch: a constant part on the device, the rest on the host behind indexes.

    Use it as `past_key_values=` of `model(...)` or `model.generate(...)`, with a model loaded or switched to
    `attn_implementation="retrieval"`. Full-attention layers retrieve, sliding layers keep their window,
    linear-attention layers keep a state.
    """

    def __init__(
        self, model: PreTrainedModel, config: Config | None = None, *, check: bool = True, **overrides: Any
    ) -> None:
        """An empty cache for `model`, a transformers model or a `PeftModel` around one.

        Raises UnsupportedModelError with the reason, ConfigError for options, BackendError in a process that was forked
        from one that computed.

        check=False skips the support check (and its one-time verification of untested model types).
        """
        refuse_forked()
        self.config = resolve(config, overrides)
        check_threads(self.config.threads)
        model = unwrapped(model)
        self.index = IndexChoice(model, self.config)
        if check:
            require_supported(model, unchecked_cache)
        text_config = model.config.get_text_config(decoder=True)
        self.batch = Batch()
        super().__init__(layers=_make_layers(model, text_config, self.config, self.index, self.batch))
        self.model_type = text_config.model_type
        self.rope = length_rope(model)
        """How the factors of the model's rotary embedding depend on the length of the text; None: they do not."""
        self.prompt_length = 0
        """Tokens of the prompt that what is read now begins: its keys get the rotary factors of so long a text."""
        self.limit = context_limit(model)
        self.max_positions = self.limit.tokens
        self.model = weakref.ref(model)
        self._first_layer = next((n for n, one in enumerate(self.layers) if isinstance(one, CacheLayer)), 0)
        if self.rope is not None:
            read_again_in_generate(model)
        self.in_batch = False
        """Whether who made it steps it with others, in graphs of their own; forks have it, too."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """See `CacheLayer.update`. Raises ContextLengthError past the model's positions, CacheMismatchError if keys of
        this forward have other rotary factors, or come from other weights, than those that are here.
        """
        if layer_idx >= len(self.layers):
            raise CacheMismatchError(
                f"This cache was made for a {self.model_type} model of {len(self.layers)} layers; the model stores "
                f"keys for layer {layer_idx}. Make a RetrievalCache for this model."
            )
        layer = self.layers[layer_idx]
        if not isinstance(layer, CacheLayer):
            raise CacheMismatchError(
                f"Layer {layer_idx} of this {self.model_type} cache keeps no keys, but the model stores some; make a "
                "RetrievalCache for this model."
            )
        use_threads()
        self.require_room(key_states.shape[2], layer.columns)
        if layer_idx == self._first_layer and not layer.ahead:
            if self.rope is not None:
                note_factors(self.batch, self.rope, counted_length(), key_states.shape[2])
            if key_states.shape[2] > 1:
                require_same_weights(self)
        return layer.update(key_states, value_states, *args, **kwargs)

    def require_room(self, new_tokens: int, cached: int | None = None) -> None:
        """Raise ContextLengthError when `new_tokens` more would pass the model's positions, or fewer that it serves."""
        cached = (self.batch.columns if cached is None else cached) - self.batch.forgotten.tokens
        if self.max_positions is not None and cached + new_tokens > self.max_positions:
            kind = f"model's {self.max_positions} positions (config.max_position_embeddings)"
            if self.limit.reason:
                kind = f"{self.max_positions} that the model serves here: {self.limit.reason}"
            raise ContextLengthError(
                f"{cached} cached and {new_tokens} new tokens are more than the {kind}. Shorten the context, or "
                f"{self.limit.cure}.",
                limit=self.max_positions,
                tokens=cached + new_tokens,
                reason=self.limit.reason,
            )

    # -- rows and lengths, for all layers together ---------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that every layer has stored."""
        return self.batch.columns

    def fork(self) -> Self:
        """An independent continuation. Host memory and indexes are shared, the device window is copied."""
        return self._forked(copied=True)

    def view(self) -> Self:
        """Return a fork to read from; it shares windows and states on the device, which nothing may change."""
        return self._forked(copied=False)

    def _forked(self, *, copied: bool) -> Self:
        """copied: whether windows and states are copied."""
        refuse_forked()
        self.quiet()
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.batch, other.index = self.batch.fork(), copy.copy(self.index)
        layers: list[Any] = self.layers
        other.layers = [
            one.fork(copied=copied) if isinstance(one, StateLayer) else one.fork(other.batch, copied=copied)
            for one in layers
        ]
        for layer in other.layers:
            if isinstance(layer, RetrievalLayer):
                layer.index = other.index
        other.on_layer = other.on_chunk = other.on_end = other.on_image = None
        return other

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens. Negative: that many. Positive (deprecated in transformers): keep that many.

        Raises CacheMismatchError for more than there are, where a sliding layer has forgotten what would be newest, and
        where layers keep a state (linear attention) unless all tokens go.
        """
        given = int(tokens_to_remove)  # assisted decoding passes a tensor
        columns = self.batch.columns
        count = columns - min(given, columns) if given > 0 else -given
        if count > columns:
            raise CacheMismatchError(f"cannot remove {count} tokens from a cache of {columns}.")
        if count != columns and columns - count <= retrieval_start(self.batch):
            why = "forgotten" if self.batch.paged_prefix is None else "in pages that others may attend to"
            raise CacheMismatchError(
                f"cannot remove {count} of {columns} tokens: those before token {retrieval_start(self.batch)} are "
                f"{why}. Fork a context before that if it may go back that far."
            )
        self.quiet()
        layers: list[Any] = self.layers
        for layer in layers:  # before any other layer: it may refuse
            if isinstance(layer, StateLayer):
                layer.drop_newest(count, columns)
        for layer in self._own_layers():
            if count:
                layer.drop_newest(layer.ahead + count)
        if count == columns:
            self.batch.reset()
        elif count:
            self.batch.crop(columns - count)

    @property
    def crops_anywhere(self) -> bool:
        """Whether all layers retrieve, so that `crop` can go back to any token."""
        return not self.config.keeps_all and all(isinstance(layer, RetrievalLayer) for layer in self.layers)

    def can_keep(self, tokens: int) -> bool:
        """Return whether `crop` can keep the first `tokens` tokens of rows without padding.

        Layers with a state or a sliding window cannot go back to an earlier token; retrieval layers read their window
        back from host memory, except where tokens are forgotten or in pages.
        """
        if tokens == self.batch.columns:
            return True
        return self.crops_anywhere and retrieval_start(self.batch) < tokens < self.batch.columns

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times; the host part is shared, not copied."""
        rows = range(len(self.batch.sequences))
        self._select([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        chosen = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
        self._select(chosen.tolist())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue from these sequences (beam search). The host part is shared, not copied."""
        self._select(beam_idx.tolist())

    def reset(self) -> None:
        """Forget everything; the cache can be filled again."""
        super().reset()
        self.index.reset()
        self.batch.reset()

    def _select(self, rows: list[int]) -> None:
        """Continue with these rows."""
        self.quiet()
        layers: list[Any] = self.layers
        for layer in layers:
            layer.select(rows)
        self.batch.select(rows)

    def quiet(self) -> None:
        """Wait until all layers are idle; a captured step checks the cache again before it continues."""
        for layer in self._own_layers():
            layer.invalidate_graph()
            layer.finish_index()

    # -- what it holds and cost ----------------------------------------------------------------------

    def stats(self) -> LayerStats:
        """Sum over layers of what happened since the cache (or its fork) was made."""
        total = LayerStats()
        for layer in self._own_layers():
            layer.sync_graph()
            layer.finish_index()
            total.add(layer.stats)
        return total

    def tail_shares(self) -> dict[int, TailMass]:
        """By layer number, the estimated shares of layers with retrieval since the cache (or its fork) was made."""
        layers = [layer for layer in self.layers if isinstance(layer, RetrievalLayer)]
        for layer in layers:
            if layer.graph is not None:
                layer.graph.add_tail()
        return {layer.number: layer.tail for layer in layers}

    @property
    def coded_indexes(self) -> list[KeyIndex]:
        """Indexes that keep codes of keys in device memory, each once."""
        held = (index for host in distinct(self._paths()) for one in host.segments for index in one.indexes)
        return list({id(index): index for index in held if isinstance(index, DeviceSearch)}.values())

    def index_kinds(self) -> dict[str, int]:
        """Kinds of the indexes over the host's keys, and how many heads (of all layers) have each."""
        kinds: Counter[str] = Counter()
        for host in distinct(self._paths()):
            kinds.update(host.index_kinds)
        return dict(kinds)

    def index_notes(self) -> list[str]:
        """Why each head has the index it has, one line per head, where something chose it."""
        self._paths()
        return [
            f"layer {number}: {note}"
            for number in range(len(self.layers))
            for host in distinct(self.batch.hosts(number))
            for note in host.index_notes
        ]

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory held by keys, values, indexes, clusters; what rows share is counted once per layer."""
        self._paths()
        return sum(held_memory(layer.hosts).host for layer in self._own_layers() if isinstance(layer, RetrievalLayer))

    @property
    def device_nbytes(self) -> int:
        """Bytes of device memory held by sinks and windows, which does not grow with the context, by codes of keys and
        their clusters, which an index of kind "device" keeps there, and by pages of an exact prefix.
        """
        pages = 0 if self.batch.paged_prefix is None else self.batch.paged_prefix.nbytes
        return sum(one.nbytes for one in own_tensors(self)) + pages + held_memory(self._paths()).device

    def _paths(self) -> list[SequenceKV]:
        """The host's part of all layers and rows, in the order of the layers; indexes are ready."""
        for layer in self._own_layers():
            layer.finish_index()
        return [host for number in range(len(self.layers)) for host in self.batch.hosts(number)]

    def _own_layers(self) -> list[CacheLayer]:
        return [layer for layer in self.layers if isinstance(layer, CacheLayer)]


def require_same_weights(cache: RetrievalCache) -> None:
    """Raise CacheMismatchError if the model has other weights, or acting adapters, than a cache's keys were read with.

    Those of an empty cache are noted.
    """
    model = cache.model()
    if model is None:
        return
    now, batch = weight_state(model), cache.batch
    if batch.weights is not None and batch.columns:
        require_same(batch.weights, now, "The keys of this cache were computed")
    batch.weights = now


def unchecked_cache(model: PreTrainedModel, config: Config) -> RetrievalCache:
    """An empty cache for a model whose support is just being checked."""
    return RetrievalCache(model, config, check=False)


def _make_layers(
    model: PreTrainedModel, text_config: Any, config: Config, index: IndexChoice, batch: Batch
) -> list[Any]:
    layer_types, layer_kwargs = get_layer_types_and_kwargs(text_config)
    layers: list[Any] = []
    for number, layer_type in enumerate(layer_types):
        if layer_type == "full_attention":
            layers.append(RetrievalLayer(config, index, model, number, batch))
        elif layer_type == "sliding_attention":
            layers.append(SlidingLayer(config, layer_kwargs["sliding_window"], batch))
        elif layer_type in ("linear_attention", "conv", "mlp", "moe"):
            layers.append(StateLayer(**layer_kwargs))
        else:
            raise UnsupportedModelError(
                f"Layer {number} of {text_config.model_type} is of type {layer_type!r}; retrieval attention supports "
                "full_attention, sliding_attention and linear_attention layers."
            )
    for layer in reversed(layers):
        if isinstance(layer, CacheLayer):
            layer.commits = True
            break
    return layers


def is_empty(cache: object) -> bool:
    """Whether a transformers cache holds no tokens (None counts as empty)."""
    return cache is None or (isinstance(cache, Cache) and int(torch.as_tensor(cache.get_seq_length())) == 0)


def retrieves(cache: RetrievalCache) -> bool:
    """Whether any layer has anything between sinks and window."""
    layers = (layer for layer in cache.layers if isinstance(layer, RetrievalLayer))
    return any(layer.held is not None and layer.held.retrieves for layer in layers)


def form_beside(cache: RetrievalCache) -> str | None:
    """The dtype in which all keys are on the model's device, "int8" where those in pages are; None: some are retrieved,
    or no layer attends to all.
    """
    held = [layer.held for layer in cache.layers if isinstance(layer, RetrievalLayer) and layer.held is not None]
    if not held or retrieves(cache):
        return None
    exact = cache.batch.paged_prefix
    in_int8 = exact is not None and exact.layers.int8
    return "int8" if in_int8 else str(held[0].window.buffers[0].dtype).removeprefix("torch.")


def seal(cache: RetrievalCache, *, coded: bool = True) -> None:
    """From now on forks of it are continued, and no fork changes what others find in what they share.

    (Forks otherwise insert into shared indexes what has left their windows, which changes a little what is found.)
    coded: tokens in the window get codes before, where a device has those of others: a question pushes some out, and
    the host would have to attend to them in each step.
    """
    for layer in cache.layers:
        if isinstance(layer, RetrievalLayer) and layer.held is not None:
            layer.finish_index()
            keeps_codes = coded and layer.index.spec.keeps_device_keys
            for host in layer.held.hosts if keeps_codes else ():
                host.extend_index(len(host))
            for host in layer.held.hosts:
                host.seal()
            for host in layer.held.hosts if keeps_codes else ():
                join_ahead(host)


def own_tensors(cache: RetrievalCache) -> Iterator[Tensor]:
    """Yield the tensors of `device_nbytes` that a fork copies: sinks, windows and states."""
    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            yield from (state for _, state in layer.states())
        elif isinstance(layer, CacheLayer) and layer.window is not None:
            yield from layer.window.buffers


def pack(cache: RetrievalCache) -> None:
    """Keep no room for tokens to come: they come to forks, which make their own."""
    for layer in cache.layers:
        if isinstance(layer, RetrievalLayer) and layer.window is not None:
            layer.window.keep_no_room()


def head_codes_of(cache: RetrievalCache) -> list[HeadCodes]:
    """Return the codes of all heads and layers of a cache that a device searches."""
    codes = (getattr(index, "codes", None) for index in cache.coded_indexes)
    return [one for one in codes if isinstance(one, HeadCodes)]


class CodedSegments:
    """Replicas on devices of the segments whose keys have some of the given codes."""

    def __init__(self, cache: RetrievalCache, codes: Collection[HeadCodes]) -> None:
        """codes: `head_codes_of`, or some of them."""
        wanted = {id(one) for one in codes}
        self._paths = distinct(cache._paths())
        self._segments = {
            segment
            for segment in segments_of(self._paths)
            if any(id(getattr(index, "codes", None)) in wanted for index in segment.indexes)
        }

    @property
    def device_nbytes(self) -> int:
        """Bytes of the replicas in device memory, without codes."""
        return sum(one.offloadable_bytes(self._segments) for one in replicas_of(self._paths, self._segments))

    def copy_to_host(self) -> None:
        """Copy them to host memory, once, so that `offload` need not; all but codes, which `copy_codes` copies."""
        for replica in replicas_of(self._paths, self._segments):
            replica.copy_to_host()

    def offload(self) -> None:
        """Free their device memory until it is needed again; all but codes, which `offload_codes` moves."""
        for replica in replicas_of(self._paths, self._segments):
            replica.offload(self._segments)


def windows_of(cache: RetrievalCache) -> list[WindowCache]:
    """Return the windows of all layers."""
    layers: list[Any] = cache.layers
    return [layer.window for layer in layers if isinstance(layer, CacheLayer) and layer.window is not None]


def offload_windows(cache: RetrievalCache) -> None:
    """Move the windows of a cache to host memory; only forks of it are used from now on."""
    windows = windows_of(cache)
    copy_to_host(windows, brought_together)
    for window in windows:
        window.offload()


log = logging.getLogger(__name__)


class Rollback:
    """Where a cache stands now. Costs a copy of its sinks and windows; keys on the host are marked, not copied.

    A fork would do too, but what is appended to a fork begins a new segment, outside the index of the one before.
    """

    def __init__(self, cache: RetrievalCache) -> None:
        """Waits for the last indexes of `cache`, and raises what went wrong there."""
        cache.quiet()
        self._cache = cache
        self._layers = [
            (layer, layer.snapshot()) for layer in cache.layers if isinstance(layer, CacheLayer | StateLayer)
        ]
        self._batch = cache.batch.snapshot()
        paths = distinct(host for sequence in cache.batch.sequences for host in sequence.kv.values())
        self._hosts = [(host, host.snapshot()) for host in paths]

    def undo(self) -> bool:
        """Forget what came after; threads that still copy or index it have ended then.

        False where that cannot be done: for layers of another kind than the package's.
        """
        for layer, _ in self._layers:
            if isinstance(layer, CacheLayer):
                layer.invalidate_graph()
                layer.abandon()
        for layer, state in self._layers:
            if isinstance(layer, CacheLayer):
                try:
                    layer.finish_index()
                except Exception as error:  # what failed is forgotten
                    log.debug("an extension that is undone had failed: %s", error)
            vars(layer).clear()
            vars(layer).update(state)
        self._cache.batch.restore(self._batch)
        for host, snapshot in self._hosts:
            host.restore(snapshot)
        self._cache.on_layer = self._cache.on_chunk = self._cache.on_end = self._cache.on_image = None
        return len(self._layers) == len(self._cache.layers)
