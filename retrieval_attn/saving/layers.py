"""A cache of one sequence as plain values and arrays, a pair for each layer, and back.

What a pair holds: the part of the layer's host path that a parent does not have (`saving/sequence.py`), and the layer's
*edge*, what lies on the device: sinks and window, a sliding layer's window, the states of a linear-attention layer.
Numbers are kept as the device has them, so that what is loaded computes to the last bit what was saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.attention.coded_clusters import ask_for_rows_of, bring_clusters
from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.attention.retrieval import RetrievalLayer
from retrieval_attn.attention.sequence import Forgotten, ids_tensor
from retrieval_attn.attention.sliding import SlidingLayer
from retrieval_attn.attention.state import STATE_NAMES, StateLayer
from retrieval_attn.config import Config
from retrieval_attn.cpu.segment import Segment
from retrieval_attn.cpu.store import SequenceKV, segments_of
from retrieval_attn.errors import InputDataError, StoreMismatchError
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.layers import decoder_layers
from retrieval_attn.model.placement import execution_device, input_device
from retrieval_attn.model.weights import weight_state
from retrieval_attn.offload.codes import DeviceCoder, SentCodes, side_stream
from retrieval_attn.offload.staging import brought
from retrieval_attn.offload.staging import sent as sent_array
from retrieval_attn.runner.graph.host_row_gather import device_reads
from retrieval_attn.saving.sequence import (
    PathMark,
    State,
    path_from_states,
    path_mark,
    path_state,
    span_marks,
    spans_since,
)
from retrieval_attn.store.mapped import is_mapped

Array = npt.NDArray[Any]
HOST = "host/"
"""Begins the names of a path's arrays."""
_AS_INTEGERS = {torch.bfloat16: torch.int16}
"""NumPy has no such numbers: their bits are kept."""


class Marks(NamedTuple):
    """Where the host's part of a cache ends: paths by the numbers of the layers that retrieve."""

    paths: dict[int, PathMark]

    def begins(self, cache: RetrievalCache) -> bool:
        """Whether the cache's paths still begin with all that is marked."""
        layers = _retrieving(cache)
        return self.paths.keys() == layers.keys() and all(
            spans_since(layers[number].hosts[0], mark) == len(mark.spans)
            and [length for _, length in span_marks(layers[number].hosts[0])][: len(mark.spans)]
            == [length for _, length in mark.spans]
            for number, mark in self.paths.items()
        )

    def of_another(self) -> Marks:
        """For a node of the same tokens by another writer: what its clusters know is not known here."""
        return Marks({number: mark._replace(replicas={}) for number, mark in self.paths.items()})


def marks_of(cache: RetrievalCache) -> Marks:
    """The marks of all that the cache has on the host. Take them before the states that are saved."""
    marks: dict[int, PathMark] = {}
    for number in range(len(cache.layers)):
        marks |= marks_of_layer(cache, number)
    return Marks(marks)


def marks_of_layer(cache: RetrievalCache, number: int) -> dict[int, PathMark]:
    """The mark of one layer by its number; of a layer that does not retrieve, none."""
    layer = cache.layers[number]
    return {number: path_mark(layer.hosts[0])} if isinstance(layer, RetrievalLayer) else {}


def require_savable(cache: RetrievalCache) -> None:
    """Raise InputDataError for several rows, padding, pages, images or no tokens."""
    if len(cache.batch.sequences) != 1 or cache.batch.valid is not None or not cache.batch.columns:
        raise InputDataError(
            "only a cache of one sequence with tokens and without padding can be saved, this cache has "
            f"{len(cache.batch.sequences)} sequences of {cache.batch.columns} tokens; save each sequence in a context "
            "of its own"
        )
    if cache.batch.images is not None or np.asarray(cache.batch.sequences[0].token_ids).min(initial=0) < 0:
        raise InputDataError("a context with images cannot be saved; save its text without them")
    if cache.batch.paged_prefix is not None:
        raise InputDataError(
            f"{cache.batch.paged_prefix.tokens:,} tokens of this cache are in pages of an engine (paged_prefix_tokens) "
            "and have no index, so they cannot be saved; read the text with LLM.read(text, save=name)"
        )


