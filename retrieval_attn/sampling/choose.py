"""Choosing the next token of every row: temperature, top-k, top-p, min-p, seed and logprobs of a row's own.

What a row draws depends on its logits, its `SamplingParams` and its position alone: not on the other rows, on their
number, on the row's place among them, or on what was drawn before. Therefore the noise comes from a counter
(`row_noise`), and sums that decide something are sums of integers, whose order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.sampling.sampling_params import SamplingParams, is_int

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
TOGETHER = 256
"""Blocks whose state stays in the first cache: 8 KiB."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words for each counter.

    counter, key: int64 tensors that hold numbers of 32 bits, [0, 2^32), of shapes that broadcast. Returns the same
    kind of numbers. Recordable in a CUDA graph; the same bits on every device.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(ROUNDS):
        if turn:
            k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def uniforms(words: Tensor) -> Tensor:
    """float32 numbers in (0, 1), neither 0 nor 1, from words [0, 2^32) in int64: (word + 1/2) / 2^32, rounded.

    Small ones keep all 32 bits; the largest is the last float32 below 1.
    """
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbels(words: Tensor) -> Tensor:
    """float32 standard Gumbel noise, -log(-log(1 - u)) of `uniforms`: [-2.81, 22.88].

    Large noise, which decides a draw, comes from small u, where float32 is finest.
    """
    return -torch.log(-torch.log1p(-uniforms(words)))


