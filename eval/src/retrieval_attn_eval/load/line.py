"""Traces in Mooncake's format: one JSON object a line, with prompts as blocks of tokens that are equal or not.

Of each line: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`, one for each
block of 512 tokens of the prompt, the last of which may be shorter. Equal ids stand for equal blocks with equal
predecessors. The format is that of the trace published with Mooncake (FAST 2025). Three more fields may be there:
`session_id`, a name that the turns of a conversation share; `delay`, milliseconds from the end of the answer to the
session's turn before, which a replay waits for; `extra`, an object whose members join the body of the request. A later
turn of a session that has a delay needs no timestamp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from retrieval_attn.errors import InputDataError

__all__ = ["BLOCK", "Block", "Line", "read_trace", "written"]

BLOCK = 512
"""Tokens of a block."""


class Block(NamedTuple):
    """A block of a prompt: which one, and how many of its tokens."""

    name: int
    tokens: int


class Line(NamedTuple):
    """One request. seconds: from the trace's first one; delay: seconds from the answer to the session's turn before,
    None where it is not waited for.
    """

    seconds: float
    blocks: tuple[Block, ...]
    answer_tokens: int
    session: str | None = None
    delay: float | None = None
    extra: Mapping[str, Any] = {}

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all blocks."""
        return sum(block.tokens for block in self.blocks)


def read_trace(path: Path, requests: int | None = None, block_tokens: int = BLOCK) -> list[Line]:
    """The first lines of a trace, all without `requests`, in order of time.

    block_tokens: size of a block here; prompts shrink with it. Raises InputDataError, the line named, for anything that
    is not in the format.
    """
    try:
        texts = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputDataError(f"the trace {path}: needed a readable text file, {error}") from None
    lines: list[Line] = []
    known: dict[str, float] = {}
    for number, text in enumerate(texts, start=1):
        if text.strip() and (requests is None or len(lines) < requests):
            try:
                lines.append(_line(json.loads(text), block_tokens, known))
            except (ValueError, TypeError, KeyError) as error:
                raise InputDataError(
                    f"the trace {path}, line {number}: needed timestamp, input_length, output_length and hash_ids, one "
                    f"for each {BLOCK} tokens of input: {type(error).__name__}: {error}"
                ) from None
    if not lines:
        raise InputDataError(f"the trace {path}: needed at least one request, found none")
    lines.sort(key=lambda line: line.seconds)
    return [line._replace(seconds=line.seconds - lines[0].seconds) for line in lines]


def written(lines: Iterable[Line]) -> Iterable[str]:
    """Each line as `read_trace` reads it, without a line break."""
    for line in lines:
        fields: dict[str, Any] = {
            "timestamp": round(line.seconds * 1000),
            "input_length": line.prompt_tokens,
            "output_length": line.answer_tokens,
            "hash_ids": [block.name for block in line.blocks],
        }
        if line.session is not None:
            fields["session_id"] = line.session
        if line.delay is not None:
            fields["delay"] = round(line.delay * 1000)
        if line.extra:
            fields["extra"] = dict(line.extra)
        yield json.dumps(fields)


def _line(fields: Any, block_tokens: int, known: dict[str, float]) -> Line:
    """known: seconds of each session's last line so far."""
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
    session = None if fields.get("session_id") is None else str(fields["session_id"])
    delay = None if fields.get("delay") is None else _seconds(fields["delay"], "delay")
    extra = fields.get("extra") or {}
    if not isinstance(extra, dict):
        raise TypeError(f"extra must be an object, got {extra!r}")
    if "timestamp" not in fields and session in known and delay is not None:
        seconds = known[session] + delay
    else:
        seconds = _seconds(fields["timestamp"], "timestamp")
    if session is not None:
        known[session] = seconds
    return Line(seconds, blocks, answer, session, delay, extra)


def _seconds(milliseconds: Any, name: str) -> float:
    seconds = float(milliseconds) / 1000
    if not math.isfinite(seconds) or (name == "delay" and seconds < 0):
        raise ValueError(f"{name} must be a number of milliseconds, got {milliseconds!r}")
    return seconds
