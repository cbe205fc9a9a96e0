"""Where the prompts of a trace are cut into the parts that requests share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from retrieval_attn_eval.load.line import Block

__all__ = ["cuts"]


def cuts(prompts: Sequence[tuple[Block, ...]]) -> list[list[int]]:
    """Where each prompt is cut into parts, in blocks: wherever requests that begin alike may go on differently.

    A request shares whole parts, and its last part is always its own. A cut belongs to a beginning: all prompts that
    have this beginning are cut there. The end of each prompt is the last of its cuts.
    """
    passing: Counter[tuple[Block, ...]] = Counter()
    next_blocks: dict[tuple[Block, ...], set[Block]] = defaultdict(set)
    for blocks in prompts:
        for end in range(1, len(blocks) + 1):
            passing[blocks[:end]] += 1
            next_blocks[blocks[: end - 1]].add(blocks[end - 1])
    chosen = {beginning for beginning, following in next_blocks.items() if beginning and len(following) > 1}
    for blocks in prompts:
        if passing[blocks] > 1:  # of others, too: they go on after it, or share all of it but the last block
            chosen |= {blocks, blocks[:-1]}
    return [[end for end in range(1, len(blocks)) if blocks[:end] in chosen] + [len(blocks)] for blocks in prompts]
