"""A model's input embedding whose table lies in host memory: of it a token needs a single row.

The parameter stays a tensor of the GPU, whose kernels read the rows of their tokens over the bus; so modules, graphs
and hooks see no difference. For a model on one GPU whose output has a table of its own.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from retrieval_attn.errors import MemoryPlanError
from retrieval_attn.model.placement import is_spread, mark_host_table
from retrieval_attn.offload.managed import as_device, host_rows

log = logging.getLogger(__name__)


def move_table(model: Any) -> bool:
    """Whether the table of `model` lies in host memory now. Where it stays, the log says why."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    weight: Any = getattr(embedding, "weight", None)
    reason = _why_not(model, embedding, output, weight)
    if reason is None:
        try:
            rows = host_rows(1, len(weight), weight.shape[1] * weight.element_size(), weight.device)
            seen = as_device(rows[0], weight.device)
        except MemoryPlanError as error:
            reason = str(error)
    if reason is not None:
        log.warning("the input embedding stays on the GPU: %s", reason)
        return False
    rows[0].view(weight.dtype).copy_(weight.detach())
    embedding.weight = nn.Parameter(seen.view(weight.dtype), requires_grad=weight.requires_grad)
    mark_host_table(embedding.weight)
    del weight
    torch.cuda.empty_cache()  # or what the table had would be cut up for smaller tensors
    log.info("the input embedding, %d bytes, lies in host memory", rows.numel())
    return True


def _why_not(model: Any, embedding: Any, output: Any, weight: Any) -> str | None:
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or type(weight) is not nn.Parameter:
        return "it is no plain table"
    if output is None or output.weight is weight:
        return "the output multiplies by it"
    if weight.device.type != "cuda" or is_spread(model):
        return "the model is not on one GPU"
    return None
