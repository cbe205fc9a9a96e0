"""Matrix products with weights stored in 4, 8 or 16 bits, in float32 arithmetic, on the threads of a pool.

A decode step reads every weight once, so its time is that of the bytes. Weights are widened in registers; activations
stay in float32, so that a product differs from that of the widened weights by rounding alone.

Kernels are explicit vectors of LLVM, which lower to AVX-512, AVX2 or narrower code (see `index/kernels/dots.py`).
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils

from retrieval_attn.cpu.pool import default_pool, raise_if_unusable, run_job
from retrieval_attn.errors import BackendError, ShapeError
from retrieval_attn.index.kernels.dots import LANES, _fold, _load, _muladd, _offset, _spread, _widen, intrinsic, widen
from retrieval_attn.index.task.atomics import at_address
from retrieval_attn.index.task.tasks import address_for_c

BFLOAT16, BYTES, NIBBLES, FLOATS = range(4)
"""Kinds of numbers: bfloat16 bits, int8, and two of 4 bits to a byte (of 32 the first 16 are the lower halves), which
are integers or twice the values of E2M1.
"""
MIDDLE = 8
"""Subtracted from numbers of 4 bits."""
ROW_TILE, QUERY_TILE = 4, 4
"""Matrix rows that one input, and inputs that one matrix row is multiplied with at once."""
TASK_WEIGHTS = 1 << 15
"""Fewest weights of a task: a thread needs some microseconds to take one."""
TASKS = 4
"""Tasks per thread, so that a preempted thread does not hold up the others."""
_TASK = "int64(int64, int64, int64)"

_FLOAT, _INT8, _INT16, _INT64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(64)
_VECTOR, _BYTES = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT8, LANES)


class _Form(NamedTuple):
    """kind: of numbers. group: numbers that share a scale. half: scales are float16, not float32."""

    kind: int
    group: int
    half: bool


FORMS = (
    _Form(BFLOAT16, LANES, False),
    _Form(BYTES, 32, True),
    _Form(BYTES, 32, False),
    _Form(BYTES, 16, False),
    _Form(NIBBLES, 32, True),
    _Form(NIBBLES, 32, False),
    _Form(FLOATS, 32, False),
)
"""Forms that kernels are compiled for, by their number in a descriptor. bfloat16 has no scales."""


def _group_vectors(builder: Any, form: _Form, row: Any, group: Any) -> list[Any]:
    """Emit the numbers of a group of a row as float32 vectors."""
    if form.kind == BFLOAT16:
        bits = _load(builder, _offset(builder, row, group, 2 * LANES), ir.VectorType(_INT16, LANES), 2)
        return [_widen(builder, bits, types.uint16, LANES)]
    if form.kind in (NIBBLES, FLOATS):
        both = _load(builder, _offset(builder, row, group, LANES), _BYTES, 1)
        low, shift, middle = (ir.Constant(_BYTES, [one] * LANES) for one in (15, 4, MIDDLE))
        halves = builder.and_(both, low), builder.lshr(both, shift)
        numbers = [_twice(builder, one) if form.kind == FLOATS else builder.sub(one, middle) for one in halves]
        return [_widen(builder, one, types.int8, LANES) for one in numbers]
    start = _offset(builder, row, group, form.group)
    parts = [builder.add(start, _INT64(place)) for place in range(0, form.group, LANES)]
    return [_widen(builder, _load(builder, part, _BYTES, 1), types.int8, LANES) for part in parts]


def _twice(builder: Any, bits: Any) -> Any:
    """Emit twice the values of bytes of E2M1: a sign, two bits of exponent and one of mantissa, from the highest."""
    one, two, three, four, seven = (ir.Constant(_BYTES, [number] * LANES) for number in (1, 2, 3, 4, 7))
    low, large = builder.and_(bits, seven), builder.lshr(builder.and_(bits, four), two)
    base = builder.add(four, builder.shl(builder.and_(bits, one), one))
    odd = builder.neg(builder.and_(builder.lshr(bits, one), one))
    high = builder.and_(builder.add(base, builder.and_(base, odd)), builder.neg(large))
    value = builder.or_(high, builder.and_(low, builder.sub(large, one)))
    sign = builder.lshr(bits, three)
    return builder.add(builder.xor(value, builder.neg(sign)), sign)


def _scale(builder: Any, form: _Form, row: Any, group: Any) -> Any:
    """Emit a vector of copies of a group's scale."""
    if not form.half:
        return _spread(builder, _load(builder, _offset(builder, row, group, 4), _FLOAT, 4))
    bits = _load(builder, _offset(builder, row, group, 2), _INT16, 2)
    return _spread(builder, _widen(builder, bits, types.int16, 0))


