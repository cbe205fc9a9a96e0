"""Free memory of a loaded model's GPUs and its division: index, layout of a prefill, prefix cache, exact pages."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from retrieval_attn.config import Config
from retrieval_attn.gpu.memory import bus_bandwidth, spare_bytes, split_bytes
from retrieval_attn.index.device import PLANNED, DeviceIndex
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.memory.device import DeviceLayout, DeviceSize, state_bytes
from retrieval_attn.memory.host_room import available_host_bytes
from retrieval_attn.memory.index_choice import (
    chosen_index,
    has_room_for_rows,
    known_shape,
    layout_like,
    opened_bytes,
    reading_bytes,
    sized,
    with_rows,
    without_rows,
)
from retrieval_attn.memory.reclaim import idle_device_bytes, reclaim
from retrieval_attn.memory.shape import ModelShape, model_shape
from retrieval_attn.memory.units import GIB, show_bytes
from retrieval_attn.model.placement import devices, input_device, is_spread, why_not_on_host
from retrieval_attn.model.quantization import unpacked_bytes
from retrieval_attn.offload.managed import has_managed, reads_host

log = logging.getLogger(__name__)
MARGIN = 1 << 28
"""Bytes of a device that a choice leaves: a read that had all but a few of what was free ended at layer 25 of 32."""
ROWS_BUS = 24e9
"""Bytes per second of a bus by which a GPU reads rows as soon as the host attends: 1.3 MB of a layer of Llama-3-8B's
shape took 29 us by one of 63 GB/s on an H100, whose host took 60 to 70. PCIe 4 of 16 lanes has 32, PCIe 3 has 16."""
LAYOUT_TOKENS = 131072
"""Longest text for which the index of an engine's texts is chosen; longer ones may get another one."""
COPY_SPARE = GIB
"""Bytes of host memory that are left beyond a copy of a text."""
GRAPH_BYTES = GIB
"""Bytes for the graphs of an engine's steps, and for the work of a question while a text is read: .96 GiB lay outside
the allocator after the graphs of 16 rows of Llama-3-8B's shape were captured (H200)."""


