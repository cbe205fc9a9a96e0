"""Haystack text for needle tests: where it comes from, where its sentences end, how a needle goes in.

Works in token ids from the first tokenisation on: nothing is decoded and encoded again, so lengths are exact.
The place of a needle is chosen in the text, through the tokenizer's offset map.  No model, no torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn_eval.parsed import parsed

__all__ = ["Haystack", "Placed", "encode_inside", "read_haystack", "sentence_ends", "shipped_prose"]

PROSE_SEED = 1 << 20  # the bundled model was trained on prose of smaller seeds
_SUFFIXES = (".txt", ".jsonl", ".json")
_PASS_BREAK = "\n\n"
_CHARS_PER_TOKEN = 6  # more than any tokenizer needs for English; other text is read further
# a terminator run, closing quotes or brackets, then white space or the end; CJK terminators need no white space;
# a blank line ends a heading or a line of verse
_ENDS = re.compile(r"[.!?…]+[\"'”’»)\]]*(?=\s|$)|[。！？]+[”’」』）]*|(?<=\S)(?=[^\S\n]*\n[^\S\n]*\n)")
# a wrong guess here only costs a place for a needle, a missing one can put it inside a sentence
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\S+",
        "mr mrs ms dr prof st jr sr vs etc e.g i.e cf ed inc ltd co gen col capt sen rep gov hon rev mt approx dept"
        " est jan feb mar apr jun jul aug sep sept oct nov dec",
    )
)
_BEFORE_NUMBERS = frozenset(("no", "nos", "fig", "figs", "eq", "vol", "pp", "p", "ch", "sec"))
_LAST_WORD = re.compile(r"[^\s\"'“‘«(\[]*$")
_SPACE_MARKS = tuple("▁ĠĊĉč \n\t\r")  # how vocabularies write white space: SentencePiece, byte-level BPE, plain


def shipped_prose(num_chars: int, seed: int) -> str:
    """The default haystack: generated prose, held out from the bundled model's training."""
    from retrieval_attn_eval.text.prose import prose

    text = prose(num_chars, PROSE_SEED + seed)
    return text[: text.rindex(".") + 1]


def read_haystack(path: Path) -> str:
    """Text of a .txt, .jsonl or .json file, or of all such files of a folder in the order of their names.

    jsonl: one string or one object with "text" (or "content") per line.  json: the same, or a list of them.
    Documents are joined by a blank line; blank documents are dropped.
    Raises InputDataError (with file and line) if something is missing, malformed, not UTF-8 or without text.
    """
    path = path.expanduser()
    if path.is_dir():
        files = sorted((p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file()), key=str)
        if not files:
            raise InputDataError(f"{path}: needed at least one .txt, .jsonl or .json file, found none")
    elif path.is_file():
        files = [path]
    else:
        raise InputDataError(f"{path}: needed a haystack folder or file, found nothing there; check the path")
    documents = [document for file in files for document in _documents(file)]
    text = _PASS_BREAK.join(d for d in (d.replace("\r\n", "\n").strip() for d in documents) if d)
    if not text:
        raise InputDataError(f"{path}: needed haystack text, found only empty documents; give files with text")
    return text


