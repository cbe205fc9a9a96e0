"""Kernels are compiled before a test replaces numpy.empty: Numba could not compile them then."""

from __future__ import annotations

import pytest

from retrieval_attn.cpu.host_attend import prepare
from retrieval_attn.index.formats import Format


@pytest.fixture(scope="session")
def compiled() -> None:
    """float32 and bfloat16 kernels are ready. Must come before `nan_empty` among a test's arguments."""
    for fmt in (Format.FLOAT32, Format.BFLOAT16):
        prepare(fmt)
