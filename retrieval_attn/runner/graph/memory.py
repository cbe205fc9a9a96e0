"""Memory of a captured decode step that keeps its addresses: the step's inputs and outputs, the host's reports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.gpu.decode.kernels import advance
from retrieval_attn.index.task import tasks as words
from retrieval_attn.runner.graph.host import MAX_MICROBATCHES

_Function = TypeVar("_Function", bound=Callable[..., Any])


def ordinary_tensors(function: _Function) -> _Function:
    """Buffers made inside `torch.inference_mode` could not be written to outside it, where the next cache may come."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return cast("_Function", called)


class StepMemory:
    """See the module.

    layers: those that attend; the states of others are in `states.py`. On the device: token and position int64
    (batch * tokens, 1), the step's inputs, which a step of one token replaces by those of the next one; chosen int64
    (batch * tokens,), the likeliest token after each; spans int32 (layers, batch, 2), the used slots of every layer's
    windows; stored int32 (batch,), by how much a step makes a row longer: 1, or 0 for a free row. On the host, int64, a
    row for each layer and microbatch: meters (layers, MAX_MICROBATCHES, workers * METER_WORDS) and descriptors (layers,
    MAX_MICROBATCHES, WORDS), as in `StepBuffers`.
    """

    def __init__(self, layers: int, batch: int, workers: int, device: torch.device, tokens: int = 1) -> None:
        """tokens: new tokens of each row. The caller counts those of a block of several."""
        self._counts = tokens == 1
        self.token = torch.zeros(batch * tokens, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros_like(self.token)
        self.chosen = torch.zeros_like(self.token[:, 0])
        # rows begin on multiples of 16 bytes: Triton compiles a kernel for aligned addresses, and one for others
        self.spans = torch.zeros(layers, batch, 4, dtype=torch.int32, device=device)[..., :2]
        self.stored = torch.ones(batch, dtype=torch.int32, device=device)
        self.meters = np.zeros((layers, MAX_MICROBATCHES, workers * words.METER_WORDS), np.int64)
        self.descriptors = np.zeros((layers, MAX_MICROBATCHES, words.WORDS), np.int64)

    def place(self, token: Tensor, position: Tensor) -> None:
        """Write the inputs of the next step, token and position (batch * tokens,)."""
        self.token.copy_(token[:, None])
        self.position.copy_(position[:, None])

    def upload_rows(self, spans: np.ndarray[Any, Any], stored: np.ndarray[Any, Any]) -> None:
        """Write the used slots of each row, int32 (layers, batch, 2), and which rows there are, int32 (batch,)."""
        self.spans.copy_(torch.from_numpy(spans))
        self.stored.copy_(torch.from_numpy(stored))

    def finish_step(self, logits: Tensor | None) -> None:
        """Record: choose from logits (batch, vocabulary), and leave the inputs of the step after this one; without them
        all but its tokens. After a block of several tokens only choose.
        """
        if logits is not None:
            self.chosen.copy_(logits.argmax(dim=-1))
        if not self._counts:
            return
        if logits is not None:
            self.token.copy_(self.chosen[:, None])
        self.position.add_(1)
        advance(self.spans, self.stored)

    @property
    def host_failed(self) -> bool:
        """Whether a host step of the last replay left an error."""
        return bool(self.descriptors[..., words.STATUS].any())

    def host_meters(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return meters of the last replay, int64: (layers, METER_WORDS) work, (layers,) nanoseconds of host steps."""
        work = self.meters.reshape(len(self.meters), -1, words.METER_WORDS).sum(axis=1)
        return work, self.descriptors[..., words.NANOSECONDS].sum(axis=1)
