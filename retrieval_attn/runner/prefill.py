"""Layer-major prefill: each decoder layer walks the prompt in chunks, one layer after the other.

One ordinary forward of an unmodified model then needs one layer's keys and one chunk's activations on the
device, and layer l is complete (and can be indexed) after l/L of the work. Exact: a chunk attends to the
layer's past and to itself. transformers' own `prefill_chunk_size` is chunk-major and, in 5.17, wrong with a
non-empty cache; it is not used.

Linear modules with weights of 4 bits multiply chunks by a copy in whole numbers (`model/fused/unpacking.py`).

Where a chunk does not fit the device's memory its layer is put back to where it was, and it and all that follow are
halved. Keys leave for the host while later layers compute (`offload/work.py`); `finish_prefill` waits for the last
index.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrieval_attn.attention.layer import CacheLayer, LayeredCache
from retrieval_attn.attention.state import StateLayer
from retrieval_attn.errors import ConfigError, MemoryPlanError, RetrievalAttentionError
from retrieval_attn.memory.host_room import require_host_room
from retrieval_attn.memory.plan import plan
from retrieval_attn.memory.reclaim import idle_device_bytes, reclaim
from retrieval_attn.memory.units import host_memory_bytes
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.fused.unpacking import UnpackedLinear
from retrieval_attn.model.hooks import MaskSpec, without_gradients
from retrieval_attn.model.layers import DecoderParts, decoder_parts, first_decoder_layer, modules_of
from retrieval_attn.model.placement import tensor_ranks
from retrieval_attn.model.quantization import may_be_packed, packed_modules
from retrieval_attn.offload.hidden import HiddenRows
from retrieval_attn.offload.traffic import traffic
from retrieval_attn.runner.hidden_states import (
    HiddenStates,
    NotedEmbedding,
    NotedHead,
    NotedHolder,
    NotedRotary,
    argument_of,
    on_device,
)

log = logging.getLogger(__name__)

MIN_CHUNK = 256
"""Chunks are not made smaller than this when memory does not suffice: attention and matrix products starve."""
HOST_CHUNK = 2048
"""Most tokens of a chunk on a CPU, where activations take memory by the token. 8,192 tokens of Gemma 3 270M: 15 s and
1.38 GiB, in chunks of 512 18 s and 1.28 GiB, in one 16 s and 1.72 GiB (docs/archive/log.md)."""
_ORIGINAL = "_retrieval_attn_original_forward"


def _embeddings(model: nn.Module) -> list[nn.Module]:
    """The model's token embedding, where it says which that is."""
    found = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    return [found] if isinstance(found, nn.Embedding) else []


def _heads(model: nn.Module) -> list[nn.Module]:
    """The model's output, where it says which that is."""
    found = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return [found] if isinstance(found, nn.Linear) else []


def wrap_layers(model: nn.Module, chunk: int) -> None:
    """Make every decoder layer walk long inputs in chunks of `chunk` tokens. Undone by `unwrap_layers`.

    Raises ConfigError for a chunk below 1. Layers that are wrapped already get the new chunk size.
    """
    _require_chunk(chunk)
    parts = decoder_parts(model)
    _unwrap(model, parts)
    stream = _PrefillStream(model, chunk)
    for layer, index in parts.layers:
        _wrap(layer, _ChunkedLayer(layer, index, chunk, stream))
        for linear, _ in packed_modules(layer):
            _wrap(linear, UnpackedLinear(linear))
    for norm in parts.norms:
        _wrap(norm, _ChunkedNorm(norm, stream))
    states, size = stream.states, functools.partial(getattr, stream, "chunk")
    for embedding in _embeddings(model):
        _wrap(embedding, NotedEmbedding(embedding, states, size))
    for holder in parts.holders:
        _wrap(holder, NotedHolder(holder, states, size))
    for rotary in parts.rotaries:
        _wrap(rotary, NotedRotary(rotary, states))
    for head in _heads(model):
        _wrap(head, NotedHead(head))


def _require_chunk(chunk: int) -> None:
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ConfigError(f"chunk must be an integer >= 1 token, got {chunk!r}; 8192 is a good start.")


def unwrap_layers(model: nn.Module) -> None:
    """Give the decoder layers their own forward back. Nothing happens when they are not wrapped."""
    _unwrap(model, decoder_parts(model))


