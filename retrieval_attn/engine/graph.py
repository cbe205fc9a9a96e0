"""The decode step of an unmodified model as one graph: no Python between two tokens, the host's search inside it.

A `GraphDecoder` records one forward of the model over static inputs; each layer's attention is replaced, while it
records, by what `engine/graph_layer.py` records. A replay then computes the next token's logits. The graph is captured
once and serves every cache of the same shape: caches are bound to it in turn. Between replays, where a layer's window
is full, its oldest tokens move to the host as in eager decoding.

Models whose step cannot be recorded are found by a named check (`refusal`) or by the capture's failure; they decode
eagerly. DESIGN section 5.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.cache.cache import RetrievalCache
from retrieval_attn.cache.retrieval import RetrievalLayer
from retrieval_attn.cache.sliding import SlidingLayer
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.cpu.serve import Server
from retrieval_attn.cpu.step import descriptor as words
from retrieval_attn.engine.graph_emulation import emulated_runtime
from retrieval_attn.engine.graph_host import MOST_TURNS
from retrieval_attn.engine.graph_layer import GraphLayer
from retrieval_attn.errors import BackendError, CaptureError, ContextLengthError, RetrievalAttentionError
from retrieval_attn.gpu.capture.exchange import Replay, asked_hop
from retrieval_attn.gpu.capture.runtime import Runtime, cuda_runtime
from retrieval_attn.gpu.codes.search import Scratch
from retrieval_attn.gpu.decode.kernels import advance
from retrieval_attn.model.capturable import is_capturable
from retrieval_attn.model.placement import devices, input_device, is_hooked, tensor_ranks

_Function = TypeVar("_Function", bound=Callable[..., Any])

KEPT_DECODERS = 2
"""Decoders that a model keeps for later caches, each with its window buffers and graphs; the oldest goes."""


def refusal(model: PreTrainedModel, cache: RetrievalCache) -> str | None:
    """Why this model's step cannot be recorded with this cache, as far as can be told without trying; or None."""
    for number, layer in enumerate(_layers(cache)):
        if type(layer) not in (RetrievalLayer, SlidingLayer):
            return f"layer {number} is a {type(layer).__name__}, whose state lives outside the step's buffers"
        if layer.window is None:
            return "the cache holds no tokens yet"
        if isinstance(layer, SlidingLayer) and layer.record_past:
            return "a sliding layer records its past for assisted decoding"
    if not cache.layers:
        return "the cache has no layers"
    if cache.config.retrieve == "all":
        return 'retrieve="all" attends to every key on the host, the reference mode'
    if any(isinstance(layer, RetrievalLayer) and layer.mass_heads for layer in _layers(cache)):
        return "measure_mass measures attention on the CPU at every step"
    places = devices(model)
    if len(places) > 1:
        return f"the model's layers run on {', '.join(map(str, places))}"
    if is_hooked(model):
        return "accelerate moves tensors or weights while the model runs (device_map)"
    if tensor_ranks(model) > 1:
        return "the model's heads are split over several processes"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids: it counts tokens on the CPU"
    text = model.config.get_text_config(decoder=True)
    changing = sorted(_rope_types(text.to_dict()) & {"dynamic", "longrope"})
    if changing:
        return f"rotary embedding of type {changing[0]} looks at the position on the CPU"
    return _hooked(model)


def _rope_types(options: Any) -> set[str]:
    if not isinstance(options, dict):
        return set()
    own = {str(options[name]) for name in ("rope_type", "type") if isinstance(options.get(name), str)}
    return own.union(*(_rope_types(value) for value in options.values()))


def _hooked(model: PreTrainedModel) -> str | None:
    for name, module in model.named_modules():
        for hook in _hooks_of(module):
            # transformers' own stay in place after a call that asked for hidden states, and do nothing otherwise
            if not is_capturable(hook) and not str(getattr(hook, "__module__", "")).startswith("transformers."):
                return f"{name or 'the model'} has a forward hook, which replays would not call (model.capturable)"
    return None


