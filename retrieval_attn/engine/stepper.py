"""Stepper: one token for each row of a step, fed and chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.engine.counts import Counts
from retrieval_attn.engine.detokenizer import OutputQueue
from retrieval_attn.engine.limits import Limits
from retrieval_attn.engine.running_request import RunningRequest
from retrieval_attn.errors import NotFiniteError
from retrieval_attn.runner.graph_runner import GraphRunner, Stepped
from retrieval_attn.runner.rows import StepClock
from retrieval_attn.sampling.sampler import SampledToken, Sampler
from retrieval_attn.sampling.sampling_params import SamplingParams

__all__ = ["Decoded", "Stepper"]

Fail = Callable[[str, BaseException, list[str]], None]
"""Ends a request with its error, and notes it in a list."""


class Decoded(NamedTuple):
    """What came of a step: rows that ended by themselves, rows that got a token, and the seconds.

    replayed: all of it was the replay of a graph, and the next step will likely be one.
    """

    ended: Sequence[str] = ()
    tokens: Sequence[str] = ()
    seconds: float = 0.0
    replayed: bool = False


class Stepper:
    """See the module. Belongs to the engine's thread."""

    def __init__(self, model: PreTrainedModel, limits: Limits, outbox: OutputQueue, fail: Fail, counts: Counts) -> None:
        """outbox: of the rows; it is sent while graphs run. counts: is told of the steps."""
        self._chooser = Sampler(limits.rows, model.device)
        self._clock = StepClock()
        self._runner = GraphRunner(model, limits.rows, self._clock)
        self._outbox, self._fail = outbox, fail
        self._counts = counts

    def decode(self, rows: Mapping[str, RunningRequest], failed: list[str], ahead: bool = False) -> Decoded:
        """One token for each of these rows. Who fails is added to failed. ahead: see `GraphRunner.advance`."""
        if not rows:
            return Decoded()
        began = time.perf_counter()
        fed = {number: row for number, row in rows.items() if row.logits is None}
        stepped = self._step(fed, failed, ahead and len(fed) == len(rows)) if fed else Stepped({}, (), None, {})
        names = list(fed)
        choices = {names[place]: choice for place, choice in stepped.choices.items()}
        logits = {number: row.logits for number, row in rows.items() if row.logits is not None}
        if stepped.logits is not None:
            logits |= {names[place]: stepped.logits[n : n + 1] for n, place in enumerate(stepped.apart)}
        logits = {number: one for number, one in logits.items() if number not in failed}
        choices |= self._choose({number: rows[number] for number in logits}, list(logits.values()))
        ended: list[str] = []
        tokens: list[str] = []
        for number in rows:
            if number not in choices:
                continue
            choice, row = choices[number], rows[number]
            if choice is None:
                self._fail(number, NotFiniteError("the model gave logits that are not finite"), failed)
            elif row.chosen(*choice):
                damage = row.damage()
                if damage is not None:
                    self._fail(number, damage, failed)
                    continue
                row.finish("stop")
                ended.append(number)
            else:
                tokens.append(number)
        seconds = time.perf_counter() - began
        self._counts.add_step(len(rows), sum(map(_spilled, rows.values())), seconds, *self._clock.take())
        return Decoded(ended, tokens, seconds, len(stepped.choices) == len(rows))

    @torch.no_grad()
    def rehearse(
        self, cache: RetrievalCache, logits: Tensor, rows: int, draws: Sequence[SamplingParams], tokens: int = 0
    ) -> None:
        """Make what steps of so many rows like `cache` need, which choose as `draws` does; nobody is in a graph.

        logits: (1, vocabulary), of the cache's last token. tokens: of the longest row that is expected. Raises what
        steps raise.
        """
        self._runner.expect(tokens)
        forks = [cache.fork() for _ in range(rows)]
        together = logits.float().expand(rows, -1).contiguous()
        try:
            for draw in draws:
                position = forks[0].get_seq_length()
                self._chooser([draw] * rows, together, [position] * rows)
                stepped = self._runner.advance(forks, [(0, position)] * rows, [draw] * rows)
                for error in stepped.errors.values():
                    raise error
        finally:
            self._runner.clear_slot()
            self._clock.take()  # a rehearsal is not counted

    def close(self) -> None:
        """Give all rows windows of their own, and let go of graphs."""
        self._runner.close()

    def _step(self, fed: Mapping[str, RunningRequest], failed: list[str], ahead: bool) -> Stepped:
        """Feed these rows their newest tokens."""
        rows = list(fed.values())
        caches = [row.cache for row in rows if row.cache is not None]
        inputs = [(row.tokens[-1], row.position) for row in rows]
        try:
            # a graph chooses from the model's logits: rows whose scores are changed before choose from what it returns
            draws = [None if row.history else row.request.draw for row in rows]
            stepped = self._runner.advance(caches, inputs, draws, self._outbox.send_beside, ahead=ahead)
        except (MemoryError, torch.OutOfMemoryError) as error:  # who comes later may find room
            for number in fed:
                self._fail(number, error, failed)
            return Stepped({}, (), None, {})
        names = list(fed)
        for place, cause in stepped.errors.items():
            self._fail(names[place], cause, failed)
        return stepped

    def _choose(self, rows: Mapping[str, RunningRequest], logits: Sequence[Tensor]) -> dict[str, SampledToken | None]:
        """What rows choose from logits (1, vocabulary) each."""
        if not rows:
            return {}
        draws, histories = [row.request.draw for row in rows.values()], [row.history for row in rows.values()]
        found = self._chooser(draws, torch.cat(list(logits)), [row.position + 1 for row in rows.values()], histories)
        return dict(zip(rows, found, strict=True))


def _spilled(row: RunningRequest) -> bool:
    """Whether the row's full windows moved tokens to the host since the last look."""
    if row.cache is None:
        return False
    spilled, row.cache.batch.spilled = row.cache.batch.spilled, False
    return spilled
