"""Run decode steps: feed every running sequence its newest token and sample the next one."""

from __future__ import annotations

import functools
import math
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
from retrieval_attn.offload.threads import foreground
from retrieval_attn.runner.drafted_steps import steps_eagerly
from retrieval_attn.runner.drafts import DRAFTED_TOKENS, BlockCosts, DraftBlock, Drafts, LookupDrafter, compile_lookup
from retrieval_attn.runner.graph.sequence_slot import StepClock
from retrieval_attn.runner.graph_runner import GraphRunner, Stepped
from retrieval_attn.runner.rows import can_draft, tokens_before_spill
from retrieval_attn.sampling.sampler import SampledToken, Sampler
from retrieval_attn.sampling.sampling_params import SamplingParams

__all__ = ["Decoded", "Stepper"]

Fail = Callable[[str, BaseException, list[str]], None]
"""Ends a request with its error and adds its number to a list."""


class Decoded(NamedTuple):
    """Result of a decode step.

    Attributes:
        ended: requests that ended with a stop token or stop string.
        tokens: requests with one more token; one with several appears as often.
        seconds: duration of the step.
        replayed: whether the whole step was a graph replay, so that the next one likely is.
    """

    ended: Sequence[str] = ()
    tokens: Sequence[str] = ()
    seconds: float = 0.0
    replayed: bool = False


