"""The host's side of an emulated replay: the compiled server of `serve.py`, which sleeps where it would hold a core.

A device asks within microseconds, so the server looks for a request without a pause. An emulated device runs Python
meanwhile: half of a test's processor time went into looking.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

from numba import njit, types

from retrieval_attn.cpu import serve
from retrieval_attn.cpu.serve import CallTable

NAP_MICROSECONDS = 50
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@njit(nogil=True)
def _nap() -> None:
    _usleep(NAP_MICROSECONDS)


def _compiled(function: Any, **names: Any) -> Any:
    """A kernel of `serve.py`, compiled anew with other values of names that it uses."""
    code = function.py_func
    return njit(nogil=True)(FunctionType(code.__code__, {**vars(serve), **names}, code.__name__))


@functools.cache
def _napping_server() -> Any:
    waits = _compiled(serve._await_request, yield_core=_nap, YIELD_NANOSECONDS=0)
    server = _compiled(serve.serve_calls, _await_request=waits)
    server.compile("int64(int64)")
    return server


class NappingTable(CallTable):
    """As `CallTable`, for a device that is slow."""

    run = property(lambda self: _napping_server())  # type: ignore[assignment]
