"""Experts of a model in GPU memory and, if they exceed it, in host memory: allocation, prefill buffer and moves."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from retrieval_attn.gpu.expert_blocks import BlockLayout, ExpertBlocks, Layer, LayerBuffer, PlacedExperts, fill_blocks
from retrieval_attn.gpu.packed_experts import ExpertShape, PackedExperts, pack_experts
from retrieval_attn.model.placement import mark_host_table
from retrieval_attn.offload.managed import as_device, host_rows

log = logging.getLogger(__name__)
BUFFER = "_retrieval_attn_expert_buffer"
"""Name of the model's buffer for experts of one layer in prefill."""


def empty_blocks(layout: BlockLayout, device: torch.device, on_host: int) -> ExpertBlocks:
    """Allocate blocks for experts, the last `on_host` of them in host memory.

    Raises MemoryPlanError if the system refuses memory that the GPU reads.
    """
    rows = host_rows(1, on_host, layout.nbytes, device)[0]
    mark_host_table(rows)
    card = torch.empty(layout.shape.experts - on_host, layout.nbytes, dtype=torch.uint8, device=device)
    seen = as_device(rows, device) if device.type == "cuda" else rows
    return ExpertBlocks.of(layout, card, rows, seen)


def pack_placed(
    matrices: Iterable[Sequence[Tensor]],
    shape: ExpertShape,
    group: int,
    device: torch.device,
    on_host: int,
    *,
    floats: bool,
) -> PackedExperts | PlacedExperts:
    """Pack experts as `pack_experts` does; on_host: the last ones, which are stored in host memory."""
    if not on_host:
        return pack_experts(matrices, shape, group, device, floats=floats)
    return fill_blocks(matrices, empty_blocks(BlockLayout(shape, group, floats), device, on_host))


def join_layers(model: nn.Module, layers: Sequence[Layer]) -> LayerBuffer | None:
    """Give a model the buffer that its layers' experts in host memory share; None: it has none.

    layers: matrices of each module of experts.
    """
    own = [layer for layer in layers if any(len(one.host) for one in layer)]
    if not own:
        return None
    for blocks in itertools.chain.from_iterable(own):
        blocks.take_sample()
    buffer = LayerBuffer(own)
    model.register_buffer(BUFFER, buffer.bytes, persistent=False)
    setattr(model, _SHARED, buffer)
    slots = [len(layer[0].card) for layer in own]
    log.info(
        "experts: %d of %d in each of %d layers in GPU memory, the rest in %.1f GiB of host memory",
        min(slots), own[0][0].layout.shape.experts, len(own),
        sum(one.host.nbytes for layer in own for one in layer) / 2**30,
    )  # fmt: skip
    return buffer


_SHARED = "_retrieval_attn_expert_layers"


def expert_buffer(model: nn.Module) -> LayerBuffer | None:
    """Return the buffer of a model with experts in host memory; None for other models."""
    found: LayerBuffer | None = vars(model).get(_SHARED)
    return found
