"""The last task of a step for one query: join the candidates that were found, keep the best k, attend to them.

Scores come from the search, so keys are not read again. What the words mean is laid out in `step`.
"""

# mypy: allow-untyped-defs
# (compiled functions get their types from Numba)
from __future__ import annotations

import functools

import numpy as np
from numba import carray, njit

from retrieval_attn.cpu.atomics import at_address, atomic_load
from retrieval_attn.cpu.gather import attend_rows, bytes_of_row
from retrieval_attn.cpu.step import descriptor as at
from retrieval_attn.cpu.step.descriptor import count_cost, floats_at, task_in_format, words_at
from retrieval_attn.cpu.step.search_tasks import scan_alone
from retrieval_attn.cpu.stored_rows import rows_at
from retrieval_attn.index.formats import Format
from retrieval_attn.index.kernels.dots import bits_to_float
from retrieval_attn.index.kernels.packed import id_of, keep_best, score_of
from retrieval_attn.index.kernels.scan import rescore


@njit(nogil=True, cache=True)
def _join_lists(step, scratch, entry, query, lists, found, floor, like):
    """Bring the best candidates of all lists to the front of `found`, in any order; returns how many, <= top_k.

    Coded candidates of a piece are joined first, and scored again: in parts, other keys would get their exact score.
    """
    top_k, size = step[at.TOP_K], step[at.LIST_WORDS]
    kept = 0
    number = 0
    while number < lists:
        start = number * size
        piece = found[start + at.LIST_PIECE]
        if piece < 0:
            first = start + at.LIST_HEAD
            for i in range(first, first + found[start + at.LIST_COUNT]):
                packed = found[i]
                found[kept] = packed  # never ahead of what is still to be read
                kept += 1 if packed >= floor else 0
            number += 1
            continue
        joined = carray(at_address(scratch + step[at.JOINED_AT]), step[at.JOINED], np.int64)
        count = 0
        while number < lists and found[number * size + at.LIST_PIECE] == piece:
            first = number * size + at.LIST_HEAD
            for i in range(first, first + found[number * size + at.LIST_COUNT]):
                joined[count] = found[i]
                count += 1
            number += 1
        count = _score_coded(step, entry, query, piece, joined, count, like)
        for i in range(count):
            found[kept] = joined[i]
            kept += 1 if joined[i] >= floor else 0
    if kept > top_k:
        keep_best(found, kept, top_k)
        kept = top_k
    return kept


@njit(nogil=True, cache=True)
def _score_coded(step, entry, query, number, joined, count, like):
    """Cut coded candidates joined[:count] of piece `number` to the best, and pack those by their scores; how many."""
    dim = step[at.HEAD_DIM]
    piece = words_at(step[at.PIECES_AT], number + 1, at.PIECE_WORDS)[number]
    kept = words_at(piece[at.INDEX], 1, at.GRAPH_WORDS)[0, at.KEPT]
    own = floats_at(step[at.TILES_AT] + (entry * step[at.PADDED] + query) * dim * 4, 1, dim)
    keys = rows_at(piece[at.KEYS], piece[at.HIGH], dim, like)
    if count < min(kept, piece[at.HIGH] - piece[at.LOW]):  # the sketch was misled: an exact answer, slowly
        count = scan_alone(own, keys, piece[at.LOW], piece[at.HIGH], step[at.TOP_K], joined)
        for i in range(count):
            joined[i] -= piece[at.FIRST]
        return count
    if count > kept:
        keep_best(joined, count, kept)
        count = kept
    rescore(keys, piece[at.HIGH], own, 0, joined, count, piece[at.FIRST], joined)
    return count


@njit(nogil=True, cache=True)
def _sort_by_id(found, other, count, digits):
    """Sort packed candidates found[:count] by id, lowest first; returns whether the result lies in `other` instead.

    Each byte of the ids in turn, lowest first. digits: (256,) int64 scratch.
    """
    most = np.int64(0)
    for i in range(count):
        most = max(most, id_of(found[i]))
    moved = False
    shift = 0
    while most >> shift:
        digits[:] = 0
        for i in range(count):
            digits[(id_of(found[i]) >> shift) & 255] += 1
        start = np.int64(0)
        for digit in range(256):
            start, digits[digit] = start + digits[digit], start
        for i in range(count):
            digit = (id_of(found[i]) >> shift) & 255
            other[digits[digit]] = found[i]
            digits[digit] += 1
        found, other = other, found
        moved = not moved
        shift += 8
    return moved