def saving_fork(cache: RetrievalCache) -> RetrievalCache:
    """Return a fork to be saved while `cache` goes on. Raises as `require_savable`."""
    require_savable(cache)
    return cache.fork()


def layer_state(cache: RetrievalCache, number: int, since: Marks | None) -> State:
    """Layer `number` of a fork to be saved, without what `since` marks."""
    layer: Any = cache.layers[number]
    if isinstance(layer, RetrievalLayer):
        assert layer.held is not None
        mark = None if since is None else since.paths[number]
        plain, arrays = path_state(layer.hosts[0], 0 if mark is None else len(mark.spans), mark)
        edge, window = layer.held.edge()
        unturned = layer.held.unturned_sinks
        more = {} if unturned is None else {"sinks/unturned": _array(unturned)}
        return (
            {"kind": "retrieval", "q_heads": layer.q_heads, "host": plain, "edge": edge, "dtype": _name(window[0])},
            {**{HOST + name: array for name, array in arrays.items()}, **_window_arrays(window), **more},
        )
    if isinstance(layer, SlidingLayer):
        assert layer.window is not None
        key, value = layer.window.tail()
        plain = {"kind": "sliding", "dtype": _name(key), "unseen": layer.unseen}
        return plain, {"tail/key": _array(key), "tail/value": _array(value)}
    if isinstance(layer, StateLayer):
        return _linear_state(layer)
    raise InputDataError(
        f"layer {number} is a {type(layer).__name__}, which cannot be saved; use a context without save="
    )


def restored_cache(
    model: PreTrainedModel, config: Config, index: Config, ids: Sequence[int], forgotten: Forgotten
) -> RetrievalCache:
    """A cache for one sequence of `ids`, whose layers `restore_layer` fills. index: what the first read decided on."""
    cache = RetrievalCache(model, config)
    cache.index.take(index, len(ids))
    cache.batch.start(1)
    cache.batch.forgotten = forgotten
    (sequence,) = cache.batch.sequences
    sequence.token_ids.extend(ids)
    sequence.length = cache.batch.columns = len(ids)
    cache.batch.factors = None if cache.rope is None else cache.rope.factors(len(ids))
    cache.batch.weights = weight_state(unwrapped(model))
    return cache


def restore_layer(
    cache: RetrievalCache, number: int, device: torch.device, states: Sequence[State], sent: SentCodes
) -> None:
    """Fill layer `number` on `device` with its states of a chain of nodes, the root's first.

    Nothing may be asked of the layer before `sent` has been waited for.
    """
    layer: Any = cache.layers[number]
    plain, arrays = states[-1]
    kinds: dict[Any, str] = {RetrievalLayer: "retrieval", SlidingLayer: "sliding", StateLayer: "state"}
    if kinds.get(type(layer)) != plain["kind"]:
        raise StoreMismatchError(
            f"layer {number} of the saved context is of kind {plain['kind']!r}, the model's is a "
            f"{type(layer).__name__}; open it with the model that read it"
        )
    if isinstance(layer, StateLayer):
        _restore_linear(layer, plain, arrays, device)
        return
    with side_stream(device):
        tail = _tensors(arrays, "tail", plain["dtype"], device)
        _require_tokens("tail", tail, tail)
        layer.is_initialized = True
        if isinstance(layer, SlidingLayer):
            layer.take_window(*tail, int(plain["unseen"]))
            return
        layer.q_heads = int(plain["q_heads"])
        held = layer.hold(*(part[:, :, :0] for part in tail))
        sinks = _tensors(arrays, "sinks", plain["dtype"], device)
        _require_tokens("sinks", sinks, tail)
        _restore_path(held.hosts[0], states, device, sent)
        _require_edge(cache, plain, (len(held.hosts[0]), sinks[0].shape[2], tail[0].shape[2], tail[0].shape[1]))
        held.restore_edge(plain["edge"], sinks, tail)
        if "sinks/unturned" in arrays:
            held.unturned_sinks = _tensor(arrays["sinks/unturned"], plain["dtype"], torch.device("cpu"))
        _bring_clusters(layer, held)


