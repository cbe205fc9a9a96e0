"""Traces in Mooncake's format: one JSON object a line, with prompts as blocks of tokens that are equal or not.

Of each line: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`, one for each
block of 512 tokens of the prompt, the last of which may be shorter. Equal ids stand for equal blocks with equal
predecessors. The format is that of the trace published with Mooncake (FAST 2025).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from retrieval_attn.errors import InputDataError

__all__ = ["BLOCK", "Block", "Line", "cuts", "read_trace"]

BLOCK = 512
"""Tokens of a block."""


class Block(NamedTuple):
    """A block of a prompt: which one, and how many of its tokens."""

    name: int
    tokens: int


class Line(NamedTuple):
    """One request. seconds: from the trace's first one."""

    seconds: float
    blocks: tuple[Block, ...]
    answer_tokens: int


def read_trace(path: Path, requests: int, block_tokens: int = BLOCK) -> list[Line]:
    """The first lines of a trace, in order of time. block_tokens: size of a block here; prompts shrink with it.

    Raises InputDataError, the line named, for anything that is not in the format.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputDataError(f"--trace {path}: needed a readable text file, {error}") from None
    lines: list[Line] = []
    for number, text in enumerate(texts, start=1):
        if text.strip() and len(lines) < requests:
            try:
                lines.append(_line(json.loads(text), block_tokens))
            except (ValueError, TypeError, KeyError) as error:
                raise InputDataError(
                    f"--trace {path}, line {number}: needed timestamp, input_length, output_length and hash_ids, one "
                    f"for each {BLOCK} tokens of input: {type(error).__name__}: {error}"
                ) from None
    if not lines:
        raise InputDataError(f"--trace {path}: needed at least one request, found none")
    lines.sort(key=lambda line: line.seconds)
    return [line._replace(seconds=line.seconds - lines[0].seconds) for line in lines]


def _line(fields: Any, block_tokens: int) -> Line:
    if not isinstance(fields, dict):
        raise TypeError(f"got a {type(fields).__name__}")
    length, answer, names = fields["input_length"], fields["output_length"], fields["hash_ids"]
    for count in (length, answer, *names):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{count!r} is no integer")
    if length < 1 or answer < 1 or len(names) != -(-length // BLOCK):
        raise ValueError(f"{length} tokens of input, {answer} of output and {len(names)} hash ids")
    rest = length - (len(names) - 1) * BLOCK
    sizes = [block_tokens] * (len(names) - 1) + [max(1, rest * block_tokens // BLOCK)]
    blocks = tuple(Block(name, size) for name, size in zip(names, sizes, strict=True))
    return Line(float(fields["timestamp"]) / 1000, blocks, answer)


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
