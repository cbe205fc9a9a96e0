"""Words: the text of a trace's blocks, which have numbers and lengths only."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import NamedTuple

from retrieval_attn_eval.load.line import Block

__all__ = ["Rate", "Words"]

COMMON = """
about after again air all also and animal answer any around ask away back be been before began below between big book
both boy but by call came can car change city close cold come could country cut day did different do does door down
draw each early earth eat end enough even every eye face family far father feet few find fire first fish five food for
form found four from game gave girl give go good got great grow had hand hard has head hear help here high hold home
horse hot house hundred idea if in inch it just keep kind know land large last late learn leave left let letter life
light like line list little live long look low made make man many mark mean men might mile money more morning most
mother mountain move much music must my name near need never new next night no north note now number of off often old
on once one only open or order other our out over own page paper part people piece place plain plan plant play point
power problem put question quick rain ran read real red rest right river road rock room round run said same saw say
school sea second see seem self sentence set several she ship short should show side simple since six slow small snow
so some song soon sound south spell stand star start state stay step still stop story strong study such sun sure table
take talk tell ten test than that the
"""
"""Short words: in most vocabularies each is one token with the space before it."""


class Rate(NamedTuple):
    """words: that a server's tokenizer takes for a token. message_tokens: that its template adds to each message."""

    words: float = 1.0
    message_tokens: float = 0.0


class Words:
    """Common words, drawn by the number of a block: equal blocks have equal texts, others do not."""

    def __init__(self, seed: int, rate: Rate = Rate()) -> None:  # noqa: B008  it is a tuple
        """rate: of the server. seed: of all texts, so that no other replay's are known."""
        self._seed, self._rate, self._common = seed, rate, COMMON.split()
        self._block = lru_cache(maxsize=4096)(self._drawn)

    def texts(self, blocks: tuple[Block, ...]) -> list[str]:
        """Of a prompt, one for each block. What begins with the same blocks begins with the same texts."""
        return [self._block(block) for block in blocks]

    def _drawn(self, block: Block) -> str:
        count = max(1, round((block.tokens - self._rate.message_tokens) * self._rate.words))
        return " ".join(random.Random(f"{self._seed}/{block.name}").choices(self._common, k=count))
