"""Products with stored matrices: each form against NumPy on the widened weights, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrieval_attn.cpu.matrix import BFLOAT16, BYTES, FLOATS, FORMS, MIDDLE, StoredMatrix
from retrieval_attn.cpu.pool import Pool
from retrieval_attn.errors import BackendError, ShapeError

Floats = npt.NDArray[np.float32]
SIZES = (64, 64), (8, 2048), (1000, 640)


def arrays(form: Any, rows: int, columns: int, *, moved: bool) -> tuple[list[Any], Floats]:
    """What a matrix of a form is made of, and its weights."""
    rng = np.random.default_rng(rows)
    if form.kind == BFLOAT16:
        bits = (rng.standard_normal((rows, columns), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return [bits], (bits.astype(np.uint32) << 16).view(np.float32)
    kind: Any = np.float16 if form.half else np.float32
    groups = columns // form.group
    scales = rng.uniform(0.5, 1.5, (rows, groups)).astype(kind)
    offsets = rng.standard_normal((rows, groups)).astype(kind) if moved else None
    if form.kind == BYTES:
        numbers: Any = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
        values = numbers.astype(np.float32)
    else:
        plain = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
        halves = plain.reshape(rows, -1, 2, 16)
        numbers = np.ascontiguousarray((halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1))
        values = plain.astype(np.float32) - MIDDLE
        if form.kind == FLOATS:
            twice = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
            values = np.concatenate([twice, -twice])[plain]
    weights = values.reshape(rows, groups, -1) * scales[..., None].astype(np.float32)
    if offsets is not None:
        weights = weights + offsets[..., None].astype(np.float32)
    return [numbers, scales, offsets], weights.reshape(rows, columns)


def product(matrix: StoredMatrix, inputs: Floats) -> Floats:
    out = np.full((len(inputs), matrix.rows), np.nan, np.float32)
    matrix.multiply(inputs.ctypes.data, len(inputs), out.ctypes.data)
    return out


@pytest.mark.parametrize("moved", [False, True], ids=["scaled", "moved"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_are_those_of_the_widened_weights(form: Any, moved: bool) -> None:
    for rows, columns in SIZES:
        parts, weights = arrays(form, rows, columns, moved=moved)
        matrix = StoredMatrix(*parts, floats=form.kind == FLOATS)
        assert (matrix.rows, matrix.columns) == (rows, columns)
        for queries in (1, 3, 4, 9):
            inputs = np.random.default_rng(queries).standard_normal((queries, columns), dtype=np.float32)
            expected = inputs.astype(np.float64) @ weights.T.astype(np.float64)
            assert np.abs(product(matrix, inputs) - expected).max() < 2e-6 * np.abs(expected).max()
        whole = np.full((rows, columns), np.nan, np.float32)
        matrix.widen(0, rows, whole.ctypes.data)
        np.testing.assert_allclose(whole, weights, rtol=1e-6, atol=1e-5)
        numbers, some = np.array([rows - 1, 0, 3]), np.full((3, columns), np.nan, np.float32)
        matrix.take(numbers.ctypes.data, 3, some.ctypes.data)
        assert np.array_equal(some, whole[numbers])


@pytest.mark.parametrize("moved", [False, True], ids=["scaled", "moved"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_parts_are_multiplied_by_number(form: Any, moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs with some parts each; what a pair gives does not depend on the other pairs and threads."""
    part_rows, parts_of_all, columns = 24, 5, 64
    own, weights = arrays(form, part_rows * parts_of_all, columns, moved=moved)
    matrix, weights = (
        StoredMatrix(*own, floats=form.kind == FLOATS),
        weights.reshape(parts_of_all, part_rows, columns),
    )
    rng = np.random.default_rng(0)
    for queries, each in ((1, 1), (1, 3), (4, 2)):
        chosen = np.stack([rng.permutation(parts_of_all)[:each] for _ in range(queries)]).astype(np.int64)
        inputs = rng.standard_normal((queries, columns), dtype=np.float32)
        expected = np.einsum("qpoi,qi->qpo", weights[chosen], inputs).reshape(-1, part_rows)
        found = []
        for threads in (1, 3):
            with Pool(threads) as pool:
                monkeypatch.setattr("retrieval_attn.cpu.matrix.default_pool", lambda: pool)
                out = np.full(expected.shape, np.nan, np.float32)
                matrix.multiply_parts(
                    inputs.ctypes.data, queries, chosen.ctypes.data, chosen.size, part_rows, out.ctypes.data
                )
                found.append(out)
        assert np.abs(found[0] - expected).max() < 1e-5 * np.abs(expected).max()
        assert np.array_equal(found[0], found[1])


def test_a_bias_is_added_and_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, weights = arrays(FORMS[5], 1000, 640, moved=True)
    bias = np.random.default_rng(0).standard_normal(1000, dtype=np.float32) * 100
    inputs = np.random.default_rng(1).standard_normal((5, 640), dtype=np.float32)
    expected = inputs @ weights.T + bias
    found = []
    for threads in (1, 2, 5):
        with Pool(threads) as pool:
            monkeypatch.setattr("retrieval_attn.cpu.matrix.default_pool", lambda: pool)
            found.append(product(StoredMatrix(parts[0], parts[1], parts[2], bias), inputs))
    assert np.abs(found[0] - expected).max() < 1e-5 * np.abs(expected).max()
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_other_matrices_are_refused() -> None:
    (numbers, scales, offsets), _ = arrays(FORMS[1], 64, 64, moved=True)
    for parts in (
        (numbers[:3], scales[:3]),  # rows that are no whole tile
        (numbers[:, :48], scales),  # no whole group
        (numbers.astype(np.int32), scales),
        (numbers, scales, offsets.astype(np.float32)),
        (numbers[::2], scales[::2]),  # rows that are not contiguous
    ):
        with pytest.raises(ShapeError, match="a stored matrix needs rows in multiples of 4"):
            StoredMatrix(*parts)


def test_a_closed_pool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, _ = arrays(FORMS[1], 64, 64, moved=False)
    pool = Pool(1)
    pool.close()
    monkeypatch.setattr("retrieval_attn.cpu.matrix.default_pool", lambda: pool)
    with pytest.raises(BackendError, match="closed"):
        product(StoredMatrix(*parts), np.zeros((1, 64), np.float32))
