"""How much of a GPU an engine's texts may hold: those that nobody asks about now, and exact prefixes in pages."""

from __future__ import annotations

import logging
from dataclasses import replace

from transformers import PreTrainedModel

from retrieval_attn.config import Config
from retrieval_attn.gpu.memory import spare_bytes
from retrieval_attn.memory.device import DeviceSize, state_bytes
from retrieval_attn.memory.shape import model_shape
from retrieval_attn.memory.units import show_bytes
from retrieval_attn.model.placement import devices

__all__ = ["exact_device_bytes", "prefix_cache_device_bytes", "shared_room"]

log = logging.getLogger(__name__)

SHARE, EXACT_SHARE = 0.25, 0.5
"""Of what is left, for texts that nobody asks about and for exact prefixes. The rest is for what grows with the texts
that are read and asked about: hidden states, keys of the layers that are on their way to the host, codes."""


def prefix_cache_device_bytes(model: PreTrainedModel, config: Config, rows: int) -> int | None:
    """For a loaded model, see `shared_room`; on several GPUs, for all together. None: it runs on a CPU."""
    beside = _beside(model, config, rows)
    if beside is None:
        return None
    room = shared_room(*beside)
    log.info("texts that nobody asks about may hold %s on the device", show_bytes(room))
    return room


def exact_device_bytes(model: PreTrainedModel, config: Config, rows: int) -> int | None:
    """The same for pages of exact prefixes: half of what is left. Half of all that is free, without the rows' windows
    in mind, and 32 rows of a 7B model with as many key heads as query heads found no memory on a card of 80 GB.
    """
    beside = _beside(model, config, rows)
    return None if beside is None else int(_left(*beside) * EXACT_SHARE)


def shared_room(size: DeviceSize, spare: int, gpus: int = 1) -> int:
    """A quarter of what `spare` bytes beside the weights leave for all rows' windows and states, and for a chunk that
    each GPU reads; 0 where they are too few.

    size: of as many sequences as there are rows, in a context at least as long as a chunk and a sliding window.
    """
    return int(_left(size, spare, gpus) * SHARE)


def _beside(model: PreTrainedModel, config: Config, rows: int) -> tuple[DeviceSize, int, int] | None:
    """A loaded model's rows, what its GPUs have to spare, and how many there are; None: it runs on a CPU."""
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
