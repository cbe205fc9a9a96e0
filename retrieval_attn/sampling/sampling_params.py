"""Choosing the next token of every row: temperature, top-k, top-p, min-p, seed and logprobs of a row's own.

What a row draws depends on its logits, its `SamplingParams` and its position alone: not on the other rows, on their
number, on the row's place among them, or on what was drawn before. Therefore the noise comes from a counter
(`philox.py`), and sums that decide something are sums of integers, whose order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrieval_attn.errors import ConfigError, ShapeError
from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.sampling.options import LEAST_TEMPERATURE, Bias, GivenBias, bias_pairs, check, is_int
from retrieval_attn.sampling.philox import WORD, row_noise

MAX_LOGPROBS = 20
WEIGHT = 2.0**40
"""The largest weight of a row as an integer; weights below it keep 40 bits. 2^22 of them fit into an int64."""


@dataclass(frozen=True)
class SamplingParams:
    """How one row chooses its tokens.

    temperature: 0, or less than 1e-5, takes the likeliest token (greedy), and so does top_p=0; top_k, top_p and min_p
    are without effect then. top_k: 0 keeps every token. top_p: [0, 1], 1 keeps every token. min_p: [0, 1], share of the
    likeliest token's probability below which a token is left out; 0 keeps every token. seed: 64 bits. logprobs: how
    many of the likeliest tokens are returned with their log-probabilities, besides the chosen one, 0 to 20; 0: none,
    the chosen one's neither.
    repetition_penalty: [0.01, 100], of the tokens of prompt and answer; presence_penalty, frequency_penalty: [-2, 2],
    of the answer's tokens, see `penalized`. logit_bias: a mapping from token ids to [-100, 100], added to their scores;
    stored as sorted pairs. These act first, then filters in the order temperature, top-k, top-p, min-p, as in
    transformers. Tokens with equal scores stay or go together. Raises ConfigError for a value of the wrong type or out
    of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: GivenBias = ()

    def __post_init__(self) -> None:
        check(self)
        if not is_int(self.top_k) or not 0 <= self.top_k < 2**31:
            raise ConfigError(f"top_k must be an integer >= 0 (0 keeps every token), got {self.top_k!r}.")
        if not is_int(self.seed) or not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed must be an integer of 64 bits, got {self.seed!r}.")
        if not is_int(self.logprobs) or not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {self.logprobs!r}.")
        object.__setattr__(self, "logit_bias", bias_pairs(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < LEAST_TEMPERATURE or self.top_p == 0

    @property
    def filters(self) -> bool:
        """Whether some tokens are never drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def biases(self) -> Bias:
        """`logit_bias` as pairs of token id and bias, sorted by id."""
        return self.logit_bias  # type: ignore[return-value]  # since it was checked

    @property
    def adjusts(self) -> bool:
        """Whether a penalty or a bias changes scores; see `penalties.py`."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or bool(self.logit_bias)


class DrawMode(NamedTuple):
    """What the host knows of all rows of a step; a graph that was captured for it serves rows that need no more.

    sample: a row draws; otherwise choosing costs an argmax. filters: a row that draws leaves tokens out. logprobs: the
    most that a row asks for; None: no row asks even for the chosen token's.
    """

    sample: bool = False
    filters: bool = False
    logprobs: int | None = None


class Chosen(NamedTuple):
    """What `choose` found, on the logits' device.

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
            raise ConfigError(f"a DrawTable needs at least 1 row, got {rows!r}.")
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
            raise IndexError(f"slot {slot} of a DrawTable of {len(self._draws)} rows")
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
        """Of the first `rows` rows, on the device: float64 (rows, 3) temperature, top-p, min-p; int64 (rows, 3) top-k
        and the low and high 32 bits of the seed.
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
        raise ShapeError(f"{len(logits)} rows of logits for a DrawTable of {len(draws)} rows; make a larger one.")


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