class Stepper:
    """Runs and samples decode steps. Belongs to the engine's thread."""

    def __init__(
        self, model: PreTrainedModel, limits: Limits, outputs: OutputQueue, fail: Fail, counts: Counts
    ) -> None:
        """Args:
        model: model of all requests.
        limits: limits of the engine; `rows` sizes the graphs and the sampler.
        outputs: output queue, flushed while graphs run.
        fail: ends a request with its error.
        counts: counts of the engine.
        """
        self._sampler = Sampler(limits.rows, model.device)
        self._clock = StepClock()
        self._runner = GraphRunner(model, limits.rows, self._clock)
        self._outputs, self._fail = outputs, fail
        self._counts = counts
        self._drafting = RowDrafts(model, self._runner)

    def decode(self, rows: Mapping[str, RunningRequest], failed: list[str], overlap: bool = False) -> Decoded:
        """Sample one token for each request, and one more for each draft that turns out right. Adds failed ones to
        `failed`. overlap: see `GraphRunner.advance`.
        """
        if not rows:
            return Decoded()
        began = time.perf_counter()
        fed = {number: row for number, row in rows.items() if row.logits is None}
        names, is_alone = list(fed), len(rows) == 1
        blocks, overlap = self._drafting.blocks(fed, overlap and len(fed) == len(rows), is_alone=is_alone)
        stepped = Stepped({}, (), None, {})
        if fed:
            stepped = self._step(fed, failed, overlap, blocks)
        verified = {names[place]: logits for place, logits in stepped.blocks.items()}
        drawn = {names[place]: choices for place, choices in stepped.drawn.items()}
        choices = {names[place]: choice for place, choice in stepped.choices.items()}
        logits = {number: row.logits for number, row in rows.items() if row.logits is not None}
        if stepped.logits is not None:
            logits |= {names[place]: stepped.logits[n : n + 1] for n, place in enumerate(stepped.apart)}
        logits = {number: one for number, one in logits.items() if number not in failed}
        choices |= self._choose({number: rows[number] for number in logits}, list(logits.values()))
        found: list[tuple[str, bool]] = []
        accepted = dict.fromkeys((*verified, *drawn), 0)
        blocks = {number: block for number, block in blocks.items() if number in accepted}
        while choices:
            new = self._take(rows, choices, failed)
            found += new
            right = [
                number
                for number, ended in new
                if not ended and self._drafting.is_next(blocks.get(number), accepted.get(number, 0), rows[number])
            ]
            accepted |= {number: accepted[number] + 1 for number in right}
            logits = {number: verified[number][accepted[number], None] for number in right if number in verified}
            choices = self._choose({number: rows[number] for number in logits}, list(logits.values()))
            choices |= {number: drawn[number][accepted[number]] for number in right if number in drawn}
        for number, count in accepted.items():
            self._drafting.end(rows[number], blocks[number], count, captured=number in drawn)
            self._counts.add_drafts(len(blocks[number].drafts), count)
        ended, tokens = ([number for number, one in found if one is ends] for ends in (True, False))
        seconds = time.perf_counter() - began
        self._counts.add_step(len(rows), sum(map(_spilled, rows.values())), seconds, *self._clock.take())
        return Decoded(ended, tokens, seconds, len(stepped.choices) == len(rows))

    def _take(
        self, rows: Mapping[str, RunningRequest], choices: Mapping[str, SampledToken | None], failed: list[str]
    ) -> list[tuple[str, bool]]:
        """Append chosen tokens. Returns requests without an error, and whether each ended with its token."""
        found: list[tuple[str, bool]] = []
        for number in rows:
            if number not in choices:
                continue
            choice, row = choices[number], rows[number]
            if choice is None:
                self._fail(number, row.choice_error, failed)
            elif row.chosen(*choice):
                damage = row.damage()
                if damage is not None:
                    self._fail(number, damage, failed)
                    continue
                row.finish("stop")
                found.append((number, True))
            else:
                found.append((number, False))
        return found

    @property
    def graph_shape(self) -> object:
        """Return the shape of the sequences that graphs serve now."""
        return self._runner.shape

    @torch.no_grad()
    def rehearse(
        self,
        cache: RetrievalCache,
        logits: Tensor,
        rows: int,
        draws: Sequence[SamplingParams],
        tokens: int = 0,
        *,
        drafts: int = 0,
    ) -> None:
        """Compile kernels and capture graphs of steps of `rows` sequences like `cache`.

        Args:
            cache: cache with a prefilled prompt; forks of it are stepped.
            logits: (1, vocabulary), of the last token of the cache.
            rows: sequences in the step.
            draws: sampling parameters; one step runs for each.
            tokens: longest sequence that graphs shall serve.
            drafts: tokens of a step of one sequence with drafts, which is captured, too; 0: none.

        Raises the errors of a step.
        """
        self._runner.expect(tokens)
        forks = [cache.fork() for _ in range(rows)]
        together = logits.float().expand(rows, -1).contiguous()
        try:
            for draw in draws:
                position = forks[0].get_seq_length()
                self._sampler([draw] * rows, together, [position] * rows)
                stepped = self._runner.advance(forks, [(0, position)] * rows, [draw] * rows)
                for error in stepped.errors.values():
                    raise error
            if drafts:
                compile_lookup()
                self._runner.capture_block(forks[0], draws, drafts)
        finally:
            self._runner.clear()
            self._clock.take()  # a rehearsal is not counted

    def close(self) -> None:
        """Give every sequence its own window and free the graphs."""
        self._runner.close()

    def _step(
        self, fed: Mapping[str, RunningRequest], failed: list[str], overlap: bool, blocks: Mapping[str, DraftBlock]
    ) -> Stepped:
        """Feed the newest token of each request, and its drafts."""
        rows = list(fed.values())
        matchers = [row.matcher for row in rows if row.matcher is not None]

        def launched() -> None:
            self._outputs.flush_async()
            for one in matchers:  # the masks of the next tokens are computed while the step runs
                _ = one.mask

        caches = [row.cache for row in rows if row.cache is not None]
        inputs = [(row.tokens[-1], row.position) for row in rows]
        try:
            # a graph chooses from the model's logits: rows whose scores are changed before choose from what it returns
            draws = [None if row.history else row.draw for row in rows]
            drafts = {place: blocks[number].drafts for place, number in enumerate(fed) if number in blocks}
            foreground.note()
            began = time.perf_counter()
            stepped = self._runner.advance(caches, inputs, draws, launched, overlap=overlap, drafts=drafts)
            self._drafting.end_step(stepped, len(fed) + sum(map(len, drafts.values())), time.perf_counter() - began)
        except (MemoryError, torch.OutOfMemoryError) as error:  # who comes later may find room
            for number in fed:
                self._fail(number, error, failed)
            return Stepped({}, (), None, {})
        names = list(fed)
        for place, cause in stepped.errors.items():
            self._fail(names[place], cause, failed)
        return stepped

    def _choose(self, rows: Mapping[str, RunningRequest], logits: Sequence[Tensor]) -> dict[str, SampledToken | None]:
        """Sample from logits (1, vocabulary) of each request."""
        if not rows:
            return {}
        draws, histories = [row.draw for row in rows.values()], [row.history for row in rows.values()]
        found = self._sampler(draws, torch.cat(list(logits)), [row.position + 1 for row in rows.values()], histories)
        return dict(zip(rows, found, strict=True))


