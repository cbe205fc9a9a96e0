"""What a captured step waits for where keys are searched by codes on a device: to compare options. Arithmetic only.

Rates are those of one H100, its host of 16 cores and a bus of PCIe 5. Qwen3-32B's shape at 128K took 18.3, 20.3 and
22.9 ms per token by codes of 40, 32 and 24 bytes with int8 rows, and 24.5 to 29.4 by 24 without; by these rates 18.1,
20.2, 24.1 and 28.8 (docs/archive/log.md, 2026-11-27). Of another device they tell which options are quicker.
"""

from __future__ import annotations

from retrieval_attn.config import Config
from retrieval_attn.index.spec import IndexSpec
from retrieval_attn.memory.shape import ModelShape

KERNELS_SECONDS = 55e-6
"""Of a layer, whatever is searched."""
SCAN_BYTES = 2.5e12
"""Of codes, per second."""
FINER_REQUESTS = 330e6
"""Finer codes that the bus brings per second, of 64 bytes or so."""
ROW_BYTES = 45e9
"""Of int8 rows, per second of the bus."""
HOST_KEYS = 77e6
"""Keys that the host attends to per second in place of such rows."""


def search_seconds(shape: ModelShape, config: Config, tokens: int, batch: int = 1) -> float:
    """Of a layer that retrieves from so many tokens of each of `batch` sequences. config: with codes on
    the device and a number of keys.
    """
    spec = IndexSpec.of(config.index, config.index_options)
    sizes = spec.code_shape(shape.key_dim, config.retrieve_count(tokens) or tokens, config.estimates)
    assert sizes is not None
    scanned = shape.kv_heads * tokens * sizes.key_bytes / SCAN_BYTES
    finer = shape.q_heads * sizes.k / FINER_REQUESTS if sizes.kept else 0.0
    named = shape.q_heads * (sizes.kept or sizes.k)
    attended = named * (shape.key_dim + shape.value_dim) / ROW_BYTES if spec.host_reads.rows else named / HOST_KEYS
    return KERNELS_SECONDS + batch * (scanned + finer + attended)
