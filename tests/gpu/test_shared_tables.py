"""Tables of many layers that reach the device by one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retrieval_attn.errors import BackendError
from retrieval_attn.gpu.codes import table
from retrieval_attn.gpu.codes.table import SharedTables, TableWriter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_device_has_every_row_after_an_upload(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where memory of one chunk is not enough; rows beside those written stay. Breaks if a span is forgotten."""
    monkeypatch.setattr(table, "CHUNK_WORDS", 96)
    shared, rng, where = SharedTables(), np.random.default_rng(3), torch.device(device)
    sizes = [(4, 4), (3, 2), (8, 4), (40, 4), (5, 2)]
    tables = [shared.take(*size, where) for size in sizes]
    assert all(own.shape == size and own.data_ptr() % 64 == 0 for (own, _), size in zip(tables, sizes, strict=True))
    expected = [np.zeros(size, np.int64) for size in sizes]
    for _ in range(30):
        for number in rng.permutation(len(sizes))[:3]:
            first = int(rng.integers(sizes[number][0]))
            rows = rng.integers(0, 3, (sizes[number][0] - first, sizes[number][1]))[:2]
            expected[number][first : first + len(rows)] = rows
            tables[number][1].write(rows.tolist(), first)
        shared.upload()
        for (own, _), wanted in zip(tables, expected, strict=True):
            np.testing.assert_array_equal(own.cpu().numpy(), wanted)


def test_what_is_written_to_all_tables_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none where the same was written again."""
    shared = SharedTables()
    tables = [shared.take(16, 4, torch.device("cpu")) for _ in range(8)]
    copies: list[int] = []
    real = torch.Tensor.copy_

    def copied(own: torch.Tensor, *given: object, **options: object) -> torch.Tensor:
        copies.append(own.numel())
        return real(own, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    for count in (1, 1):
        for _, writer in tables:
            writer.write([[1, 2, 3, 4]], 5)
        shared.upload()
        assert len(copies) == count
    tables[3][1].write([[5, 6, 7, 8]], 15)
    shared.upload()
    assert copies[1:] == [4] and tables[3][0][15].tolist() == [5, 6, 7, 8]


def test_a_table_of_its_own_is_written_as_a_whole() -> None:
    writer = TableWriter(torch.zeros(3, 2, dtype=torch.int64))
    for rows, first in (([[1, 2]], 0), ([[1, 2]] * 3, 1)):
        with pytest.raises(BackendError, match="must be written at once"):
            writer.write(rows, first)
