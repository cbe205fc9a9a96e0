"""TailSize: how many tokens of a layer stay in its window's tail, and how many the tail has room for."""

from __future__ import annotations

from typing import NamedTuple

from retrieval_attn.config import Config
from retrieval_attn.gpu.attention.window import WindowCache, make_room
from retrieval_attn.index.base import MAX_KEYS
from retrieval_attn.index.full import kept_tokens

__all__ = ["TailSize"]


class TailSize(NamedTuple):
    """kept: tokens that stay when others move to the host. spill: tokens that gather behind them before they do.
    grows: none moves to the host, see index "full": the tail's memory grows. least: slots that it has until they are
    used up; 0: it keeps more than it uses.
    """

    kept: int
    spill: int
    grows: bool
    least: int = 0

    @classmethod
    def of(cls, config: Config) -> TailSize:
        """As the options say."""
        return cls(MAX_KEYS if config.keeps_all else config.window, config.spill, config.keeps_all)

    def slots(self, tail: int) -> int:
        """Tokens that there is to be room for, where the tail has so many."""
        if not self.grows:
            return self.kept + self.spill
        return self.least if tail < self.least else kept_tokens(tail)

    def fit(self, window: WindowCache, tail: int) -> None:
        """Give a window this room, for a tail that has, or is about to have, so many tokens."""
        slots = self.slots(tail)
        if self.grows:
            make_room(window, slots - window.tail_len)
        window.shrink(slots)
