"""Sample the tokens of a batch on the device, by a graph that runs after that of the step.

A separate graph lets sampling parameters change without capturing the step again. Sampled tokens are written to the
inputs of the next step and to page-locked memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.gpu.capture.exchange import Replay, Runtime
from retrieval_attn.runner.graph.memory import StepMemory
from retrieval_attn.sampling.choose import DrawMode, SamplingState, choose
from retrieval_attn.sampling.sampler import SampledToken
from retrieval_attn.sampling.sampling_params import MAX_LOGPROBS, SamplingParams

__all__ = ["GraphSampler", "GraphSampling"]

LOGPROBS = (5, MAX_LOGPROBS)
"""Of how many tokens graphs tell the log-probabilities: rows get the first of these."""
_GREEDY = SamplingParams()


class GraphSampler:
    """Samples for one batch size: `prepare`, replay of the step, `launch`, and `choices` once both are over.

    The next step may be launched before `choices` is read: it writes to other memory.
    """

    def __init__(self, runtime: Runtime, memory: StepMemory) -> None:
        """memory: step memory of the batch's decoder."""
        self._runtime, self._memory = runtime, memory
        rows = len(memory.token)
        self._table = SamplingState(rows, memory.token.device)
        self._draws = [_GREEDY] * rows
        self._graphs: dict[tuple[int, DrawMode], list[GraphSampling]] = {}  # take turns
        self._drawing: GraphSampling | None = None

    def prepare(self, draws: Mapping[int, SamplingParams], logits: Tensor) -> bool:
        """Set the sampling parameters of the next step by place; other places sample greedily.

        logits: float32 (rows, vocabulary), written by the step. Returns False if a graph was captured, which overwrites
        the inputs of the next step. Raises CaptureError.
        """
        for place, known in enumerate(self._draws):
            draw = draws.get(place, _GREEDY)
            if draw is not known and draw != known:
                self._table.write(place, draw)
            self._draws[place] = draw
        mode = self._table.mode
        if mode.logprobs is not None:
            asked = min(count for count in LOGPROBS if count >= mode.logprobs)
            mode = mode._replace(logprobs=min(asked, logits.shape[1]))
        key = logits.data_ptr(), mode
        there = key in self._graphs
        if not there:
            self._graphs[key] = [self._captured(logits, mode) for _ in range(2)]
        drawings = self._graphs[key]
        drawings.reverse()
        self._drawing = drawings[0]
        return there

    def launch(self) -> GraphSampling:
        """Sample after the step of `prepare`. Returns the memory of the result."""
        assert self._drawing is not None
        self._drawing.replay()
        return self._drawing

    def choices(self, drawing: GraphSampling, places: Sequence[int]) -> list[SampledToken | None]:
        """Return the sampled token of each place; None if its logits hold NaN or infinity."""
        ids, wrong = drawing.ids.tolist()
        logprobs, top_ids = drawing.logprobs, drawing.top_ids
        found: list[SampledToken | None] = []
        for place in places:
            logprob, top = None, tuple[tuple[int, float], ...]()
            if count := self._draws[place].logprobs:
                logprob, *most = logprobs[place, : count + 1].tolist()
                top = tuple(zip(top_ids[place, :count].tolist(), most, strict=True))
            found.append(None if wrong[place] else SampledToken(ids[place], logprob, top))
        return found

    def _captured(self, logits: Tensor, mode: DrawMode) -> GraphSampling:
        rows, locked, count = len(logits), logits.device.type == "cuda", mode.logprobs or 0
        ids = torch.zeros(2, rows, dtype=torch.int64, pin_memory=locked)
        logprobs = torch.zeros(rows, count + 1, pin_memory=locked)
        top_ids = torch.zeros(rows, max(count, 1), dtype=torch.int64, pin_memory=locked)

        def record() -> None:
            chosen = choose(logits, self._table, self._memory.position[:, 0], mode)
            self._memory.token.copy_(chosen.ids[:, None])
            ids.copy_(torch.stack([chosen.ids, chosen.failed.long()]), non_blocking=True)
            if chosen.logprobs is not None and chosen.top_logprobs is not None and chosen.top_ids is not None:
                logprobs.copy_(torch.cat([chosen.logprobs[:, None], chosen.top_logprobs], dim=1), non_blocking=True)
                top_ids.copy_(chosen.top_ids, non_blocking=True)

        self._runtime.warm_up(record)
        return GraphSampling(self._runtime.capture(record), ids.numpy(), logprobs, top_ids)


class GraphSampling(NamedTuple):
    """A sampling graph and the host memory of its result.

    ids: int64 (2, rows), tokens and failures, as NumPy arrays, which are faster to read. logprobs: float32 (rows, 1 +
    n), of the token and of the likeliest ones. top_ids: int64 (rows, n), the likeliest ones.
    """

    replay: Replay
    ids: np.ndarray[Any, Any]
    logprobs: Tensor
    top_ids: Tensor

    @property
    def tokens(self) -> list[int]:
        """Tokens by place: the inputs of the next step."""
        found: list[int] = self.ids[0].tolist()
        return found
