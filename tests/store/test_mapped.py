"""The file behind a view of a private map."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from retrieval_attn.store.mapped import Mapped, file_bytes, is_mapped, map_file, populate

PAGE = 4096


@pytest.fixture
def mapped(tmp_path: Path) -> Mapped:
    (tmp_path / "file").write_bytes((np.arange(5 * PAGE) % 251).astype(np.uint8).tobytes())
    handle = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        return map_file(handle, 5 * PAGE)
    finally:
        os.close(handle)


@pytest.mark.skipif(os.name == "nt", reason="files are mapped by NumPy there")
def test_a_view_has_its_files_own_bytes(mapped: Mapped) -> None:
    """At another address, whatever was written to the view; as long as one of them is used."""
    view = mapped.data[PAGE : 3 * PAGE].view(np.int16).reshape(2, -1)
    populate(view)
    assert is_mapped(view) and not np.shares_memory(view, file_bytes(view))
    before = view.copy()
    view[1, 5] += 1
    del mapped
    found = file_bytes(view)
    del view
    gc.collect()
    assert found is not None and found.flags.c_contiguous and found.ctypes.data % PAGE == 0
    assert found.dtype == np.int16 and np.array_equal(found, before)


@pytest.mark.skipif(os.name == "nt", reason="files are mapped by NumPy there")
def test_other_arrays_have_no_file(mapped: Mapped) -> None:
    for view in (mapped.data.reshape(5, -1)[:, :7], mapped.data.copy(), np.zeros(3), np.zeros(0)):
        populate(view.copy())
        assert file_bytes(view) is None and not is_mapped(view)
    stored = mapped.stored
    assert stored is not None and not stored.flags.writeable and not is_mapped(stored)


def test_a_range_is_read_in_to_its_end(mapped: Mapped) -> None:
    mapped.populate(0, 5 * PAGE)
    mapped.populate(4 * PAGE + 100, 5 * PAGE)
    mapped.populate(7, 7)
    assert mapped.data[-1] == (5 * PAGE - 1) % 251
