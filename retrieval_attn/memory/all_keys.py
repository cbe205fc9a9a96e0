"""Of which texts a GPU reads all keys sooner than a search names the best of them. Arithmetic only."""

from __future__ import annotations

from retrieval_attn.memory.shape import ModelShape

SEARCH_MICROSECONDS = {False: 85.0, True: 100.0}
"""What reading a layer's keys and values may take, by the GPU's bandwidth, to be sooner than a search, its transfers
and the host's answer; True: in int8, of twice as many keys, whose search takes longer. Of Llama-3-8B's shape on an H100
65,536 and 158,627 tokens, a sixth less than where the ways were equal (docs/archive/log.md, 2026-11-27). Where the GPU
reads what is named, a token of 128K by retrieval takes 8.9 ms, and 9.2 over all keys in int8, as good as exact: they
stay.
"""


def device_kv_bytes(shape: ModelShape, *, int8: bool) -> int:
    """Bytes of a token's keys and values of one layer, as they lie beside the model."""
    from retrieval_attn.index.formats import Format

    if not int8:
        return shape.kv_layer_bytes
    return shape.kv_heads * sum(Format.INT8.row_bytes(dim) for dim in (shape.key_dim, shape.value_dim))


def full_attention_breakeven(shape: ModelShape, bandwidth: float, *, int8: bool = False) -> int:
    """Tokens of which a GPU reads a layer's keys and values sooner than a search answers. bandwidth: bytes per second.
    int8: they lie there so.
    """
    return int(SEARCH_MICROSECONDS[int8] * 1e-6 * bandwidth / max(1, device_kv_bytes(shape, int8=int8)))
