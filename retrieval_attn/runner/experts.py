"""Moves of a model's most visited experts to GPU memory, between requests."""

from __future__ import annotations

import logging
from typing import Any

import torch

from retrieval_attn.errors import BackendError
from retrieval_attn.model.adapters import unwrapped
from retrieval_attn.model.placed_experts import expert_buffer
from retrieval_attn.runner.graph.support import runtime_for

log = logging.getLogger(__name__)
MOST_MOVES = 64
"""Experts that move at once, at most: 64 of GPT-OSS-120B's are 0.9 GB over the bus in each direction."""


def move_experts(model: Any, most: int = MOST_MOVES) -> int:
    """Move the experts that tokens visited most to GPU memory, at most `most`; return how many moved.

    Captured steps stay valid. Blocks until the GPU has executed all launches. 0 for a model without experts in host
    memory.
    """
    inner = unwrapped(model)
    buffer = expert_buffer(inner)
    if buffer is None:
        return 0
    try:
        runtime = runtime_for(inner)
        settle = None if runtime is None else runtime.synchronize
    except BackendError:  # no graphs: no thread captures or answers one
        settle = torch.cuda.synchronize
    moved = buffer.move_hottest(most, settle or (lambda: None))
    if moved:
        log.info("experts: %d moved to GPU memory, in exchange for as many", moved)
    return moved
