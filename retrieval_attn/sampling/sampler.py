"""Sampler: choose the next token of every row of a batch by its own `SamplingParams`, on a CPU or a GPU.

A row's token depends on its logits, its parameters, its position and its own tokens alone: not on other rows, on its
place among them, or on earlier draws. Therefore the noise comes from a counter (`philox`), and sums that decide
something are sums of integers, whose order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from retrieval_attn.errors import ConfigError, InputDataError, ShapeError
from retrieval_attn.gpu.decode.kernels import kernels_for
from retrieval_attn.sampling.grammar import TokenMatcher, mask_words
from retrieval_attn.sampling.sampling_params import SamplingParams, is_int

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
TOGETHER = 256
"""Blocks whose state stays in the first cache: 8 KiB."""
WEIGHT = 2.0**40
"""The largest weight of a row as an integer; weights below it keep 40 bits. 2^22 of them fit into an int64."""
CACHED_LOGITS = 1 << 17
SCORED_TOGETHER = 64
"""Tokens whose scores are computed at once: it takes 16 bytes for each logit."""
SIGN = 0x80000000
GREEDY = SamplingParams()

Ids = NDArray[Any]
Words = tuple[Tensor, Tensor, Tensor, Tensor]
Top = tuple[tuple[int, float], ...]
"""Pairs of a token id and its log-probability, likeliest first."""


class SampledToken(NamedTuple):
    """A row's next token. logprob, top: see `SamplingParams.logprobs`."""

    token: int
    logprob: float | None
    top: Top


class TokenScore(NamedTuple):
    """A given token's log-probability, and the likeliest tokens in its place."""

    logprob: float
    top: Top


class DrawMode(NamedTuple):
    """Options of all rows of a step; a graph captured for a mode also serves rows that need less.

    sample: some row draws; otherwise choosing costs an argmax. filters: a row that draws excludes tokens. logprobs:
    the most that a row requests; None: no row requests even the chosen token's. masked: a row has a grammar.
    """

    sample: bool = False
    filters: bool = False
    logprobs: int | None = None
    masked: bool = False


@dataclass(frozen=True)
class MaskedParams(SamplingParams):
    """Parameters of a row whose tokens a grammar constrains.

    matcher: state of the grammar; its mask must be that of the next token when the token is chosen.
    """

    matcher: TokenMatcher | None = None

    @classmethod
    def of(cls, params: SamplingParams, matcher: TokenMatcher) -> MaskedParams:
        """Return parameters with a grammar."""
        return cls(**{one.name: getattr(params, one.name) for one in fields(SamplingParams)}, matcher=matcher)


class Chosen(NamedTuple):
    """Result of `Sampler.choose`, on the logits' device.

    ids: int64 (rows,), 0 in failed rows. failed: bool (rows,): rows whose logits hold NaN, or whose largest is
    infinite. logprobs: float32 (rows,) of the chosen tokens, natural logarithms, of the logits before penalties,
    temperature and filters. top_ids int64, top_logprobs float32: (rows, n), likeliest first. The last three are None
    in a mode without logprobs, and NaN in failed rows.
    """

    ids: Tensor
    failed: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def tokens(self, params: Mapping[int, SamplingParams]) -> list[SampledToken | None]:
        """Copy the tokens of rows to the host, in the order of `params`, by row; None for a failed row."""
        ids, failed = self.ids.tolist(), self.failed.tolist()
        scores = [one.tolist() for one in self[2:] if one is not None]
        found: list[SampledToken | None] = []
        for row, one in params.items():
            logprob, top = None, Top()
            if one.logprobs:
                logprob, *tops = (part[row] for part in scores)
                top = tuple(zip(*(part[: one.logprobs] for part in tops), strict=True))
            found.append(None if failed[row] else SampledToken(ids[row], logprob, top))
        return found


