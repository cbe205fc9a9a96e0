"""Synthetic keys and queries of one key-value head that are out of each other's distribution, as real ones are.

Tokens come from topics (segments of text) with Zipf frequencies, beside a slowly changing context. Keys have
a decaying channel spectrum with outliers and a mean; queries are scaled inversely to that spectrum and carry a
mean of their own, so that they lie far outside the keys' distribution (the Mahalanobis ratio of RetrievalAttention's
figure 3b is above 10). Both are rotated (RoPE, half-split layout) at their own positions. A few keys of small
norm score above the crowd for every query (attention sinks of the text). Only element-wise arithmetic is used:
the same arguments give the same bits at any thread count.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.errors import ConfigError
from retrieval_attn.testing import train_positions

FloatArray = npt.NDArray[np.float32]

HUBS = 20
VOCABULARY = 8192
TOPICS = 64
TOPIC_WORDS = 256
SEGMENT = 400
"""Mean tokens of a topic segment."""
CONTEXT_MEMORY = 0.97
"""Share of the context vector that a token leaves as it was (an AR(1) process)."""


@dataclass(frozen=True)
class _Level:
    """What makes a head easy or hard. Weights of a query's parts are relative; `logit_spread` scales them all.

    shared: weight of the query-independent mean. word, topic, context, noise: of the query's own parts.
    logit_spread: standard deviation of q.k / sqrt(head_dim) over the keys. mahalanobis: of queries, wanted.
    fast: gain of the fastest rotating pair against the slowest (1: positions scramble everything).
    """

    shared: float
    word: float
    topic: float
    context: float
    noise: float
    logit_spread: float
    mahalanobis: float
    fast: float


LEVELS = {
    "mid": _Level(
        shared=0.85, word=0.7, topic=0.8, context=0.6, noise=0.25, logit_spread=3.3, mahalanobis=264, fast=0.3
    ),
    "hard": _Level(
        shared=0.4, word=0.8, topic=0.5, context=0.6, noise=0.6, logit_spread=3.1, mahalanobis=235, fast=0.5
    ),
}


class SyntheticHead(NamedTuple):
    """One key-value head and the query heads of its group; everything float32, after RoPE.

    keys: (n, head_dim), key i at position i.
    train: (group, m, head_dim), training queries at their own positions.
    train_rotated: the same, as if they stood at position n, where decoding begins.
    train_positions: (m,) int64, ascending, more of them near the end.
    decode: (group, d, head_dim), queries at positions n .. n + d - 1.
    theta: the base of the rotation.
    """

    keys: FloatArray
    train: FloatArray
    train_rotated: FloatArray
    train_positions: npt.NDArray[np.int64]
    decode: FloatArray
    theta: float


@dataclass(frozen=True)
class HeadOptions:
    """What a head is like. level: "mid" or "hard" (LEVELS). train, decode: queries per query head.

    Raises ConfigError for an odd or too small head_dim, an unknown level or a negative count.
    """

    head_dim: int = 128
    group: int = 4
    level: str = "mid"
    train: int = 8192
    decode: int = 64
    seed: int = 0
    theta: float = 5e5

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ConfigError(f"level={self.level!r} is not known; use one of {', '.join(LEVELS)}")
        if self.head_dim < 16 or self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even and at least 16")
        if min(self.train, self.decode) < 0 or self.group < 1:
            raise ConfigError(f"train={self.train} and decode={self.decode} must be >= 0 and group={self.group} >= 1")


def synthetic_head(n: int, **options: Any) -> SyntheticHead:
    """A head of n keys (n may be 0); options: fields of HeadOptions.

    `train` is cut to n: a token asks once. Raises ConfigError for options out of range or n < 0.
    """
    return next(synthetic_heads(n, 1, **options))


def synthetic_heads(n: int, count: int, *, threads: int = 1, **options: Any) -> Iterator[SyntheticHead]:
    """`count` heads of one text, as the heads of a model read one: `synthetic_head` otherwise, and its errors.

    Each has a spectrum, means and wishes of its own. The text is made once, which for long contexts is what takes
    the time; heads are made by up to `threads` threads. All ask at the same training positions.
    """
    if n < 0:
        raise ConfigError(f"n={n} must be >= 0")
    chosen = HeadOptions(**options)
    text = _Text(n + chosen.decode, chosen.head_dim, chosen.seed)

    def make(number: int) -> SyntheticHead:
        seed, first = chosen.seed + number, number * chosen.group
        head = _Head(LEVELS[chosen.level], chosen.head_dim, chosen.group, chosen.theta, seed, first=first)
        positions, after = train_positions(n, chosen.train, chosen.seed), np.arange(n, n + chosen.decode)
        own = head.queries(text, positions)
        return SyntheticHead(
            keys=rotate(head.keys(text, n), np.arange(n), chosen.theta),
            train=rotate(own, positions, chosen.theta),
            train_rotated=rotate(own, np.full(len(positions), n), chosen.theta),
            train_positions=positions,
            decode=rotate(head.queries(text, after), after, chosen.theta),
            theta=chosen.theta,
        )

    with ThreadPoolExecutor(max(1, threads)) as pool:
        yield from pool.map(make, range(count))


def rotate(vectors: FloatArray, positions: npt.NDArray[np.int64], theta: float) -> FloatArray:
    """RoPE in the half-split layout: vectors (..., m, head_dim) at positions (m,); element j pairs with
    j + head_dim / 2. Rotations add: rotating by a, then by b, is rotating by a + b.
    """
    half = vectors.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = vectors[..., :half], vectors[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class _Text:
    """Tokens of one text: what each is (word, topic, context), and which word it asks for, per position."""

    def __init__(self, length: int, dim: int, seed: int) -> None:
        rng = np.random.default_rng((seed, 1))
        self.words = rng.standard_normal((VOCABULARY, dim), dtype=np.float32)
        self.topics = rng.standard_normal((TOPICS, dim), dtype=np.float32)
        topic_words = rng.integers(0, VOCABULARY, (TOPICS, TOPIC_WORDS))
        self.topic = np.repeat(*_segments(length, rng))[:length]
        of_topic = topic_words[self.topic, _zipf(length, TOPIC_WORDS, rng)]
        self.word = np.where(rng.random(length) < 0.5, of_topic, _zipf(length, VOCABULARY, rng))
        self.context = _slow_walk(length, dim, rng)
        self._seed = seed

    def asked(self, positions: npt.NDArray[np.int64], head: int) -> npt.NDArray[np.int64]:
        """The word that each position of query head `head` looks for: one that occurred before it."""
        rng = np.random.default_rng((self._seed, 2, head))
        draws = rng.random(len(self.word))[positions]  # per position, whatever else is asked for
        near = rng.random(len(self.word))[positions] < 0.5
        reach = np.where(near, np.minimum(positions, 4 * SEGMENT), positions)
        found: npt.NDArray[np.int64] = self.word[positions - (draws * reach).astype(np.int64)]
        return found


class _Head:
    """Spectrum, means and gains of one key-value head and its query heads."""

    def __init__(self, level: _Level, dim: int, group: int, theta: float, seed: int, first: int = 0) -> None:
        """first: of its query heads among those of the text, which all look for other words."""
        rng = np.random.default_rng((seed, 3))
        half = dim // 2
        slow = np.arange(half) / (half - 1)  # 0: fastest pair, 1: slowest
        gain = level.fast + (1 - level.fast) * slow
        spectrum = rng.permutation((1 + np.arange(half)) ** -0.35)
        spectrum[rng.choice(np.arange(half // 2, half), max(1, half // 32), replace=False)] *= 6  # outlier channels
        self._level, self._dim, self._seed, self._first = level, dim, seed, first
        pair_jitter = rng.uniform(0.8, 1.25, dim)
        self._sigma = np.tile(spectrum, 2) * pair_jitter
        self._gains = np.tile(gain, 2) * np.exp(0.5 * rng.standard_normal((group, dim)))
        common = rng.standard_normal(dim)
        own = rng.standard_normal((group, dim))
        self._means = np.tile(slow**2, 2) * (0.7 * common + 0.7 * own)
        # the mean key scores low for every query: hubs of small norm stand above it
        self._key_mean = -1.5 * np.tile(slow**2, 2) * common
        self._scale_to_level()

    def _scale_to_level(self) -> None:
        """Set the size of keys and queries so that logits spread, and queries lie outside, as the level says."""
        level, dim = self._level, self._dim
        own = level.word**2 + level.topic**2 + level.context**2 + level.noise**2
        self._parts = np.sqrt(np.array([level.word, level.topic, level.context, level.noise]) ** 2 / own)
        content = self._gains**2
        shared = self._means**2 * (content.mean(1) / (self._means**2).mean(1))[:, None] * level.shared**2
        self._means = np.sign(self._means) * np.sqrt(shared)
        # keys have unit variance per channel before sigma, so the variance of q.k is the sum of squared gains
        spread = np.sqrt((content + shared).sum(1, keepdims=True) / dim)
        self._gains = self._gains / spread * level.logit_spread
        self._means = self._means / spread * level.logit_spread
        outside = np.sqrt(((self._gains**2 + self._means**2) / self._sigma**4).sum(1).mean())
        self._sigma = self._sigma * np.sqrt(outside / level.mahalanobis)

    def keys(self, text: _Text, n: int) -> FloatArray:
        """(n, dim) before RoPE."""
        rng = np.random.default_rng((self._seed, 4))
        content = 0.62 * text.words[text.word[:n]] + 0.45 * text.topics[text.topic[:n]] + 0.5 * text.context[:n]
        content += np.float32(0.4) * rng.standard_normal(content.shape, dtype=np.float32)
        keys = (content + self._key_mean.astype(np.float32)) * self._sigma.astype(np.float32)
        hubs = rng.choice(n, min(HUBS, n // 64), replace=False)
        keys[hubs] *= np.float32(0.1)
        return keys.astype(np.float32)

    def queries(self, text: _Text, positions: npt.NDArray[np.int64]) -> FloatArray:
        """(group, len(positions), dim) before RoPE."""
        found = []
        for head, (gain, mean) in enumerate(zip(self._gains, self._means, strict=True)):
            rng = np.random.default_rng((self._seed, 5, head))
            noise = rng.standard_normal((len(text.word), self._dim), dtype=np.float32)[positions]
            word, topic, context, other = self._parts.astype(np.float32)
            content = (
                word * text.words[text.asked(positions, self._first + head)]
                + topic * text.topics[text.topic[positions]]
            )
            content += context * text.context[positions] + other * noise
            found.append((content * (gain / self._sigma).astype(np.float32)) + (mean / self._sigma).astype(np.float32))
        return np.stack(found).astype(np.float32)


def _segments(length: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Topics and lengths of segments that cover at least `length` tokens."""
    count = 4 * length // SEGMENT + 16
    sizes = rng.geometric(1 / SEGMENT, count)
    sizes[-1] = max(int(sizes[-1]), length)
    return rng.integers(0, TOPICS, count), sizes


def _zipf(count: int, kinds: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """count ranks below `kinds`, rank r with probability proportional to 1 / (r + 1)."""
    edges = np.cumsum(1 / np.arange(1, kinds + 1))
    return np.searchsorted(edges / edges[-1], rng.random(count), side="right").clip(max=kinds - 1)


def _slow_walk(length: int, dim: int, rng: np.random.Generator) -> FloatArray:
    """(length, dim) of unit variance: a first-order autoregression along the text."""
    steps = rng.standard_normal((length, dim), dtype=np.float32)
    steps[1:] *= np.float32(np.sqrt(1 - CONTEXT_MEMORY**2))
    keep = np.float32(CONTEXT_MEMORY)
    for i in range(1, length):
        steps[i] += keep * steps[i - 1]
    return steps
