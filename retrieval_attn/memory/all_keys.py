"""Of which texts a GPU reads all keys sooner than a search names the best of them. Arithmetic only."""

from __future__ import annotations

SEARCH_MICROSECONDS = 85.0
"""What reading a layer's keys and values may take, by the GPU's bandwidth, to be sooner than a search, its transfers
and the host's answer: 65,536 tokens of Llama-3-8B's shape on an H100, where both were timed (docs/log.md, 2026-11-27).
"""


def tokens_read_sooner(token_bytes: int, bandwidth: float) -> int:
    """Tokens of which a GPU reads a layer's keys and values sooner than a search answers. token_bytes: of one token in
    one layer. bandwidth: bytes per second.
    """
    return int(SEARCH_MICROSECONDS * 1e-6 * bandwidth / max(1, token_bytes))