def row_noise(key: tuple[Tensor, Tensor], positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise (rows, vocabulary) float32 for the tokens that rows draw at `positions`, int64 (rows,), >= 0.

    key: two int64 tensors (rows,) with the low and high 32 bits of a row's seed. Token v takes word v % 4 of the
    counter (v // 4, position low, position high, 0): its noise does not depend on the size of the vocabulary.
    """
    if positions.device.type == "cpu":
        return gumbels(_compiled_words(*key, positions, vocabulary))
    return gumbels(_row_words(key, positions, vocabulary))


# An operation of torch: who records operations, to run them again with other numbers, then records this one, too.
@torch.library.custom_op(
    "retrieval_attn::row_words", mutates_args=(), device_types="cpu",
    schema="(Tensor low, Tensor high, Tensor positions, int vocabulary) -> Tensor",
)  # fmt: skip
def _compiled_words(low: Tensor, high: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    drawn = np.empty((len(positions), (vocabulary + 3) // 4, 4), np.int64)
    _fill_words(low.numpy(), high.numpy(), positions.numpy(), drawn)
    return torch.from_numpy(drawn).flatten(1)[:, :vocabulary].contiguous()


def _row_words(key: tuple[Tensor, Tensor], positions: Tensor, vocabulary: int) -> Tensor:
    blocks = torch.arange((vocabulary + 3) // 4, dtype=torch.int64, device=positions.device)
    place = positions[:, None]
    counter = (blocks[None], place & WORD, (place >> 32) & WORD, torch.zeros_like(place))
    words = philox(counter, (key[0][:, None], key[1][:, None]))
    return torch.stack(words, dim=-1).flatten(1)[:, :vocabulary]


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of 64 bits, which an int64 has no room for: by halves of the factor."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & WORD


@njit(nogil=True, cache=True)
def _fill_words(
    key_low: npt.NDArray[Any], key_high: npt.NDArray[Any], positions: npt.NDArray[Any], out: npt.NDArray[Any]
) -> None:
    """out[row, block]: the words of `_row_words`; out (rows, blocks, 4) int64.

    A round is done for `TOGETHER` blocks before the next one, a loop that the compiler makes vector instructions of;
    the masks of factors tell it that their upper halves are 0.
    """
    word, half = np.uint64(WORD), np.uint64(32)
    first, second = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
    step_low, step_high = np.uint64(KEY_STEPS[0]), np.uint64(KEY_STEPS[1])
    c0, c1, c2, c3 = np.empty((4, TOGETHER), np.uint64)
    for row in range(len(positions)):
        place = np.uint64(positions[row])
        for start in range(0, out.shape[1], TOGETHER):
            count = min(TOGETHER, out.shape[1] - start)
            for i in range(count):
                c0[i], c1[i], c2[i], c3[i] = np.uint64(start + i), place & word, place >> half, np.uint64(0)
            k0, k1 = np.uint64(key_low[row]), np.uint64(key_high[row])
            for _ in range(ROUNDS):
                for i in range(count):
                    product0, product1 = (c0[i] & word) * first, (c2[i] & word) * second
                    c0[i] = (product1 >> half) ^ c1[i] ^ k0
                    c2[i] = (product0 >> half) ^ c3[i] ^ k1
                    c1[i], c3[i] = product1 & word, product0 & word
                k0, k1 = (k0 + step_low) & word, (k1 + step_high) & word
            for i in range(count):
                block = start + i
                out[row, block, 0], out[row, block, 1] = c0[i], c1[i]
                out[row, block, 2], out[row, block, 3] = c2[i], c3[i]


WEIGHT = 2.0**40
"""The largest weight of a row as an integer; weights below it keep 40 bits. 2^22 of them fit into an int64."""


class DrawMode(NamedTuple):
    """Draw options of all rows of a step, as the host knows them; a graph of a mode also supports rows that need less.

    sample: a row draws; otherwise choosing costs an argmax. filters: a row that draws leaves tokens out. logprobs: the
    most that a row asks for; None: no row asks even for the chosen token's.
    """

    sample: bool = False
    filters: bool = False
    logprobs: int | None = None


class Chosen(NamedTuple):
    """Result of `choose`, on the logits' device.

    ids: int64 (rows,), 0 in failed rows. failed: bool (rows,): rows whose logits hold NaN, or whose largest is
    infinite. logprobs: float32 (rows,) of the chosen tokens, natural logarithms, of the logits before temperature and
    filters. top_ids int64, top_logprobs float32: (rows, n), likeliest first. The last three are None where the mode
    has no logprobs. NaN in failed rows.
    """

    ids: Tensor
    failed: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


class SamplingState:
    """The `SamplingParams` of every row in tensors that stay where they are, so that a captured graph reads what is
    new.

    A row that was never written is greedy. mode: what all rows together need.
    """

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        """Raises ConfigError for fewer than one row."""
        if not is_int(rows) or rows < 1:
            raise ConfigError(f"a SamplingState needs at least 1 row, got {rows!r}.")
        self._draws = [SamplingParams()] * rows
        self.mode = DrawMode()
        device = torch.device(device)
        page_locked = device.type == "cuda"
        self._numbers_cpu = torch.zeros(rows, 3, dtype=torch.float64, pin_memory=page_locked)
        self._words_cpu = torch.zeros(rows, 3, dtype=torch.int64, pin_memory=page_locked)
        self._numbers_cpu[:, 1] = 1.0
        self._numbers_view, self._words_view = self._numbers_cpu.numpy(), self._words_cpu.numpy()
        self._numbers = self._numbers_cpu.to(device, copy=True)
        self._words = self._words_cpu.to(device, copy=True)

    def __len__(self) -> int:
        return len(self._draws)

    def write(self, slot: int, draw: SamplingParams) -> None:
        """Row `slot` chooses by `draw` from the next step on.

        On a GPU the copy is queued on the current stream and waits for nothing. The same slot may be written again
        once that copy has run. Raises IndexError for a slot outside [0, rows).
        """
        if not 0 <= slot < len(self._draws):
            raise IndexError(f"slot {slot} of a SamplingState of {len(self._draws)} rows")
        self._draws[slot] = draw
        self.mode = _mode(self._draws)
        seed = draw.seed % 2**64
        temperature = 0.0 if draw.greedy else float(draw.temperature)
        self._numbers_view[slot] = temperature, draw.top_p, draw.min_p
        self._words_view[slot] = draw.top_k, seed & WORD, seed >> 32
        self._numbers[slot].copy_(self._numbers_cpu[slot], non_blocking=True)
        self._words[slot].copy_(self._words_cpu[slot], non_blocking=True)

    def clear(self, slot: int) -> None:
        """Row `slot` is free: greedy, which costs least. Raises IndexError as `write` does."""
        self.write(slot, SamplingParams())

    def options(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return the options of the first `rows` rows, on the device: float64 (rows, 3) temperature, top-p, min-p;
        int64 (rows, 3) top-k and the low and high 32 bits of the seed.
        """
        return self._numbers[:rows], self._words[:rows]

    def columns(self, rows: int) -> _Columns:
        """The same, one tensor (rows,) for each."""
        (temperature, top_p, min_p), (top_k, seed_low, seed_high) = (part.unbind(1) for part in self.options(rows))
        return _Columns(temperature.float(), top_p, min_p.float(), top_k, seed_low, seed_high)


def _mode(draws: Sequence[SamplingParams]) -> DrawMode:
    asked = max((draw.logprobs for draw in draws), default=0)
    return DrawMode(
        any(not draw.greedy for draw in draws), any(draw.filters for draw in draws), asked if asked else None
    )


class _Columns(NamedTuple):
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed_low: Tensor
    seed_high: Tensor


def choose(
    logits: Tensor, draws: SamplingState, positions: Tensor, mode: DrawMode | None = None, scores: Tensor | None = None
) -> Chosen:
    """The next token of every row.

    logits: float32 (rows, vocabulary), row r for slot r of `draws`, the numbers of a row side by side; not changed.
    positions: int64 (rows,) >= 0 of the tokens that are chosen. mode: None takes `draws.mode`; who replays a captured
    graph gives the mode that it was captured for, which must cover the table's. scores: the logits after penalties and
    biases, in the same form: tokens are chosen from these, and log-probabilities are of `logits`. None: the logits.
    No row waits for the host and no shape depends on data, so a CUDA graph can record it. A failed row changes nothing
    in the others. Raises ShapeError for other shapes and dtypes, and for more rows than `draws` has.
    """
    _require_shapes(logits, draws, positions)
    mode = draws.mode if mode is None else mode
    kernels = _kernels(logits) if mode.sample else None
    scores = logits if scores is None else scores
    if mode.sample:
        most = scores.amax(dim=1)
    else:
        most, ids = scores.max(dim=1)
    failed = ~torch.isfinite(most)
    if kernels is not None:
        ids = torch.zeros_like(positions)
        kernels.choose(scores, most, draws.options(len(logits)), positions, ids)
    elif mode.sample:
        ids = _perturbed(scores, draws.columns(len(logits)), positions, mode.filters).argmax(dim=1)
    ids = ids.masked_fill(failed, 0)
    if mode.logprobs is None:
        return Chosen(ids, failed)
    most = most if scores is logits else logits.amax(dim=1)
    return Chosen(ids, failed, *_logprobs(logits, most, ids, failed, mode.logprobs))


def token_logprobs(logits: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of given tokens, as `choose` computes them for the tokens that it chooses.

    logits: float32 (rows, vocabulary). ids: int64 (rows,). count: of the likeliest tokens. Returns logprobs (rows,),
    and top_ids and top_logprobs (rows, n), see `Chosen`.
    """
    most = logits.amax(dim=1)
    logprobs, top_ids, top = _logprobs(logits, most, ids, ~torch.isfinite(most), count)
    return logprobs, top_ids, top


def _logprobs(logits: Tensor, most: Tensor, ids: Tensor, failed: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    lse = most + (_weights(logits, most).sum(dim=1).double() / WEIGHT).log().float()
    lse = lse.masked_fill(failed, math.nan)
    chosen = logits.gather(1, ids[:, None]).squeeze(1) - lse
    top, top_ids = logits.topk(min(count, logits.shape[1]), dim=1)
    return chosen, top_ids, top - lse[:, None]


def _require_shapes(logits: Tensor, draws: SamplingState, positions: Tensor) -> None:
    fits = logits.ndim == 2 and logits.dtype == torch.float32 and logits.shape[1] > 0 and logits.stride(1) == 1
    if not fits:
        raise ShapeError(
            "logits must be float32 (rows, vocabulary) with the numbers of a row side by side, got "
            f"{logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}; call .float().contiguous()."
        )
    if positions.shape != logits.shape[:1] or positions.dtype != torch.int64:
        raise ShapeError(
            f"positions must be int64 ({len(logits)},), one for each row of the logits, got {positions.dtype} "
            f"{tuple(positions.shape)}."
        )
    if len(logits) > len(draws):
        raise ShapeError(f"{len(logits)} rows of logits for a SamplingState of {len(draws)} rows; make a larger one.")


def _kernels(logits: Tensor) -> Any:
    """The Triton kernels where they run on these logits, else None: then it is operations of torch, slower."""
    return kernels_for(logits, "draw_triton")


def _perturbed(logits: Tensor, row: _Columns, positions: Tensor, filters: bool) -> Tensor:
    """Scores (rows, vocabulary) whose argmax is a draw from the softmax (the Gumbel-max rule); greedy rows: logits."""
    greedy = row.temperature == 0
    scaled = logits / torch.where(greedy, 1.0, row.temperature)[:, None]
    noise = row_noise((row.seed_low, row.seed_high), positions, logits.shape[1])
    scores = scaled + noise.masked_fill_(greedy[:, None], 0.0)
    return scores.masked_fill(~_kept(scaled, row), -math.inf) if filters else scores


def _kept(scaled: Tensor, row: _Columns) -> Tensor:
    """Which tokens top-k, top-p and min-p leave to each row: bool (rows, vocabulary). One sort serves all."""
    ordered = scaled.sort(dim=1, descending=True).values
    last = ordered.shape[1] - 1
    place = torch.where(row.top_k > 0, row.top_k - 1, last).clamp(max=last)
    least = ordered.gather(1, place[:, None])
    most = ordered[:, :1]
    weights = _weights(ordered, most.squeeze(1)).masked_fill_(ordered < least, 0)
    total = weights.sum(dim=1)
    # a token stays while the tokens before it do not have the share yet; ceil: comparing integers is exact
    share = torch.where(row.top_p < 1, (total.double() * row.top_p).ceil().long(), total + 1)
    before = weights.cumsum(dim=1) - weights
    nucleus = (before < share[:, None]).sum(dim=1) - 1
    least = torch.maximum(least, ordered.gather(1, nucleus.clamp(0, last)[:, None]))
    return (scaled >= least) & (torch.exp(scaled - most) >= row.min_p[:, None])


def _weights(scores: Tensor, most: Tensor) -> Tensor:
    """exp(score - most) as integers, the largest 2^40: sums of integers do not depend on their order."""
    return (torch.exp(scores - most[:, None]) * WEIGHT).long()
