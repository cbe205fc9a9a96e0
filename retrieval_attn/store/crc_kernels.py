"""CRC-32C compiled: by the processor's instruction where it has one, else by tables for eight bytes at a time.

One chain of the instruction waits for its own result, three cycles on x86. Blocks are independent, so three of them
go side by side, and nothing has to be combined.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools
import platform
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic as _numba_intrinsic

import retrieval_attn.compile.numba_cache  # noqa: F401  # before any kernel is defined
from retrieval_attn.store.polynomial import BLOCK, byte_table

intrinsic: Any = _numba_intrinsic
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FEATURES = {"x86_64": "sse4.2", "AMD64": "sse4.2", "aarch64": "crc", "arm64": "crc"}
_WORD, _BYTE = np.int64(8), np.int64(1)


@functools.cache
def has_instruction() -> bool:
    """Whether Numba may use the processor's instruction here: what it compiles for has it.

    The settings NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another processor: for that one it must be named.
    """
    feature = _FEATURES.get(platform.machine())
    settings = vars(numba.config)
    name, features = settings.get("CPU_NAME"), settings.get("CPU_FEATURES")
    if feature is None:
        return False
    if features:
        return f"+{feature}" in str(features).split(",")
    if name and name != llvmlite.binding.get_host_cpu_name():
        return False
    return bool(llvmlite.binding.get_host_cpu_features().get(feature))


def _tables() -> npt.NDArray[np.uint64]:
    """(8, 256): row k tells what a byte does that k zero bytes follow."""
    tables = np.zeros((8, 256), np.uint64)
    first = byte_table()
    row = list(first)
    for number in range(8):
        tables[number] = row
        row = [first[value & 255] ^ value >> 8 for value in row]
    return tables


_TABLES = _tables()


def _load(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1  # bytes begin anywhere
    return loaded


@intrinsic
def _load_word(typingctx, address):
    def codegen(context, builder, signature, args):
        return _load(builder, args[0], _I64)

    return types.uint64(types.int64), codegen


@intrinsic
def _load_byte(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.zext(_load(builder, args[0], _I8), _I64)

    return types.uint64(types.int64), codegen


def _declared(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    return builder.module.declare_intrinsic(name, fnty=ir.FunctionType(result, arguments))


def _is_x86() -> bool:
    return _FEATURES.get(platform.machine()) == "sse4.2"


@intrinsic
def _word_by_instruction(typingctx, register, address):
    def codegen(context, builder, signature, args):
        word = _load(builder, args[1], _I64)
        if _is_x86():
            step = _declared(builder, "llvm.x86.sse42.crc32.64.64", _I64, [_I64, _I64])
            return builder.call(step, [args[0], word])
        step = _declared(builder, "llvm.aarch64.crc32cx", _I32, [_I32, _I64])
        return builder.zext(builder.call(step, [builder.trunc(args[0], _I32), word]), _I64)

    return types.uint64(types.uint64, types.int64), codegen


@intrinsic
def _byte_by_instruction(typingctx, register, address):
    def codegen(context, builder, signature, args):
        byte = _load(builder, args[1], _I8)
        low = builder.trunc(args[0], _I32)
        if _is_x86():
            step = _declared(builder, "llvm.x86.sse42.crc32.32.8", _I32, [_I32, _I8])
            return builder.zext(builder.call(step, [low, byte]), _I64)
        step = _declared(builder, "llvm.aarch64.crc32cb", _I32, [_I32, _I32])
        return builder.zext(builder.call(step, [low, builder.zext(byte, _I32)]), _I64)

    return types.uint64(types.uint64, types.int64), codegen


@njit(nogil=True, cache=True)
def _word_by_tables(register, address):
    word = _load_word(address) ^ register
    result = np.uint64(0)
    for place in range(8):
        result ^= _TABLES[7 - place, (word >> np.uint64(8 * place)) & np.uint64(255)]
    return result


@njit(nogil=True, cache=True)
def _byte_by_tables(register, address):
    return _TABLES[0, (register ^ _load_byte(address)) & np.uint64(255)] ^ (register >> np.uint64(8))


@njit(nogil=True, cache=True)
def _chain_by_tables(register, address, size):
    end = address + size
    while address + _WORD <= end:
        register = _word_by_tables(register, address)
        address += _WORD
    while address < end:
        register = _byte_by_tables(register, address)
        address += _BYTE
    return register


@njit(nogil=True, cache=True)
def _chain_by_instruction(register, address, size):
    end = address + size
    while address + _WORD <= end:
        register = _word_by_instruction(register, address)
        address += _WORD
    while address < end:
        register = _byte_by_instruction(register, address)
        address += _BYTE
    return register


@njit(nogil=True, cache=True)
def _blocks_by_tables(address, size, block, sums):
    ones = np.uint64(0xFFFFFFFF)
    for number in range(len(sums)):
        begin = number * block
        sums[number] = ones ^ _chain_by_tables(ones, address + begin, min(block, size - begin))


@njit(nogil=True, cache=True)
def _blocks_by_instruction(address, size, block, sums):
    ones = np.uint64(0xFFFFFFFF)
    number = np.int64(0)
    while (number + 3) * block <= size:
        first = address + number * block
        second, third = first + block, first + 2 * block
        a, b, c = ones, ones, ones
        for place in range(0, block, 8):
            a = _word_by_instruction(a, first + place)
            b = _word_by_instruction(b, second + place)
            c = _word_by_instruction(c, third + place)
        sums[number], sums[number + 1], sums[number + 2] = a ^ ones, b ^ ones, c ^ ones
        number += 3
    while number < len(sums):
        begin = number * block
        sums[number] = ones ^ _chain_by_instruction(ones, address + begin, min(block, size - begin))
        number += 1


def checksum(data: npt.NDArray[np.uint8], start: int, *, instruction: bool | None = None) -> int:
    """Return the CRC of contiguous bytes. start: CRC of the bytes before. instruction: default: if the CPU has it."""
    chain = _chain_by_instruction if _choose(instruction) else _chain_by_tables
    return int(chain(np.uint64(~start & 0xFFFFFFFF), np.int64(data.ctypes.data), np.int64(len(data)))) ^ 0xFFFFFFFF


def blocks(data: npt.NDArray[np.uint8], sums: npt.NDArray[np.uint32], *, instruction: bool | None = None) -> None:
    """Write the checksum of every BLOCK bytes of `data`, contiguous, to `sums`; the last block may be shorter."""
    kernel = _blocks_by_instruction if _choose(instruction) else _blocks_by_tables
    kernel(np.int64(data.ctypes.data), np.int64(len(data)), np.int64(BLOCK), sums)


def _choose(instruction: bool | None) -> bool:
    return has_instruction() if instruction is None else instruction


def prepare() -> None:
    """Compile, or load what is compiled: a job of `compile/jobs.py`, or before a timing."""
    few = np.zeros(16, np.uint8)
    checksum(few, 0)
    blocks(few, np.zeros(1, np.uint32))