def _unwrap(model: nn.Module, parts: DecoderParts) -> None:
    beside = itertools.chain(parts.norms, parts.holders, parts.rotaries, _embeddings(model), _heads(model))
    packed = may_be_packed()
    inside = (modules_of(layer) if packed else (layer,) for layer, _ in parts.layers)
    for module in itertools.chain(*inside, beside):
        if _ORIGINAL in module.__dict__:
            del module.forward  # the instance attribute; the class's forward shows again
            if (before := module.__dict__.pop(_ORIGINAL)) is not None:
                module.forward = before  # accelerate's hooks (device_map) are instance attributes too


def _wrap(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.__dict__[_ORIGINAL] = module.__dict__.get("forward")
    module.forward = functools.wraps(module.forward)(forward)


def forwards_itself(module: nn.Module) -> bool:
    """Whether the forward of a decoder layer, or of a module in it, is its class's own, wrapped here or not."""
    return "forward" not in module.__dict__ or (_ORIGINAL in module.__dict__ and module.__dict__[_ORIGINAL] is None)


@contextmanager
def prefill_by_layer(model: PreTrainedModel, chunk: int = 8192) -> Iterator[PreTrainedModel]:
    """Within this context, forwards with a RetrievalCache go layer by layer in chunks of `chunk` tokens."""
    inner = unwrapped(model)
    before = wrapped_chunk(inner)
    wrap_layers(inner, chunk)
    try:
        yield model
    finally:
        unwrap_layers(inner)
        if before is not None:
            wrap_layers(inner, before)


def wrapped_chunk(model: nn.Module) -> int | None:
    """The chunk size the decoder layers are wrapped with, or None."""
    layer = first_decoder_layer(model)
    if layer is None or _ORIGINAL not in layer.__dict__:
        return None
    chunk: int = layer.__dict__["forward"].chunk
    return chunk


class _Asked(threading.local):
    """Chunks by model that the calling thread has asked for."""

    def __init__(self) -> None:
        self.chunks: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


_asked = _Asked()


@contextmanager
def chunks_of(model: nn.Module, chunk: int) -> Iterator[None]:
    """The calling thread's forwards take `chunk` tokens at once, whatever the layers are wrapped with.

    Other threads' forwards of the model keep their own. Blocks nest. Raises ConfigError for a chunk below 1.
    """
    _require_chunk(chunk)
    chunks = _asked.chunks
    before = chunks.get(model)
    chunks[model] = chunk
    try:
        yield
    finally:
        if before is None:
            chunks.pop(model, None)
        else:
            chunks[model] = before


class _PrefillStream:
    """State that the wrapped modules of one model share: tokens per chunk, and the memory of the rest."""

    def __init__(self, model: nn.Module, chunk: int) -> None:
        self._chunk = chunk
        self.states = HiddenStates(model)

    def chunk_for(self, hidden_states: Tensor) -> int:
        """Return the tokens of a chunk of `hidden_states`, at most HOST_CHUNK on a CPU."""
        on_host = self.states.computed_on(hidden_states).type == "cpu"
        return min(self.chunk, HOST_CHUNK) if on_host else self.chunk

    @property
    def chunk(self) -> int:
        """Tokens that go through at once: what the calling thread has asked for (`chunks_of`), or the wrapped layers'.

        Fewer in a forward that leaves room for codes (`HiddenStates.begin`). Halved where memory does not suffice.
        """
        fewer = self.states.chunk
        return _asked.chunks.get(self.states.model, self._chunk) if fewer is None else fewer

    @chunk.setter
    def chunk(self, chunk: int) -> None:
        asked = _asked.chunks
        if self.states.chunk is not None:
            self.states.shrink(chunk)
        elif self.states.model in asked:
            asked[self.states.model] = chunk
        else:
            self._chunk = chunk

    def shrink(self, size: int, layer: int) -> bool:
        """A chunk of `size` tokens did not fit: go on with half of it. False if it was as small as it gets.

        Also False where ranks share the model's heads: the others are in the middle of the same chunk.
        """
        if size <= MIN_CHUNK or tensor_ranks(self.states.model) > 1:
            return False
        self.chunk = max(MIN_CHUNK, size // 2)
        log.warning(
            "layer %d: out of device memory with a chunk of %d tokens; prefill goes on with chunks of %d",
            layer,
            size,
            self.chunk,
        )
        return True

    def shortage(self, cache: Any, hidden_states: Tensor) -> str:
        """The arithmetic of what a pass over these hidden states needs, as far as it is known for this model."""
        (batch, tokens), device = hidden_states.shape[:2], self.states.computed_on(hidden_states)
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory_bytes()
        config = cache.index.config.replace(prefill_chunk=min(self.chunk, tokens))
        context = cache.get_seq_length() + tokens
        try:
            needed = plan(
                self.states.model.config, context=context, gpu_memory=total, batch=batch, config=config, decide=False
            )
            return str(needed)
        except RetrievalAttentionError as error:
            return f"(no arithmetic for this model: {error})"


class _ChunkedLayer:
    """A decoder layer's forward that splits the token axis when a retrieval cache is in use."""

    def __init__(self, layer: nn.Module, index: int, chunk: int, stream: _PrefillStream) -> None:
        self._layer, self._original = layer, layer.forward
        self._index, self._stream = index, stream
        self.chunk = chunk

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = argument_of(LayeredCache, args, kwargs)
        if cache is None:
            return self._original(hidden_states, *args, **kwargs)
        if not torch.is_grad_enabled():
            return self._pass(cache, hidden_states, args, kwargs)
        with torch.no_grad():
            result = self._pass(cache, hidden_states, args, kwargs)
        if hidden_states.requires_grad or any(one.requires_grad for one in self._layer.parameters()):
            if isinstance(result, tuple):
                return without_gradients(result[0]), *result[1:]
            return without_gradients(result)
        return result

    def _pass(self, cache: Any, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = cache.layers[self._index] if self._index < len(cache.layers) else None
        tokens = hidden_states.shape[1]
        spec = argument_of(MaskSpec, args, kwargs)
        if spec is not None:  # here, where nothing is cut into chunks yet
            spec.positions.require_one_text(spec.padding, tokens, kwargs)
        if tokens <= min(self._stream.chunk, MIN_CHUNK) or not isinstance(layer, CacheLayer | StateLayer):
            if cache.on_chunk is not None:
                cache.on_chunk(tokens)
            result = self._original(hidden_states, *args, **kwargs)
        elif isinstance(layer, StateLayer):  # its state goes from chunk to chunk
            if self._stream.states.layout.kv_layers == 1:  # keys of a layer before it, or what it computes
                traffic(self._stream.states.computed_on(hidden_states)).make_room(alone=True)
            result = self._walk(cache, layer, hidden_states, args, kwargs)
        else:
            result = self._read(cache, layer, hidden_states, args, kwargs)
        if cache.on_layer is not None:
            cache.on_layer()
        return result

    def _read(
        self, cache: Any, layer: CacheLayer, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if layer is next(item for item in cache.layers if isinstance(item, CacheLayer)):
            model = self._stream.states.model
            batch, tokens = hidden_states.shape[:2]
            cache.require_room(tokens)  # its chunks do not know of each other
            cache.index.decide(tokens, batch)
            on_host = self._stream.states.ferry is not None
            require_host_room(model.config, cache.index.config, tokens, batch, hidden_on_host=on_host)
        for other in cache.layers:
            if isinstance(other, CacheLayer):
                other.check_index()  # an index that failed five layers ago need not wait for the last layer
        try:
            tokens = hidden_states.shape[1]
            layer.begin_pass(tokens, self._stream.states.layout.kv_layers == 1)
            result = self._walk(cache, layer, hidden_states, args, kwargs)
            if cache.on_end is not None:
                cache.on_end(True)  # behind the dearest chunk, what ends the layer would come on top
                layer.end_pass(functools.partial(cache.on_end, False))
            else:
                layer.end_pass()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise MemoryPlanError(
                f"Layer {self._index}: out of device memory after {tokens:,} tokens were read, while the window and "
                "the sampled queries were stored. Read with a smaller prefill_chunk; this cache cannot be used any "
                f"more.\n{self._stream.shortage(cache, hidden_states)}"
            ) from error
        except Exception:
            raise
        except BaseException:  # Ctrl-C: leave no threads that build an unused index
            abandon(cache)
            raise
        return result

    def _walk(
        self,
        cache: Any,
        layer: CacheLayer | StateLayer,
        hidden_states: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        tokens = hidden_states.shape[1]
        seen = bool(kwargs.get("output_hidden_states")) or bool(self._layer._forward_hooks)
        rows = self._stream.states.rows(hidden_states, seen)
        rest: tuple[Any, ...] | None = None
        spec, start = argument_of(MaskSpec, args, kwargs), 0
        while start < tokens:
            most = min(self._stream.chunk_for(hidden_states), tokens - start)
            stop = start + (most if cache.on_chunk is None else min(most, cache.on_chunk(most)))
            stop = stop if spec is None else spec.image_end(stop)
            mark = layer.mark()
            part = self._fitting(rows, (start, stop, tokens), args, kwargs)
            if part is None:
                self._step_back(cache, layer, mark, hidden_states, stop - start)
                continue
            out, rest = part
            rows.write(start, stop, out)
            del out, part
            start = stop
        whole = rows.result()
        self._stream.states.passed(whole, self._layer, seen=seen)
        return whole if rest is None else (whole, *rest)

    def _fitting(
        self, rows: HiddenRows, span: tuple[int, int, int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...] | None] | None:
        """The output of tokens [start, stop) of all, and what else the layer returned; None: out of memory.

        span: start, stop, all tokens. `rows` has room for the output then; nothing was written.
        """
        start, stop, tokens = span
        try:
            hidden_states = rows.read(start, stop)
            cut = [_cut(item, start, stop, tokens) for item in (args, *kwargs.values())]
            if self._stream.states.ferry is not None:
                cut = [on_device(item, hidden_states.device) for item in cut]
            part = self._original(hidden_states, *cut[0], **dict(zip(kwargs, cut[1:], strict=True)))
            out = part[0] if isinstance(part, tuple) else part
            rest = part[1:] if isinstance(part, tuple) else None
            rows.make_room(out)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return None  # the error, and with it what the layer had in its hands, is gone once this returns
        return out, rest

    def _step_back(
        self, cache: Any, layer: CacheLayer | StateLayer, mark: object, hidden_states: Tensor, size: int
    ) -> None:
        """Put the layer back to before the chunk that did not fit, and make chunks smaller; MemoryPlanError if not."""
        tokens, device = hidden_states.shape[1], self._stream.states.computed_on(hidden_states)
        needed = f"Layer {self._index}: out of device memory in prefill with a chunk of {size:,} of {tokens:,} tokens"
        traffic(device).drain()
        reclaim(device=idle_device_bytes())
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if mark is None or not layer.restore(mark):
            cure = "this layer cannot compute a chunk again. Make a new cache and read with a smaller prefill_chunk"
        elif self._stream.shrink(size, self._index):
            return
        else:
            cure = (
                "the chunk has its minimum size already. Read a shorter text, quantise the weights or use a larger GPU"
            )
        arithmetic = self._stream.shortage(cache, hidden_states)
        raise MemoryPlanError(f"{needed}, and {cure}; this cache cannot be used any more.\n{arithmetic}")


def out_of_memory(error: RuntimeError) -> bool:
    """Whether the device ran out of memory, in torch's allocator or in a library that asked for a workspace."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "ALLOC_FAILED" in str(error)


def finish_prefill(cache: Any, on_layer: Callable[[], object] | None = None) -> None:
    """Wait until the keys of all layers of a RetrievalCache are on the host and indexed; on_layer after each.

    Reading returns before the last indexes are built, and the first question waits for them: call this to wait now.
    Raises what went wrong, with the layer named. Interrupted (Ctrl-C), it leaves no threads behind.
    """
    try:
        for layer in cache.layers:
            if isinstance(layer, CacheLayer):
                layer.finish_index()
            if on_layer is not None:
                on_layer()
    except Exception:
        raise
    except BaseException:
        abandon(cache)
        raise


def abandon(cache: Any) -> None:
    """Stop copying and indexing for this cache soon, without waiting. It cannot be used any more."""
    for layer in cache.layers:
        if isinstance(layer, CacheLayer):
            layer.abandon()


class _ChunkedNorm:
    """The final normalisation in chunks of tokens: the same rows, without a float32 copy of the whole prompt."""

    def __init__(self, norm: nn.Module, stream: _PrefillStream) -> None:
        self._original, self._stream = norm.forward, stream

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = hidden_states.shape[1] if hidden_states.ndim == 3 else 0
        chunk, states = self._stream.chunk_for(hidden_states), self._stream.states
        if tokens <= chunk or torch.is_grad_enabled():
            return self._original(hidden_states, *args, **kwargs)
        rows = states.rows(hidden_states)
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            out = self._original(rows.read(start, stop), *args, **kwargs)
            rows.make_room(out)
            rows.write(start, stop, out)
        return rows.result()


def _cut(item: Any, start: int, stop: int, tokens: int) -> Any:
    """The part of a layer argument that belongs to tokens [start, stop); things without a token axis pass."""
    if isinstance(item, MaskSpec):
        return item.part(start, stop)
    if isinstance(item, Tensor) and item.ndim >= 2 and item.shape[1] == tokens:
        return item[:, start:stop]
    if isinstance(item, tuple):
        return tuple(_cut(member, start, stop, tokens) for member in item)
    return item
