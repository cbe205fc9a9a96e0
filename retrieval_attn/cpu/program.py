"""Sequences of norms, matrix products, rotations and gates that run in one call into compiled code.

A decoder layer of one token is some 60 small operations next to its seven products. As separate calls they take as long
as the products of a small model; a program of them takes a few microseconds.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, njit

from retrieval_attn.cpu.matrix import StoredMatrix, check_job, multiply, scratch_for, task_addresses
from retrieval_attn.cpu.pool import default_pool
from retrieval_attn.index.kernels.dots import bits_to_float
from retrieval_attn.index.task.atomics import at_address

_PRODUCT, _NORM, _TURN, _GATE, _ADD = range(5)
SILU, GELU_TANH = range(2)
"""Activations of a gate."""
_WIDTH = 8
"""Words of a step of a program."""
_FAST = {"contract", "reassoc", "nsz", "arcp"}
SLOTS = 16
"""Buffers of a program at most."""


@njit(nogil=True, cache=True, fastmath=_FAST)
def _normalize(given, weight, eps, from_one, out):
    """RMS norm of one vector; products with weight, or with 1 + weight."""
    total = np.float32(0.0)
    for i in range(len(given)):
        total += given[i] * given[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(len(given)) + eps)
    for i in range(len(given)):
        out[i] = given[i] * scale * (weight[i] + from_one)


@njit(nogil=True, cache=True, fastmath=_FAST)
def _turn(head, cosines, sines):
    """Rotate the first numbers of a head, of which the halves are pairs (Su et al., 2021)."""
    half = len(cosines) // 2
    for i in range(half):
        low, high = head[i], head[i + half]
        head[i] = low * cosines[i] - high * sines[i]
        head[i + half] = high * cosines[i + half] + low * sines[i + half]


@njit(nogil=True, cache=True, fastmath=_FAST)
def _gate(gate, up, kind):
    """Write activation(gate) * up to gate."""
    for i in range(len(gate)):
        number = gate[i]
        inner = number
        if kind == GELU_TANH:  # x / 2 * (1 + tanh(y)) is x * sigmoid(2 y)
            inner = np.float32(1.5957691216) * (number + np.float32(0.044715) * number * number * number)
        gate[i] = number / (np.float32(1.0) + np.exp(-inner)) * up[i]


@njit(nogil=True, cache=True)
def _floats(address, count):
    return carray(at_address(address), count, np.float32)


@njit(nogil=True, cache=True)
def run_program(steps_at, count, slots_at, rows, function, pool, threads, scratch, sums):
    """Run `count` steps for `rows` rows; returns 0, or what `pool.run_job` returned.

    slots_at: addresses of the buffers that steps name by number. scratch, sums: see `matrix.multiply`.
    """
    steps = carray(at_address(steps_at), (count, _WIDTH), np.int64)
    slots = carray(at_address(slots_at), SLOTS, np.int64)
    for number in range(count):
        step = steps[number]
        kind = step[0]
        if kind == _PRODUCT:
            code = multiply(step[1], slots[step[2]], rows, slots[step[3]], function, pool, threads, scratch, sums)
            if code != 0:
                return code
        elif kind == _NORM:
            size, each = step[4], step[5]
            weight = _floats(step[3], size)
            eps = bits_to_float(np.int32(step[6]))
            for row in range(rows * each):
                given = _floats(slots[step[1]] + row * size * 4, size)
                _normalize(given, weight, eps, np.float32(step[7]), _floats(slots[step[2]] + row * size * 4, size))
        elif kind == _TURN:
            heads, size, turned = step[4], step[5], step[6]
            for row in range(rows):
                cosines = _floats(slots[step[2]] + row * turned * 4, turned)
                sines = _floats(slots[step[3]] + row * turned * 4, turned)
                for head in range(heads):
                    _turn(_floats(slots[step[1]] + (row * heads + head) * size * 4, size), cosines, sines)
        elif kind == _GATE:
            size = rows * step[3]
            _gate(_floats(slots[step[1]], size), _floats(slots[step[2]], size), step[4])
        else:
            size = rows * step[4]
            left, right = _floats(slots[step[1]], size), _floats(slots[step[2]], size)
            out = _floats(slots[step[3]], size)
            for i in range(size):
                out[i] = left[i] + right[i]
    return np.int64(0)


class Program:
    """Steps over numbered buffers of float32, each (rows, width); see `run`."""

    def __init__(self) -> None:
        self._steps: list[list[int]] = []
        self._kept: list[Any] = []
        self._words: npt.NDArray[np.int64] | None = None
        self._groups = 0

    def product(self, matrix: StoredMatrix, given: int, out: int) -> None:
        """Append out = given times the transposed matrix."""
        self._groups = max(self._groups, matrix.groups)
        self._add(_PRODUCT, matrix.address, given, out, keep=matrix)

    def norm(
        self, given: int, out: int, weight: npt.NDArray[np.float32], eps: float, *, each: int, from_one: bool
    ) -> None:
        """Append an RMS norm of `each` vectors of a row, by weight (size,) or 1 + weight."""
        bits = int(np.float32(eps).view(np.int32))
        self._add(_NORM, given, out, weight.ctypes.data, len(weight), each, bits, int(from_one), keep=weight)

    def turn(self, given: int, cosines: int, sines: int, *, heads: int, size: int, turned: int) -> None:
        """Append the rotation of the first `turned` numbers of each head, in place."""
        self._add(_TURN, given, cosines, sines, heads, size, turned)

    def gate(self, gate: int, up: int, *, size: int, activation: int) -> None:
        """Append gate = activation(gate) * up."""
        self._add(_GATE, gate, up, size, activation)

    def add(self, left: int, right: int, out: int, *, size: int) -> None:
        """Append out = left + right."""
        self._add(_ADD, left, right, out, size)

    def run(self, slots: list[int], rows: int) -> None:
        """Run for `rows` rows. slots: addresses of the buffers. Raises BackendError if the pool is closed."""
        if self._words is None:
            self._words = np.array(self._steps, np.int64)
        pool, table = default_pool(), np.zeros(SLOTS, np.int64)
        table[: len(slots)] = slots
        _memory, place, sums = scratch_for(pool.workers, rows * self._groups)
        check_job(
            run_program(
                self._words.ctypes.data,
                len(self._words),
                table.ctypes.data,
                rows,
                task_addresses()[0],
                pool.address,
                pool.threads,
                place,
                sums,
            )  # fmt: skip
        )

    def _add(self, *words: int, keep: Any = None) -> None:
        self._steps.append([*words, *[0] * (_WIDTH - len(words))])
        self._kept.append(keep)
