"""Primitives of Numba kernels that share memory without the GIL: atomic words, calls, arrays and rows by address,
the clock, and the system's futex.

Addresses are int64 and unchecked: the owner keeps the memory alive.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic as _numba_intrinsic
from numba.extending import overload

from retrieval_attn.index.formats import SCALE_BYTES

intrinsic: Any = _numba_intrinsic  # untyped: callers do not pass the typing context that the definition has

_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_VOID = ir.VoidType()
_MACHINE = platform.machine().lower()
_FUTEX = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98}.get(_MACHINE) if sys.platform == "linux" else None
"""Number of the futex system call, None where there is none: sleepers then look again every 50 us."""
_FUTEX_WAIT_PRIVATE = 128
_FUTEX_WAKE_PRIVATE = 129
_POLL_MICROSECONDS = 50
YIELD_NANOSECONDS = 20_000
"""After this long of waiting, let other threads have the core between two looks."""
_CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _INT64.as_pointer())


def _function(builder: Any, name: str, result: Any, arguments: list[Any], *, var_arg: bool = False) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments, var_arg=var_arg), name)


@intrinsic
def atomic_load(typingctx, address):
    """The int64 at `address`, acquire: what its writer wrote before is visible."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8, typ=_INT64)

    return types.int64(types.int64), codegen


def _read_modify_write(operation: str) -> Any:
    """Return an intrinsic (address, value) of an atomic operation on the int64 at `address`, sequentially consistent.

    It returns what was there before.
    """

    def atomic(typingctx, address, value):
        def codegen(context, builder, signature, args):
            return builder.atomic_rmw(operation, _word(builder, args[0]), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), codegen

    return intrinsic(atomic)


atomic_swap = _read_modify_write("xchg")
"""Write `value`."""
atomic_add = _read_modify_write("add")
"""Add `value`."""
atomic_min = _read_modify_write("min")
"""Lower what is there to `value` if that is less."""
atomic_max = _read_modify_write("max")
"""Raise what is there to `value` if that is more."""


@intrinsic
def atomic_exchange_if(typingctx, address, expected, value):
    """Write int64 `value` at `address` if `expected` is there; returns whether it was (sequentially consistent)."""

    def codegen(context, builder, signature, args):
        pair = builder.cmpxchg(_word(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this is a waiting loop: it saves power and leaves room to its other hardware thread."""

    def codegen(context, builder, signature, args):
        if _MACHINE in ("x86_64", "amd64"):
            builder.call(_function(builder, "llvm.x86.sse2.pause", _VOID, []), [])
        elif _MACHINE in ("aarch64", "arm64"):
            builder.call(_function(builder, "llvm.aarch64.hint", _VOID, [_INT32]), [ir.Constant(_INT32, 1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Let another thread that waits for this core run."""

    def codegen(context, builder, signature, args):
        builder.call(_function(builder, "sched_yield", _INT32, []), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def nanoseconds(typingctx):
    """The monotonic clock, int64 nanoseconds (about 30 ns a call)."""

    def codegen(context, builder, signature, args):
        moment = cgutils.alloca_once(builder, ir.ArrayType(_INT64, 2))
        clock = _function(builder, "clock_gettime", _INT32, [_INT32, _INT64.as_pointer()])
        first = builder.bitcast(moment, _INT64.as_pointer())
        builder.call(clock, [ir.Constant(_INT32, _CLOCK_MONOTONIC), first])
        seconds, rest = (builder.extract_value(builder.load(moment), i) for i in range(2))
        return builder.add(builder.mul(seconds, ir.Constant(_INT64, 10**9)), rest)

    return types.int64(), codegen


def _futex(builder: Any, address: Any, operation: int, value: Any) -> None:
    call = _function(builder, "syscall", _INT64, [_INT64], var_arg=True)
    zero = ir.Constant(_INT64, 0)
    number = ir.Constant(_INT64, _FUTEX)
    builder.call(call, [number, address, ir.Constant(_INT64, operation), value, zero, zero, zero])


@intrinsic
def sleep_on(typingctx, address, value):
    """Sleep until `wake` is called on `address`, unless the low 32 bits there are no longer those of `value`.

    May return early.
    """

    def codegen(context, builder, signature, args):
        if _FUTEX is None:
            doze = _function(builder, "usleep", _INT32, [_INT32])
            builder.call(doze, [ir.Constant(_INT32, _POLL_MICROSECONDS)])
        else:
            _futex(builder, args[0], _FUTEX_WAIT_PRIVATE, args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def wake(typingctx, address, count):
    """Wake up to `count` threads that sleep on `address`."""

    def codegen(context, builder, signature, args):
        if _FUTEX is not None:
            _futex(builder, args[0], _FUTEX_WAKE_PRIVATE, args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call_task(typingctx, function, descriptor, task, worker):
    """Call the C function int64 f(int64, int64, int64) at address `function`."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_INT64, [_INT64] * 3)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def call_search(typingctx, function, descriptor, task, worker):
    """Call the search or attend task at address `function`: int64 f(int64, int64, int64, pointer), see `tasks`.

    The pointer is never read, its type alone tells the function its format: any address will do.
    """

    def codegen(context, builder, signature, args):
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(_INT64, [*[_INT64] * 3, pointer])
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(function, [*args[1:], builder.inttoptr(args[1], pointer)])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def at_address(typingctx, address):
    """The pointer that `numba.carray` takes, to what lies at int64 `address`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


def rows_at(address, rows, dim, like):
    """Return stored rows at an address as a kernel's array (rows, dim), like `formats.kernel_view`.

    like: any array of the storage format. In compiled functions only.
    """
    raise NotImplementedError("rows_at is for compiled functions")


@overload(rows_at)
def _rows_at(address, rows, dim, like):
    if like.dtype == types.int8:

        def scaled(address, rows, dim, like):
            return carray(at_address(address), (rows, dim + SCALE_BYTES), np.int8)[:, :dim]

        return scaled

    def plain(address, rows, dim, like):
        return carray(at_address(address), (rows, dim), like.dtype)

    return plain


@njit(nogil=True, cache=True, inline="always")
def bytes_of_row(like, dim):
    """Return the bytes of a stored row of `dim` numbers. like: any array of the storage format."""
    return dim * like.itemsize + (SCALE_BYTES if like.itemsize == 1 else 0)