def _restore_path(host: SequenceKV, states: Sequence[State], device: torch.device, codes: SentCodes) -> None:
    coder = None
    if host.spec.keeps_device_keys:
        coder = DeviceCoder(device, host.num_kv_heads, codes, on_host=host.spec.host_reads.codes)
    path_from_states([(one["host"], _of_host(some)) for one, some in states], host, coder)
    codes.flush()


def _bring_clusters(layer: RetrievalLayer, held: LayerKV) -> None:
    """To a device that has codes: the first question would wait for them, layer by layer."""
    (host,), ((start, stop),) = held.hosts, held.ranges
    count = layer.config.retrieve_count(stop - start)
    if count is not None and stop > start and host.spec.keeps_codes(host.head_dim):
        bring_clusters(host, start, stop, count)


def make_rows_ahead(cache: RetrievalCache) -> None:
    """Have threads make the int8 rows that a GPU reads of an opened context: the first answer decodes with them."""
    for layer in _retrieving(cache).values():
        if layer.held is None or not device_reads(layer):
            continue
        for host, (start, stop) in zip(layer.held.hosts, layer.held.ranges, strict=True):
            count = layer.config.retrieve_count(stop - start)
            if count is not None and stop > start:
                ask_for_rows_of(host, start, stop, count)


def asked_exactly(cache: RetrievalCache, devices: Sequence[torch.device]) -> list[Segment]:
    """Return the segments that exact questions will upload to GPUs, in the order of layers. devices: of each layer."""
    if cache.config.question_attention != "exact":
        return []
    held = [layer.held for number, layer in _retrieving(cache).items() if devices[number].type == "cuda"]
    return [segment for one in held if one is not None for host in one.hosts for segment in host.segments]


class MappedBytes(NamedTuple):
    """Bytes of keys and values that are maps of a store's files: part of the system's cache of the disk.

    Attributes:
        nbytes: all of them.
        locked: those that are page-locked for a GPU; the system cannot evict these.
    """

    nbytes: int
    locked: int


def mapped_bytes(cache: RetrievalCache) -> MappedBytes:
    """Count the mapped keys and values of a cache; shared segments count once. `host_nbytes` includes them."""
    segments = segments_of(host for layer in _retrieving(cache).values() for host in layer.hosts)
    mapped = [one for one in segments if not one.is_hole and is_mapped(one.keys) and is_mapped(one.values)]
    locked = [one for one in mapped if one.locked_rows is not None]
    return MappedBytes(sum(one.nbytes for one in mapped), sum(one.nbytes for one in locked))


def layer_devices(model: PreTrainedModel, layers: int) -> list[torch.device]:
    """Return the device on which each layer of 0 to `layers` - 1 computes."""
    found = {number: execution_device(layer) for layer, number in decoder_layers(model)}
    return [found.get(number, input_device(model)) for number in range(layers)]


