"""Keys in a few bytes each, row by row, for a device that scans all of them: `device.py` has the index.

q . k - q . mean is approximated by (A q) . (B (k - mean)), A and B as `sketch.learn_projection` has them. The first
`wide` numbers of B (k - mean) are stored in 8 bits, the next `narrow` in 4, the rest not at all; the steps are folded
into A. How many of each is fixed by the bytes per key, for a kernel reads all heads alike: measured at 64 bytes for
head_dim 128, 16 wide and 96 narrow numbers hold .96 to .999 of the best 100 keys among the first 200, 32 and 64 only
.90 of a hard head's.

To order keys a code's score needs no more. As large as q . k it is together with q . offset: of the mean, and of what
lies between a number and its floor. What is then left is spread about 0, whatever the score: the more, the more a query
asks for what is not stored. A sum of exponentials of such scores is too small by half of that variance, of its
logarithm: by .1 to .3 at half a byte per number for synthetic heads, whose logits are spread by 3; by .00 to .02 when
the variance is counted in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from retrieval_attn.index.sketch.blocks import FITTED_KEYS, best_steps

FEW_WIDE, MORE_WIDE, MORE_FROM = 8, 16, 48
"""Numbers of 8 bits, of keys of less than MORE_FROM bytes and of others."""


class CodeSpace(NamedTuple):
    """What keys of one head are coded by.

    query_side (rank, head_dim) float32: A with the steps folded in. key_side (rank, head_dim): B over the steps. shift
    (rank,): key_side . mean. wide + narrow = rank, a key's code being `wide` int8 and `narrow / 2` bytes, of which
    byte b has number wide + b in its lower half and number wide + narrow / 2 + b in its upper half.

    estimate (2 + head_dim - rank, head_dim) float32: what makes a score as large as q . k. Row 0: offset; q . k is near
    `code_scores` + q . offset. Row 1: in `rank` places, the variance of what rounding took from each number. Then A's
    rows for numbers that are not stored, times the deviation of each. Empty where no query is scored.
    """

    query_side: npt.NDArray[np.float32]
    key_side: npt.NDArray[np.float32]
    shift: npt.NDArray[np.float32]
    estimate: npt.NDArray[np.float32]
    wide: int
    narrow: int

    @property
    def key_bytes(self) -> int:
        """Bytes of one key's code."""
        return self.wide + self.narrow // 2


def split_bytes(key_bytes: int, head_dim: int) -> tuple[int, int]:
    """How many numbers get 8 bits and how many 4, for at most so many bytes per key: (wide, narrow)."""
    if key_bytes >= head_dim:
        return head_dim, 0
    wide = min(FEW_WIDE if key_bytes < MORE_FROM else MORE_WIDE, key_bytes)
    narrow = 2 * (key_bytes - wide)
    if wide + narrow <= head_dim:
        return wide, narrow
    return 2 * key_bytes - head_dim, 2 * (head_dim - key_bytes)


def learn_space(
    sides: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]], keys: npt.NDArray[np.float32], key_bytes: int
) -> CodeSpace:
    """A space for keys like `keys` (n, head_dim), n > 0, under A and B of `sides`, both (head_dim, head_dim).

    Steps are those of `blocks.SHARES` with the least squared error.
    """
    wide, narrow = split_bytes(key_bytes, keys.shape[1])
    rank = wide + narrow
    query_side, unseen_query, key_side = sides[0][:rank], sides[0][rank:], sides[1][:rank]
    mean = keys.mean(axis=0, dtype=np.float64).astype(np.float32)
    numbers, unseen = np.split((keys - mean) @ sides[1].T, [rank], axis=1)
    reach = np.maximum(np.abs(numbers).max(axis=0), np.finfo(np.float32).tiny * 2**16)
    sample = np.ascontiguousarray(numbers[:: max(1, len(numbers) // FITTED_KEYS)])
    step = np.zeros(rank, np.float32)
    best_steps(sample, np.zeros(rank, np.float32), reach, wide, step)
    over = (key_side / step[:, None]).astype(np.float32)
    scaled = (query_side * step[:, None]).astype(np.float32)
    estimate = np.zeros((2 + len(unseen_query), keys.shape[1]), np.float32)
    # a code is the floor of a number: half a step below it on average; and 4-bit numbers are stored 8 higher
    estimate[0] = mean + np.repeat([0.5, 0.5 - 8], [wide, narrow]) @ scaled.astype(np.float64)
    reach = np.repeat([128, 8], [wide, narrow])
    rounded = np.clip(np.floor(sample / step), -reach, reach - 1) + 0.5
    estimate[1, :rank] = np.square(sample / step - rounded).mean(axis=0)
    estimate[2:] = unseen_query * np.sqrt(np.square(unseen).mean(axis=0))[:, None]
    return CodeSpace(scaled, over, over @ mean, estimate, wide, narrow)


def encode(space: CodeSpace, keys: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Codes (n, key_bytes) of keys (n, head_dim)."""
    numbers = np.floor(keys @ space.key_side.T - space.shift)
    half = space.narrow // 2
    codes = np.empty((len(keys), space.key_bytes), np.uint8)
    codes[:, : space.wide] = np.clip(numbers[:, : space.wide], -128, 127).astype(np.int8).view(np.uint8)
    low, high = (np.clip(part + 8, 0, 15).astype(np.uint8) for part in np.split(numbers[:, space.wide :], [half], 1))
    codes[:, space.wide :] = low | high << 4
    return codes


def code_scores(
    space: CodeSpace, codes: npt.NDArray[np.uint8], queries: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """What the codes say of q . k, but for a number per query: (queries, codes) float32; queries (m, head_dim)."""
    sides = np.split(queries @ space.query_side.T, [space.wide, space.wide + space.narrow // 2], axis=1)
    packed = codes[:, space.wide :]
    parts = codes[:, : space.wide].view(np.int8), packed & 15, packed >> 4
    scores = [side @ part.astype(np.float32).T for side, part in zip(sides, parts, strict=True)]
    return np.sum(scores, axis=0, dtype=np.float32)
