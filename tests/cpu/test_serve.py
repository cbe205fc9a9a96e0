"""Serving a replay's calls: their order, and that every wait ends."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np

from retrieval_attn.cpu.serve import COPY, ENDED, NEVER_ASKED, NOT_READY, WRITE, Server

ERROR = 719


class Device:
    """Two calls of three floats each, and functions that note what they are asked for."""

    def __init__(self, limit_seconds: float = 20.0) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.copy_code = self.stream_state = self.event_state = 0
        self.requests, self.answers = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self.results, self.arrived = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
        kinds = ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint32
        self._kept = (
            ctypes.CFUNCTYPE(kinds[0], *[kinds[1]] * 4)(self._copy),
            ctypes.CFUNCTYPE(kinds[0], kinds[1], kinds[1], kinds[2], kinds[2])(self._write),
            ctypes.CFUNCTYPE(*kinds[:2])(lambda stream: self.stream_state),
            ctypes.CFUNCTYPE(*kinds[:2])(lambda event: self.event_state),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._search),
        )
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._kept]
        self.server = Server((addresses[0], addresses[1], addresses[2], addresses[3]), 77, limit_seconds)
        for i in range(2):
            self.server.add(
                request=self.requests[i:].ctypes.data,
                function=addresses[4],
                argument=i + 1,
                target=self.arrived[i].ctypes.data,
                source=self.results[i].ctypes.data,
                size=12,
                answer=self.answers[i:].ctypes.data,
            )

    def _search(self, argument: int) -> None:
        self.did.append(("search", argument - 1))
        self.results[argument - 1] = 10 * argument + np.arange(3)

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        assert stream == 77
        self.did.append(("copy", (target - self.arrived.ctypes.data) // 12))
        ctypes.memmove(target, source, size)
        return self.copy_code

    def _write(self, stream: int, address: int, value: int, flags: int) -> int:
        assert (stream, flags) == (77, 0)
        self.did.append(("answer", (address - self.answers.ctypes.data) // 8, value))
        return 0

    def run(self, generation: int) -> int:
        self.server.prepare(generation, 5, 6)
        return int(self.server.run(self.server.table))


ALL = [("search", 0), ("copy", 0), ("answer", 0, 4), ("search", 1), ("copy", 1), ("answer", 1, 4)]


def test_calls_are_answered_in_order_once_they_are_asked() -> None:
    """A request of another replay is none."""
    device = Device()
    device.requests[:] = 3
    device.stream_state = NOT_READY

    def ask() -> None:
        for i in range(2):
            time.sleep(0.05)
            assert len(device.did) == 3 * i
            device.requests[i] = 4

    asking = threading.Thread(target=ask)
    asking.start()
    assert device.run(4) == 0 and device.server.served == 2
    asking.join()
    assert device.did == ALL
    assert device.arrived.tolist() == [[10, 11, 12], [20, 21, 22]]


def test_what_is_not_asked_for_ends_at_the_limit_and_is_answered() -> None:
    device = Device(limit_seconds=0.3)
    device.requests[0], device.stream_state = 4, NOT_READY
    began = time.monotonic()
    assert device.run(4) == NEVER_ASKED and device.server.served == 1
    assert 0.3 <= time.monotonic() - began < 5
    assert device.did == [*ALL[:3], ALL[5]]


def test_a_stream_that_is_over_or_fails_ends_the_waiting() -> None:
    for state, code in ((0, ENDED), (ERROR, ERROR)):
        device = Device()
        device.stream_state = state
        assert device.run(4) == code and device.server.served == 0
        assert device.did == [ALL[2], ALL[5]]
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


def test_a_failed_copy_ends_it_and_answers_all() -> None:
    device = Device()
    device.requests[:], device.copy_code = 4, ERROR
    assert device.run(4) == ERROR and device.server.served == 0
    assert device.did == [*ALL[:2], ALL[2], ALL[5]]


def test_without_a_driver_an_answer_is_the_low_half_of_a_word() -> None:
    """Results stay where the search left them; the high half is the call's number, and nobody else's functions run."""
    device = Device()
    device.server.head[COPY] = device.server.head[WRITE] = 0
    device.requests[:], device.answers[:] = 4, [5 << 32 | 3, 6 << 32]
    assert device.run(4) == 0 and device.server.served == 2
    assert device.answers.tolist() == [5 << 32 | 4, 6 << 32 | 4]
    assert device.did == [("search", 0), ("search", 1)] and not device.arrived.any()
    device.requests[:], device.stream_state = 4, ERROR
    assert device.run(7) == ERROR  # and all are answered
    assert device.answers.tolist() == [5 << 32 | 7, 6 << 32 | 7]
