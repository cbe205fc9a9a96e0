"""Captured decode steps without a GPU, for tests: graphs are recorded and replayed by `gpu/capture/emulate.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from retrieval_attn.cpu.serve import Server
from retrieval_attn.gpu.capture.emulate import EmulatedRuntime

_active: list[EmulatedRuntime | None] = []
"""Of the process, not of a thread: a thread that decodes for the caller emulates too."""


@contextmanager
def emulated(runtime: EmulatedRuntime | None = None) -> Iterator[None]:
    """Within this, every model's graphs are emulated, on whatever device it runs, unless `Config.graph` is False.

    graph=True raises where a step cannot be captured. runtime: the one to use; None: one of the process.
    """
    _active.append(runtime)
    try:
        yield
    finally:
        _active.remove(runtime)


def emulated_runtime() -> EmulatedRuntime | None:
    """What graphs are captured with inside `emulated`; None outside."""
    if not _active:
        return None
    return _active[-1] or _shared()


@functools.cache
def _shared() -> EmulatedRuntime:
    return EmulatedRuntime(Server)