@njit(nogil=True, cache=True)
def _attend(descriptor, number, worker, like):
    """Attend to the best candidates of query `number` of all; returns an error code."""
    step = words_at(descriptor, 1, at.WORDS)[0]
    scratch = step[at.SCRATCH_AT] + worker * step[at.SCRATCH_STRIDE]
    entry = number // step[at.QUERIES]
    entries = words_at(step[at.ENTRIES_AT], step[at.ENTRIES], at.ENTRY_WORDS)
    queries, top_k, value_dim = step[at.QUERIES], step[at.TOP_K], step[at.VALUE_DIM]
    out = floats_at(step[at.OUT_AT], step[at.ENTRIES] * queries, value_dim)[number]
    lse = floats_at(step[at.LSE_AT], step[at.ENTRIES] * queries, 1)
    size = step[at.LISTS] * step[at.LIST_WORDS]
    found = carray(at_address(step[at.LISTS_AT] + number * size * 8), size, np.int64)
    floor = atomic_load(step[at.FLOORS_AT] + number * 8)
    lists = entries[entry, at.ENTRY_LISTS]
    count = _join_lists(step, scratch, entry, number % queries, lists, found, floor, like)
    rows = carray(at_address(scratch + step[at.ROWS_AT]), top_k, np.int64)
    scores = carray(at_address(scratch + step[at.SCORES_AT]), top_k, np.float32)
    # one order, whatever the order of finding was, or sums would differ; and neighbours in memory come together
    digits = carray(at_address(scratch + step[at.DIGITS_AT]), 256, np.int64)
    if _sort_by_id(found, rows, count, digits):
        found = rows
    first, last = entries[entry, at.ENTRY_PIECE], entries[entry, at.ENTRY_PIECE] + entries[entry, at.ENTRY_PIECES]
    pieces = words_at(step[at.PIECES_AT], last, at.PIECE_WORDS)
    row_bytes = bytes_of_row(like, value_dim)
    own = first
    for i in range(count):
        key = id_of(found[i])
        token = key - pieces[own, at.FIRST]
        if token < pieces[own, at.LOW] or token >= pieces[own, at.HIGH]:  # mostly the same piece as before
            for own in range(first, last):
                token = key - pieces[own, at.FIRST]
                if pieces[own, at.LOW] <= token < pieces[own, at.HIGH]:
                    break
            else:
                out[:] = np.float32(np.nan)
                lse[number, 0] = np.float32(np.nan)
                return np.int64(at.BAD_ID)
        scores[i] = score_of(found[i])
        rows[i] = pieces[own, at.VALUES] + token * row_bytes  # may be where found[i] lay
    scale, softcap = bits_to_float(np.int32(step[at.SCALE])), bits_to_float(np.int32(step[at.SOFTCAP]))
    lse[number, 0] = attend_rows(like, rows, scores, count, scale, softcap, out)
    count_cost(step, worker, 0, count * row_bytes)
    return np.int64(0)


# One function per storage format: the type of the array decides how its elements are read.


def _attend_float32(descriptor, number, worker):
    return _attend(descriptor, number, worker, carray(at_address(descriptor), (1, 1), np.float32))


def _attend_bfloat16(descriptor, number, worker):
    return _attend(descriptor, number, worker, carray(at_address(descriptor), (1, 1), np.uint16))


def _attend_float16(descriptor, number, worker):
    return _attend(descriptor, number, worker, carray(at_address(descriptor), (1, 1), np.int16))


def _attend_int8(descriptor, number, worker):
    return _attend(descriptor, number, worker, carray(at_address(descriptor), (1, 1), np.int8))


@functools.cache
def attend_task(fmt: Format) -> int:
    """Address of the function that attends to values in `fmt`; compiled, or loaded, on first use."""
    return task_in_format(fmt, _attend_float32, _attend_bfloat16, _attend_float16, _attend_int8)