def _emit_dots(builder: Any, form: _Form, rows: list[Any], scales: list[Any], queries: list[Any], groups: Any) -> Any:
    """Emit the products of rows and queries at these addresses: query-major in the lanes of one vector."""
    slots = [[cgutils.alloca_once(builder, _VECTOR) for _ in rows] for _ in queries]
    for slot in (slot for own in slots for slot in own):
        builder.store(ir.Constant(_VECTOR, [0.0] * LANES), slot)
    muladd = _muladd(builder)
    with cgutils.for_range(builder, groups) as loop:
        group = loop.index
        starts = [_offset(builder, query, group, 4 * form.group) for query in queries]
        places = [_INT64(4 * place) for place in range(0, form.group, LANES)]
        given = [[_load(builder, builder.add(start, place), _VECTOR, 4) for place in places] for start in starts]
        for i, row in enumerate(rows):
            vectors = _group_vectors(builder, form, row, group)
            scale = None if form.kind == BFLOAT16 else _scale(builder, form, scales[i], group)
            if scale is not None and len(queries) > 1:
                vectors, scale = [builder.fmul(vector, scale) for vector in vectors], None
            for own, slot in zip(given, (own[i] for own in slots), strict=True):
                total = builder.load(slot) if scale is None else None
                for left, right in zip(own, vectors, strict=True):
                    total = builder.fmul(left, right) if total is None else builder.call(muladd, [left, right, total])
                if scale is not None:
                    total = builder.call(muladd, [total, scale, builder.load(slot)])
                builder.store(total, slot)
    return _fold(builder, [builder.load(slot) for own in slots for slot in own])


def _emit_row(builder: Any, form: _Form, row: Any, scales: Any, offsets: Any, groups: Any, out: Any) -> None:
    """Emit the widening of a row to float32 at address `out`. offsets: address, 0 if there are none."""
    muladd = _muladd(builder)
    moved = builder.icmp_signed("!=", offsets, _INT64(0))
    offset = cgutils.alloca_once(builder, _VECTOR)
    builder.store(ir.Constant(_VECTOR, [0.0] * LANES), offset)
    with cgutils.for_range(builder, groups) as loop:
        vectors = _group_vectors(builder, form, row, loop.index)
        if form.kind != BFLOAT16:
            with builder.if_then(moved):
                builder.store(_scale(builder, form, offsets, loop.index), offset)
            scale = _scale(builder, form, scales, loop.index)
            vectors = [builder.call(muladd, [vector, scale, builder.load(offset)]) for vector in vectors]
        start = _offset(builder, out, loop.index, 4 * form.group)
        for j, vector in enumerate(vectors):
            builder.store(
                vector, builder.inttoptr(builder.add(start, _INT64(4 * j * LANES)), _VECTOR.as_pointer()), align=4
            )


def _for_each_form(builder: Any, number: Any, emit: Any) -> None:
    """Emit code for every form, of which the one with `number` runs."""
    for own, form in enumerate(FORMS):
        with builder.if_then(builder.icmp_signed("==", number, _INT64(own))):
            emit(form)


