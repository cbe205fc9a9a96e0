"""Reading tokens while the device runs the next step already, which it began with the likeliest token by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from retrieval_attn.errors import BackendError


class LookaheadSteps(Protocol):
    """What a lookahead asks of `decode.LookaheadSteps`."""

    def launch_next(self) -> bool: ...

    def confirm(self) -> None: ...

    def discard(self) -> None: ...


class TokenCopy:
    """Copies numbers from the device; what is launched after `send` does not delay them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._sent = torch.cuda.Event() if self._cuda else None

    def send(self, numbers: Tensor) -> None:
        """Begin to copy them, int64 of any shape. Those sent before must have been read."""
        if self._sent is None:
            self._numbers = numbers.clone()
            return
        if self._numbers.shape != numbers.shape:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[int]:
        """Wait for the numbers that were sent last."""
        if self._sent is not None:
            self._sent.synchronize()
        return list(self._numbers.tolist())


class Lookahead:
    """Reads the tokens of a device that takes the likeliest one itself and begins the next step with it.

    Nothing of the loop then lies between two steps of the device: the CPU evaluates what ends a text while the next
    step runs. Only for criteria of transformers itself: others may need what is on the device.
    """

    CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)

    def __init__(
        self,
        steps: LookaheadSteps,
        token_copy: TokenCopy,
        criteria: StoppingCriteriaList,
        cancelled: threading.Event,
        sequences: Tensor,
    ) -> None:
        self._steps, self._token_copy, self._criteria, self._cancelled = steps, token_copy, criteria, cancelled
        self._ids, self._columns = sequences.cpu(), sequences.shape[1]
        self._max_columns = min(
            (one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)), default=None
        )
        self.stopped = torch.zeros(sequences.shape[0], dtype=torch.bool)

    @classmethod
    def serves(cls, criteria: StoppingCriteriaList) -> bool:
        """Whether it can evaluate all of them."""
        return all(type(one) in cls.CRITERIA for one in criteria)

    def note(self, token: list[int]) -> None:
        """Note the id of every row that the caller has read itself."""
        if self._columns == self._ids.shape[1]:
            more = max(64, self._columns)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(len(self._ids), more)], dim=1)
        self._ids[:, self._columns] = torch.tensor(token)
        self._columns += 1

    def follow(self, chosen: Tensor, on_token: Callable[[list[int]], None]) -> Tensor:
        """Read what the launched step chooses, and so on until a row ends or the device has to wait for the caller.

        chosen: (batch,) on the device, where every step writes its token. on_token gets the ids of each. Returns all
        ids, (batch, n) on the CPU; `stopped` says which rows have ended. No step is launched at the end. Raises
        BackendError once all tokens before the failed step are read.
        """
        begun, launched, failed = self._columns, True, None
        while launched and not self.stopped.any():
            self._token_copy.send(chosen)
            try:
                launched = self._columns + 1 != self._max_columns and self._steps.launch_next()
            except BackendError as error:
                launched, failed = False, error  # of the next token: this one is read first
            token = self._token_copy.read()
            self._steps.confirm()
            self.note(token)
            on_token(token)
            self.stopped = self._criteria(self._ids[:, : self._columns], None)
            if self._cancelled.is_set():
                self.stopped = torch.ones_like(self.stopped)
        if failed is not None and not self.stopped.all():
            raise failed
        if launched:
            self._steps.discard()
        return self._ids[:, begun : self._columns]
