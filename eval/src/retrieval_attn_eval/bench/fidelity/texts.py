"""Texts that are read and then fed token by token: prose, code, JSON, UUIDs, a RULER needle task, an
extraction, or a file."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_attn.errors import ConfigError, InputDataError

__all__ = ["TEXTS", "FedText", "make_text", "parse_texts"]

RULER_TASK = "niah_multikey_3"
"""UUIDs among UUIDs: the hardest needle task that the bundled model answers."""
"""Sixteen of the text's records as JSON."""
_FIRST_CHARS_PER_TOKEN = 3


@dataclass(frozen=True)
class FedText:
    """name: as asked for. length: tokens asked for. ids: int64 (context + forced,). context: ids that are read; those
    after them are fed one by one, token i at position i.
    """

    name: str
    length: int
    ids: NDArray[np.int64]
    context: int

    @property
    def forced(self) -> NDArray[np.int64]:
        """The ids that are fed one by one."""
        return self.ids[self.context :]


def parse_texts(text: str) -> tuple[str, ...]:
    """Names of TEXTS, or paths to text files, of a comma list, each once. Raises ConfigError."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in TEXTS and not Path(name).expanduser().exists()]
    if unknown or not names:
        raise ConfigError(
            f"--texts {text!r}: {unknown[0] if unknown else 'nothing'!r} is no known text and no file; "
            f"choose from {', '.join(TEXTS)}, or give a .txt, .json or .jsonl file"
        )
    return names


def make_text(name: str, length: int, tokens: int, tokenizer: Any, seed: int, number: int = 0) -> FedText:
    """A text of `length` tokens to read and `tokens` to feed, the same for the same arguments.

    number: of several texts; what is made by a seed has its own seed, of a file it is the part after the one before.
    ruler: the prompt has about `length` tokens (a row of the task); what is fed are the last `tokens` of question and
    answer. extract: prompt and whole answer have about `length` tokens, and the first `tokens` of the answer are fed.
    Raises InputDataError for a text that is too short.
    """
    if name == "extract":
        return _extract(length, tokens, tokenizer, seed + number)
    if name == "ruler":
        ids = _ids(tokenizer, _ruler(length, tokenizer, seed + number))
        if len(ids) <= tokens:
            raise InputDataError(f"the ruler prompt has {len(ids)} tokens, {tokens} are to be fed; give fewer --tokens")
        return FedText(name, length, ids, len(ids) - tokens)
    source = TEXTS.get(name)
    start = number * (length + tokens) if source is None else 0
    needed, chars = start + length + tokens, (start + length + tokens) * _FIRST_CHARS_PER_TOKEN
    while True:
        text = _file(name, chars) if source is None else source(chars, seed + number)
        ids = _ids(tokenizer, text)
        if len(ids) >= needed:
            return FedText(name, length, ids[start:needed], length)
        if len(text) < chars:
            more = f" after {start} of other samples" if start else ""
            raise InputDataError(
                f"text {name} has {len(ids)} tokens, {length} to read and {tokens} to feed are needed{more}; give "
                "shorter --lengths or another text"
            )
        chars *= 2


def _ids(tokenizer: Any, text: str) -> NDArray[np.int64]:
    return np.array(tokenizer(text, verbose=False)["input_ids"], dtype=np.int64)


def _prose(chars: int, seed: int) -> str:
    from retrieval_attn_eval.text.haystack import PROSE_SEED
    from retrieval_attn_eval.text.prose import prose

    return prose(chars, PROSE_SEED + seed)


def _code(chars: int, seed: int) -> str:
    """This package's own modules, in an order of the seed's, each under its path."""
    root = Path(__file__).resolve().parents[3]
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    random.Random(f"code/{seed}").shuffle(files)
    parts: list[str] = []
    size = 0
    for file in files:
        if size >= chars:
            break
        parts.append(f"# {file.relative_to(root).as_posix()}\n{file.read_text(encoding='utf-8')}\n")
        size += len(parts[-1])
    return "".join(parts)[:chars]


def _json(chars: int, seed: int) -> str:
    """An array of orders as a shop's interface gives them: identifiers, nested objects, numbers, dates, sentences."""
    from retrieval_attn_eval.text.prose import sentences
    from retrieval_attn_eval.text.words import ADJECTIVES, CITIES, MATERIALS, NOUNS

    drawn = random.Random(f"json/{seed}")
    notes = sentences(64, seed)
    parts: list[str] = []
    size = 0
    while size < chars:
        items: list[dict[str, Any]] = [
            {
                "sku": f"{drawn.choice(NOUNS)}-{drawn.randrange(1000, 10_000)}",
                "name": f"{drawn.choice(ADJECTIVES)} {drawn.choice(MATERIALS)} {drawn.choice(NOUNS)}",
                "quantity": drawn.randrange(1, 12),
                "price": round(drawn.uniform(1, 900), 2),
            }
            for _ in range(drawn.randrange(1, 5))
        ]
        order: dict[str, Any] = {
            "id": str(uuid.UUID(int=drawn.getrandbits(128), version=4)),
            "date": f"20{drawn.randrange(10, 30)}-{drawn.randrange(1, 13):02}-{drawn.randrange(1, 29):02}",
            "ship_to": {"city": drawn.choice(CITIES), "code": f"{drawn.randrange(100_000):05}"},
            "items": items,
            "total": round(sum(item["quantity"] * item["price"] for item in items), 2),
            "paid": drawn.random() < 0.7,
            "note": drawn.choice(notes) if drawn.random() < 0.4 else None,
        }
        parts.append(json.dumps(order, indent=2))
        size += len(parts[-1]) + 2
    return ("[\n" + ",\n".join(parts))[:chars]


