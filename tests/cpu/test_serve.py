"""Serving a replay's calls: their order, and that every wait ends."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np

from retrieval_attn.cpu.serve import ENDED, NEVER_ASKED, NOT_READY, CallTable

ERROR = 719


class Device:
    """Two calls, whose searches are noted, and states of a stream and an event."""

    def __init__(self, limit_seconds: float = 20.0) -> None:
        self.searched: list[tuple[int, int]] = []  # and how many calls were answered then
        self.stream_state = self.event_state = 0
        self.requests, self.answers = np.zeros(2, np.int64), np.array([5 << 32 | 3, 6 << 32])
        self._kept = (
            ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64)(lambda stream: self.stream_state),
            ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64)(lambda event: self.event_state),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._search),
        )
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._kept]
        self.server = CallTable((addresses[0], addresses[1]), limit_seconds)
        for i in range(2):
            self.server.add(
                request=self.requests[i:].ctypes.data,
                function=addresses[2],
                argument=i + 1,
                answer=self.answers[i:].ctypes.data,
            )

    def _search(self, argument: int) -> None:
        self.searched.append((argument - 1, len(self.answered)))

    @property
    def answered(self) -> list[int]:
        """Calls whose word has the number of the last replay in its low half. The high half is the call's number."""
        assert (self.answers >> 32).tolist() == [5, 6]
        return np.flatnonzero(self.answers & 0xFFFFFFFF == self.generation).tolist()

    def run(self, generation: int) -> int:
        self.generation = generation
        self.server.prepare(generation, 5, 6)
        return int(self.server.run(self.server.table))


def test_calls_are_answered_in_order_once_they_are_asked() -> None:
    """A request of another replay is none."""
    device = Device()
    device.requests[:] = 3
    device.stream_state = NOT_READY

    def ask() -> None:
        for i in range(2):
            time.sleep(0.05)
            assert len(device.searched) == len(device.answered) == i
            device.requests[i] = 4

    asking = threading.Thread(target=ask)
    asking.start()
    assert device.run(4) == 0 and device.server.served == 2
    asking.join()
    assert device.searched == [(0, 0), (1, 1)] and device.answered == [0, 1]


def test_what_is_not_asked_for_ends_at_the_limit_and_is_answered() -> None:
    device = Device(limit_seconds=0.3)
    device.requests[0], device.stream_state = 4, NOT_READY
    began = time.monotonic()
    assert device.run(4) == NEVER_ASKED and device.server.served == 1
    assert 0.3 <= time.monotonic() - began < 5
    assert device.searched == [(0, 0)] and device.answered == [0, 1]


def test_a_stream_that_is_over_or_fails_ends_the_waiting() -> None:
    for state, code in ((0, ENDED), (ERROR, ERROR)):
        device = Device()
        device.stream_state = state
        assert device.run(4) == code and device.server.served == 0
        assert device.searched == [] and device.answered == [0, 1]
    device = Device()
    device.event_state = ERROR
    assert device.run(4) == ERROR


def test_the_limit_begins_with_the_replay() -> None:
    """What was launched before it may take as long as it likes."""
    device = Device(limit_seconds=0.2)
    device.event_state = device.stream_state = NOT_READY

    def begin() -> None:
        time.sleep(0.6)
        device.event_state = 0
        device.requests[:] = 4

    beginning = threading.Thread(target=begin)
    beginning.start()
    assert device.run(4) == 0
    beginning.join()
