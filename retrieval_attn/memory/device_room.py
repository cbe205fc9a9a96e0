"""Whether a device has room for the codes of a context's keys, so that index="auto" may keep them there."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any

from retrieval_attn.config import Config
from retrieval_attn.errors import ConfigError
from retrieval_attn.gpu.memory import bus_bandwidth, spare_bytes, split_bytes
from retrieval_attn.index.code_layout import PLANNED
from retrieval_attn.index.device import DeviceIndex
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.memory.device import DeviceLayout
from retrieval_attn.memory.host_room import available_host_bytes
from retrieval_attn.memory.index_choice import (
    chosen_index,
    has_room_for_rows,
    known_shape,
    sized,
    with_rows,
    without_rows,
)
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.model.hidden import why_not_on_host
from retrieval_attn.model.packed import unpacked_bytes
from retrieval_attn.model.placement import input_device, is_spread
from retrieval_attn.offload.finer import reads_host
from retrieval_attn.offload.managed import has_managed

log = logging.getLogger(__name__)
MARGIN = 1 << 28
"""Bytes of a device that a choice leaves: a read that had all but a few of what was free ended at layer 25 of 32."""
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

    def decide(self, tokens: int, batch: int = 1) -> IndexSpec:
        """The index for `tokens` first tokens of each of `batch` sequences; `config` and `spec` say so from then on."""
        model = self._loaded
        if not self._decided and self._requested.index == "auto" and model is not None:
            free = whole_device_bytes(model)
            _log_fragmentation(model, free)
            finer = free is not None and reads_host(input_device(model))
            host_free = self._host_free(model)
            room = None if free is None else free - MARGIN
            self.config = chosen_index(
                model.config,
                self._requested,
                tokens,
                room,
                batch,
                hidden_movable=why_not_on_host(model) is None,
                finer=finer,
                host_free=host_free,
            )
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

    But for the copy of a matrix of 4 bits that reading makes (`model/fused/unpacking.py`).
    """
    device = input_device(model)
    if device.type != "cuda" or is_spread(model):
        return None
    return max(0, spare_bytes(device) - unpacked_bytes(model))


def whole_device_bytes(model: Any) -> int | None:
    """`free_device_bytes` without pieces between tensors: what does not fit them ends a read."""
    free = free_device_bytes(model)
    return None if free is None else max(0, free - split_bytes(input_device(model)))


def _log_fragmentation(model: Any, free: int | None) -> None:
    """Tell of free memory that no large tensor fits: where weights were loaded by others, say."""
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