class Sampler:
    """Choose the next tokens of up to `rows` rows.

    Parameters are in tensors whose addresses do not change: a captured graph of `choose` reads the ones that were
    assigned last. mode: the options that all rows together need.
    """

    def __init__(self, rows: int, device: torch.device | str = "cpu") -> None:
        """All rows are greedy at first. Raises ConfigError for fewer than one row."""
        if not is_int(rows) or rows < 1:
            raise ConfigError(f"a Sampler needs at least 1 row, got {rows!r}.")
        self.mode = DrawMode()
        self._params, self._penalties = [GREEDY] * rows, Penalties()
        device = torch.device(device)
        pinned = device.type == "cuda"
        self._numbers_cpu = torch.tensor([[0.0, 1.0, 0.0]] * rows, dtype=torch.float64, pin_memory=pinned)
        self._words_cpu = torch.zeros(rows, 3, dtype=torch.int64, pin_memory=pinned)
        self._numbers_view, self._words_view = self._numbers_cpu.numpy(), self._words_cpu.numpy()
        self._numbers = self._numbers_cpu.to(device, copy=True)
        self._words = self._words_cpu.to(device, copy=True)
        self._masks: _Masks | None = None

    def __call__(
        self,
        params: Sequence[SamplingParams],
        logits: Tensor,
        positions: Sequence[int],
        histories: Sequence[History | None] = (),
    ) -> list[SampledToken | None]:
        """Choose a token for each row of logits and copy it to the host: `assign`, `prepare_masks`,
        `upload_masks`, `choose` and `Chosen.tokens`.
        """
        rows = dict(enumerate(params))
        self.assign(rows)
        self.prepare_masks(logits)
        self.upload_masks()
        return self.choose(logits, torch.tensor(positions, device=logits.device), histories).tokens(rows)

    def assign(self, params: Mapping[int, SamplingParams]) -> None:
        """Set the parameters of rows from the next step on; other rows become greedy, which costs least.

        On a GPU copies are queued on the current stream. A row may be assigned again once its copy has run. Raises
        IndexError for a row outside [0, rows).
        """
        if params and not 0 <= min(params) <= max(params) < len(self._params):
            raise IndexError(f"rows {sorted(params)} of a Sampler of {len(self._params)} rows")
        changed = [
            (row, given)
            for row, known in enumerate(self._params)
            if (given := params.get(row, GREEDY)) is not known and given != known
        ]
        for row, given in changed:
            self._params[row], seed = given, given.seed % 2**64
            self._numbers_view[row] = 0.0 if given.greedy else given.temperature, given.top_p, given.min_p
            self._words_view[row] = given.top_k, seed & WORD, seed >> 32
            self._numbers[row].copy_(self._numbers_cpu[row], non_blocking=True)
            self._words[row].copy_(self._words_cpu[row], non_blocking=True)
        if changed:
            sample = any(not one.greedy for one in self._params)
            logprobs = max(one.logprobs for one in self._params) or None
            masked = any(isinstance(one, MaskedParams) for one in self._params)
            self.mode = DrawMode(sample, any(one.filters for one in self._params), logprobs, masked)

    def prepare_masks(self, logits: Tensor) -> None:
        """Allocate the masks of rows with a grammar, if there is one. A graph must be captured after this.

        logits: (rows, vocabulary) on the sampler's device, of which only the width counts: the same one in all calls.
        """
        if self.mode.masked and self._masks is None:
            self._masks = _Masks(len(self._params), logits)

    def upload_masks(self) -> None:
        """Copy the masks of rows with a grammar to the device, for the next `choose`; does nothing without such rows.

        `prepare_masks` must have been called. On a GPU copies are queued on the current stream. Call it again only
        after they have run.
        """
        if self.mode.masked and self._masks is not None:
            self._masks.upload(self._params)

    def choose(
        self, logits: Tensor, positions: Tensor, histories: Sequence[History | None] = (), mode: DrawMode | None = None
    ) -> Chosen:
        """Choose the next token of every row.

        logits: float32 (rows, vocabulary), numbers of a row contiguous; not changed. positions: int64 (rows,) >= 0 of
        the chosen tokens. histories: tokens of each row for penalties; (): no row's scores change. mode: the mode of a
        captured graph, which must include `self.mode`; None: `self.mode`. With a grammar `upload_masks` must have been
        called. Without histories no row waits for the host
        and no shape depends on data, so a CUDA graph can record it. A failed row changes nothing in others. Raises
        ShapeError for other shapes and dtypes, and for more rows than the sampler has.
        """
        self._require_shapes(logits, positions)
        mode = self.mode if mode is None else mode
        scores = self._penalties(logits, histories)
        if mode.masked and self._masks is not None:
            scores = self._masks.applied(scores)
        size = len(logits) if mode == DrawMode() else _rows_together(logits)
        raw = None if scores is logits else logits
        if size >= len(logits):
            return self._chosen(scores, raw, positions, slice(len(logits)), mode)
        chosen: list[Chosen] = []
        for start in range(0, len(logits), size):
            part = slice(start, min(start + size, len(logits)))
            own = None if raw is None else raw[part]
            chosen.append(self._chosen(scores[part], own, positions[part], part, mode))
        return Chosen(*(torch.cat(part) for part in zip(*chosen, strict=True) if part[0] is not None))

    def _chosen(self, scores: Tensor, raw: Tensor | None, positions: Tensor, rows: slice, mode: DrawMode) -> Chosen:
        """Choose from scores. raw: logits before penalties; None: the scores. rows: of the sampler."""
        if mode.sample:
            most = scores.amax(dim=1)
            ids = self._drawn(scores, most, positions, rows, mode.filters)
        else:
            most, ids = scores.max(dim=1)
        failed = ~torch.isfinite(most)
        ids = ids.masked_fill(failed, 0)
        if mode.logprobs is None:
            return Chosen(ids, failed)
        logits, most = (scores, most) if raw is None else (raw, raw.amax(dim=1))
        return Chosen(ids, failed, *_logprobs(logits, most, ids, mode.logprobs))

    def _drawn(self, scores: Tensor, most: Tensor, positions: Tensor, rows: slice, filters: bool) -> Tensor:
        """Draw from the softmax of each row by the Gumbel-max rule; greedy rows: the likeliest token."""
        numbers, words = self._numbers[rows], self._words[rows]
        if (kernels := _kernels(scores)) is not None:
            ids = torch.zeros_like(positions)
            kernels.choose(scores, most, (numbers, words), positions, ids)
            return ids
        greedy = numbers[:, :1] == 0
        scaled = scores / torch.where(greedy, 1.0, numbers[:, :1]).float()
        noise = row_noise((words[:, 1], words[:, 2]), positions, scores.shape[1])
        drawn = scaled + noise.masked_fill_(greedy, 0.0)
        if filters:
            drawn = drawn.masked_fill_(~_kept(scaled, numbers[:, 1], numbers[:, 2].float(), words[:, 0]), -math.inf)
        return drawn.argmax(dim=1)

    def _require_shapes(self, logits: Tensor, positions: Tensor) -> None:
        fits = logits.ndim == 2 and logits.dtype == torch.float32 and logits.shape[1] > 0 and logits.stride(1) == 1
        if not fits:
            raise ShapeError(
                "logits must be float32 (rows, vocabulary) with the numbers of a row contiguous, got "
                f"{logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}; call .float().contiguous()."
            )
        if positions.shape != logits.shape[:1] or positions.dtype != torch.int64:
            raise ShapeError(
                f"positions must be int64 ({len(logits)},), one for each row of the logits, got {positions.dtype} "
                f"{tuple(positions.shape)}."
            )
        if len(logits) > len(self._params):
            raise ShapeError(f"{len(logits)} rows of logits for a Sampler of {len(self._params)}; make a larger one.")