def ids_array(ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Token ids as they are saved."""
    return ids_tensor(ids).to(torch.int32).numpy()


def _retrieving(cache: RetrievalCache) -> dict[int, RetrievalLayer]:
    return {number: layer for number, layer in enumerate(cache.layers) if isinstance(layer, RetrievalLayer)}


def _of_host(arrays: Any) -> dict[str, Array]:
    return {name.removeprefix(HOST): array for name, array in arrays.items() if name.startswith(HOST)}


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _array(tensor: Tensor) -> Array:
    """A copy on the host that no later step changes."""
    integers = _AS_INTEGERS.get(tensor.dtype)
    plain = tensor.detach() if integers is None else tensor.detach().view(integers)
    return brought(plain)


def _tensor(array: Array, dtype: str, device: torch.device) -> Tensor:
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype) or torch.from_numpy(array).dtype != _AS_INTEGERS.get(wanted, wanted):
        raise InputDataError(
            f"a saved array has dtype {array.dtype}, but its record says {dtype!r:.80}; save the context again"
        )
    return sent_array(array, device).view(wanted)


def _tensors(arrays: Any, name: str, dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    key, value = (_tensor(arrays[f"{name}/{part}"], dtype, device) for part in ("key", "value"))
    return key, value


def _require_edge(cache: RetrievalCache, plain: dict[str, Any], held: tuple[int, int, int, int]) -> None:
    """Raise InputDataError where the numbers of a layer's edge do not fit its tokens.

    held: tokens of the host path, of the sinks and of the tail, and key-value heads.
    """
    edge, (host, sinks, tail, kv_heads) = plain["edge"], held
    numbers = plain["q_heads"], edge["sinks"], edge["stop"], edge["tail_start"]
    whole = all(type(one) is int and one >= 0 for one in numbers)
    if not whole or edge["tail_start"] + tail != cache.batch.columns or not numbers[0] or numbers[0] % kv_heads:
        raise InputDataError(
            f"{plain['q_heads']!r:.80} heads and {edge!r:.80} of a saved layer do not fit its {cache.batch.columns} "
            "tokens; save the context again"
        )
    if edge["sinks"] != sinks or not edge["stop"] <= edge["tail_start"] <= host <= cache.batch.columns:
        raise InputDataError(
            f"{edge!r:.80} of a saved layer does not fit {sinks} sinks and {host} tokens in host memory; save the "
            "context again"
        )


def _require_tokens(name: str, kv: tuple[Tensor, Tensor], like: tuple[Tensor, Tensor]) -> None:
    """Raise InputDataError unless kv are keys and values of as many tokens of one row, with the heads of `like`."""
    shapes = [tuple(one.shape) for one in kv]
    wanted = [
        (1, like[0].shape[1], kv[0].shape[2], one.shape[3]) if kv[0].ndim == one.ndim == 4 else () for one in like
    ]
    if shapes != wanted:
        raise InputDataError(
            f"the {name} of a saved layer must have keys and values of {wanted}, got {shapes}; save the context again"
        )


def _window_arrays(parts: Sequence[Tensor]) -> dict[str, Array]:
    names = "sinks/key", "sinks/value", "tail/key", "tail/value"
    return {name: _array(part) for name, part in zip(names, parts, strict=True)}


def _linear_state(layer: StateLayer) -> State:
    """The states, and the other attributes of transformers' layer: flags and sizes by number."""
    states = layer.confirmed_states()
    noted = {
        name: {str(number): one for number, one in value.items()}
        for name, value in vars(layer).items()
        if isinstance(value, dict) and name not in STATE_NAMES and all(_is_plain(one) for one in value.values())
    }
    dtypes = {f"{name}/{number}": _name(state) for (name, number), state in states.items()}
    arrays = {f"{name}/{number}": _array(state) for (name, number), state in states.items()}
    return {"kind": "state", "noted": noted, "dtypes": dtypes}, arrays


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int)


def _restore_linear(layer: StateLayer, plain: dict[str, Any], arrays: Any, device: torch.device) -> None:
    for name, values in plain["noted"].items():
        getattr(layer, name).update({int(number): value for number, value in values.items()})
    for place, dtype in plain["dtypes"].items():
        name, number = place.rsplit("/", 1)
        state = _tensor(arrays[place], dtype, device)
        getattr(layer, name)[int(number)] = state
        vars(layer).update(device=state.device, dtype=state.dtype)


def file_of(cache: RetrievalCache, number: int) -> str | None:
    """The name of the file for layer `number`; None for a layer of a hybrid that keeps nothing."""
    layer = cache.layers[number]
    return None if isinstance(layer, StateLayer) and not layer.nbytes else f"layer-{number:03d}"
