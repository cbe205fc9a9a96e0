"""Sampler: choose the next tokens of a step's rows and copy them to the host."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation import LogitsProcessor

from retrieval_attn.errors import InputDataError
from retrieval_attn.sampling.choose import SamplingState, choose
from retrieval_attn.sampling.sampling_params import SamplingParams

__all__ = ["History", "Penalties", "PenaltyProcessor", "SampledToken", "Sampler", "penalized", "require_known"]


Ids = NDArray[Any]


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


@dataclass(frozen=True, eq=False)
class History:
    """The tokens of one row, and the options that look at them.

    prompt: ids of the whole prompt. output: ids of the answer so far; the caller appends to it. ends: ids that end the
    answer, which are not chosen before it has `min_tokens`.
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


class Penalties:
    """Applies the options of rows to their scores. Rows may be given in another order, and to other places, each time.

    A row has a slot of the tensors from its first call to the first one that it is not part of.
    """

    def __init__(self) -> None:
        """Nothing is allocated before the first row that needs counts."""
        self._slots: dict[int, tuple[int, History]] = {}  # by the history's id
        self._counted: list[int] = []  # tokens of the answer in `_counts`, by slot
        self._seen = self._counts = self._bias = self._options = torch.empty(0)

    def __call__(self, logits: Tensor, histories: Sequence[History | None]) -> Tensor:
        """Return scores (rows, vocabulary) float32, `logits` itself if no row changes any.

        logits: float32 (rows, vocabulary), not changed. histories: of each row; None: its scores stay.
        """
        changing = [(row, one) for row, one in enumerate(histories) if one is not None and one.changes]
        if not changing:
            self._slots.clear()
            return logits
        scores = logits.clone()
        counting = [(row, one) for row, one in changing if one.draw.adjusts]
        if counting:
            slots = self._updated([one for _, one in counting], logits)
            rows = torch.tensor([row for row, _ in counting], device=logits.device)
            state = (part[slots] for part in (self._seen, self._counts, self._bias, self._options))
            scores[rows] = penalized(logits[rows], *state)
        masked = [(row, end) for row, one in changing if one.too_short for end in one.ends if end < logits.shape[1]]
        if masked:
            places = torch.tensor(masked, device=logits.device)
            scores[places[:, 0], places[:, 1]] = -math.inf
        return scores

    def _updated(self, histories: Sequence[History], logits: Tensor) -> Tensor:
        """Slots int64 (rows,) of these rows, with all their tokens counted; other rows lose theirs."""
        wanted = {id(one) for one in histories}
        self._slots = {key: held for key, held in self._slots.items() if key in wanted}
        joining = [one for one in histories if id(one) not in self._slots]
        if joining:
            self._reserve(len(histories), logits)
            free = sorted(set(range(len(self._counted))) - {slot for slot, _ in self._slots.values()})
            for slot, history in zip(free, joining, strict=False):
                self._write(slot, history)
        new: list[tuple[int, int]] = []
        for slot, history in self._slots.values():
            new += [(slot, token) for token in history.output[self._counted[slot] :] if token < logits.shape[1]]
            self._counted[slot] = len(history.output)
        if new:
            slots, tokens = torch.tensor(new, device=logits.device).T
            one = torch.ones((), dtype=self._counts.dtype, device=logits.device)
            self._counts.index_put_((slots, tokens), one, accumulate=True)
            self._seen[slots, tokens] = True
        return torch.tensor([self._slots[id(one)][0] for one in histories], device=logits.device)

    def _reserve(self, rows: int, logits: Tensor) -> None:
        """Make room for `rows` rows of scores like these; the rows that have slots keep them."""
        if rows <= len(self._counted) and self._seen.shape[1:] == logits.shape[1:]:
            return
        if self._seen.shape[1:] != logits.shape[1:]:
            self._slots.clear()
        size, held = 1 << (rows - 1).bit_length(), [slot for slot, _ in self._slots.values()]
        width = logits.shape[1]
        kinds = ((torch.bool, width), (torch.int32, width), (torch.float32, width), (torch.float32, 3))
        new = [torch.zeros(size, columns, dtype=kind, device=logits.device) for kind, columns in kinds]
        for old, part in zip((self._seen, self._counts, self._bias, self._options), new, strict=True):
            if held:
                part[held] = old[held]
        self._seen, self._counts, self._bias, self._options = new
        self._counted = (self._counted + [0] * size)[:size]

    def _write(self, slot: int, history: History) -> None:
        """Give a row this slot: its prompt is seen, nothing of its answer is counted yet."""
        draw, width = history.draw, self._seen.shape[1]
        seen = np.zeros(width, bool)
        prompt = np.asarray(history.prompt, np.int64)
        seen[prompt[prompt < width]] = True
        self._seen[slot] = torch.from_numpy(seen).to(self._seen.device)
        self._counts[slot] = 0
        self._bias[slot] = 0
        if biases := {token: value for token, value in draw.biases if token < width}:
            self._bias[slot, list(biases)] = torch.tensor(list(biases.values()), device=self._bias.device)
        options = draw.repetition_penalty, draw.presence_penalty, draw.frequency_penalty
        self._options[slot] = torch.tensor(options, device=self._options.device)
        self._slots[id(history)], self._counted[slot] = (slot, history), 0


