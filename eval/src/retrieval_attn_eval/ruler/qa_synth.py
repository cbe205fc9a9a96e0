"""Made-up documents and questions for runs without SQuAD and HotpotQA; reported as qa_synth_1 and qa_synth_2.

Documents come in pairs: a building, and the person who designed it.  One hop asks about the building; two hops ask
about the designer of a building, so that the answer stands in the other document.  Names are unique by construction.
The numbers compare methods with each other, not with published ones.
"""

from __future__ import annotations

import random
from functools import lru_cache

from retrieval_attn_eval.ruler.qa_files import Question
from retrieval_attn_eval.text.prose import sentences
from retrieval_attn_eval.text.words import CITIES, MATERIALS, NOUNS, PEOPLE

__all__ = ["SyntheticSource"]

_KINDS = ("Museum", "Library", "Bridge", "Theater", "Tower", "Market", "Station", "Chapel", "Observatory", "Mill")
_SYLLABLES = tuple(
    consonant + vowel
    for consonant in ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "gr", "tr")
    for vowel in ("a", "e", "i", "o", "u")
)
_NAMES = len(_SYLLABLES) ** 3
_FIRST = (
    *("Alda", "Bero", "Cilia", "Doran", "Edda", "Falk", "Gisa", "Hauk", "Ilva", "Joran", "Katla", "Leif"),
    *("Maren", "Nils", "Orla", "Peder", "Runa", "Sten", "Tilda", "Ulf", "Vera", "Wim", "Ylva", "Zoltan"),
)
_ENDINGS = ("n", "r", "l", "th", "s", "nd")


def _name(index: int) -> str:
    """A name of three syllables; different for indices that differ modulo the number of names."""
    place = (index * 104_729 + 7) % _NAMES  # 104,729 is prime and no factor of the number of names
    base = len(_SYLLABLES)
    parts = [_SYLLABLES[place // base**2], _SYLLABLES[place // base % base], _SYLLABLES[place % base]]
    return "".join(parts).capitalize() + _ENDINGS[place % len(_ENDINGS)]


class SyntheticSource:
    """hops: 1 or 2.  Document 2k is building k's, document 2k+1 its designer's; question i is about pair i."""

    count = None

    def __init__(self, hops: int, seed: int) -> None:
        self.label = f"built-in questions with {hops} hop{'s' if hops > 1 else ''}"
        self.digest = "built-in questions 1"
        self._hops, self._seed = hops, seed

    def pool(self, length: int) -> int:
        return max(1024, length // 64 * 2)  # twice what fits of the shortest ones

    def question(self, i: int) -> Question:
        return _question(self._seed, self._hops, i)

    def document(self, j: int) -> str:
        return _pair(self._seed, j // 2)[j % 2]


def _facts(seed: int, k: int) -> dict[str, str]:
    rng = random.Random(f"ruler/qa/{seed}/{k}")
    return {
        "building": f"{_name(2 * k)} {rng.choice(_KINDS)}",
        "designer": f"{rng.choice(_FIRST)} {_name(2 * k + 1)}",
        "year": str(rng.randint(1502, 1987)),
        "city": rng.choice(CITIES),
        "material": rng.choice(MATERIALS),
        "height": str(rng.randint(11, 240)),
        "birthplace": rng.choice(CITIES),
        "trade": rng.choice(PEOPLE),
        "born": str(rng.randint(1450, 1930)),
        "hobby": rng.choice(NOUNS),
    }


@lru_cache(maxsize=65536)
def _pair(seed: int, k: int) -> tuple[str, str]:
    facts = _facts(seed, k)
    rng = random.Random(f"ruler/qa/{seed}/{k}/text")
    filler = sentences(8, rng.getrandbits(40))
    building = [
        "The {building} is a landmark in {city}.",
        "The {building} was opened in {year}.",
        "It was designed by {designer}.",
        "Its walls are made of {material}, and it is {height} meters high.",
    ]
    person = [
        "{designer} was born in {birthplace} in {born}.",
        "Before turning to architecture, {designer} worked as a {trade}.",
        "{designer} kept a famous collection of drawings, each showing a {hobby}.",
    ]
    texts = []
    for lines, spare in ((building, filler[:4]), (person, filler[4:])):
        told = [line.format(**facts) for line in lines]
        # the first line names the subject, so that "it" has something to stand for
        for sentence in spare[: rng.randint(1, 4)]:
            told.insert(rng.randint(1, len(told)), sentence)
        texts.append(" ".join(told).replace("It was designed", f"The {facts['building']} was designed"))
    titles = (facts["building"], facts["designer"])
    return f"{titles[0]}\n{texts[0]}", f"{titles[1]}\n{texts[1]}"


def _question(seed: int, hops: int, i: int) -> Question:
    facts = _facts(seed, i)
    if hops == 1:
        kinds = (
            ("In which year was the {building} opened?", "year", "{year}"),
            ("Who designed the {building}?", "designer", "{designer}"),
            ("In which city is the {building}?", "city", "{city}"),
            ("How many meters high is the {building}?", "height", "{height}"),
        )
        text, _, answer = kinds[i % len(kinds)]
        answers = [answer.format(**facts)]
        if answer == "{height}":
            answers.append(f"{facts['height']} meters")
        return Question(text.format(**facts), tuple(answers), (2 * i,), (2 * i + 1,))
    two = (
        ("In which city was the designer of the {building} born?", "{birthplace}"),
        ("In which year was the designer of the {building} born?", "{born}"),
        ("As what did the designer of the {building} work before turning to architecture?", "{trade}"),
    )
    text, answer = two[i % len(two)]
    return Question(text.format(**facts), (answer.format(**facts),), (2 * i, 2 * i + 1))
