"""Token-level training batches: long contexts with many questions each, made in worker processes.

Uses the same plans (needles, questions) as evaluation, but splices pre-encoded filler, so that a
131,072-token context costs milliseconds.  Nothing here touches a GPU.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from retrieval_attn_eval.plans import (
    NOISE_LINE,
    Plan,
    Question,
    make_plan,
    number,
    plan_city,
    plan_niah,
    plan_vt,
    uuid4,
)
from retrieval_attn_eval.tasks import split_sentences
from retrieval_attn_eval.text.prose import prose

IGNORE, EOS = -100, 1
MAX_POSITION = 131072
KINDS = (
    "niah_noise",
    "niah_prose",
    "niah_uuid",
    "niah_needles",
    "niah_uuid_needles",
    "multivalue",
    "multiquery",
    "vt",
    "passkey",
    "number_string",
    "city_number",
    "city_activity",
    "kv_uuid",
    "mixed",
    "repeat",
)
# weights in the order of KINDS; training multiplies them by a factor that grows with the error rate of the kind
MIXTURES = {
    "base": (0.5, 0.8, 0.7, 0.9, 0.8, 4.0, 0.6, 5.0, 0.3, 0.4, 0.8, 0.8, 1.4, 0.8, 0.3),
    "lists": (0.4, 0.6, 1.0, 0.9, 0.9, 5.0, 0.4, 6.5, 0.2, 0.3, 0.7, 0.8, 2.0, 0.6, 0.3),
    "long": (0.5, 0.9, 1.4, 0.6, 0.8, 2.8, 0.2, 2.8, 0.3, 0.3, 0.9, 1.2, 3.2, 0.6, 0.1),
    "last": (0.5, 0.8, 1.2, 1.6, 1.6, 4.5, 0.2, 2.5, 0.3, 0.3, 0.8, 1.2, 4.0, 0.6, 0.1),
}

_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# the same cuts as training/tokenizer.py, for ASCII text only; a UUID comes out whole and is cut by `Encoder`
_PIECES = re.compile(
    rf"{_UUID}| (?={_UUID})|\n|[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+?(?={_UUID})"
    r"| ?[^\sA-Za-z0-9]+|[^\S\n]+(?!\S)|[^\S\n]+"
)


class Encoder:
    """Tokenizer with a cache keyed by pre-token: several times faster than encoding the whole string."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}
        self._pairs = {f"{i:02x}": self._plain(f"{i:02x}") for i in range(256)}
        vocab = tokenizer.get_vocab()
        self._pairs = {pair: [vocab[pair]] for pair in self._pairs if pair in vocab}
        self._dash = vocab["-"]

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def __call__(self, text: str) -> list[int]:
        if not text.isascii():
            return self._plain(text)
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            known = self._cache.get(piece)
            if known is None:
                known = self._uuid(piece) if len(piece) == 36 and piece[8] == "-" == piece[13] else self._plain(piece)
                if len(self._cache) < 400_000 and len(piece) < 36:
                    self._cache[piece] = known
            ids.extend(known)
        return ids

    def _uuid(self, text: str) -> list[int]:
        if len(self._pairs) < 256 or not re.fullmatch(_UUID, text):
            return self._plain(text)
        ids: list[int] = []
        for group in text.split("-"):
            ids += [self._dash] if ids else []
            for at in range(0, len(group), 2):
                ids += self._pairs[group[at : at + 2]]
        return ids


@dataclass
class Pool:
    """Encoded filler: ids of all sentences in a row; sentence i is ids[starts[i]:starts[i + 1]]."""

    ids: np.ndarray
    starts: np.ndarray
    first: np.ndarray  # sentences that open a paragraph

    @classmethod
    def build(cls, text: str, tokenizer: Any) -> Pool:
        sentences = split_sentences(text)
        rows = tokenizer(sentences, add_special_tokens=False)["input_ids"]
        starts = np.cumsum([0, *(len(row) for row in rows)])
        flat = np.fromiter((t for row in rows for t in row), dtype=np.uint16, count=int(starts[-1]))
        opens = np.array([i for i, s in enumerate(sentences) if s.startswith("\n\n")] or [0])
        return cls(flat, starts, opens)

    def run(self, size: int, rng: random.Random) -> list[np.ndarray]:
        """Sentences of about `size` tokens from a random paragraph start; wraps around the end."""
        at = int(self.first[rng.randrange(len(self.first))])
        out: list[np.ndarray] = []
        while size > 0:
            end = int(np.searchsorted(self.starts, self.starts[at] + size, side="right"))
            end = min(max(end - 1, at + 1), len(self.starts) - 1)
            bounds = self.starts[at : end + 1]
            out.extend(self.ids[a:b] for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
            size -= int(bounds[-1] - bounds[0])
            at = 0 if end >= len(self.starts) - 1 else end
        return out


def read_text(folder: Path) -> str:
    """All .txt files of a folder, ASCII characters only (the tokenizer's fast path)."""
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("*.txt"))]
    return "\n\n".join(texts).encode("ascii", "ignore").decode()


