"""Scores of the long-context forms, 0 to 1 each, by the rules of their publications."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from retrieval_attn_eval.ruler.scoring import match_part

__all__ = ["SCORERS", "choice", "extracted", "label", "node_set", "number", "piece"]

_NUMBER = re.compile(r"-?\d[\d,]*")
_LETTER = re.compile(r"correct answer is:? *\(?([A-D])\b|^\W*\(?([A-D])\b", re.IGNORECASE)


def piece(text: str, answers: Sequence[str]) -> float:
    """MRCR: the ratio of difflib's SequenceMatcher. What follows a next turn ("User:") does not count."""
    found = text.partition("\nUser:")[0].strip()
    return SequenceMatcher(None, found, answers[0], autojunk=False).ratio()


def node_set(text: str, answers: Sequence[str]) -> float:
    """GraphWalks: the F1 of the set of nodes up to "]"; 1 if both sets are empty."""
    listed = text.rpartition("Final Answer:")[2].lstrip(" [").partition("]")[0].partition("\n")[0]
    found = {one.strip() for one in listed.split(",") if one.strip()}
    truth = set(answers)
    if not found and not truth:
        return 1.0
    both = len(found & truth)
    return 2 * both / (len(found) + len(truth))


def number(text: str, answers: Sequence[str]) -> float:
    """OOLONG: 0.75 to the power of the error of the first number; 0 without one."""
    found = _NUMBER.search(text)
    return 0.0 if found is None else 0.75 ** abs(int(found.group().replace(",", "")) - int(answers[0]))


def label(text: str, answers: Sequence[str]) -> float:
    """OOLONG: 1 if the first word is an accepted label."""
    words = re.findall(r"\w+", text.lower())
    return float(bool(words) and words[0] in answers)


def extracted(text: str, answers: Sequence[str]) -> float:
    """Text2JSON: share of the fields that the object with the same first field has with the same value.

    text: objects as they follow "["; reading stops at the first that is not JSON.
    """
    objects, place, decoder = [], 0, json.JSONDecoder()
    text = text.strip().removeprefix("[")
    while place < len(text):
        place += len(text[place:]) - len(text[place:].lstrip(", \n"))
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            break
        objects.append(value)
    right = wanted = 0
    for answer in answers:
        truth: Mapping[str, Any] = json.loads(answer)
        key = next(iter(truth))
        known: Mapping[str, Any] = next(
            (one for one in objects if isinstance(one, dict) and one.get(key) == truth[key]), {}
        )
        right += sum(known.get(name) == value for name, value in truth.items() if name != key)
        wanted += len(truth) - 1
    return right / wanted


def choice(text: str, answers: Sequence[str]) -> float:
    """LongBench v2: 1 if the letter after "The correct answer is", or at the start, is the right one."""
    found = _LETTER.search(text.strip())
    return float(found is not None and (found[1] or found[2]).upper() == answers[0])


SCORERS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "mrcr": piece, "graphwalks": node_set, "oolong_number": number, "oolong_label": label, "text2json": extracted,
    "longbench": choice, "helmet": match_part, "nolima": match_part,
}  # fmt: skip
"""By the family of a task."""