def _hooks_of(module: torch.nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _layers(cache: RetrievalCache) -> list[Any]:
    return list(cache.layers)


def _ordinary_tensors(function: _Function) -> _Function:
    """Buffers made inside `torch.inference_mode` could not be written to outside it, where the next cache may come."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return cast("_Function", called)


@dataclass
class _Launch:
    """A step that was launched and not confirmed: its replay, and what its host part left, once that is over."""

    replay: Replay
    generation: int
    retrieves: bool
    over: bool = False
    work: Any = 0
    nanoseconds: Any = 0
    error: BackendError | None = None


class GraphDecoder:
    """See the module. For one cache at a time; `acquire` finds or makes one, `release` gives it back.

    captures, replays: how many there were.
    """

    @_ordinary_tensors
    def __init__(self, model: PreTrainedModel, cache: RetrievalCache, runtime: Runtime) -> None:
        """Buffers for caches shaped as `cache`. Nothing is bound or captured yet."""
        layers = _layers(cache)
        key = layers[0].window.buffers[0]
        self._model = weakref.ref(model)
        self.signature = signature(model, cache, runtime)
        self.runtime = runtime
        self.pool = default_pool()
        self.recording = self.retrieves = self.padded = False
        self.captures = self.replays = 0
        self._batch = key.shape[0]
        self._token = torch.zeros(self._batch, 1, dtype=torch.int64, device=key.device)
        self._position = torch.zeros_like(self._token)
        self.chosen = torch.zeros_like(self._token[:, 0])
        self._logits: Tensor | None = None
        self._spans = torch.zeros(len(layers), 2, dtype=torch.int32, device=key.device)
        self._meters = np.zeros((len(layers), MOST_TURNS, self.pool.workers * words.METER_WORDS), np.int64)
        self._descriptors = np.zeros((len(layers), MOST_TURNS, words.WORDS), np.int64)
        self._slots = [
            GraphLayer(self, number, layer, self._spans[number], self._meters[number], self._descriptors[number])
            for number, layer in enumerate(layers)
        ]
        self._work = np.zeros((len(layers), words.METER_WORDS), np.int64)
        self._nanoseconds = np.zeros(len(layers), np.int64)
        self.capture_failure: str | None = None
        # kept, so that the signature's ids stay taken and what they recorded stays in memory
        self._hooks = [hook for module in model.modules() for hook in _hooks_of(module)]
        self._graphs: dict[tuple[bool, bool, int], Replay] = {}
        self.scratch: dict[Any, Scratch] = {}
        self._cache: RetrievalCache | None = None
        self._stale = False
        self._launched: list[_Launch] = []  # in order; the second one went ahead
        self._room = self._unsettled = 0
        self._kind = False, False, 0

    @_ordinary_tensors
    def bind(self, cache: RetrievalCache) -> None:
        """Make `cache` the one that steps continue. Raises CaptureError; the cache then is as it was."""
        self._cache = cache
        try:
            self._take()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let the bound cache go, with all confirmed tokens in it; a launched one that was not confirmed is lost."""
        self.take_back()
        if self._cache is not None:
            self.settle()
            self._cache = None
        for slot in self._slots:
            slot.give_back()

    @_ordinary_tensors
    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Launch the step for token (batch,) at position (batch,); returns its logits, (batch, vocabulary) float32.

        The logits are the same memory at every step, and so is `chosen`, the likeliest token (batch,). Before the next
        step the caller waits for them, by reading what it chose from them, and calls `confirm`. Raises CaptureError
        where the step cannot go on as a graph (the cache then holds what was confirmed), ContextLengthError past the
        model's positions, BackendError where device and host lost each other: the step then did not happen.
        """
        assert self._cache is not None and not self._launched
        self._cache.require_room(1)
        if self._stale:
            self.settle()
            self._take()
        elif self._room == 0:
            self._spill()
        self._place(token, position)
        if self._kind not in self._graphs:
            captured = self._capture(token, position)
            self._kind = self._kind_now()  # a first pass has told what is searched
            self._graphs[self._kind] = captured
        return self._launch()

    @_ordinary_tensors
    def ahead(self) -> bool:
        """As `step` for `chosen`, at the next position, before that is read: the device does not wait for the caller.

        The caller then confirms one after the other; what is not confirmed at the end did not happen. False, and
        nothing done, where this step has to wait for the other: no graph yet, a window that is full, an exchange whose
        host part may still be under way, an error.
        """
        alone = self._launched[0] if len(self._launched) == 1 else None
        if alone is None or not alone.over or alone.error is not None or self._stale or self._room < 2:
            return False
        assert self._cache is not None
        try:
            self._cache.require_room(2)
        except ContextLengthError:
            return False
        self._launch()
        return True

    def take_back(self) -> None:
        """Steps that were launched and are not confirmed did not happen."""
        if self._launched:
            self.runtime.synchronize()  # whose calls were served before `step` was left
            self._launched.clear()
            self._stale = True

    def _place(self, token: Tensor, position: Tensor) -> None:
        self._token.copy_(token[:, None])
        self._position.copy_(position[:, None])

    def _launch(self) -> Tensor:
        replay = self._graphs[self._kind]
        try:
            replay()
        except BackendError:
            with contextlib.suppress(RuntimeError):  # the error is told already
                self.runtime.synchronize()
            self._stale = True  # the device may have counted the token
            raise
        launch = _Launch(replay, replay.generation, self.retrieves)
        self._launched.append(launch)
        if replay.serves:
            self._note_host_part(launch)
        self.replays += 1
        assert self._logits is not None
        return self._logits

    def _note_host_part(self, launch: _Launch) -> None:
        """Keep what the host's searches left: the next step writes over it."""
        launch.over = True
        if not launch.retrieves:
            return
        try:
            self._raise_errors()
        except BackendError as error:
            launch.error = error
        launch.work = self._meters.reshape(len(self._slots), -1, words.METER_WORDS).sum(axis=1)
        launch.nanoseconds = self._descriptors[..., words.NANOSECONDS].sum(axis=1)

    def confirm(self) -> None:
        """The first step that was launched is over: count its token.

        Raises BackendError, with the layer named, if a host search failed or came too late; steps after it are lost.
        """
        if not self._launched:
            return
        launch = self._launched.pop(0)
        if not launch.over:
            self._note_host_part(launch)
        failure = launch.replay.failure(launch.generation) if launch.retrieves else None
        if launch.error is not None or failure is not None:
            self._stale = True  # the device has counted a token that does not count
            self._launched.clear()
            raise launch.error or BackendError(failure)
        self._work += launch.work
        self._nanoseconds += launch.nanoseconds
        if self._cache is not None:
            self._cache.batch.commit(1)
        self._room -= 1
        self._unsettled += 1

    def settle(self) -> None:
        """See `GraphHook`."""
        count, self._unsettled = self._unsettled, 0
        if not count:
            return
        for slot, work, nanoseconds in zip(self._slots, self._work.tolist(), self._nanoseconds.tolist(), strict=True):
            layer = slot.layer
            slot.window.note_appended(count)
            search, attend = work[words.SEARCH_TIME], work[words.ATTEND_TIME]
            seconds, share = nanoseconds / 1e9, search / max(1, search + attend)
            layer.stats.host_seconds += seconds
            layer.stats.search_seconds += seconds * share
            layer.stats.attend_seconds += seconds * (1 - share)
            layer.stats.keys_scanned += work[words.SCANNED]
            layer.stats.bytes_read += work[words.BYTES]
        self._work[:] = 0
        self._nanoseconds[:] = 0

    def leave(self) -> None:
        """See `GraphHook`."""
        self.settle()
        self._stale = True

    @property
    def most_coded(self) -> int:
        """See `Owner`."""
        return max(slot.most_coded for slot in self._slots)

    # -- inside -------------------------------------------------------------------------------------

    def _kind_now(self) -> tuple[bool, bool, int]:
        """What a graph is captured for."""
        return self.retrieves, self.padded, self.most_coded if self.retrieves else 0

    def _take(self) -> None:
        """Bind the cache's layers as they are now."""
        assert self._cache is not None
        for layer in _layers(self._cache):
            if isinstance(layer, RetrievalLayer):
                layer.finish_index()
        if signature(self._bound_model, self._cache, self.runtime) != self.signature:
            raise CaptureError("the cache's shapes or the model's weights changed")
        for slot, layer in zip(self._slots, _layers(self._cache), strict=True):
            slot.take(layer)
        self._refresh(self._slots)
        self._stale = False

    @property
    def _bound_cache(self) -> RetrievalCache:
        assert self._cache is not None
        return self._cache

    @property
    def _bound_model(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None
        return model

    def _spill(self) -> None:
        """Some window is full: make room as eager decoding does."""
        self.settle()
        full = [slot for slot in self._slots if slot.window.room == 0]
        for slot in full:
            slot.layer.spill()
        self._refresh(full)

    def _refresh(self, changed: list[GraphLayer]) -> None:
        """Windows have moved: upload where they are, and plan what the host searches now."""
        layers = [slot.layer for slot in self._slots]
        self._room = min(slot.window.room for slot in self._slots)
        self.padded = any(slot.window.valid is not None for slot in self._slots)
        retrieving = [layer for layer in layers if isinstance(layer, RetrievalLayer)]
        self.retrieves = any(stop > start for layer in retrieving for start, stop in layer.ranges)
        for slot in changed:
            if self.padded:
                slot.refresh()
            if self.retrieves:
                slot.plan()
        self._kind = self._kind_now()
        self._upload()

    def _upload(self) -> None:
        self._spans.copy_(torch.tensor([slot.window.span for slot in self._slots], dtype=torch.int32))

    def _raise_errors(self) -> None:
        if not self._descriptors[..., words.STATUS].any():
            return
        for slot in self._slots:
            slot.raise_error()

    def _capture(self, token: Tensor, position: Tensor) -> Replay:
        """Record the step, for these inputs; afterwards everything is as before it.

        The passes before it compile kernels and take the libraries' workspaces, too.
        """
        with self._recording():
            try:
                seen = []
                for shift in (0, self._bound_cache.batch.columns // 2):
                    self._place(token, position)
                    seen.append(self._dry_run(shift))
                self._raise_errors()
                # no difference at all but where a model's own kernels add in any order
                known = 1e-4 if self._bound_model.dtype == torch.float32 else 1e-2
                tolerance = known * float(seen[0].abs().max())
                if not torch.allclose(seen[0], seen[1], rtol=0, atol=tolerance, equal_nan=True):
                    raise CaptureError("the model computes with the number of cached tokens on the CPU")
                self._upload()
                self._place(token, position)
                replay = self.runtime.capture(self._record)
            except CaptureError as error:
                self.capture_failure = str(error)
                raise
            except RetrievalAttentionError:
                raise
            except Exception as error:
                self.capture_failure = f"{type(error).__name__}: {error}"
                raise CaptureError(self.capture_failure) from error
            finally:
                self.runtime.synchronize()
                self._upload()
                self._place(token, position)
        self.captures += 1
        return replay

    def _dry_run(self, shift: int) -> Tensor:
        """Logits of a recorded pass that is run eagerly, told that the cache holds `shift` tokens fewer.

        What follows from that number on the CPU would be frozen in a graph; a model that uses none gives equal logits.
        """
        batch = self._bound_cache.batch
        self._upload()
        batch.columns -= shift
        try:
            self.runtime.warm_up(self._record)
        finally:
            batch.columns += shift
            for slot in self._slots:
                slot.layer._pending = None
        assert self._logits is not None
        return self._logits.clone()

    def _record(self) -> None:
        arguments: dict[str, Any] = {
            "input_ids": self._token,
            "position_ids": self._position,
            "past_key_values": self._cache,
            "use_cache": True,
            "return_dict": True,
        }
        model = self._bound_model
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            arguments["logits_to_keep"] = 1
        logits = model(**arguments).logits[:, -1]
        if self._logits is None:
            self._logits = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        self._logits.copy_(logits)
        self.chosen.copy_(self._logits.argmax(dim=-1))
        self._token.copy_(self.chosen[:, None])
        self._position.add_(1)
        advance(self._spans)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        assert self._cache is not None
        on_layer, self._cache.on_layer = self._cache.on_layer, None
        self.recording = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.recording = False
            self._cache.on_layer = on_layer


def signature(model: PreTrainedModel, cache: RetrievalCache, runtime: Runtime) -> tuple[Any, ...]:
    """What a decoder's buffers and graphs depend on: shapes, where the weights lie, and the pool of threads."""
    layers = []
    for layer in _layers(cache):
        key, value = layer.window.buffers
        slots = layer.sliding_window if isinstance(layer, SlidingLayer) else key.shape[2]
        fmt = codes = None
        if isinstance(layer, RetrievalLayer):
            fmt = None if layer.held is None else layer.held.fmt
            codes = layer.code_shape(key.shape[3])
        sizes = key.shape[:2], slots, key.shape[3], value.shape[3]
        layers.append((type(layer), *sizes, key.dtype, key.device, fmt, codes))
    weights = hash(tuple(parameter.data_ptr() for parameter in model.parameters()))
    hooks = hash(tuple(id(hook) for module in model.modules() for hook in _hooks_of(module)))
    return id(runtime), id(default_pool()), weights, hooks, tuple(layers)


_decoders: weakref.WeakKeyDictionary[PreTrainedModel, list[GraphDecoder]] = weakref.WeakKeyDictionary()
_failed: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, str]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def runtime_for(model: PreTrainedModel) -> Runtime | None:
    """The runtime of the model's device, or None where there is none, with the exchange that the environment asks for.

    Raises BackendError where there is none that works, ConfigError if the environment asks for one that is unknown.
    """
    runtime = emulated_runtime()
    if runtime is not None:
        return runtime
    device = input_device(model)
    if device.type != "cuda":
        return None
    return cuda_runtime(device.index if device.index is not None else torch.cuda.current_device(), Server, asked_hop())


def acquire(model: PreTrainedModel, cache: RetrievalCache, runtime: Runtime) -> GraphDecoder:
    """A decoder with `cache` bound: one that waits, or a new one. Give it back by `give_back`.

    Raises CaptureError with the reason where the step cannot be recorded.
    """
    reason = refusal(model, cache)
    if reason is not None:
        raise CaptureError(reason)
    wanted = signature(model, cache, runtime)
    with _lock:
        reason = _failed.setdefault(model, {}).get(wanted)
        if reason is not None:
            raise CaptureError(reason)
        waiting = _decoders.setdefault(model, [])
        decoder = next((one for one in waiting if one.signature == wanted), None)
        if decoder is not None:
            waiting.remove(decoder)
    if decoder is None:
        decoder = GraphDecoder(model, cache, runtime)
    decoder.bind(cache)
    return decoder


def forget(model: PreTrainedModel) -> None:
    """Drop the decoders that wait for this model's next cache, with their buffers and graphs, and why others failed."""
    with _lock:
        _decoders.pop(model, None)
        _failed.pop(model, None)


def give_back(model: PreTrainedModel, decoder: GraphDecoder) -> None:
    """Release the decoder's cache, and keep the decoder for the next one; or remember why it could not capture."""
    decoder.release()
    with _lock:
        if decoder.capture_failure is not None:
            _failed.setdefault(model, {})[decoder.signature] = decoder.capture_failure
            return
        waiting = _decoders.setdefault(model, [])
        waiting.append(decoder)
        del waiting[:-KEPT_DECODERS]