def _uuid(chars: int, seed: int) -> str:
    """The haystack of RULER_TASK alone: one line after the other gives a UUID for a UUID."""
    from retrieval_attn_eval.plans import DRAW
    from retrieval_attn_eval.ruler.specs import NEEDLE

    drawn, draw = random.Random(f"uuid/{seed}"), DRAW["uuids"]
    parts: list[str] = []
    size = 0
    while size < chars:
        parts.append(NEEDLE.format(values="uuids", key=draw(drawn), value=draw(drawn)))
        size += len(parts[-1]) + 1
    return "\n".join(parts)[:chars]


def _ruler(length: int, tokenizer: Any, seed: int) -> str:
    """One row of RULER_TASK with its answer written."""
    from retrieval_attn_eval.ruler.suite import RulerSuite

    row = next(iter(RulerSuite().rows(RULER_TASK, length, [0], tokenizer, seed)))
    return f"{row.prompt} {', '.join(row.answers)}"


def _extract(length: int, tokens: int, tokenizer: Any, seed: int) -> FedText:
    """An extraction: read is all up to the answer's first bracket, fed is the true JSON."""
    from retrieval_attn_eval.longcontext.extraction import make_extraction

    text, answer = make_extraction(length, tokenizer, seed)
    prompt = _ids(tokenizer, text)
    forced = np.array(tokenizer(answer, add_special_tokens=False)["input_ids"], dtype=np.int64)
    if len(forced) < tokens:
        raise InputDataError(
            f"the JSON of an extraction has {len(forced)} tokens, {tokens} are to be fed; give fewer --tokens"
        )
    return FedText("extract", length, np.concatenate([prompt, forced[:tokens]]), len(prompt))


def _file(name: str, chars: int) -> str:
    from retrieval_attn_eval.text.haystack import read_haystack

    return read_haystack(Path(name))[:chars]


TEXTS: dict[str, Callable[[int, int], str] | None] = {
    "prose": _prose,
    "code": _code,
    "json": _json,
    "uuid": _uuid,
    "ruler": None,
    "extract": None,
}
"""(characters, seed) -> so many characters, or fewer where there are no more; ruler and extract are made from a row."""
