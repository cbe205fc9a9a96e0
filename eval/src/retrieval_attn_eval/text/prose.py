"""Seeded, unlimited, readable English filler prose.

Sentences come from own templates and own word lists, so nothing is quoted and no person is named.  The text
is a haystack for retrieval tests, not a language-model corpus: it is varied on the surface, without a plot.
Deterministic in (num_chars, seed); standard library and NumPy only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

import numpy as np

from retrieval_attn_eval.text.words import ADJECTIVES, ADVERBS, MATERIALS, NOUNS, PEOPLE, PLACES, TIMES, entries

__all__ = ["endless_sentences", "prose", "sentences"]

_TRANSITIVE = entries("""
admired borrowed bought carried cleaned copied described discovered drew examined explained followed found
forgot hid ignored inspected kept lifted lost measured mended noticed ordered packed painted passed polished
praised prepared preserved pushed remembered repaired replaced returned saved sketched sold studied tested
traded watched weighed wrapped
""")
_INTRANSITIVE = entries("""
worked, waited, slept, laughed, sang, wandered about, sat down, argued, rested, stood still, read aloud,
kept watch, lost the way, told old stories, said nothing, listened, looked around, took notes, made plans,
grew tired, started again, whistled
""")
_THING_VERBS = entries("""
gleamed, creaked, stood empty, was covered with dust, needed repair, could be seen, had been moved, seemed
out of place, smelled of smoke, was wet with rain, had lost its color, was worth very little, made no sound,
lay in pieces, looked almost new, was kept locked
""")
_ABSTRACT = entries("""
patience, the weather, the price of grain, the old road, the new law, the train schedule, good advice, the
missing page, the shape of the coast, the harvest, the long voyage, the local dialect, the city council, the
cost of repairs, the art of printing, silence, the water supply, the history of the bridge, a change of
plan, the evening news, trade
""")
_OPINIONS = entries("""
nobody was surprised, this was considered normal, the result was better than expected, there was nothing
left to say, the reason was never explained, most people agreed, few visitors understood why, the records do
not mention it, it hardly mattered, everyone had a different opinion, that was the end of it, the rumor
spread quickly, it took years to find out, the matter was soon forgotten, some still doubt it
""")
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "a dozen", "twenty", "forty")

_POOLS: dict[str, tuple[str, ...]] = {
    "a": ADJECTIVES, "n": NOUNS, "w": PEOPLE, "p": PLACES, "t": TIMES, "v": ADVERBS, "m": MATERIALS, "x": _TRANSITIVE,
    "i": _INTRANSITIVE, "h": _THING_VERBS, "b": _ABSTRACT, "o": _OPINIONS, "d": _NUMBERS,
}  # fmt: skip

# one letter in braces draws from the pool of that letter
_TEMPLATES = (
    "The {a} {n} {p} {h}.",
    "{t}, the {w} {x} the {a} {n}.",
    "The {w} {v} {x} a {n} made of {m}.",
    "{t}, the {w} and the {w} {i} {p}.",
    "A {a} {n} and {d} {a} {n} crates stood {p}.",
    "The {w} wrote about {b}, but {o}.",
    "Whenever the {w} {i}, the {a} {n} {h}.",
    "It was {t} that the {w} first {x} the {m} {n}.",
    "{p}, one could find a {n}, a {a} {n}, and {d} pieces of {m}.",
    "The {w} who {x} the {n} {p} also {x} the {a} {n}.",
    "Although the {n} was {a}, the {w} {v} {x} it {t}.",
    "There is a {a} {n} {p}, and {o}.",
    "{d} of the visitors {x} the {n}; the others {i} {p}.",
    "Nothing about {b} seemed {a} to the {w}.",
    "The {w} talked {v} about {b} and {b}.",
    "If the {n} is {a}, the {w} prefers {m}.",
    "{t} the {n} {h}, and the {w} {i}.",
    "According to the {w}, {b} depends on {b}.",
    "The {a} {w} {x} the {n} because the {n} {h}.",
    "In the view of the {w}, a {a} {n} is better than a {a} {n}.",
    "No {w} has ever {x} a {n} as {a} as this one.",
    "The {n} was {a}, the {n} was {a}, and {o}.",
    "Some said that {b} had changed {t}; {o}.",
    "The {w} {x} {d} sheets of {m} and {v} left.",
    "Between the {n} and the {n} there was a wall of {m}.",
    "With a {a} {n} under one arm, the {w} {i} {p}.",
    "The {w} asked whether {b} was {a}, and {o}.",
    "{t}, smoke rose {p} and the {n} {h}.",
    "Every {w} knows that {m} is {a} {t}.",
    "They {x} the {n}, {x} the {a} {n}, and {i} {t}.",
    "A letter from the {w} described {b} and a {a} {n} {p}.",
    "The {a} {n} belonged to the {w}, who {i} {p} {t}.",
)

_COMPILED: list[tuple[str, tuple[tuple[str, ...], ...]]] = [
    (re.sub(r"\{(\w)\}", "%s", text), tuple(_POOLS[code] for code in re.findall(r"\{(\w)\}", text)))
    for text in _TEMPLATES
]
_MAX_SLOTS = max(len(pools) for _, pools in _COMPILED)


def sentences(count: int, seed: int) -> list[str]:
    """`count` independent sentences, each ending with a full stop, without surrounding spaces."""
    rng = np.random.default_rng([seed, 0x50])
    which = rng.integers(0, len(_COMPILED), count).tolist()
    slots = rng.integers(0, 1 << 30, (count, _MAX_SLOTS)).tolist()
    out = []
    for template, row in zip(which, slots, strict=True):
        pattern, pools = _COMPILED[template]
        text = pattern % tuple([pool[value % len(pool)] for pool, value in zip(pools, row, strict=False)])
        out.append(text[0].upper() + text[1:])
    return out


def endless_sentences(seed: int) -> Iterator[str]:
    """Sentences without end, of a seed from 0 to 2**24 - 1; training prose uses other seeds."""
    for block in count():
        yield from sentences(64, (1 << 44) + (seed << 16) + block)


def prose(num_chars: int, seed: int) -> str:
    """`num_chars` characters of prose; sentences are joined by a space, paragraphs of 3-9 by a blank line.

    The text of a smaller num_chars is a prefix of the text of a larger one with the same seed, and the last
    sentence may be cut.  num_chars <= 0 gives "".
    """
    parts: list[str] = []
    length, block = 0, 0
    while length < num_chars:
        batch = sentences(256, seed * 1_000_003 + block if block else seed)
        sizes = np.random.default_rng([seed, block, 0x51]).integers(3, 10, 96).tolist()
        start = 0
        for size in sizes:
            chunk = batch[start : start + size]
            if not chunk:
                break
            start += size
            parts.append(" ".join(chunk))
            length += len(parts[-1]) + 2
        block += 1
    return "\n\n".join(parts)[: max(num_chars, 0)]