class IndexChoice:
    """Index of the keys of one cache. `auto` is decided before the first prefill, once for all layers."""

    def __init__(self, model: Any, config: Config) -> None:
        """model: model of the cache; None: its device is unknown. Raises ConfigError for an unknown index or option."""
        self._model = None if model is None else weakref.ref(model)
        self._requested = config
        self.config, self.spec = config, IndexSpec.of(config.index, config.index_options)
        self._decided = False

    @property
    def chunk(self) -> int | None:
        """Prefill chunk of the first text if codes fit only with a smaller one; None: the caller's chunk."""
        chunk = self.config.prefill_chunk
        return chunk if chunk < self._requested.prefill_chunk else None

    @property
    def _loaded(self) -> Any:
        """The model while it is alive."""
        return None if self._model is None else self._model()

    def reset(self) -> None:
        """Decide again at the next first prefill; until then `config` and `spec` are kept for forks."""
        self._decided = False

    def take(self, decided: Config, tokens: int) -> None:
        """Adopt the index of a saved context of `tokens` tokens.

        Codes in host memory are dropped if this device cannot read host memory. Int8 rows are not saved: they are
        built again if the host has room.
        """
        model = self._loaded
        on_host = {"finer_bytes", "codes_on_host"}.intersection(decided.index_options)
        if on_host and model is not None and not reads_host(input_device(model)):
            kept = {name: value for name, value in decided.index_options.items() if name not in on_host}
            decided = decided.replace(index_options=kept)
        if model is not None and decided.index in (DeviceIndex.kind, PLANNED) and self._requested.index == "auto":
            plain = without_rows(decided.replace(index=PLANNED))
            shape = known_shape(model.config)
            room = shape is not None and has_room_for_rows(shape, plain, tokens, self._host_free(model))
            decided = with_rows(plain) if room else plain
        self.config, self.spec = decided, IndexSpec.of(decided.index, decided.index_options)
        self._decided = True
        self._reclaim(lambda shape, room: opened_bytes(shape, self.config, tokens))

    def has_room(self, tokens: int, image_tokens: int = 0) -> bool:
        """Return False if an engine's layout for `tokens` more tokens lacks GPU memory even without idle texts, or if
        the embedding of an image of `image_tokens` tokens does.
        """
        layout = layout_of(self._loaded)
        if layout is None:
            return True
        room = layout.free - MARGIN + idle_device_bytes()
        if _image_bytes(layout.shape, image_tokens) > room:
            return False
        if self._decided:
            return True
        return layout_like(layout.shape, self._requested, layout.config, tokens, room) is not None

    def can_ask(self, nbytes: int, tokens: int) -> bool:
        """Return whether the GPU has room for `nbytes` bytes and a question on `tokens` tokens without idle texts."""
        model = self._loaded
        free = None if model is None else _free_bytes(model)
        shape = None if free is None else _shape_of(model)
        if free is None or shape is None:
            return True
        return free - MARGIN + idle_device_bytes() >= nbytes + question_bytes(shape, tokens)

    def make_room_to_ask(self, nbytes: int, tokens: int) -> None:
        """Free GPU memory of idle texts if `nbytes` bytes and a question about `tokens` tokens lack room."""
        self._reclaim(lambda shape, room: nbytes + question_bytes(shape, tokens))

    def make_room_to_copy(self, tokens: int, layer_bytes: int) -> bool:
        """Return whether there is host memory for a copy of `layer_bytes` bytes in each layer, and GPU memory for the
        codes of `tokens` tokens that get a new index; if so, free GPU memory of idle texts for these.
        """
        model = self._loaded
        shape = None if model is None else _shape_of(model)
        layers = 1 if shape is None else shape.full_layers
        if layers * layer_bytes > available_host_bytes() - COPY_SPARE:
            return False
        free = None if model is None else _free_bytes(model)
        if free is None or shape is None:
            return True
        room, idle = free - MARGIN, idle_device_bytes()
        needed = reading_bytes(shape, self.config, tokens, room + idle)
        if room < needed <= room + idle:
            reclaim(device=needed - room)
        return needed <= room + idle

    def make_room_for_image(self, tokens: int) -> None:
        """Free GPU memory of idle texts if the embedding of an image of `tokens` tokens lacks room."""
        self._reclaim(lambda shape, room: _image_bytes(shape, tokens))

    def make_room(self, tokens: int, batch: int = 1) -> None:
        """Evict idle texts from GPU memory if a prefill of `tokens` more tokens of `batch` sequences needs their room.

        What it needs is what it takes if they were all evicted, so that no text gets smaller codes because of them.
        """
        model = self._loaded

        def needed(shape: ModelShape, room: int) -> int:
            config = self.config if self._decided else self._requested
            layout = None if self._decided else layout_of(model)
            shared = None if layout is None else layout_like(shape, config, layout.config, tokens, room, batch)
            if shared is not None:
                return reading_bytes(shape, shared, tokens, room, batch)
            finer, host_free = reads_host(input_device(model)), self._host_free(model)
            return reading_bytes(shape, config, tokens, room, batch, finer=finer, host_free=host_free)

        self._reclaim(needed)

    def _reclaim(self, needed: Callable[[ModelShape, int], int]) -> None:
        """Evict idle texts for the bytes that are needed; `needed` gets those that are free without idle texts."""
        model, idle = self._loaded, idle_device_bytes()
        free = _free_bytes(model) if idle else None
        shape = None if free is None else _shape_of(model)
        if free is None or shape is None:
            return
        room = free - MARGIN
        lacking = needed(shape, room + idle) - room
        if lacking > 0:
            reclaim(device=lacking)

    def decide(self, tokens: int, batch: int = 1) -> IndexSpec:
        """Choose the index for the first `tokens` tokens of each of `batch` sequences; set `config` and `spec`.

        Idle texts yield their GPU memory first, so that no text gets smaller codes because of them.
        """
        model = self._loaded
        if not self._decided and self._requested.index == "auto" and model is not None:
            self.make_room(tokens, batch)
            self.config = self._shared_layout(tokens, batch) or self._own_layout(model, tokens, batch)
            self.spec = IndexSpec.of(self.config.index, self.config.index_options)
        self._decided = True
        return self.spec

    def _shared_layout(self, tokens: int, batch: int) -> Config | None:
        """Return the config with the index of an engine's texts; None: there is none, or it lacks memory."""
        layout = layout_of(self._loaded)
        if layout is None:
            return None
        return layout_like(layout.shape, self._requested, layout.config, tokens, layout.free - MARGIN, batch)

    def _own_layout(self, model: Any, tokens: int, batch: int) -> Config:
        """Return the config with the index that fits what is free now."""
        free = whole_device_bytes(model)
        _log_fragmentation(model, free)
        return chosen_index(
            model.config,
            self._requested,
            tokens,
            None if free is None else free - MARGIN,
            batch,
            hidden_movable=why_not_on_host(model) is None,
            finer=free is not None and reads_host(input_device(model)),
            host_free=self._host_free(model),
        )

    def _host_free(self, model: Any) -> int:
        return rows_host_bytes(model, self._requested)


