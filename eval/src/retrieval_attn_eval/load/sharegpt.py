"""Traces from ShareGPT's JSON files: conversations, without the times at which they took place.

A file is a list of {"id": ..., "conversations": [{"from": "human" or "gpt", "value": text}, ...]}. Times are drawn:
conversations arrive by a Poisson process. Blocks are equal where the conversations' texts are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.load.line import BLOCK, Block, Line
from retrieval_attn_eval.load.made import Arrivals

__all__ = ["counted_bytes", "read_sharegpt"]

USERS, MODELS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")
TOKEN_BYTES = 4
"""Of English text, about."""

Tokens = Callable[[str], Sequence[Any]]
"""A text's tokens: anything that can be compared, as many as there are tokens."""


def counted_bytes(text: str) -> list[bytes]:
    """A text's tokens without a tokenizer: four bytes each."""
    data = text.encode(errors="replace")
    return [data[start : start + TOKEN_BYTES] for start in range(0, len(data), TOKEN_BYTES)]


def read_sharegpt(
    path: Path, tokens: Tokens, arrivals: Arrivals, seed: int, requests: int | None = None
) -> Iterator[Line]:
    """The questions of each conversation that begins with one and is answered, behind all that was said before.

    Lines of one conversation follow each other. Raises InputDataError for a file of another form.
    """
    draw = random.Random(seed)
    names: dict[tuple[int, tuple[Any, ...]], int] = {}
    began, given = 0.0, 0
    for name, turns in _conversations(path):
        said: list[Any] = []
        seconds, delay = began, None
        for question, answer in turns:
            said += tokens(question)
            answered = tokens(answer)
            if not said or not answered:
                break
            yield Line(seconds, _blocks(said, names), len(answered), name, delay)
            given += 1
            if requests is not None and given >= requests:
                return
            said += answered
            delay = draw.expovariate(1 / arrivals.think_seconds) if arrivals.think_seconds else 0.0
            seconds += len(answered) * arrivals.token_seconds + delay
        began += draw.expovariate(arrivals.rate)


def _blocks(said: Sequence[Any], names: dict[tuple[int, tuple[Any, ...]], int]) -> tuple[Block, ...]:
    """names: of each block by its predecessor's name and its tokens; new ones are added."""
    blocks: list[Block] = []
    before = 0
    for start in range(0, len(said), BLOCK):
        piece = tuple(said[start : start + BLOCK])
        before = names.setdefault((before, piece), len(names) + 1)
        blocks.append(Block(before, len(piece)))
    return tuple(blocks)


def _conversations(path: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each conversation's name, and its questions with their answers."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise InputDataError(f"{path}: needed a JSON file in UTF-8, {error}; give one of ShareGPT's") from None
    if not isinstance(found, list):
        raise InputDataError(f"{path}: needed a list of conversations as ShareGPT's, got a {type(found).__name__}")
    for number, entry in enumerate(found):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("conversations"), list):
            raise InputDataError(f'{path}, entry {number}: needed an object with the list "conversations"')
        said = [(_text(one, "from"), _text(one, "value")) for one in entry["conversations"]]
        while said and said[0][0] not in USERS:  # some begin with an answer, or with a system's text
            said = said[1:]
        turns: list[tuple[str, str]] = []
        for (asks, question), (answers, answer) in zip(said[::2], said[1::2], strict=False):
            if asks not in USERS or answers not in MODELS:
                break
            turns.append((question, answer))
        if turns:
            yield str(entry.get("id", number)), turns


def _text(message: Any, field: str) -> str:
    value = message.get(field) if isinstance(message, Mapping) else None
    return value if isinstance(value, str) else ""