class Source:
    """Draws training sequences.  Build once in the parent; worker processes share its pools by fork."""

    def __init__(self, tokenizer: Any, filler: Path | None, prose_chars: int = 4_000_000) -> None:
        self.encode = Encoder(tokenizer)
        rng = random.Random(5)
        self.pools = [Pool.build(prose(prose_chars, 1), tokenizer)]
        words: list[str] = []
        if filler is not None:
            real = read_text(filler)
            self.pools.append(Pool.build(real, tokenizer))
            words = sorted({w for w in re.findall(r"[a-z]{3,10}", real.lower())})
        syllables = [
            a + b
            for a in [
                "b",
                "c",
                "d",
                "f",
                "g",
                "h",
                "k",
                "l",
                "m",
                "n",
                "p",
                "r",
                "s",
                "t",
                "v",
                "w",
                "z",
                "br",
                "st",
                "tr",
                "gl",
            ]
            for b in ["a", "e", "i", "o", "u", "ai", "ea"]
        ]
        made = ["".join(rng.choices(syllables, k=rng.randint(2, 3))) for _ in range(3000)]
        self.words = (words or made)[:40_000] + made
        lines = [
            "\n\n" + " ".join(rng.choices(self.words, k=rng.randint(5, 60))).capitalize() + "." for _ in range(6000)
        ]
        self.pools.append(Pool.build("".join(lines), tokenizer))
        self.noise = np.array(self.encode("\n" + NOISE_LINE), dtype=np.uint16)

    # keys that no list holds, so that the model copies instead of recalling
    def word_key(self, rng: random.Random) -> str:
        return f"{rng.choice(self.words)}-{rng.choice(self.words)}"

    def city_key(self, rng: random.Random) -> str:
        return " ".join(rng.choice(self.words).capitalize() for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))

    def plan(self, kind: str, rng: random.Random, asks: int) -> Plan:
        """Plan with up to `asks` questions; half the time the keys are any words, not the lists."""
        key = self.word_key if rng.random() < 0.5 else "words"
        city = self.city_key if rng.random() < 0.4 else None
        hay = rng.choice(("prose", "prose", "noise"))
        value = rng.choice(("numbers", "numbers", "numbers", "words"))
        if kind == "niah_noise":
            return plan_niah(rng, asks, haystack="noise", value=value, key=key)
        if kind == "niah_prose":
            return plan_niah(rng, asks, haystack="prose", value=value, keys=4, key=key)
        if kind == "niah_uuid":
            by = rng.choice(("words", "words", "uuids"))
            return plan_niah(rng, asks, haystack=hay, key=key if by == "words" else by, value="uuids")
        if kind == "niah_needles":
            return plan_niah(rng, asks, haystack="needles", key=key)
        if kind == "niah_uuid_needles":
            return plan_niah(rng, asks, haystack="needles", key="uuids", value="uuids")
        if kind == "multivalue":
            return plan_niah(
                rng,
                min(rng.choice((1, 1, 2, 3, 4, 8, 16)), max(asks // 2, 1)),
                haystack=hay,
                values=rng.choice((2, 3, 4, 4, 4, 4)),
                key=key,
            )
        if kind == "multiquery":
            return plan_niah(rng, max(asks // 3, 1), haystack=hay, queries=rng.choice((2, 4, 4)), key=key)
        if kind == "vt":
            # several chains in one text: with one chain the next line would always be the next hop
            chains = min(rng.choice((1, 1, 2, 3, 4, 8, 16)), max(asks // 2, 1))
            plan = plan_vt(rng, chains, hops=rng.choice((2, 3, 4, 4, 4, 4)), example=rng.random() < 0.7)
            plan.haystack = rng.choice(("noise", "noise", "noise", "prose"))
            return plan
        if kind in ("passkey", "number_string"):
            plan = make_plan(kind, rng)
            plan.haystack = hay if rng.random() < 0.5 else "noise"
            return plan
        if kind in ("city_number", "city_activity"):
            what = kind.removeprefix("city_")
            count = 1 if rng.random() < 0.2 else asks
            plan = plan_city(rng, count, what=what, varied=rng.random() < 0.65, draw_key=city)
            plan.haystack = rng.choice(("prose", "prose", "prose", "noise"))
            return plan
        if kind == "kv_uuid":
            return make_plan(kind, rng, asks)
        return self._mixed(rng, asks)

    def _mixed(self, rng: random.Random, asks: int) -> Plan:
        """Needles and questions of several plans in one haystack, under the instruction of the first."""
        kinds = rng.sample([k for k in KINDS[:12] if "needles" not in k], k=min(max(asks // 3, 1), 10))
        plans = [self.plan(kind, rng, max(asks // len(kinds), 1)) for kind in kinds]
        needles = [n for plan in plans for n in plan.needles]
        order = list(range(len(needles)))
        if not any(plan.ordered for plan in plans):
            rng.shuffle(order)
        else:  # keep each plan's own order
            owner = [i for i, plan in enumerate(plans) for _ in plan.needles]
            rng.shuffle(owner)
            cursors = [iter(plan.needles) for plan in plans]
            needles, order = [next(cursors[i]) for i in owner], order
        questions = [q for plan in plans for q in plan.questions]
        rng.shuffle(questions)
        return Plan(
            plans[0].instruction,
            [needles[i] for i in order],
            questions,
            rng.choice(("prose", "prose", "noise")),
            ordered=True,
            needle_style=rng.choice([(" ", ""), ("\n", ""), ("\n", "\n")]),
        )

    def _filler(self, plan: Plan, size: int, rng: random.Random) -> list[np.ndarray]:
        """Haystack of about `size` tokens as pieces that needles may go between."""
        if plan.haystack == "noise":
            return [self.noise] * max(size // len(self.noise), 1)
        if plan.haystack == "prose":
            pools = rng.choices(
                self.pools,
                weights=(4, 4, 1)[: len(self.pools)] if len(self.pools) > 2 else (4, 1),
                k=rng.choice((1, 1, 1, 3)),
            )
            return [piece for pool in pools for piece in pool.run(size // len(pools), rng)]
        assert plan.distractor is not None
        lead = ", " if plan.haystack == "kv" else "\n"
        pieces: list[np.ndarray] = []
        while size > 0:
            pieces.append(np.array(self.encode(lead + plan.distractor()), dtype=np.uint16))
            size -= len(pieces[-1])
        return pieces

    def _span(self, size: int, rng: random.Random) -> np.ndarray:
        """`size` tokens to copy: any tokens, filler text, or what the tasks are made of."""
        mode = rng.random()
        if mode < 0.4:
            kinds = rng.choice((64, 512, 4093))
            low = rng.randint(3, 4096 - kinds)
            return np.array([rng.randrange(low, low + kinds) for _ in range(size)], dtype=np.uint16)
        if mode < 0.65:
            return np.concatenate(rng.choice(self.pools).run(size, rng))[:size]
        parts: list[int] = []
        while len(parts) < size:
            pick = rng.random()
            if pick < 0.5:
                parts += self.encode(" " + uuid4(rng))
            elif pick < 0.7:
                parts += self.encode(" " + "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)))
            else:
                parts += self.encode(" " + (self.word_key(rng) if pick < 0.9 else number(rng)))
        return np.array(parts[:size], dtype=np.uint16)

    def _repeat(self, length: int, rng: random.Random) -> tuple[list[np.ndarray], list[bool]]:
        """A span and later copies of it; every copy but its first tokens is an answer.  Teaches copying."""
        span = self._span(rng.randint(8, min(100, length // 2 - 8)), rng)
        pieces, marks = [span], [False]
        used = len(span)
        while True:
            room = length - used - len(span)
            if room < 2:
                return pieces, marks
            gap = min(rng.randint(1, 24) if length < 1024 else rng.randint(1, length // 2), room - 1)
            cue = rng.randint(1, 3)
            pieces += [self._span(gap, rng), span[:cue], span[cue:]]
            marks += [False, False, True]
            used += gap + len(span)

    def sequence(self, kind: str, length: int, rng: random.Random, asks: int, stretch: float) -> tuple[np.ndarray, ...]:
        """ids, positions, weights as targets (0 none, 1 answer, 2 first two answer tokens), ends of answers.

        All (length,).  positions have random gaps with probability `stretch`, up to MAX_POSITION.
        """
        if kind == "repeat":
            pieces, marks = self._repeat(length, rng)
            tail: list[tuple[list[int], list[int]]] = []
        else:
            plan = self.plan(kind, rng, asks)
            questions: list[Question] = list(plan.questions)
            rng.shuffle(questions)
            encoded = [(self.encode(q.text), self.encode(q.completion)) for q in questions]
            before, after = plan.needle_style if plan.haystack != "needles" else ("\n", "")
            needles = [np.array(self.encode(before + n + after), dtype=np.uint16) for n in plan.needles]
            head = np.array(self.encode(plan.instruction.removesuffix("{")), dtype=np.uint16)
            # fit: drop questions that leave the haystack too small
            room = length - len(head) - sum(map(len, needles)) - 2
            tail, used = [], 0
            for q, a in encoded:
                if used + len(q) + len(a) + 1 <= max(room * 0.6, 90) or not tail:
                    tail.append((q, a))
                    used += len(q) + len(a) + 1
            pieces = self._filler(plan, max(room - used, 0), rng)
            total, keep = 0, 0
            for piece in pieces:
                if total + len(piece) > room - used:
                    break
                total, keep = total + len(piece), keep + 1
            pieces = pieces[:keep]
            places = [rng.randint(0, keep) for _ in needles]
            if plan.ordered:
                places.sort()
            mixed: list[np.ndarray] = []
            at = 0
            for place, i in sorted(zip(places, range(len(needles)), strict=True)):
                mixed += pieces[at:place]
                mixed.append(needles[i])
                at = place
            mixed += pieces[at:]
            if mixed and plan.haystack == "kv":  # {"..." and ..."} are joined the way the tokenizer joins them
                mixed[0] = np.concatenate((np.array(self.encode('{"'), dtype=np.uint16), mixed[0][2:]))
                mixed[-1] = np.concatenate((mixed[-1][:-1], np.array(self.encode('"' + plan.closing), dtype=np.uint16)))
            elif mixed:
                opener = places.index(0) if 0 in places else -1
                if opener >= 0:
                    mixed[0] = np.array(self.encode(plan.needles[opener] + after), dtype=np.uint16)
                else:
                    mixed[0] = mixed[0][int(np.argmax(mixed[0] != self.noise[0])) :]
            pieces = [head, *mixed]
            marks = [False] * len(pieces)
        return self._pack(pieces, marks, tail, length, rng, stretch)

    def _pack(
        self,
        pieces: Sequence[np.ndarray],
        marks: Sequence[bool],
        tail: list[tuple[list[int], list[int]]],
        length: int,
        rng: random.Random,
        stretch: float,
    ) -> tuple[np.ndarray, ...]:
        ids = np.full(length, 2, dtype=np.int64)
        weights = np.zeros(length, dtype=np.uint8)
        ends = np.zeros(length, dtype=np.uint8)
        borders: list[int] = []
        at = 0
        for piece, mark in zip(pieces, marks, strict=True):
            size = min(len(piece), length - at)
            ids[at : at + size] = piece[:size]
            if mark:
                weights[at : at + size] = 1
                ends[at + size - 1] = 1
            at += size
            borders.append(at)
        for question, answer in tail:
            size = len(question) + len(answer) + 1
            if at + size > length:
                break
            ids[at : at + size] = [*question, *answer, EOS]
            first = at + len(question)
            weights[first : at + size] = 1
            weights[first : first + 2] = 2  # the first digit follows a space token
            at += size
            ends[at - 1] = 1
            borders.append(at)
        steps = np.ones(length, dtype=np.int64)
        steps[0] = 0
        if stretch and rng.random() < stretch and length < MAX_POSITION:
            span = int(np.exp(rng.uniform(np.log(length), np.log(MAX_POSITION)))) - length
            inner = [b for b in borders[:-1] if b < length]
            cuts = rng.sample(inner, k=min(len(inner), rng.randint(1, 24)))
            shares = np.array([rng.random() ** 2 for _ in cuts])
            for cut, share in zip(cuts, shares / max(shares.sum(), 1e-9), strict=True):
                steps[cut] += int(share * span)
        return ids, np.cumsum(steps), weights, ends


class Batches(IterableDataset[dict[str, torch.Tensor]]):
    """Endless micro-batches; worker w draws from its own stream of (seed, stage, w)."""

    def __init__(
        self,
        source: Source,
        length: int,
        rows: int,
        asks: int,
        stretch: float,
        seed: int,
        weights: SynchronizedArray[float],
    ) -> None:
        self.source, self.length, self.rows, self.asks = source, length, rows, asks
        self.stretch, self.seed, self.weights = stretch, seed, weights

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}/{self.length}/{info.id if info else 0}")
        while True:
            kinds = rng.choices(range(len(KINDS)), weights=self.weights[:], k=self.rows)
            asks = [max(1, round(self.asks * rng.uniform(0.3, 1.0))) for _ in kinds]
            rows = [
                self.source.sequence(KINDS[kind], self.length, rng, ask, self.stretch)
                for kind, ask in zip(kinds, asks, strict=True)
            ]
            ids, positions, weights, ends = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
            yield {"ids": ids, "positions": positions, "weights": weights, "ends": ends, "kinds": torch.tensor(kinds)}


__all__ = ["KINDS", "MIXTURES", "Batches", "Encoder", "Source", "number", "uuid4"]
