"""Reading tokens while the device is at the next step already, which it began with the likeliest token by itself."""

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


class Steps(Protocol):
    """What a follower asks of `decode.Steps`."""

    @property
    def chosen(self) -> Tensor | None: ...

    def ahead(self) -> bool: ...

    def confirm(self) -> None: ...

    def take_back(self) -> None: ...


class Teller:
    """Brings numbers from the device; what is launched after `send` does not hold them up."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._sent = torch.cuda.Event() if self._cuda else None

    def send(self, numbers: Tensor) -> None:
        """Begin to bring them. Those sent before must have been read."""
        if self._sent is None:
            self._numbers = numbers.clone()
            return
        if self._numbers.shape != numbers.shape:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._sent.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[int]:
        """Wait for them."""
        if self._sent is not None:
            self._sent.synchronize()
        return list(self._numbers.tolist())


class Follower:
    """Follows the device, which takes the likeliest token itself and begins the next step with it.

    Nothing of the loop then lies between two steps of the device: what ends a text is asked on the CPU, while the next
    step runs. Only for what transformers itself asks.
    """

    CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)

    def __init__(
        self,
        steps: Steps,
        teller: Teller,
        criteria: StoppingCriteriaList,
        cancelled: threading.Event,
        sequences: Tensor,
    ) -> None:
        self._steps, self._teller, self._criteria, self._cancelled = steps, teller, criteria, cancelled
        self._ids, self._columns = sequences.cpu(), sequences.shape[1]
        self._most = min((one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)), default=None)
        self.stopped = torch.zeros(sequences.shape[0], dtype=torch.bool)

    @classmethod
    def serves(cls, criteria: StoppingCriteriaList) -> bool:
        """Whether it can ask all of them."""
        return all(type(one) in cls.CRITERIA for one in criteria)

    def note(self, token: list[int]) -> None:
        """The id of every row that was told by somebody else."""
        if self._columns == self._ids.shape[1]:
            more = max(64, self._columns)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(len(self._ids), more)], dim=1)
        self._ids[:, self._columns] = torch.tensor(token)
        self._columns += 1

    def follow(self, tell: Callable[[list[int]], None]) -> Tensor:
        """Tell what the step under way chooses, and so on until a row ends or the device has to wait for the caller.

        Returns the ids that were told, (batch, n) on the CPU; `stopped` says which rows have ended. What comes next has
        not begun. Raises BackendError once all that came before is told.
        """
        begun, gone, failed = self._columns, True, None
        while gone and not self.stopped.any():
            assert self._steps.chosen is not None
            self._teller.send(self._steps.chosen)
            try:
                gone = self._columns + 1 != self._most and self._steps.ahead()
            except BackendError as error:
                gone, failed = False, error  # of the next token: this one is told first
            token = self._teller.read()
            self._steps.confirm()
            self.note(token)
            tell(token)
            self.stopped = self._criteria(self._ids[:, : self._columns], None)
            if self._cancelled.is_set():
                self.stopped = torch.ones_like(self.stopped)
        if failed is not None and not self.stopped.all():
            raise failed
        if gone:
            self._steps.take_back()
        return self._ids[:, begun : self._columns]