def _documents(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputDataError(f"{file}: needed UTF-8 text, byte {error.start} is not; convert the file") from None
    except OSError as error:
        raise InputDataError(f"{file}: could not be read ({error.strerror}); check the file") from None
    suffix = file.suffix.lower()
    if suffix == ".jsonl":
        lines = text.split("\n")
        return [_parsed(line, f"{file}, line {i}") for i, line in enumerate(lines, start=1) if line.strip()]
    if suffix == ".json":
        tree = _load(text, str(file))
        items = tree if isinstance(tree, list) else [tree]
        return [_text_of(item, f"{file}, item {i}") for i, item in enumerate(items, start=1)]
    return [text]


def _load(text: str, where: str) -> Any:
    try:
        return parsed(text)
    except ValueError as error:
        raise InputDataError(f"{where}: needed JSON ({error}); correct or remove it") from None


def _parsed(line: str, where: str) -> str:
    return _text_of(_load(line, where), where)


def _text_of(item: Any, where: str) -> str:
    if isinstance(item, dict):
        found = item.get("text", item.get("content"))
        if isinstance(found, list) and all(isinstance(part, str) for part in found):
            return _PASS_BREAK.join(found)
        if isinstance(found, str):
            return found
        keys = ", ".join(map(str, list(item)[:5])) or "no keys"
        raise InputDataError(f'{where}: needed an object with "text", found {keys}; rename the field to "text"')
    if isinstance(item, str):
        return item
    raise InputDataError(f'{where}: needed a string or an object with "text", found {type(item).__name__}')


def sentence_ends(text: str) -> NDArray[np.int64]:
    """Ends of sentences: (n, 2) character positions, after the terminator and before the next sentence's text.

    Between the two lies white space only (nothing, for CJK).  Abbreviations, initials, decimal points and a stop
    before a lower-case word do not end a sentence; a single line break inside a paragraph does not either.
    """
    found: list[tuple[int, int]] = []
    for match in _ENDS.finditer(text):
        end = match.end()
        after = end
        while after < len(text) and text[after].isspace():
            after += 1
        if match.group().startswith(".") and after < len(text) and "\n\n" not in text[end:after]:
            word = _LAST_WORD.search(text[max(match.start() - 24, 0) : match.start()])
            last = word.group() if word else ""
            short = last.lower() in _ABBREVIATIONS or (len(last) == 1 and last.isupper())
            numbered = last.lower() in _BEFORE_NUMBERS and text[after].isdigit()
            if short or numbered or text[after].islower():
                continue
        found.append((end, after))
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def encode_inside(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text` as they are in the middle of other text: without the space some tokenizers put in front."""
    if not text:
        return []
    for anchor in (".", "a", "0"):
        encoded = tokenizer(anchor + text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = [end for _, end in encoded["offset_mapping"]]
        starts = [start for start, _ in encoded["offset_mapping"]]
        cut = next((i for i, end in enumerate(ends) if end > 1), len(ends))
        # a token that ends behind the anchor and starts before it has swallowed both: try another anchor
        if cut < len(ends) and starts[cut] >= 1 and cut > 0 and _joins(tokenizer, encoded["input_ids"], cut, text):
            return list(encoded["input_ids"][cut:])
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _joins(tokenizer: Any, ids: Sequence[int], cut: int, text: str) -> bool:
    """False if offsets without their white space hid that the anchor's token took the white space of `text`."""
    if not text[0].isspace():
        return True
    anchor = tokenizer.convert_ids_to_tokens(int(ids[cut - 1]))
    return not _ends_with_space(anchor)


@dataclass(frozen=True)
class Placed:
    """A context with its needle: `ids` (int64), the needle's token range in it, and the depth reached, in percent.

    Of several needles, range and `depth` are the first one's; `depths` are all of them.
    """

    ids: NDArray[np.int64]
    needle_start: int
    needle_stop: int
    depth: float
    haystack_tokens: int
    depths: tuple[float, ...]


class Haystack:
    """A text as token ids, with the places where a needle may go.

    text is repeated as a whole, cyclically, until it holds `num_tokens` tokens; `passes` says how often it was used.
    ids: int64 (n,).  cuts: int64, ascending token indices before which a sentence ends; n itself is one if the
    whole text was used.
    Raises InputDataError for text with fewer than two sentences, ConfigError for a tokenizer without offsets.
    """

    def __init__(self, text: str, tokenizer: Any, num_tokens: int) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"needed a tokenizer with an offset map (a fast tokenizer), given {type(tokenizer).__name__};"
                " use a model folder with a tokenizer.json"
            )
        ends = sentence_ends(text[:200_000])
        if len(ends) < 2:
            raise InputDataError(
                f"needed a haystack of at least two sentences, found {len(ends)} in {len(text)} characters;"
                " give more text, or text with sentence ends"
            )
        self.tokenizer = tokenizer
        self.text, self.passes = text, 1
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        chars = num_tokens * _CHARS_PER_TOKEN + 1000
        encoded = self._encode(text[:chars])
        while len(encoded["input_ids"]) < num_tokens and chars < len(text):
            chars *= 2
            encoded = self._encode(text[:chars])
        used = text[:chars]
        if len(encoded["input_ids"]) < num_tokens:
            self.passes = -(-num_tokens // max(len(encoded["input_ids"]), 1)) + 1
            used = _PASS_BREAK.join([text] * self.passes)
            encoded = self._encode(used)
        self.ids: NDArray[np.int64] = np.asarray(encoded["input_ids"], dtype=np.int64)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        self.cuts = _cuts(sentence_ends(used), offsets)
        if chars >= len(text) and self.cuts[-1:] != len(self.ids):  # the end of a whole text ends a sentence
            self.cuts = np.append(self.cuts, len(self.ids))

    def _encode(self, text: str) -> Any:
        # special tokens written out in a haystack are text, not tokens
        return self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True, verbose=False
        )

    def excerpt(self, budget: int, slack: int, round_index: int = 0) -> tuple[int, int]:
        """Token range of at most `budget` tokens that ends with a sentence and, if it can, starts with one.

        If whole sentences leave more than `slack` tokens of the budget unused, the range starts inside a sentence,
        at a word.  Later rounds start at other sentences where the text is long enough.
        """
        room = len(self.ids) - budget
        starts = self.cuts[self.cuts <= max(room, 0)]
        start = int(starts[(round_index * 7919) % len(starts)]) if round_index and len(starts) else 0
        at = int(np.searchsorted(self.cuts, start + budget, side="right")) - 1
        if at >= 0 and self.cuts[at] > start and start + budget - self.cuts[at] <= slack:
            return start, int(self.cuts[at])
        at = int(np.searchsorted(self.cuts, start + budget, side="left"))
        stop = int(self.cuts[min(at, len(self.cuts) - 1)])
        start = max(stop - budget, 0)
        limit = min(start + slack, stop)
        while 0 < start < limit and not _starts_with_space(self._token(start)):
            start += 1
        return start, stop

    def place(self, needle: str, depth: float, span: tuple[int, int]) -> Placed:
        """Put `needle` at the sentence end nearest at or before `depth` percent of the tokens of `span`.

        Depth 0 is before the first token, depth 100 after the last.  White space that the needle brings along is
        kept, otherwise one space (before the first token: a line break) keeps it apart from its neighbours.
        """
        return self.place_all([needle], [depth], span)

    def place_all(self, needles: Sequence[str], depths: Sequence[float], span: tuple[int, int]) -> Placed:
        """As `place`, for several needles at ascending depths; those of one sentence end stand side by side."""
        assert needles and len(needles) == len(depths), (needles, depths)
        start, stop = span
        places: dict[int, list[str]] = {}
        reached = []
        for needle, depth in zip(needles, depths, strict=True):
            where = self._sentence_end(depth, start, stop)
            places.setdefault(where, []).append(needle)
            reached.append(100.0 * (where - start) / max(stop - start, 1))
        parts: list[NDArray[np.int64]] = []
        last = start
        for where, here in sorted(places.items()):
            text = here[0] if len(here) == 1 else " ".join(needle.strip() for needle in here)
            middle = self._needle_ids(text, where, start, stop)
            parts += [self.ids[last:where], np.asarray(middle, dtype=np.int64)]
            last = where
        before = min(places) - start
        first = len(self._needle_ids(needles[0], min(places), start, stop))
        ids = np.concatenate([*parts, self.ids[last:stop]])
        return Placed(ids, before, before + first, reached[0], stop - start, tuple(reached))

    def _sentence_end(self, depth: float, start: int, stop: int) -> int:
        target = start + int((stop - start) * depth / 100 + 0.5)
        at = int(np.searchsorted(self.cuts, target, side="right")) - 1
        if target >= stop:
            return stop
        return int(self.cuts[at]) if at >= 0 and self.cuts[at] > start else start

    def needle_room(self, needle: str) -> int:
        """Most tokens that `place` can add for this needle, wherever it goes."""
        core = needle.strip()
        return max(
            len(encode_inside(self.tokenizer, lead + core + trail)) for lead in ("", " ") for trail in ("", "\n", " ")
        ) + max(len(encode_inside(self.tokenizer, needle)) - len(encode_inside(self.tokenizer, core)), 0)

    def _needle_ids(self, needle: str, where: int, start: int, stop: int) -> list[int]:
        lead = trail = ""
        if where > start and not needle[:1].isspace() and not _ends_with_space(self._token(where - 1)):
            lead = " "
        if where < stop and not needle[-1:].isspace() and not _starts_with_space(self._token(where)):
            trail = "\n"
        return encode_inside(self.tokenizer, lead + needle + trail)

    def _token(self, index: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(int(self.ids[index])))


def _cuts(ends: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Token indices at sentence ends: the first token that starts at or behind each end.

    ends: (n, 2) from sentence_ends.  offsets: (tokens, 2) characters.  An end in the middle of a token is left out.
    """
    starts, stops = np.maximum.accumulate(offsets[:, 0]), np.maximum.accumulate(offsets[:, 1])
    index = np.searchsorted(starts, ends[:, 0], side="left")
    whole = stops[np.maximum(index - 1, 0)] <= ends[:, 1]
    return np.unique(index[whole & (index > 0)])


def _starts_with_space(token: str) -> bool:
    return token.startswith(_SPACE_MARKS) or token in ("<0x0A>", "<0x20>", "<0x09>")


def _ends_with_space(token: str) -> bool:
    return token.endswith(_SPACE_MARKS) or token in ("<0x0A>", "<0x20>", "<0x09>")