class RowDrafts:
    """Drafts of the rows of a step: of all rows of an eager one, or of a row that is alone in a captured one.

    All rows of an eager step wait for the drafts of one: these count as often as there are rows, and rows without
    drafts wait for at most `SHARED_EXTRA` of a step. costs: of such steps by their tokens. Captured steps are timed as
    in `CapturedDrafts`. Their row samples from the model's logits: one with a grammar or penalties has no drafts.
    """

    SHARED_EXTRA = 0.25

    def __init__(self, model: PreTrainedModel, runner: GraphRunner) -> None:
        """model: of all rows. runner: of their steps."""
        self.costs, self._runner = BlockCosts(), runner
        self._steps_eagerly = functools.cache(functools.partial(steps_eagerly, model))
        self._timed: Drafts | None = None  # of the row that the last step had alone, a captured one
        self._overlapped = False

    def blocks(
        self, rows: Mapping[str, RunningRequest], overlap: bool, *, is_alone: bool
    ) -> tuple[dict[str, DraftBlock], bool]:
        """Return the drafts that are worth a longer step, by request, and whether the next step may be launched early.

        rows: of the step. overlap: see `GraphRunner.advance`. is_alone: whether no other request samples a token.
        """
        found: dict[str, DraftBlock] = {}
        last, self._timed = self._timed, None
        spare = DRAFTED_TOKENS - len(rows)
        for number, row in rows.items() if spare > 0 else ():
            cache = row.cache
            is_eager = cache is not None and self._steps_eagerly(cache.config.graph)
            if cache is None or not (is_eager or (is_alone and row.matcher is None and row.history is None)):
                continue
            if cache.config.drafts is not True and (is_eager or not self._runner.blocks.graphs):
                continue
            drafts, left = _drafts_of(row), row.request.max_tokens - len(row.tokens)
            if drafts is None:
                continue
            drafts.add(row.tokens[drafts.tokens :])
            if is_eager:
                most, others = min(spare, left - 1, tokens_before_spill(cache) - 1), DRAFTED_TOKENS - len(rows) - spare
                block = drafts.block(most, functools.partial(self._extra, len(rows), others))
            else:
                block, overlap = self._captured_block(cache, drafts, left, overlap, starts=drafts is not last)
            if block.drafts:
                found[number] = block
                spare -= len(block.drafts)
        return found, overlap

    def end_step(self, stepped: Stepped, tokens: int, seconds: float) -> None:
        """Note the time of a step of `tokens` tokens, of all rows, whose tokens were read."""
        if not stepped.choices:
            self.costs.note(tokens, seconds)
        if self._timed is None:
            return
        if stepped.choices:
            count = max(1, len(stepped.drawn.get(0, ())))
            self._timed.end_replay(count, self._runner.captures, self._runner.blocks.take_delay())
        else:
            self._timed.restart()

    def is_next(self, block: DraftBlock | None, accepted: int, row: RunningRequest) -> bool:
        """Return whether the newest token of a row is the draft behind those that are accepted."""
        return block is not None and block.drafts[accepted : accepted + 1] == row.tokens[-1:]

    def end(self, row: RunningRequest, block: DraftBlock, accepted: int, *, captured: bool) -> None:
        """Crop the drafts of a row that were not accepted; of a captured step, count those that were."""
        if row.drafts is not None:
            row.drafts.note(block, accepted)
        if row.cache is not None and captured:
            self._runner.commit_drafts(row.cache, accepted)
        elif row.cache is not None and len(block.drafts) > accepted and not row.cache.batch.broken:
            row.cache.crop(accepted - len(block.drafts))

    def _captured_block(
        self, cache: RetrievalCache, drafts: Drafts, left: int, overlap: bool, *, starts: bool
    ) -> tuple[DraftBlock, bool]:
        """Return the drafts of a captured step, and whether the next one may be launched early.

        Drafts wait for a step that was launched early, whose token is the next one. starts: the last step had others.
        """
        if starts:
            drafts.restart()
        elif not self._overlapped:
            drafts.restart(time.perf_counter())  # other work may have run since the last step
        self._timed, self._overlapped = drafts, overlap
        most = min(self._runner.block_room(cache), left) - 1
        block = drafts.timed_block(most, self._runner.blocks)
        if block.drafts and self._runner.is_ahead:
            drafts.wait()
            return DraftBlock([]), False
        return block, overlap

    def _extra(self, rows: int, others: int, drafts: int) -> float:
        """Return the cost of a row's drafts behind `others` of other rows: infinite if rows would wait too long."""
        extra = self.costs.extra(rows, drafts)
        too_long = rows > 1 and self.costs.extra(rows, drafts + others) > self.SHARED_EXTRA
        return math.inf if too_long else rows * extra


def _drafts_of(row: RunningRequest) -> Drafts | None:
    """Return the drafts of a row, made at the first call; None: its options or its cache allow none."""
    cache = row.cache
    if row.drafts is None and cache is not None and cache.config.drafts and can_draft(cache):
        row.drafts = Drafts(LookupDrafter(row.prompt))
    return row.drafts


def _spilled(row: RunningRequest) -> bool:
    """Return whether a full window's oldest block was evicted since the last call."""
    if row.cache is None:
        return False
    spilled, row.cache.batch.spilled = row.cache.batch.spilled, False
    return spilled
