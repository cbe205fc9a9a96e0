"""Hidden states of a prompt on their way through a layer, chunk by chunk: on the device, or in host memory.

In host memory they are page-locked. A chunk goes up while the one before it computes, and its output goes down while
the next one does: two buffers on the device, and one stream for both ways, so that what a layer wrote is what the next
one reads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.index.memory import aligned_empty
from retrieval_attn.offload.page_lock import register, say_refused, unregister

UNDER_WAY = 2
"""Outputs that may be on their way down while the host launches further chunks; more would pile up on the device."""


class HiddenRows(ABC):
    """Hidden states (batch, tokens, width) that one module reads in chunks and writes, each chunk after it was read."""

    def __init__(self, states: Tensor | None, overwrite: bool) -> None:
        """states: None: nothing is read. overwrite: whether `states` are not needed once they are read."""
        self._states = states
        self._out = states if overwrite else None

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Those of tokens [start, stop) on the device, until the next but one are read."""

    @abstractmethod
    def make_room(self, out: Tensor) -> None:
        """Take what memory outputs like `out`, of one chunk, need. Before a first `write`; nothing is written yet."""

    @abstractmethod
    def write(self, start: int, stop: int, out: Tensor) -> None:
        """`out` is the output of tokens [start, stop)."""

    def result(self) -> Tensor:
        """All outputs."""
        assert self._out is not None, "nothing was written"
        return self._out


class DeviceHiddenRows(HiddenRows):
    """`HiddenRows` of a tensor on the device."""

    def read(self, start: int, stop: int) -> Tensor:
        assert self._states is not None, "there is nothing to read"
        return self._states[:, start:stop]

    def make_room(self, out: Tensor) -> None:
        assert self._states is not None, "there is nothing to read"
        tokens, whole = self._states.shape[1], self._out
        if out.shape[1] == tokens:
            self._out = out
        elif whole is None or out.dtype != whole.dtype or out.device != whole.device:
            self._out = out.new_empty(out.shape[0], tokens, *out.shape[2:])

    def write(self, start: int, stop: int, out: Tensor) -> None:
        assert self._out is not None, "make_room comes first"
        if self._out is not out:
            self._out[:, start:stop] = out


class HostHiddenRows(HiddenRows):
    """`HiddenRows` in host memory; their chunks travel by `ferry`."""

    def __init__(self, ferry: Ferry, states: Tensor | None, overwrite: bool) -> None:
        """states: in host memory."""
        super().__init__(states, overwrite)
        self._ferry = ferry

    def read(self, start: int, stop: int) -> Tensor:
        assert self._states is not None, "there is nothing to read"
        return self._ferry.fetch(self._states, start, stop)

    def make_room(self, out: Tensor) -> None:
        if self._out is None:
            self._out = self._ferry.empty(out)

    def write(self, start: int, stop: int, out: Tensor) -> None:
        assert self._out is not None, "make_room comes first"
        self._ferry.store(self._out, start, stop, out)


class Ferry:
    """Takes chunks of host tensors (batch, tokens, width) to one device and back, during one forward of a model.

    Calls come from one thread. On a CPU nothing is copied up.
    """

    def __init__(self, device: torch.device, tokens: int) -> None:
        """tokens: of the forward."""
        self.device, self._tokens = device, tokens
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots: list[Tensor] = []  # two, of which the fetches take turns
        self._turn = 0
        self._ahead: tuple[int, int, int] | None = None  # what the latest fetch sent: address, start, stop
        self._fetched: torch.cuda.Event | None = None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._locked: list[Tensor] = []

    def empty(self, like: Tensor) -> Tensor:
        """Host memory for all tokens' rows, of which `like` (batch, any, width) has some; any contents.

        Page-locked; where that is refused it is ordinary memory, which is said once. Raises MemoryPlanError without
        memory.
        """
        shape = like.shape[0], self._tokens, *like.shape[2:]
        nbytes = math.prod(shape) * like.element_size()
        memory = torch.from_numpy(aligned_empty((nbytes,), np.uint8))
        if self._stream is not None and _lock(memory):
            self._locked.append(memory)
        return memory.view(like.dtype).view(shape)

    def fetch(self, states: Tensor, start: int, stop: int) -> Tensor:
        """Rows [start, stop) on the device, for work on its current stream until the next fetch but one.

        As many rows after them are sent ahead.
        """
        if self._stream is None:
            return states[:, start:stop]
        address = states.data_ptr()
        if self._ahead != (address, start, stop):
            self._send(states, start, stop)
        fetched, rows = self._fetched, self._slots[self._turn]
        if fetched is not None:
            torch.cuda.current_stream(self.device).wait_event(fetched)
        rows = rows.view(-1)[: len(states) * (stop - start) * states.shape[2]]
        if stop < self._tokens:
            self._send(states, stop, min(2 * stop - start, self._tokens))
        return rows.view(len(states), stop - start, states.shape[2])

    def _send(self, states: Tensor, start: int, stop: int) -> None:
        """Begin to bring rows into the slot whose turn it is, once the work that was launched so far is over."""
        assert self._stream is not None
        size = len(states) * (stop - start) * states.shape[2]
        if not self._slots or self._slots[0].numel() < size or self._slots[0].dtype != states.dtype:
            self._stream.synchronize()  # what it still writes to is given back
            self._slots = [torch.empty(size, dtype=states.dtype, device=self.device) for _ in range(2)]
        self._turn = 1 - self._turn
        into = self._slots[self._turn][:size].view(len(states), stop - start, states.shape[2])
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for row, source in zip(into, states[:, start:stop], strict=True):  # each one run of memory
                row.copy_(source, non_blocking=True)
            self._fetched = torch.cuda.Event()
            self._fetched.record(self._stream)
        self._ahead = states.data_ptr(), start, stop

    def store(self, states: Tensor, start: int, stop: int, out: Tensor) -> None:
        """Write `out` (batch, stop - start, width), which the device's current stream makes, to rows [start, stop)."""
        if self._stream is None:
            states[:, start:stop] = out
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for row, source in zip(states[:, start:stop], out, strict=True):
                row.copy_(source.contiguous(), non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        self._leaving.append((out, done))
        while len(self._leaving) > UNDER_WAY:
            self._leaving.popleft()[1].synchronize()

    def finish(self) -> None:
        """Wait until all rows that were stored can be read on the host."""
        while self._leaving:
            self._leaving.popleft()[1].synchronize()

    def close(self) -> None:
        """Nothing travels any more; what is still held becomes ordinary memory."""
        if self._stream is not None:
            self._stream.synchronize()
        self._leaving.clear()
        self._slots, self._ahead, self._fetched = [], None, None
        if self._locked:
            unregister([memory.data_ptr() for memory in self._locked])
        self._locked = []


def _lock(memory: Tensor) -> bool:
    """Page-lock `memory` (bytes,); False where the system refuses, which is said once."""
    if not len(memory):
        return False
    memory.fill_(0)  # by all threads: the driver would take page after page by one
    if reason := register(memory.data_ptr(), len(memory)):
        say_refused(reason, "hidden states lie in ordinary memory, and reading is slower")
        return False
    return True