class PenaltyProcessor(LogitsProcessor):
    """`Penalties` for transformers' kind of loop, whose rows stay where they are and get their tokens together."""

    def __init__(self, histories: Sequence[History], columns: int) -> None:
        """histories: of each row, with an empty output. columns: of the prompt, padding included."""
        self._histories, self._penalties, self._columns = list(histories), Penalties(), columns

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return scores (rows, vocabulary) after penalties, bias and minimum length."""
        for history, new in zip(self._histories, input_ids[:, self._columns :].tolist(), strict=True):
            history.output.extend(new)
        self._columns = input_ids.shape[1]
        return self._penalties(scores, self._histories)  # type: ignore[return-value]  # declared FloatTensor


class SampledToken(NamedTuple):
    """A row's next token. logprob, top: see `SamplingParams.logprobs`; top has pairs of an id and its
    log-probability.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Knows what each slot of its table was written with, so that only what changed is written."""

    def __init__(self, rows: int, device: torch.device) -> None:
        """rows: most rows of a step."""
        self._table = SamplingState(rows, device)
        self._drawn: list[SamplingParams | None] = [None] * rows
        self._penalties = Penalties()

    def __call__(
        self,
        draws: Sequence[SamplingParams],
        logits: Tensor,
        positions: Sequence[int],
        histories: Sequence[History | None] = (),
    ) -> list[SampledToken | None]:
        """For each row of logits (rows, vocabulary) float32 its choice; None: they hold NaN or infinity.

        positions: of the tokens that are chosen. histories: of each row, or none at all: no score is changed.
        """
        for slot, known in enumerate(self._drawn):
            draw = draws[slot] if slot < len(draws) else None
            if draw != known:
                self._table.write(slot, SamplingParams() if draw is None else draw)
                self._drawn[slot] = draw
        scores = self._penalties(logits, histories)
        found = choose(logits, self._table, torch.tensor(positions, device=logits.device), scores=scores)
        wrong, ids = found.failed.tolist(), found.ids.tolist()
        logprobs = [None] * len(ids) if found.logprobs is None else found.logprobs.tolist()
        tops: list[list[tuple[int, float]]] = [[] for _ in ids]
        if found.top_ids is not None and found.top_logprobs is not None:
            pairs = zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
            tops = [list(zip(top, of, strict=True)) for top, of in pairs]
        choices: list[SampledToken | None] = []
        for draw, failed, token, logprob, top in zip(draws, wrong, ids, logprobs, tops, strict=True):
            choice = SampledToken(token, logprob if draw.logprobs else None, tuple(top[: draw.logprobs]))
            choices.append(None if failed else choice)
        return choices
