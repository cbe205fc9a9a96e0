"""Whether a device has room for the codes of a context's keys, so that index="auto" may keep them there."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from retrieval_attn.config import Config
from retrieval_attn.errors import ConfigError, RetrievalAttentionError
from retrieval_attn.gpu.codes.reach import RowShape
from retrieval_attn.gpu.memory import bus_bandwidth, spare_bytes, split_bytes
from retrieval_attn.index.auto import SKETCH_FROM
from retrieval_attn.index.code_sizes import brought_size, code_sizes
from retrieval_attn.index.device import DeviceOptions
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.memory.device import DEVICE_RESERVE, DeviceSize, Layout, layouts, state_bytes
from retrieval_attn.memory.host import HostSize
from retrieval_attn.memory.host_room import available_host_bytes
from retrieval_attn.memory.shape import ModelShape, model_shape
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.model.hidden import why_not_on_host
from retrieval_attn.model.packed import unpacked_bytes
from retrieval_attn.model.placement import input_device, is_spread
from retrieval_attn.offload.finer import reads_host
from retrieval_attn.offload.managed import has_managed

log = logging.getLogger(__name__)
LEAST_CHUNK = 512
"""Tokens of a chunk that `auto` takes: below, reading slows down."""
ROWS_BUS = 24e9
"""Bytes per second of a bus by which a GPU reads rows as soon as the host attends: 1.3 MB of a layer of Llama-3-8B's
shape took 29 us by one of 63 GB/s on an H100, whose host took 60 to 70. PCIe 4 of 16 lanes has 32, PCIe 3 has 16."""
_ANY_DIM = 128
"""Kinds keep codes on the device for every head_dim or for none."""


class IndexChoice:
    """Which index the keys of one cache get. `auto` is decided when the first tokens come, once for all layers."""

    def __init__(self, model: Any, config: Config) -> None:
        """model: whose cache it is; None: nothing is known of its device. Raises ConfigError for an index or options
        that do not exist.
        """
        self._model = None if model is None else weakref.ref(model)
        self._requested = config
        self.config, self.spec = config, IndexSpec.of(config.index, config.index_options)
        if config.retrieve == "auto" and self.spec.keeps_codes(_ANY_DIM):
            raise ConfigError(
                f"retrieve='auto' gives each head keys of its own, and index={config.index!r} names as many for all of "
                "them; use retrieve=100, or another index, such as 'auto'"
            )
        self._decided = False

    @property
    def chunk(self) -> int | None:
        """Tokens that go through a layer at once while the first ones are read, where codes fit with no more; None:
        as many as the caller says. Later tokens come when what reading took is free again.
        """
        chunk = self.config.prefill_chunk
        return chunk if chunk < self._requested.prefill_chunk else None

    @property
    def _loaded(self) -> Any:
        """The model, as long as there is one."""
        return None if self._model is None else self._model()

    def reset(self) -> None:
        """The next first tokens decide anew; until then `config` and `spec` stay, for forks that read before."""
        self._decided = False

    def take(self, decided: Config, tokens: int) -> None:
        """The index is the one that `config` named when a saved context of so many tokens was read, but for codes on
        the host that the device here cannot read. Rows that a device reads are not saved: they are made where the host
        here has room for them.
        """
        model, options = self._loaded, dict(decided.index_options)
        on_host = {"finer_bytes", "codes_on_host"}.intersection(options)
        if on_host and model is not None and not reads_host(input_device(model)):
            options = {name: value for name, value in options.items() if name not in on_host}
            decided = decided.replace(index_options=options)
        if model is not None and decided.index == "device" and self._requested.index == "auto":
            options.pop("int8_rows", None)
            plain = decided.replace(index_options=options)
            shape = _known_shape(model.config)
            room = shape is not None and has_room_for_rows(shape, plain, tokens, self._host_free(model))
            decided = _with_rows(plain) if room else plain
        self.config, self.spec = decided, IndexSpec.of(decided.index, decided.index_options)
        self._decided = True

    def decide(self, tokens: int, batch: int = 1) -> IndexSpec:
        """The index for `tokens` first tokens of each of `batch` sequences; `config` and `spec` say so from then on."""
        model = self._loaded
        if not self._decided and self._requested.index == "auto" and model is not None:
            possible = self._requested
            if possible.hidden_states == "auto" and why_not_on_host(model) is not None:
                possible = possible.replace(hidden_states="device")
            free = whole_device_bytes(model)
            finer = free is not None and reads_host(input_device(model))
            host_free = self._host_free(model)
            self.config = chosen_index(model.config, possible, tokens, free, batch, finer=finer, host_free=host_free)
            self.spec = IndexSpec.of(self.config.index, self.config.index_options)
        self._decided = True
        return self.spec

    def _host_free(self, model: Any) -> int:
        """Bytes of host memory of which some may be for rows that a device reads; 0 where it reads none."""
        place = input_device(model)
        if not has_managed(place) or is_spread(model) or self._requested.graph is False:
            return 0
        bus = bus_bandwidth(place)
        return available_host_bytes() if bus is None or bus >= ROWS_BUS else 0


def free_device_bytes(model: Any) -> int | None:
    """What this process may still take on the one CUDA device that `model` runs on; None for any other placement.

    But for the copy of a matrix of 4 bits that reading makes (`engine/unpacking.py`).
    """
    device = input_device(model)
    if device.type != "cuda" or is_spread(model):
        return None
    return max(0, spare_bytes(device) - unpacked_bytes(model))


def whole_device_bytes(model: Any) -> int | None:
    """`free_device_bytes` without pieces between tensors: what does not fit them ends a read."""
    free = free_device_bytes(model)
    return None if free is None else max(0, free - split_bytes(input_device(model)))


def chosen_index(
    model_config: Any,
    config: Config,
    tokens: int,
    free: int | None,
    batch: int = 1,
    *,
    finer: bool = True,
    host_free: int = 0,
) -> Config:
    """`config`, or where it says index="auto" and `free` bytes of device memory are enough, one with index="device".

    Enough for reading so many tokens of each of `batch` sequences, in the tightest layout that the options allow, and
    for their codes, beside what is there already. Where codes of the usual size do not fit, smaller ones are taken, of
    which more candidates get an exact score (`SMALLER_CODES`), or where the device can read host memory (finer) what
    finer codes there leave of these. Where none fit beside a chunk of config.prefill_chunk tokens, that is halved until
    some do. Where the host has room for int8 rows of all keys and values that a device reads, they are kept as well;
    host_free: its bytes, for a device that reads any. Where no codes fit, they lie on the host, if it has room, and
    come by the bus for every token (`BROUGHT_CODES`), in a third of the time that the host's scan takes. A scan on the
    device takes a tenth of it, and nothing is built while the device waits; the choice is logged.
    """
    if config.index != "auto" or config.index_options or free is None or tokens < SKETCH_FROM:
        return config
    if config.retrieve == "auto":
        log.info("index 'auto' stays on the host: codes on the device name as many keys for every head")
        return config
    try:
        shape = model_shape(model_config, None)
    except RetrievalAttentionError as error:
        log.warning("index 'auto' stays on the host: what codes on the device need is not known (%s)", error)
        return config
    wanted = config.retrieve_count(tokens)
    sizes: list[Config] = []
    for size in code_sizes(shape.key_dim, wanted, finer=finer):
        plain = config.replace(index="device", index_options=size)
        room = has_room_for_rows(shape, plain, tokens, host_free, batch)
        sizes += [_with_rows(plain), plain] if room else [plain]
    brought = brought_size(shape.key_dim, wanted) if finer and config.estimates else None
    on_host: list[Config] = []
    if brought is not None:
        plain = config.replace(index="device", index_options=brought)
        if _host_bytes(shape, plain, tokens, batch) <= host_free:
            room = has_room_for_rows(shape, plain, tokens, host_free, batch)
            on_host = [_with_rows(plain), plain] if room else [plain]
    for coded in (*_coded_configs(sizes, tokens), *_coded_configs(on_host, tokens)):
        needed = _needed(shape, coded, tokens, batch, free)
        if needed <= free:
            taken = f"; prefill_chunk={coded.prefill_chunk} makes room for them and is taken for this read"
            log.info(
                "index 'auto' for %d tokens: codes of all keys %s, %d bytes each%s (reading takes %s, %s is free)%s",
                tokens,
                "come from the host" if coded.index_options.get("codes_on_host") else "lie on the device",
                DeviceOptions(**coded.index_options).bytes_for(shape.key_dim),
                ", which reads int8 rows on the host" if coded.index_options.get("int8_rows") else "",
                show_bytes(needed),
                show_bytes(free),
                "" if coded.prefill_chunk == config.prefill_chunk else taken,
            )
            return coded
    log.info(
        "index 'auto' for %d tokens: codes of all keys do not fit on the device (reading takes %s with the smallest "
        "codes and chunks, %s is free)",
        tokens,
        show_bytes(needed),
        show_bytes(free),
    )
    return config


def has_room_for_rows(shape: ModelShape, config: Config, tokens: int, host_free: int, batch: int = 1) -> bool:
    """Whether rows that the device reads take no more than half of what keys and values leave of the host's memory.

    config: without them. Not without estimates: then the host attends.
    """
    held, coded = (_host_bytes(shape, one, tokens, batch) for one in (config, _with_rows(config)))
    rows = coded - held
    return RowShape(shape.key_dim, shape.value_dim).readable and config.estimates and held + 2 * rows <= host_free


def _host_bytes(shape: ModelShape, config: Config, tokens: int, batch: int) -> int:
    """Of keys, values and what the index has of them."""
    size = HostSize(shape, config, batch)
    return size.token_bytes * tokens + size.index_bytes(tokens)


def _with_rows(config: Config) -> Config:
    return config.replace(index_options={**config.index_options, "int8_rows": True})


def _coded_configs(sizes: Sequence[Config], tokens: int) -> Iterator[Config]:
    """All `sizes`, the preferred first, with their chunk, then with half of it, and so on."""
    yield from sizes
    chunk = min(sizes[0].prefill_chunk, tokens) if sizes else 0
    while (chunk := chunk // 2) >= LEAST_CHUNK:
        yield from (one.replace(prefill_chunk=chunk) for one in sizes)


def _needed(shape: ModelShape, config: Config, tokens: int, batch: int, free: int) -> int:
    """Bytes that reading and then generating take beside what is there, in the layout that fits `free` best."""
    size = _sized(shape, config, tokens, batch, free)
    return max(size.reading_bytes - state_bytes(size)[1], size.decode_bytes) - _there(shape)


def reading_layout(model_config: Any, config: Config, tokens: int, free: int | None, batch: int = 1) -> Layout:
    """Where a pass has what grows with `tokens` tokens of each of `batch` sequences, see `Layout`.

    free: bytes of device memory beside what is there already; None: not known, and the first of `layouts` is taken.
    """
    shape = _known_shape(model_config)
    if free is None or shape is None:
        return layouts(config)[0]
    return _sized(shape, config, tokens, batch, free).layout


def _known_shape(model_config: Any) -> ModelShape | None:
    try:
        return model_shape(model_config, None)
    except RetrievalAttentionError:
        return None


def _sized(shape: ModelShape, config: Config, tokens: int, batch: int, free: int) -> DeviceSize:
    """In the layout that fits `free` best. States of a captured step are there already, or come behind the reading."""
    size = DeviceSize(shape, config, tokens, batch)
    return size.fitting(free + _there(shape) + state_bytes(size)[1])


def _there(shape: ModelShape) -> int:
    """Bytes of the arithmetic that a loaded model has taken already."""
    return shape.weight_bytes + DEVICE_RESERVE
