"""Attention of rows over stretches of their own memory: against a dense reference, for every format."""

from __future__ import annotations

import numpy as np
import pytest

from retrieval_attn.cpu.pool import Pool
from retrieval_attn.cpu.windows import WindowRow, attend_stretches, put_last
from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.index.formats import Format, from_float32, to_float32


def case(fmt: Format, group: int, lengths: list[int], dims: tuple[int, int]) -> tuple[object, ...]:
    rng = np.random.default_rng(0)
    heads, (dim, value_dim) = 2, dims
    arrays = [
        (from_float32(rng.standard_normal((heads, n + 3, dim), np.float32), fmt),
         from_float32(rng.standard_normal((heads, n + 3, value_dim), np.float32), fmt))
        for n in lengths
    ]  # fmt: skip
    queries = rng.standard_normal((len(lengths), heads * group, dim)).astype(np.float32)
    rows = [
        WindowRow(
            keys.ctypes.data + 2 * keys.strides[1],
            values.ctypes.data + 2 * values.strides[1],
            keys.strides[0],
            values.strides[0],
            n,
        )
        for (keys, values), n in zip(arrays, lengths, strict=True)
    ]
    return arrays, queries, rows


@pytest.mark.parametrize("fmt", [Format.FLOAT32, Format.BFLOAT16, Format.FLOAT16])
@pytest.mark.parametrize(("group", "softcap"), [(1, None), (4, 2.0), (5, None), (8, 5.0)])
def test_stretches_equal_a_dense_softmax(fmt: Format, group: int, softcap: float | None) -> None:
    lengths = [0, 1, 63, 200]
    arrays, queries, rows = case(fmt, group, lengths, (24, 40))
    with Pool(2) as pool:
        out, lse = attend_stretches(pool, fmt, queries, rows, (2, 40), scale=0.3, softcap=softcap)  # type: ignore[arg-type]
        one, one_lse = attend_stretches(
            pool,
            fmt,
            queries[3:],  # type: ignore[index]
            rows[3:],  # type: ignore[index]
            (2, 40),
            scale=0.3,
            softcap=softcap,
            threads=1,
        )
    assert (one == out[3:]).all() and (one_lse == lse[3:]).all()
    assert (out[0] == 0).all() and np.isneginf(lse[0]).all()
    for row, ((keys, values), n) in enumerate(zip(arrays, lengths, strict=True)):  # type: ignore[call-overload]
        for head in range(2 * group):
            if not n:
                continue
            own = to_float32(keys[head // group, 2 : 2 + n], fmt).astype(np.float64)
            scores = own @ queries[row, head] * 0.3  # type: ignore[index]
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            wanted = weights @ to_float32(values[head // group, 2 : 2 + n], fmt) / weights.sum()
            np.testing.assert_allclose(out[row, head], wanted, atol=2e-6)
            np.testing.assert_allclose(lse[row, head], np.log(weights.sum()) + scores.max(), atol=2e-6)


def test_what_does_not_fit_is_refused() -> None:
    _, queries, rows = case(Format.FLOAT32, 1, [3], (16, 16))
    with Pool(1) as pool:
        with pytest.raises(ShapeError, match="do not belong"):
            attend_stretches(pool, Format.FLOAT32, queries, [], (2, 16), scale=1.0, softcap=None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="scale"):
            attend_stretches(pool, Format.FLOAT32, queries, rows, (2, 16), scale=float("nan"), softcap=None)  # type: ignore[arg-type]
        empty = np.empty((0, 2, 16), np.float32)
        assert attend_stretches(pool, Format.FLOAT32, empty, [], (2, 16), scale=1.0, softcap=None)[0].shape == (
            0,
            2,
            16,
        )


def test_the_last_token_of_each_stretch_is_written() -> None:
    """Every head of every row, at its own end, and no byte beside it."""
    lengths = [1, 63, 200]
    arrays, _, rows = case(Format.FLOAT32, 4, lengths, (24, 40))
    before = [(keys.copy(), values.copy()) for keys, values in arrays]  # type: ignore[attr-defined]
    rng = np.random.default_rng(1)
    new = [rng.standard_normal((3, 2, dim), np.float32) for dim in (24, 40)]
    put_last(np.array(rows, np.int64), *(part.view(np.uint8) for part in new))
    for row, n in enumerate(lengths):
        for part in range(2):
            before[row][part][:, 2 + n - 1] = new[part][row]
            np.testing.assert_array_equal(arrays[row][part], before[row][part])  # type: ignore[index]
    with pytest.raises(ShapeError, match="need a token each"):
        put_last(np.array(rows, np.int64), *(part[:2].view(np.uint8) for part in new))
