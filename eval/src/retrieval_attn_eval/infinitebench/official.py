"""The benchmark's own scoring rules, defects included: what published InfiniteBench numbers were counted with.

Known defects (each has its cure in `fixed`): a dialogue's first name with a space can never match; "Based on" counts
as choice B and "Answer: C" as A; a number before the key hides it; signs are lost in math_calc, and a first value that
the prompt's own examples ask for shifts every later one; "3.5" where an integer is expected stops the whole scoring
(here: that row scores 0).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from retrieval_attn_eval.infinitebench.text_scores import characters, f1, rouge_lsum, words

__all__ = ["RULES", "number", "prefix_share", "spaced"]

Rule = Callable[[str, Sequence[str]], float]
_WORD_BREAKS = "\n:\"'.,?!{}"


def spaced(text: str, characters: str | Sequence[str]) -> str:
    """`text` with a space in place of each of `characters` (which may be longer strings)."""
    for piece in characters:
        text = text.replace(piece, " ")
    return text


def number(text: str) -> int | float:
    """A reference number, int if it is written as one: the rules compare these two differently."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _first_digits(text: str, answers: Sequence[str]) -> float:
    """passkey, number_string: the first run of digits is the key."""
    found = re.search("[0-9]+", text)
    return float(answers[0] == (found.group() if found else ""))


def _key_value(text: str, answers: Sequence[str]) -> float:
    """kv_retrieval: the value is one of the words."""
    return float(answers[0] in spaced(text, _WORD_BREAKS).split())


def _dialogue(text: str, answers: Sequence[str]) -> float:
    """longdialogue_qa_eng: the first name, as it is written, is one of the upper-cased words."""
    return float(answers[0] in [word.upper() for word in spaced(text, _WORD_BREAKS).split()])


def _math_find(text: str, answers: Sequence[str]) -> float:
    """math_find: the first unsigned number equals the answer; a fraction never equals an integer."""
    found = re.search(r"\d+\.\d+|\d+", text)
    if found is None:
        return 0.0
    label = number(answers[0])
    if isinstance(label, float):
        return float(float(found.group()) == label)
    return float("." not in found.group() and int(found.group()) == label)


def _code_run(text: str, answers: Sequence[str]) -> float:
    """code_run: the last word is the value."""
    last = spaced(text.strip(), "\n.`'\":").split()[-1:]
    try:
        return float(bool(last) and int(last[0]) == number(answers[0]))
    except ValueError:
        return 0.0


def prefix_share(found: Sequence[int], answers: Sequence[str]) -> float:
    """Share of the reference values before the first wrong one."""
    right = 0
    for value, answer in zip(found, answers, strict=False):
        if value != number(answer):
            break
        right += 1
    return right / len(answers)


def _math_calc(text: str, answers: Sequence[str]) -> float:
    """math_calc: digit runs against the values, in order."""
    return prefix_share([int(run) for run in re.findall("[0-9]+", text)], answers)


def math_calc_after_first(text: str, answers: Sequence[str]) -> float:
    """math_calc as it is scored for the chat prompt, whose example begins with the expression's first number."""
    return prefix_share([int(run) for run in re.findall("[0-9]+", text)][1:], answers)


def _choice(text: str, answers: Sequence[str]) -> float:
    """longbook_choice_eng: a letter at the start, an option as a whole, what follows a phrase, or the first letter."""
    text = text.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in answers)
    if text in answers:
        return 1.0
    text = re.sub(" {2,}", " ", spaced(text, "\n\"'.,?!{}"))
    for phrase in ("answer is:", "answer:", "answer is", "option is"):
        at = text.find(phrase)
        if at >= 0:
            rest = text[at + len(phrase) + 1 :]  # one character, mostly a space, stands between
            return float(any(rest.startswith(answer) for answer in answers)) if at + len(phrase) < len(text) else 0.0
    for word in text.split():
        if word in "ABCD":
            return float(word in answers)
    return 0.0


def _code_debug(text: str, answers: Sequence[str]) -> float:
    """code_debug: "B." or "B:" at the start, or the letter or the function's name after a phrase."""
    name, letter = answers
    text = text.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = re.sub(" {2,}", " ", spaced(text, ("\n", "`", "'", '"', "-", "*", "Option", "option")))
    for phrase in ("answer is:", "is:", "answer:", "correct option is:"):
        at = text.find(phrase)
        if at >= 0:
            rest = text[at + len(phrase) + 1 :]
            return float(rest.startswith((letter, name))) if at + len(phrase) < len(text) else 0.0
    return 0.0


def _english(text: str, answers: Sequence[str]) -> float:
    return max(f1(words(text), words(answer)) for answer in answers)


def _chinese(text: str, answers: Sequence[str]) -> float:
    return max(f1(characters(text), characters(answer)) for answer in answers)


RULES: dict[str, Rule] = {
    "passkey": _first_digits,
    "number_string": _first_digits,
    "kv_retrieval": _key_value,
    "longbook_sum_eng": rouge_lsum,
    "longbook_qa_eng": _english,
    "longbook_choice_eng": _choice,
    "longdialogue_qa_eng": _dialogue,
    "longbook_qa_chn": _chinese,
    "code_debug": _code_debug,
    "code_run": _code_run,
    "math_calc": _math_calc,
    "math_find": _math_find,
}
