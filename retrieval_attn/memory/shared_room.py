"""How much of a GPU the texts may hold that an engine keeps although nobody asks about them now."""

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

__all__ = ["shared_device_bytes", "shared_room"]

log = logging.getLogger(__name__)

SHARE = 0.25
"""Of what is left. The rest is for what grows with the texts that are read and asked about: hidden states, keys of the
layers that are on their way to the host, codes, and an engine's pages for exact prefixes, which take half at most."""


def shared_device_bytes(model: PreTrainedModel, config: Config, rows: int) -> int | None:
    """For a loaded model, see `shared_room`; on several GPUs, for all together. None: it runs on a CPU."""
    places = [place for place in devices(model) if place.type == "cuda"]
    if not places:
        return None
    shape = model_shape(model)
    size = DeviceSize(shape, config, max(config.prefill_chunk, shape.sliding_window), rows)
    room = shared_room(size, sum(map(spare_bytes, places)), len(places))
    log.info("texts that nobody asks about may hold %s on the device", show_bytes(room))
    return room


def shared_room(size: DeviceSize, spare: int, gpus: int = 1) -> int:
    """A quarter of what `spare` bytes beside the weights leave for all rows' windows and states, and for a chunk that
    each GPU reads; 0 where they are too few.

    size: of as many sequences as there are rows, in a context at least as long as a chunk and a sliding window.
    """
    rows = size.window_bytes + size.sliding_bytes + sum(state_bytes(size))
    reading = gpus * replace(size, batch=1).chunk_bytes(size.chunk)
    return max(0, int((spare - rows - reading) * SHARE))