def _image_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the GPU memory that embedding an image of `tokens` tokens takes for a time; 0 without one."""
    return 0 if shape.tower is None or not tokens else shape.tower.image_bytes(tokens)


def rows_host_bytes(model: Any, config: Config) -> int:
    """Return free bytes of host memory for rows that the device reads; 0 if it cannot read host memory."""
    place = input_device(model)
    if not has_managed(place) or is_spread(model) or config.graph is False:
        return 0
    bus = bus_bandwidth(place)
    return available_host_bytes() if bus is None or bus >= ROWS_BUS else 0


class EngineLayout(NamedTuple):
    """Index of all texts of an engine, with facts of its model that stay the same while it runs.

    One look at a model takes 15 ms (32 tiny layers, two busy cores).

    Attributes:
        config: options with the index.
        shape: sizes of the model; `hidden_movable` as the loaded model allows.
        device: GPU of the model.
        unpacked: bytes of `unpacked_bytes`.
    """

    config: Config
    shape: ModelShape
    device: torch.device
    unpacked: int

    @property
    def free(self) -> int:
        """Bytes of `whole_device_bytes`, now."""
        return max(0, spare_bytes(self.device) - self.unpacked - split_bytes(self.device))


_layouts: weakref.WeakKeyDictionary[Any, EngineLayout] = weakref.WeakKeyDictionary()


def layout_of(model: Any) -> EngineLayout | None:
    """Return the index that all texts of an engine on this model get if it fits; None: each text its own."""
    return None if model is None else _layouts.get(model)


def _free_bytes(model: Any) -> int | None:
    """Return `whole_device_bytes` of a model, quickly for that of an engine."""
    layout = layout_of(model)
    if layout is not None:
        return layout.free
    return None if model is None else whole_device_bytes(model)


def _shape_of(model: Any) -> ModelShape | None:
    """Return the sizes of a loaded model, whose hidden states may not be movable to the host; None: unknown."""
    layout = layout_of(model)
    if layout is not None:
        return layout.shape
    shape = known_shape(model.config)
    movable = shape is not None and shape.hidden_movable and why_not_on_host(model) is None
    return None if shape is None else replace(shape, hidden_movable=movable)


def drop_layout(model: Any) -> None:
    """Forget the layout of an engine that is closed."""
    _layouts.pop(model, None)


def planned_rows(model: PreTrainedModel, config: Config, rows: int, tokens: int | None) -> int:
    """Return the largest batch, `rows` at most, whose windows leave GPU memory to read one text; at least 1.

    Fewer rows are better than rows without windows in a graph, whose steps are eager. `rows` itself for a model on a
    CPU or on several GPUs. tokens: of the text, LAYOUT_TOKENS at most; None: no limit.
    """
    free = whole_device_bytes(model)
    shape = None if free is None else _shape_of(model)
    if free is None or shape is None:
        return rows
    finer, host_free, fitting = reads_host(input_device(model)), rows_host_bytes(model, config), rows
    count = min(tokens or LAYOUT_TOKENS, LAYOUT_TOKENS)
    while fitting > 1:
        room = _beside_windows(model, config, fitting, free)
        if reading_bytes(shape, config, count, room, finer=finer, host_free=host_free) <= room:
            break
        fitting = 1 << ((fitting - 1).bit_length() - 1)
    if fitting < rows:
        log.info("steps take %d rows at most: windows of %d leave no room to read %d tokens", fitting, rows, count)
    return fitting


def share_layout(model: PreTrainedModel, config: Config, rows: int, tokens: int | None) -> None:
    """Choose one index for all texts of an engine: only rows with equal indexes share a captured step.

    The index is the one that `auto` chooses for a text of `tokens` tokens (None: no limit), LAYOUT_TOKENS at most, in
    the GPU memory that windows of `rows` rows and graphs leave. Nothing for a model on a CPU or another index.
    """
    _layouts.pop(model, None)
    free = whole_device_bytes(model)
    if config.index != "auto" or free is None:
        return
    chosen = chosen_index(
        model.config, config, min(tokens or LAYOUT_TOKENS, LAYOUT_TOKENS), _beside_windows(model, config, rows, free),
        hidden_movable=why_not_on_host(model) is None, finer=reads_host(input_device(model)),
        host_free=rows_host_bytes(model, config),
    )  # fmt: skip
    shape = _shape_of(model)
    if chosen.index != config.index and shape is not None:
        _layouts[model] = EngineLayout(chosen, shape, input_device(model), unpacked_bytes(model))


def _beside_windows(model: PreTrainedModel, config: Config, rows: int, free: int) -> int:
    """Return what windows and states of a batch and its graphs leave of `free` bytes. Graphs have slots for a power of
    two.
    """
    size = DeviceSize(model_shape(model), config, config.prefill_chunk, 1 << max(0, rows - 1).bit_length())
    return max(0, free - MARGIN - size.window_bytes - size.sliding_bytes - sum(state_bytes(size)) - GRAPH_BYTES)


def free_device_bytes(model: Any) -> int | None:
    """Return bytes that this process may still allocate on the CUDA device of `model`; None for other placements.

    The unpacked copy of a 4-bit matrix during prefill (`model/fused/unpacking.py`) is subtracted.
    """
    device = input_device(model)
    if device.type != "cuda" or is_spread(model):
        return None
    return max(0, spare_bytes(device) - unpacked_bytes(model))


def whole_device_bytes(model: Any) -> int | None:
    """Return `free_device_bytes` without fragments between tensors, which no large tensor fits."""
    free = free_device_bytes(model)
    return None if free is None else max(0, free - split_bytes(input_device(model)))


def _log_fragmentation(model: Any, free: int | None) -> None:
    """Log free memory that no large tensor fits, such as after another program's loading of weights."""
    pieces = 0 if free is None else split_bytes(input_device(model))
    if pieces >= MARGIN:
        log.info(
            "%s of the device's memory is free in pieces between tensors, and of no use to a read: load the model with "
            "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, as LLM does",
            show_bytes(pieces),
        )


