"""Evict blocks of small windows after few tokens, so that a test of 20 tokens sees several evictions."""

from __future__ import annotations

from retrieval_attn.config import Config

LARGE_WINDOW = 128
"""Tokens of a window from which on tests evict blocks as the product does."""
PRODUCT_SPILL = Config.__dict__["spill"]


def spill_early() -> None:
    """Replace `Config.spill` in this process: 8 tokens, or a quarter of the window, for windows below LARGE_WINDOW."""
    type.__setattr__(Config, "spill", property(_spill))


def _spill(config: Config) -> int:
    if 0 < config.window < LARGE_WINDOW:
        return min(config.window, max(8, config.window // 4))
    tokens: int = PRODUCT_SPILL.fget(config)
    return tokens
