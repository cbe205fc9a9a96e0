"""Captured decode steps without a GPU: graphs are recorded and replayed by `runtime.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from retrieval_attn.cpu.serve import CallTable
from retrieval_attn.gpu.decode.kernels import replaced_kernels
from retrieval_attn.runner.graph.support import replaced_runtime
from tests.emulation.runtime import EmulatedRuntime
from tests.reference.kernels import reference_kernels


@contextmanager
def emulated(runtime: EmulatedRuntime | None = None) -> Iterator[None]:
    """Emulate the graphs of all models in this context, on any device, unless `Config.graph` is False.

    graph=True raises for a step that cannot be captured. runtime: defaults to one of the process.
    """
    with replaced_runtime(lambda: runtime or _shared()), replaced_kernels(reference_kernels):
        yield


@functools.cache
def _shared() -> EmulatedRuntime:
    return EmulatedRuntime(CallTable)