def reading_layout(
    model_config: Any, config: Config, tokens: int, free: int | None, batch: int, *, hidden_movable: bool
) -> DeviceLayout:
    """Choose the layout of a prefill of `tokens` tokens of each of `batch` sequences.

    free: free bytes of device memory; None: unknown, and everything stays on the device. hidden_movable: whether the
    loaded model may keep hidden states in host memory.
    """
    shape = None if free is None else known_shape(model_config)
    if free is None or shape is None:
        return DeviceLayout()
    shape = replace(shape, hidden_movable=shape.hidden_movable and hidden_movable)
    return sized(shape, config, tokens, batch, free).layout


EXACT_SHARE = 0.5
"""Share of the remaining memory for pages of exact prefixes."""
QUESTION_BYTES = GIB
"""Bytes that idle texts leave free for a question about one of them: keys and values on their way from the host, and
codes of its tokens. A prefill that needs more evicts some of them first (`IndexChoice.make_room`)."""


QUESTION_LAYERS = 3
"""Layers of keys and values that a question may have on a GPU at once, on their way from the host."""


def question_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the GPU memory for a question about `tokens` tokens, which attends to all of them layer by layer."""
    return max(QUESTION_BYTES, QUESTION_LAYERS * tokens * shape.kv_layer_bytes)


def prefix_cache_device_bytes(model: PreTrainedModel, config: Config, rows: int) -> int | None:
    """Return the GPU memory for idle texts of an engine, the sum over all GPUs. None: the model runs on a CPU.

    See `shared_room`.
    """
    beside = _beside(model, config, rows)
    if beside is None:
        return None
    room = shared_room(*beside)
    log.info("idle texts in the prefix cache may hold %s on the device", show_bytes(room))
    return room


def exact_device_bytes(model: PreTrainedModel, config: Config, rows: int) -> int | None:
    """Return the GPU memory for pages of exact prefixes, the sum over all GPUs. None: the model runs on a CPU.

    Windows of all rows are subtracted before the share is taken: 32 rows of a 7B model without grouped queries
    otherwise find no memory on a card of 80 GB.
    """
    beside = _beside(model, config, rows)
    return None if beside is None else int(_left(*beside) * EXACT_SHARE)


def shared_room(size: DeviceSize, spare: int, gpus: int = 1) -> int:
    """Return what windows and states of all rows, a prefill chunk and QUESTION_BYTES per GPU leave of `spare` bytes.

    size: a batch of all rows, with a context at least as long as a chunk and a sliding window.
    """
    return max(0, _left(size, spare, gpus) - gpus * QUESTION_BYTES)


def _beside(model: PreTrainedModel, config: Config, rows: int) -> tuple[DeviceSize, int, int] | None:
    """Return the sizes of a loaded model's rows, spare bytes and number of its GPUs. None: it runs on a CPU."""
    places = [place for place in devices(model) if place.type == "cuda"]
    if not places:
        return None
    shape = model_shape(model)
    size = DeviceSize(shape, config, max(config.prefill_chunk, shape.sliding_window), rows)
    return size, sum(map(spare_bytes, places)), len(places)


def _left(size: DeviceSize, spare: int, gpus: int) -> int:
    rows = size.window_bytes + size.sliding_bytes + sum(state_bytes(size))
    reading = gpus * replace(size, batch=1).chunks.bytes(size.chunk)
    return max(0, spare - rows - reading)