class _Masks:
    """Masks of all rows of a sampler, in memory whose addresses do not change."""

    def __init__(self, rows: int, logits: Tensor) -> None:
        width, device = logits.shape[1], logits.device
        self._host = torch.full((rows, mask_words(width)), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._view = self._host.numpy()
        self._shifts = torch.arange(32, dtype=torch.int32, device=device)
        self._masked: set[int] = set()
        self._words: Tensor | None = None if device.type == "cpu" else self._host.to(device, copy=True)
        # on a CPU in place of the words: 0 and minus infinity
        self._added = torch.zeros(rows if self._words is None else 0, width)
        self._added_view = self._added.numpy()
        self._filled = self._view.copy()  # words that `_added` shows

    def upload(self, params: Sequence[SamplingParams]) -> None:
        """Write the masks of rows with a grammar; other rows get all tokens."""
        matchers = {
            row: one.matcher
            for row, one in enumerate(params)
            if isinstance(one, MaskedParams) and one.matcher is not None
        }
        changed = sorted(self._masked | matchers.keys())
        for row in changed:
            matcher, view = matchers.get(row), self._view[row]
            if matcher is None:
                view[:] = -1
            elif len(mask := matcher.mask) == len(view):
                view[:] = mask
            else:
                view[:] = 0
                count = min(len(mask), len(view))
                view[:count] = mask[:count]
        self._masked = set(matchers)
        if not changed:
            return
        rows = slice(changed[0], changed[-1] + 1)
        if self._words is None:
            _fill_added(self._view[rows], self._filled[rows], self._added_view[rows])
        else:
            self._words[rows].copy_(self._host[rows], non_blocking=True)

    def applied(self, scores: Tensor) -> Tensor:
        """Return scores (rows, vocabulary) float32, minus infinity for excluded tokens. NaN and infinity stay visible:
        minus infinity is added.
        """
        if self._words is None:
            return scores + self._added[: len(scores)]
        words = self._words[: len(scores), :, None]
        excluded = ((words >> self._shifts) & 1).flatten(1)[:, : scores.shape[1]] == 0
        return scores + torch.zeros_like(scores).masked_fill_(excluded, -math.inf)


@njit(nogil=True, cache=True)
def _fill_added(words: Ids, filled: Ids, out: Ids) -> None:
    """Write 0 for tokens whose bit is set, else minus infinity, in words that differ from `filled`, and store these.

    words, filled: (rows, words). out: (rows, vocabulary). Masks of successive tokens differ in few words.
    """
    for row in range(len(out)):
        for place in range(words.shape[1]):
            word = words[row, place]
            if word == filled[row, place]:
                continue
            filled[row, place] = word
            for token in range(32 * place, min(32 * place + 32, out.shape[1])):
                is_set = (word >> (token & 31)) & 1
                out[row, token] = np.float32(0) if is_set else -np.float32(np.inf)


def _rows_together(logits: Tensor) -> int:
    """Return how many rows to process at once: all, on a CPU as many as keep intermediate results in its caches."""
    return len(logits) if logits.device.type != "cpu" else max(1, CACHED_LOGITS // logits.shape[1])


def token_scores(logits: Tensor, ids: Tensor, count: int) -> list[TokenScore]:
    """Score given tokens as `Sampler.choose` scores chosen ones.

    logits: (n, vocabulary), that predict ids int64 (n,). count: number of likeliest tokens returned with each.
    """
    found: list[TokenScore] = []
    for start in range(0, len(ids), SCORED_TOGETHER):
        part = slice(start, start + SCORED_TOGETHER)
        scores = logits[part].float()
        scored = _logprobs(scores, scores.amax(dim=1), ids[part], count)
        logprobs, top_ids, top = (one.tolist() for one in scored)
        pairs = (tuple(zip(tokens, values, strict=True)) for tokens, values in zip(top_ids, top, strict=True))
        found += map(TokenScore, logprobs, pairs)
    return found


def _logprobs(logits: Tensor, most: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    lse = most + (_weights(logits, most).sum(dim=1).double() / WEIGHT).log().float()
    lse = lse.masked_fill(~torch.isfinite(most), math.nan)
    chosen = logits.gather(1, ids[:, None]).squeeze(1) - lse
    top, top_ids = logits.topk(min(count, logits.shape[1]), dim=1)
    return chosen, top_ids, top - lse[:, None]


def _kernels(logits: Tensor) -> Any:
    """Return the Triton kernels if they run on these logits, else None: operations of torch run, slower."""
    return kernels_for(logits, "draw_triton")


def _weights(scores: Tensor, most: Tensor) -> Tensor:
    """Return exp(score - most) as integers, the largest 2^40: sums of integers do not depend on their order."""
    return (torch.exp(scores - most[:, None]) * WEIGHT).long()


def _kept(scaled: Tensor, top_p: Tensor, min_p: Tensor, top_k: Tensor) -> Tensor:
    """Return the tokens that top-k, top-p and min-p leave to each row: bool (rows, vocabulary)."""
    most = scaled.amax(dim=1)
    floors = _compiled_floors if scaled.device.type == "cpu" else _sorted_floors
    least = floors(scaled, _weights(scaled, most), top_k, top_p)
    return (scaled >= least[:, None]) & (torch.exp(scaled - most[:, None]) >= min_p[:, None])


def _sorted_floors(scaled: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the least score that top-k and top-p leave to each row, float32 (rows,). One sort serves both."""
    ordered, order = scaled.sort(dim=1, descending=True)
    last = ordered.shape[1] - 1
    least = ordered.gather(1, torch.where(top_k > 0, top_k - 1, last).clamp(max=last)[:, None])
    weights = weights.gather(1, order).masked_fill_(ordered < least, 0)
    total = weights.sum(dim=1)
    # a token stays while the tokens before it do not have the share yet; ceil: comparing integers is exact
    share = torch.where(top_p < 1, (total.double() * top_p).ceil().long(), total + 1)
    before = weights.cumsum(dim=1) - weights
    nucleus = (before < share[:, None]).sum(dim=1) - 1
    return torch.maximum(least, ordered.gather(1, nucleus.clamp(0, last)[:, None])).squeeze(1)


@torch.library.custom_op(
    "retrieval_attn::row_floors", mutates_args=(), device_types="cpu",
    schema="(Tensor scaled, Tensor weights, Tensor top_k, Tensor top_p) -> Tensor",
)  # fmt: skip
def _compiled_floors(scaled: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    floors = torch.empty(len(scaled))
    _fill_floors(scaled.numpy(), weights.numpy(), top_k.numpy(), top_p.numpy(), floors.numpy())
    return floors


@njit(nogil=True, cache=True)
def _fill_floors(scaled: Ids, weights: Ids, top_k: Ids, top_p: Ids, floors: Ids) -> None:
    """Write the result of `_sorted_floors` without a sort; any number for rows with NaN."""
    for row in range(len(scaled)):
        floors[row] = -np.inf
        if 0 < top_k[row] < scaled.shape[1]:
            floors[row] = _floor(scaled[row], weights[row], False, top_k[row])
        if top_p[row] < 1:
            total = np.int64(0)
            for i in range(scaled.shape[1]):
                total += weights[row, i] if scaled[row, i] >= floors[row] else 0
            share = max(np.int64(np.ceil(np.float64(total) * top_p[row])), np.int64(1))
            floors[row] = _floor(scaled[row], weights[row], True, share)


@njit(nogil=True, cache=True)
def _floor(scaled: Ids, weights: Ids, weighted: bool, bound: Any) -> Any:
    """Return the largest score such that scores from it on weigh at least `bound`; each weighs 1 unless `weighted`.

    A radix search: 11, 11 and 10 bits of a key that orders scores are decided by sums of the weights of each digit.
    """
    bits = scaled.view(np.uint32)
    found, decided, above = np.int64(0), np.int64(0), np.int64(0)
    sums = np.empty(2048, np.int64)
    for shift, digits in ((21, 2047), (10, 2047), (0, 1023)):
        sums[:] = 0
        for i in range(len(bits)):
            bit = np.int64(bits[i])
            key = WORD - bit if bit & SIGN else bit | SIGN
            if key & decided == found:
                sums[key >> shift & digits] += weights[i] if weighted else 1
        digit = digits
        while digit > 0 and above + sums[digit] < bound:
            above += sums[digit]
            digit -= 1
        found, decided = found | digit << shift, decided | digits << shift
    score = np.empty(1, np.uint32)
    score[0] = found ^ SIGN if found & SIGN else WORD - found
    return score.view(np.float32)[0]


# -- noise ------------------------------------------------------------------------------------------


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four random words for each counter, by Philox4x32-10 (Salmon et al., SC 2011).

    counter, key: int64 tensors of numbers of 32 bits, [0, 2^32), of shapes that broadcast. Returns the same kind of
    numbers. Recordable in a CUDA graph.
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
    """Return float32 numbers in (0, 1) of words [0, 2^32) in int64: (word + 1/2) / 2^32, rounded.

    Small ones keep all 32 bits; the largest is the last float32 below 1.
    """
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbels(words: Tensor) -> Tensor:
    """Return float32 standard Gumbel noise, -log(-log(1 - u)) of `uniforms`: [-2.81, 22.88].

    Large noise, which decides a draw, comes from small u, for which float32 is finest.
    """
    return -torch.log(-torch.log1p(-uniforms(words)))


def row_noise(key: tuple[Tensor, Tensor], positions: Tensor, vocabulary: int) -> Tensor:
    """Return Gumbel noise (rows, vocabulary) float32 of tokens drawn at `positions`, int64 (rows,), >= 0.

    key: two int64 tensors (rows,) with the low and high 32 bits of each row's seed. Token v takes word v % 4 of the
    counter (v // 4, position low, position high, 0): its noise does not depend on the size of the vocabulary.
    """
    if positions.device.type == "cpu":
        return gumbels(_compiled_words(*key, positions, vocabulary))
    return gumbels(_row_words(key, positions, vocabulary))


# An operation of torch, so that a recorder of operations, which runs them again with other numbers, records it too.
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
    """Return high and low 32 bits of a product of 64 bits, too many for an int64: by halves of the factor."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & WORD


@njit(nogil=True, cache=True)
def _fill_words(key_low: Ids, key_high: Ids, positions: Ids, out: Ids) -> None:
    """Write the words of `_row_words` to out (rows, blocks, 4) int64.

    A round runs for `TOGETHER` blocks before the next one, a loop that the compiler turns into vector instructions;
    the masks of factors show it that their upper halves are 0.
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


# -- penalties --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class History:
    """Tokens of one row, and the options that depend on them.

    prompt: ids of the whole prompt. output: ids of the answer so far; the caller appends to it. ends: ids that end the
    answer, excluded before it has `min_tokens`.
    """

    draw: SamplingParams
    prompt: Sequence[int] | Ids
    output: list[int] = field(default_factory=list)
    ends: Collection[int] = ()
    min_tokens: int = 0

    @classmethod
    def of(
        cls,
        draw: SamplingParams,
        prompt: Sequence[int] | Ids,
        output: list[int],
        ends: Collection[int],
        min_tokens: int,
    ) -> History | None:
        """Return None if no option of the row ever changes its scores."""
        return cls(draw, prompt, output, ends, min_tokens) if draw.adjusts or (min_tokens and ends) else None

    @property
    def too_short(self) -> bool:
        """Whether the answer must not end with its next token."""
        return len(self.output) < self.min_tokens and bool(self.ends)

    @property
    def changes(self) -> bool:
        """Whether the scores of the next token are changed."""
        return self.draw.adjusts or self.too_short


def require_known(draw: SamplingParams, vocabulary: int) -> None:
    """Raise InputDataError if the logit bias names a token that the model does not have."""
    unknown = [token for token, _ in draw.biases if token >= vocabulary]
    if unknown:
        raise InputDataError(
            f"logit_bias names the token {unknown[-1]}; token ids of this model are in [0, {vocabulary})."
        )


def penalized(scores: Tensor, seen: Tensor, counts: Tensor, bias: Tensor, options: Tensor) -> Tensor:
    """Return scores (rows, vocabulary) float32 after penalties and bias.

    seen: bool, tokens of prompt and answer. counts: int32, how often the answer has each token. bias: float32. All
    (rows, vocabulary). options: float32 (rows, 3), repetition, presence and frequency penalty of each row. The
    repetition penalty divides positive scores of seen tokens and multiplies negative ones; the others are subtracted
    from scores of the answer's tokens, presence once, frequency as often as the token occurs. A row with the options
    1, 0, 0 and no bias keeps its scores.
    """
    repetition, presence, frequency = options[:, :, None].unbind(1)
    scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    return scores - frequency * counts - presence * (counts > 0) + bias


class Penalties:
    """Apply the options of rows to their scores; rows may come, leave and change places from step to step."""

    def __init__(self) -> None:
        """Nothing is allocated before the first row that needs counts."""
        self._histories: list[History] = []  # of the rows with a state
        self._counted: list[int] = []  # tokens of their answers in the counts
        self._state: list[Tensor] = []  # their seen, counts, bias and options of `penalized`

    def __call__(self, logits: Tensor, histories: Sequence[History | None]) -> Tensor:
        """Return scores (rows, vocabulary) float32, `logits` itself if no row changes any.

        logits: float32 (rows, vocabulary), not changed. histories: of each row; None: its scores stay.
        """
        changing = [(row, one) for row, one in enumerate(histories) if one is not None and one.changes]
        counting = [(row, one) for row, one in changing if one.draw.adjusts]
        self._update([one for _, one in counting], logits)
        if not changing:
            return logits
        scores = logits.clone()
        size = _rows_together(logits)
        for start in range(0, len(counting), size):
            part = slice(start, start + size)
            rows = torch.tensor([row for row, _ in counting[part]], device=logits.device)
            scores[rows] = penalized(logits[rows], *(state[part] for state in self._state))
        masked = [(row, end) for row, one in changing if one.too_short for end in one.ends if end < logits.shape[1]]
        if masked:
            places = torch.tensor(masked, device=logits.device)
            scores[places[:, 0], places[:, 1]] = -math.inf
        return scores

    def _update(self, histories: list[History], logits: Tensor) -> None:
        """Make the state that of these rows, with all their tokens counted."""
        if [*map(id, histories)] != [*map(id, self._histories)]:
            known = {id(one): row for row, one in enumerate(self._histories)}
            held = [known.get(id(one)) for one in histories]
            self._counted = [0 if row is None else self._counted[row] for row in held]
            states = [
                _state(one, logits) if row is None else [part[row] for part in self._state]
                for one, row in zip(histories, held, strict=True)
            ]
            self._state = [torch.stack(parts) for parts in zip(*states, strict=True)]
            self._histories = histories
        new: list[tuple[int, int]] = []
        for row, (history, counted) in enumerate(zip(histories, self._counted, strict=True)):
            new += [(row, token) for token in history.output[counted:] if token < logits.shape[1]]
        self._counted = [len(history.output) for history in histories]
        if new:
            seen, counts, *_ = self._state
            places = tuple(torch.tensor(new, device=logits.device).T)
            counts.index_put_(places, counts.new_ones(()), accumulate=True)
            seen[places] = True


def _state(history: History, logits: Tensor) -> list[Tensor]:
    """Return a row of `Penalties` with the prompt seen and no token of the answer counted, on the logits' device."""
    draw, width = history.draw, logits.shape[1]
    prompt, seen, bias = np.asarray(history.prompt, np.int64), np.zeros(width, bool), np.zeros(width, np.float32)
    seen[prompt[prompt < width]] = True
    for token, value in draw.biases:
        bias[token : token + 1] = value
    options = np.array([draw.repetition_penalty, draw.presence_penalty, draw.frequency_penalty], np.float32)
    return [torch.from_numpy(part).to(logits.device) for part in (seen, np.zeros(width, np.int32), bias, options)]