@intrinsic(prefer_literal=True)
def _dots(typingctx, rows, queries, form, numbers, row_bytes, scales, scale_bytes, inputs, input_bytes, groups, out):
    """Write products of matrix rows and inputs as 16 floats to address `out`, query-major.

    rows, queries: literals, a power of two together. numbers, scales, inputs: addresses of the first, each with the
    bytes to the next.
    """
    sizes = [getattr(one, "literal_value", None) for one in (rows, queries)]
    if None in sizes:
        return None

    def codegen(context, builder, signature, args):
        form, numbers, row_bytes, scales, scale_bytes, inputs, input_bytes, groups, out = args[2:]

        def each(first, nbytes, count):
            return [builder.add(first, builder.mul(nbytes, _INT64(number))) for number in range(count)]

        def emit(own):
            addresses = each(numbers, row_bytes, sizes[0]), each(scales, scale_bytes, sizes[0])
            products = _emit_dots(builder, own, *addresses, each(inputs, input_bytes, sizes[1]), groups)
            builder.store(products, builder.inttoptr(out, products.type.as_pointer()), align=4)

        _for_each_form(builder, form, emit)
        return context.get_dummy_value()

    return types.void(rows, queries, *[types.int64] * 9), codegen


@intrinsic
def _widen_row(typingctx, form, numbers, scales, offsets, groups, out):
    """Write a matrix row as float32 to address `out`. offsets: address, 0 if there are none."""

    def codegen(context, builder, signature, args):
        _for_each_form(builder, args[0], lambda own: _emit_row(builder, own, *args[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


# Words of a descriptor: of the matrix, then of the call.
(
    _FORM, _NUMBERS, _ROW_BYTES, _SCALES, _SCALE_BYTES, _OFFSETS, _BIAS, _GROUPS, _GROUP, _ROWS, _HALF,
    _INPUTS, _INPUT_BYTES, _QUERIES, _SUMS, _OUT, _OUT_WIDTH, _TILE, _SCRATCH, _FIRST, _CHOSEN, _EACH,
) = range(22)  # fmt: skip
_WORDS = 22
_WORDS_BYTES, _SCRATCH_BYTES = 256, 128
"""Bytes of a descriptor, and of the products of a worker."""


@njit(nogil=True, cache=True, fastmath={"contract", "reassoc"})
def _offset_product(words, row, query):
    """Sum of a row's offsets times the sums of an input's groups."""
    groups = words[_GROUPS]
    sums = carray(at_address(words[_SUMS] + query * groups * 4), groups, np.float32)
    total = np.float32(0.0)
    if words[_HALF]:
        halves = carray(at_address(words[_OFFSETS] + row * words[_SCALE_BYTES]), groups, np.int16)
        for group in range(groups):
            total += widen(halves[group]) * sums[group]
    else:
        offsets = carray(at_address(words[_OFFSETS] + row * words[_SCALE_BYTES]), groups, np.float32)
        for group in range(groups):
            total += offsets[group] * sums[group]
    return total


@njit(nogil=True, cache=True)
def _finish(words, row, query, product):
    """Store a product with its offsets and bias."""
    if words[_OFFSETS]:
        product += _offset_product(words, row, query)
    if words[_BIAS]:
        product += carray(at_address(words[_BIAS]), row + 1, np.float32)[row]
    out = carray(at_address(words[_OUT] + query * words[_OUT_WIDTH] * 4), words[_OUT_WIDTH], np.float32)
    out[row] = product


def _multiply_task(descriptor, number, worker):
    words = carray(at_address(descriptor), _WORDS, np.int64)
    scratch = words[_SCRATCH] + worker * _SCRATCH_BYTES
    products = carray(at_address(scratch), LANES, np.float32)
    form, row_bytes, scale_bytes = words[_FORM], words[_ROW_BYTES], words[_SCALE_BYTES]
    input_bytes, groups, queries = words[_INPUT_BYTES], words[_GROUPS], words[_QUERIES]
    first = number * words[_TILE]
    last = min(words[_ROWS], first + words[_TILE])
    tiled = queries // QUERY_TILE * QUERY_TILE
    for row in range(first, last if tiled else first):
        numbers, scales = words[_NUMBERS] + row * row_bytes, words[_SCALES] + row * scale_bytes
        for query in range(0, tiled, QUERY_TILE):
            given = words[_INPUTS] + query * input_bytes
            _dots(1, 4, form, numbers, row_bytes, scales, scale_bytes, given, input_bytes, groups, scratch)
            for own in range(QUERY_TILE):
                _finish(words, row, query + own, products[own])
    for query in range(tiled, queries):
        given = words[_INPUTS] + query * input_bytes
        for row in range(first, last, ROW_TILE):
            numbers, scales = words[_NUMBERS] + row * row_bytes, words[_SCALES] + row * scale_bytes
            _dots(4, 1, form, numbers, row_bytes, scales, scale_bytes, given, input_bytes, groups, scratch)
            for own in range(ROW_TILE):
                _finish(words, row + own, query, products[own])
    return np.int64(0)


def _widen_task(descriptor, number, worker):
    words = carray(at_address(descriptor), _WORDS, np.int64)
    first = number * words[_TILE]
    for place in range(first, min(words[_ROWS], first + words[_TILE])):
        row = words[_FIRST] + place
        if words[_CHOSEN]:
            row = carray(at_address(words[_CHOSEN]), words[_ROWS], np.int64)[place]
        offsets = words[_OFFSETS]
        if offsets:
            offsets += row * words[_SCALE_BYTES]
        numbers, scales = words[_NUMBERS] + row * words[_ROW_BYTES], words[_SCALES] + row * words[_SCALE_BYTES]
        out = words[_OUT] + place * words[_GROUPS] * words[_GROUP] * 4
        _widen_row(words[_FORM], numbers, scales, offsets, words[_GROUPS], out)
    return np.int64(0)


def _chosen_task(descriptor, number, worker):
    """Multiply a tile of the rows of one part of the matrix; _ROWS: of a part, _OUT_WIDTH of them, by number."""
    words = carray(at_address(descriptor), _WORDS, np.int64)
    scratch = words[_SCRATCH] + worker * _SCRATCH_BYTES
    products = carray(at_address(scratch), LANES, np.float32)
    form, row_bytes, scale_bytes = words[_FORM], words[_ROW_BYTES], words[_SCALE_BYTES]
    rows = words[_ROWS]
    tiles = (rows + words[_TILE] - 1) // words[_TILE]
    pair = number // tiles
    base = carray(at_address(words[_CHOSEN]), pair + 1, np.int64)[pair] * rows
    query = pair // words[_EACH]
    given = words[_INPUTS] + query * words[_INPUT_BYTES]
    out = carray(at_address(words[_OUT] + pair * rows * 4), rows, np.float32)
    first = number % tiles * words[_TILE]
    for place in range(first, min(rows, first + words[_TILE]), ROW_TILE):
        row = base + place
        numbers, scales = words[_NUMBERS] + row * row_bytes, words[_SCALES] + row * scale_bytes
        _dots(4, 1, form, numbers, row_bytes, scales, scale_bytes, given, words[_INPUT_BYTES], words[_GROUPS], scratch)
        for own in range(ROW_TILE):
            product = products[own]
            if words[_OFFSETS]:
                product += _offset_product(words, row + own, query)
            out[place + own] = product
    return np.int64(0)


@functools.cache
def task_addresses() -> tuple[int, int]:
    """Addresses of the tasks that multiply and widen; compiled, or loaded, on first use."""
    return address_for_c(_multiply_task, _TASK), address_for_c(_widen_task, _TASK)


@functools.cache
def _chosen_address() -> int:
    """Address of the task that multiplies by parts of a matrix; compiled, or loaded, on first use."""
    return address_for_c(_chosen_task, _TASK)


@njit(nogil=True, cache=True)
def _sum_groups(words, sums):
    """Write the sum of each group of each input to address `sums`, (queries, groups)."""
    groups, group = words[_GROUPS], words[_GROUP]
    for query in range(words[_QUERIES]):
        given = carray(at_address(words[_INPUTS] + query * words[_INPUT_BYTES]), (groups, group), np.float32)
        out = carray(at_address(sums + query * groups * 4), groups, np.float32)
        for i in range(groups):
            total = np.float32(0.0)
            for j in range(group):
                total += given[i, j]
            out[i] = total


@njit(nogil=True, cache=True)
def multiply(matrix, inputs, queries, out, function, pool, threads, scratch, sums):
    """Multiply float32 inputs (queries, columns) at an address with a stored matrix; returns what `run_job` returned.

    matrix: `StoredMatrix.address`. function: the first of `task_addresses`. scratch: address of `scratch_for`.
    sums: address of 4 bytes for each group of the inputs; not used by a matrix without offsets.
    """
    stored = carray(at_address(matrix), _WORDS, np.int64)
    words = carray(at_address(scratch), _WORDS, np.int64)
    for i in range(_WORDS):
        words[i] = stored[i]
    words[_INPUTS], words[_QUERIES], words[_OUT], words[_SUMS] = inputs, queries, out, sums
    words[_SCRATCH] = scratch + _WORDS_BYTES
    if words[_OFFSETS]:
        _sum_groups(words, sums)
    rows, columns = words[_ROWS], words[_GROUPS] * words[_GROUP]
    fewest = (TASK_WEIGHTS + columns * queries - 1) // (columns * queries)
    tile = max(fewest, (rows + TASKS * threads - 1) // (TASKS * threads))
    tile = (tile + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    words[_TILE] = tile
    return run_job(pool, function, scratch, (rows + tile - 1) // tile, threads)


def scratch_for(workers: int, groups: int) -> tuple[npt.NDArray[np.uint8], int, int]:
    """Return scratch memory of `multiply` with sums of `groups` behind it, which the caller keeps, and the addresses of
    both.
    """
    first = _WORDS_BYTES + workers * _SCRATCH_BYTES
    memory = np.empty(first + 4 * groups, np.uint8)
    return memory, memory.ctypes.data, memory.ctypes.data + first


class StoredMatrix:
    """A matrix (rows, columns) in one of FORMS, in memory that the arrays own.

    numbers: (rows, bytes of a row) uint8 or int8, or (rows, columns) uint16, the bits of bfloat16. scales, offsets:
    (rows, groups) float32 or float16, None for bfloat16; a weight is number * scale + offset, of 4 bits
    (number - MIDDLE) * scale + offset. floats: numbers of 4 bits are E2M1, multiplied by twice their value. bias:
    (rows,) float32. All are contiguous.
    Raises ShapeError for another form, and for rows that are no multiple of ROW_TILE.
    """

    def __init__(
        self,
        numbers: npt.NDArray[Any],
        scales: npt.NDArray[Any] | None = None,
        offsets: npt.NDArray[Any] | None = None,
        bias: npt.NDArray[Any] | None = None,
        *,
        floats: bool = False,
    ) -> None:
        kinds = {np.dtype(np.uint16): BFLOAT16, np.dtype(np.int8): BYTES, np.dtype(np.uint8): NIBBLES}
        kind = kinds.get(numbers.dtype)
        rows, width = numbers.shape
        self.rows, self.columns = rows, width * 2 if kind == NIBBLES else width
        kind = FLOATS if floats else kind
        groups = self.columns // LANES if scales is None else scales.shape[1]
        group = self.columns // max(1, groups)
        half = scales is not None and scales.dtype == np.float16
        form = None if kind is None else _Form(kind, group, half)
        arrays = [one for one in (numbers, scales, offsets, bias) if one is not None]
        whole = all(one.flags.c_contiguous and len(one) == rows for one in arrays) and groups * group == self.columns
        if (
            form not in FORMS
            or not whole
            or rows % ROW_TILE
            or len({one.dtype for one in (scales, offsets) if one is not None}) > 1
        ):
            shapes = ", ".join(f"{one.dtype} {one.shape}" for one in arrays)
            raise ShapeError(f"a stored matrix needs rows in multiples of {ROW_TILE} in one of {FORMS}, got {shapes}")
        self._arrays = arrays
        words = np.zeros(_WORDS, np.int64)
        words[_FORM] = FORMS.index(form)
        words[_NUMBERS], words[_ROW_BYTES] = numbers.ctypes.data, numbers.strides[0]
        if scales is not None:
            words[_SCALES], words[_SCALE_BYTES] = scales.ctypes.data, scales.strides[0]
        words[_OFFSETS] = 0 if offsets is None else offsets.ctypes.data
        words[_BIAS] = 0 if bias is None else bias.ctypes.data
        words[_GROUPS], words[_GROUP], words[_ROWS], words[_HALF] = groups, group, rows, half
        words[_OUT_WIDTH], words[_INPUT_BYTES] = rows, 4 * self.columns
        self._words, self._address = words, words.ctypes.data

    @property
    def address(self) -> int:
        """Address of the descriptor, valid while this object lives."""
        return self._address

    @property
    def groups(self) -> int:
        """Groups of a row if the matrix has offsets, else 0."""
        return int(self._words[_GROUPS]) if self._words[_OFFSETS] else 0

    def multiply(self, inputs: int, queries: int, out: int) -> None:
        """Multiply float32 inputs (queries, columns) at an address with the transposed matrix, plus its bias.

        out: address of float32 (queries, rows). Raises BackendError if the pool is closed.
        """
        pool = default_pool()
        _memory, place, sums = scratch_for(pool.workers, queries * self.groups)
        function = task_addresses()[0]
        check_job(multiply(self._address, inputs, queries, out, function, pool.address, pool.threads, place, sums))

    def multiply_parts(self, inputs: int, queries: int, chosen: int, pairs: int, part_rows: int, out: int) -> None:
        """Multiply float32 inputs (queries, columns) at an address with parts of the matrix, without its bias.

        Pair i multiplies input i // (pairs // queries) by rows [part_rows * chosen[i], part_rows * (chosen[i] + 1)).
        chosen: address of int64 (pairs,). part_rows: a multiple of ROW_TILE. out: of float32 (pairs, part_rows).
        Raises BackendError if the pool is closed.
        """
        pool, words = default_pool(), self._words.copy()
        memory, place, sums = scratch_for(pool.workers, queries * self.groups)
        words[_INPUTS], words[_QUERIES], words[_OUT], words[_SUMS] = inputs, queries, out, sums
        words[_CHOSEN], words[_EACH], words[_ROWS] = chosen, pairs // queries, part_rows
        words[_SCRATCH] = place + _WORDS_BYTES
        if words[_OFFSETS]:
            _sum_groups(words, sums)
        fewest = max(-(-TASK_WEIGHTS // self.columns), -(-part_rows * pairs // (TASKS * pool.threads)))
        words[_TILE] = tile = min(part_rows, -(-fewest // ROW_TILE) * ROW_TILE)
        tasks = pairs * -(-part_rows // tile)
        check_job(run_job(pool.address, _chosen_address(), words.ctypes.data, tasks, pool.threads))
        del memory

    def widen(self, first: int, count: int, out: int) -> None:
        """Write rows [first, first + count) as float32 (count, columns) to an address."""
        self._widen(count, out, _FIRST, first)

    def take(self, rows: int, count: int, out: int) -> None:
        """Write rows by number, int64 (count,) at address `rows`, as float32 (count, columns) to address `out`."""
        self._widen(count, out, _CHOSEN, rows)

    def _widen(self, count: int, out: int, word: int, value: int) -> None:
        pool, words = default_pool(), self._words.copy()
        words[_ROWS], words[_OUT], words[word] = count, out, value
        words[_TILE] = tile = max(1, TASK_WEIGHTS // self.columns, -(-count // (TASKS * pool.threads)))
        check_job(run_job(pool.address, task_addresses()[1], words.ctypes.data, -(-count // tile), pool.threads))


def check_job(code: int) -> None:
    """Raise BackendError unless `code`, returned by `run_job`, is 0."""
    raise_if_unusable(code)
    if code:
        raise BackendError(f"a task of a matrix product failed with code {code}")
