"""Answering what a device asks while it runs a graph: one compiled function for all calls of a replay, without the GIL.

A call is a row of a table of int64 words behind one address. In the rows' order the function waits for the call's
request word to hold the number of this replay, calls its C function and then writes the number to the call's answer
word, from where the device fetches the results. All of these words are the host's: no call of the driver, which another
thread may keep while it waits for the very device, stands between a request and its answer.

It always ends: a request that does not come within a limit, a stream that is over or that reports an error ends the
waiting, and every call that is left is answered all the same, so that the device does not wait for it.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic as _numba_intrinsic

from retrieval_attn.index.task.atomics import at_address, atomic_load, atomic_swap, nanoseconds, pause, yield_core

intrinsic: Any = _numba_intrinsic

# Words of the table's head.
(
    CALLS,  # how many rows follow
    GENERATION,  # the number of this replay, positive, below 2**31
    QUERY_STREAM,  # address of int32 f(stream): 0 if all its work is done, NOT_READY, or an error
    QUERY_EVENT,  # the same for an event
    STREAM,  # the stream of the replay
    BEGUN,  # an event in it just before the replay
    LIMIT,  # nanoseconds to wait for a request once that event is over
    SERVED,  # calls that were answered, written by `serve_calls`
) = range(8)
HEAD_WORDS = 16
# A row. ASKED, SEARCHED, ANSWERED: when, in nanoseconds of `atomics.nanoseconds`, written by `serve_calls`.
REQUEST, FUNCTION, ARGUMENT, ANSWER, ASKED, ANSWERED, SEARCHED = range(7)
ROW_WORDS = 8

MAX_CALLS = 512
NOT_READY = 600
"""CUDA's code for work that is still under way."""
NEVER_ASKED, ENDED = -1, -2
"""Results of `serve_calls` other than 0 and CUDA's codes: the limit passed; the stream ended without a request."""
LOOKS = 16
"""Looks at the request word between two readings of the clock."""
CHECK_NANOSECONDS = 50_000_000
YIELD_NANOSECONDS = 5_000_000
"""Longer than a layer takes anywhere: until then the thread keeps its core, since it would get it back late."""

_INT32, _INT64, _VOID = ir.IntType(32), ir.IntType(64), ir.VoidType()


@intrinsic
def _call(typingctx, function, argument):
    """void f(void *)"""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_VOID, [_INT64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _call_query(typingctx, function, handle):
    """int32 f(int64), as int64."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_INT32, [_INT64])
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]]), _INT64)

    return types.int64(types.int64, types.int64), codegen


@njit(nogil=True, cache=True)
def _await_request(head, row):
    """0 when the call was asked for, else why it will not be."""
    request, generation = row[REQUEST], head[GENERATION]
    since = checked = nanoseconds()
    while True:
        for _ in range(LOOKS):
            if atomic_load(request) == generation:
                return np.int64(0)
            pause()
        now = nanoseconds()
        if now - checked > CHECK_NANOSECONDS:
            checked = now
            state = _call_query(head[QUERY_EVENT], head[BEGUN])
            if state == NOT_READY:
                since = now  # the device is still busy with what was launched before
            elif state != 0:
                return state
            else:
                state = _call_query(head[QUERY_STREAM], head[STREAM])
                if state == 0:
                    return np.int64(0) if atomic_load(request) == generation else np.int64(ENDED)
                if state != NOT_READY:
                    return state
        if now - since > head[LIMIT]:
            return np.int64(NEVER_ASKED)
        if now - since > YIELD_NANOSECONDS:
            yield_core()


@njit(nogil=True, cache=True)
def _write_answer(head, address):
    # the high half is the call's number, which is not written
    atomic_swap(address, (atomic_load(address) >> 32 << 32) | head[GENERATION])


@njit(nogil=True, cache=True)
def serve_calls(table):
    """Serve the table at address `table` for one replay, which was launched. Returns 0, or why it ended early."""
    head = carray(at_address(table), (HEAD_WORDS,), np.int64)
    rows = carray(at_address(table + 8 * HEAD_WORDS), (head[CALLS], ROW_WORDS), np.int64)
    for i in range(head[CALLS]):
        row = rows[i]
        code = _await_request(head, row)
        row[ASKED] = nanoseconds()
        if code == 0:
            _call(row[FUNCTION], row[ARGUMENT])
            row[SEARCHED] = nanoseconds()
            _write_answer(head, row[ANSWER])
        row[ANSWERED] = nanoseconds()
        if code != 0:
            head[SERVED] = i
            for j in range(i, head[CALLS]):
                _write_answer(head, rows[j, ANSWER])
            return code
    head[SERVED] = head[CALLS]
    return np.int64(0)


class CallTable:
    """The table of one graph's calls. What its addresses name is kept alive by its owner."""

    run = staticmethod(serve_calls)
    """`serve_calls`, itself: between a replay's launch and its serving no Python runs that a signal could interrupt."""

    def __init__(self, functions: tuple[int, int], limit_seconds: float) -> None:
        """functions: addresses of QUERY_STREAM and QUERY_EVENT."""
        self._words = np.zeros(HEAD_WORDS + MAX_CALLS * ROW_WORDS, np.int64)
        self.head, self.rows = self._words[:HEAD_WORDS], self._words[HEAD_WORDS:].reshape(MAX_CALLS, ROW_WORDS)
        self.head[QUERY_STREAM], self.head[QUERY_EVENT] = functions
        self.head[LIMIT] = int(limit_seconds * 1e9)
        self.table = int(self._words.ctypes.data)
        compile_server()

    def add(self, *, request: int, function: int, argument: int, answer: int) -> None:
        """One call more: addresses of its words, and void function(argument)."""
        self.rows[self.head[CALLS], : ANSWER + 1] = request, function, argument, answer
        self.head[CALLS] += 1

    def prepare(self, generation: int, stream: int, event: int) -> None:
        """Before a replay: its number, its stream, and an event in it at the replay's beginning."""
        self.head[GENERATION], self.head[STREAM], self.head[BEGUN], self.head[SERVED] = generation, stream, event, 0

    @property
    def served(self) -> int:
        """Calls that the last replay got answered."""
        return int(self.head[SERVED])

    def spent(self, number: int) -> str:
        """Describe the time of a call in the last replay: the search, and writing the result."""
        row = self.rows[number]
        search, answer = (row[SEARCHED] - row[ASKED]) / 1e6, (row[ANSWERED] - row[SEARCHED]) / 1e6
        return f"its search took {search:.1f} ms, to send the answer {answer:.1f} ms"


def compile_server() -> None:
    """Compile `serve_calls`, or load it."""
    serve_calls.compile("int64(int64)")
