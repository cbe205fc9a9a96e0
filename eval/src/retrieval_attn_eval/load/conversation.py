"""Conversation: a text that grows turn by turn, as the blocks that its prompts share."""

from __future__ import annotations

from collections.abc import Iterator

from retrieval_attn_eval.load.line import BLOCK, Block

__all__ = ["Conversation"]


class Conversation:
    """Prompts of one conversation have their full blocks in common, and nothing with another's.

    A block that is not full is the prompt's own: with more tokens it is another block.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        """numbers: names of blocks, each given once; all conversations of a trace take theirs from the same."""
        self._numbers = numbers
        self._full: list[int] = []

    def prompt(self, tokens: int) -> tuple[Block, ...]:
        """The blocks of its first `tokens` tokens."""
        full, rest = divmod(tokens, BLOCK)
        while len(self._full) < full:
            self._full.append(next(self._numbers))
        blocks = [Block(name, BLOCK) for name in self._full[:full]]
        return (*blocks, Block(next(self._numbers), rest)) if rest else tuple(blocks)
