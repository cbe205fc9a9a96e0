"""Scoring rules without the defects of `official`, for the same answers.

They read an answer as a person would: names with spaces match, a letter is a choice only where it stands for one,
signs count, a number is compared as a number.  Tasks without a known defect keep the official rule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from retrieval_attn_eval.infinitebench import official
from retrieval_attn_eval.infinitebench.official import Rule, number, prefix_share

__all__ = ["RULES", "choice_letter"]

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")
_INTEGER = re.compile(r"(?<![\w.])[-−]?\d+(?![\w]|\.\d)")
# the letters of options are upper case; what leads up to them may be written in any case
_LEADING = re.compile(r"\(([A-D])\)|([A-D])(?:[).:;]|\s*(?:\n|$))")
_STATED = re.compile(
    r"\b(?:(?i:answer|option|choice|letter|error|one)\s*(?::|(?i:is|would be|should be|must be)\b)\s*:?|is\s*:)\s*"
    r"(?:(?i:function|option)\s+)?\(?([A-D])\b"
)
_ALONE = re.compile(r"(?<!\w)([A-D])(?=[).:,;]|\s|$)")
_WORD_AFTER_ARTICLE = re.compile(r" +(?!(?:or|and|is|was|seems|as|because|since)\b)[a-z]")
_NEXT_QUESTION = re.compile(r"\n\s*Question:")  # a completion model goes on with a question of its own
_LISTED = re.compile(r"^\s*\(?([A-D])\b", re.MULTILINE)


def _key(text: str, answers: Sequence[str]) -> float:
    """The first run of digits that is at least half as long as the key."""
    runs = (run for run in re.findall("[0-9]+", text) if 2 * len(run) >= len(answers[0]))
    return float(answers[0] == next(runs, ""))


def _key_value(text: str, answers: Sequence[str]) -> float:
    """The value is one of the UUIDs in the answer (which may repeat the key); other values by the official rule."""
    if not _UUID.fullmatch(answers[0]):
        return official.RULES["kv_retrieval"](text, answers)
    return float(answers[0].lower() in (found.lower() for found in _UUID.findall(text)))


def _dialogue(text: str, answers: Sequence[str]) -> float:
    """One of the character's names stands in the answer, word by word, in any case."""
    have = " " + " ".join(re.findall(r"\w+", text.upper())) + " "
    names = (" ".join(re.findall(r"\w+", answer.upper())) for answer in answers)
    return float(any(name and f" {name} " in have for name in names))


def _math_find(text: str, answers: Sequence[str]) -> float:
    """The first number, with its sign, equals the answer numerically."""
    found = _NUMBER.search(text)
    return float(found is not None and _value(found.group()) == number(answers[0]))


def _code_run(text: str, answers: Sequence[str]) -> float:
    """An integer at the very start, else the last one."""
    text = text.strip().strip("`*\"' =$")
    found = _INTEGER.findall(text)
    if not found:
        return 0.0
    first = _INTEGER.match(text)
    return float(_value(first.group() if first else found[-1]) == number(answers[0]))


def _math_calc(text: str, answers: Sequence[str]) -> float:
    """Signed values; the list may or may not begin with the expression's first number."""
    found = [int(run.replace("−", "-")) for run in re.findall(r"[-−]?[0-9]+", text)]
    return max(prefix_share(found, answers), prefix_share(found[1:], answers))


def _value(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


def choice_letter(text: str, options: Sequence[str]) -> str:
    """The letter an answer chooses, "" if it chooses none.

    In this order: a letter set off at the start, unless a list of the options begins there; the last letter after
    "answer is", "option:" and the like; the only option whose text occurs; the only letter that stands alone and is no
    article.
    """
    text = re.sub(r"[`*\"“”'’]", "", text)
    text = _NEXT_QUESTION.split(text)[0].strip().lstrip(": \n")
    leading = _LEADING.match(text)
    if leading and len(set(_LISTED.findall(text))) < 3:
        return leading.group(1) or leading.group(2)
    stated = [found.group(1) for found in _STATED.finditer(text) if not _article(text, found)]
    if stated:
        return stated[-1]
    folded = text.casefold()
    named = [letter for letter, option in zip("ABCD", options, strict=False) if option and option.casefold() in folded]
    if len(named) == 1:
        return named[0]
    alone = {found.group(1) for found in _ALONE.finditer(text) if not _article(text, found)}
    return alone.pop() if len(alone) == 1 else ""


def _article(text: str, found: re.Match[str]) -> bool:
    """True for "A" before a lower-case word: "A good guess"."""
    return found.group(1) == "A" and _WORD_AFTER_ARTICLE.match(text, found.end(1)) is not None


def choice(text: str, answers: Sequence[str], options: Sequence[str]) -> float:
    """longbook_choice_eng and code_debug: answers are the right option's text and its letter."""
    option, letter = answers
    if not text.strip():
        return 0.0
    if text.strip().casefold() == option.casefold():
        return 1.0
    return float(choice_letter(text, options) == letter)


RULES: dict[str, Rule] = {
    **official.RULES,
    "passkey": _key,
    "number_string": _key,
    "kv_retrieval": _key_value,
    "longdialogue_qa_eng": _dialogue,
    "math_find": _math_find,
    "math_calc": _math_calc,
    "code_run": _code_run,
}
