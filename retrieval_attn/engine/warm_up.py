"""WarmUp: what the first requests of an engine would wait for, made before they come: graphs, kernels.

A short text of random ids is read and forked; its forks step in every number of rows that has graphs of its own. Then
they go, and nothing is left of them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache, seal
from retrieval_attn.compile.progress import ProgressBar
from retrieval_attn.config import Config
from retrieval_attn.engine.chunked_prefill import read_batch
from retrieval_attn.engine.paged_prefix import PageAllocation, PagedKVPool
from retrieval_attn.engine.stepper import Stepper
from retrieval_attn.errors import ConfigError, EngineFullError
from retrieval_attn.gpu.memory import lower_cap_for_graphs
from retrieval_attn.index.auto import SKETCH_FROM
from retrieval_attn.memory.device_room import layout_of
from retrieval_attn.runner.drafted_steps import steps_eagerly
from retrieval_attn.runner.drafts import BLOCKS
from retrieval_attn.runner.graph.host_row_gather import Reads
from retrieval_attn.runner.rows import can_draft
from retrieval_attn.sampling.sampling_params import SamplingParams

__all__ = ["DRAWS", "WarmUp", "WarmUpProgress", "WarmUps"]

log = logging.getLogger(__name__)

DRAWS = (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9, top_k=40))
"""One for each way of choosing that has a graph of its own, but for log-probabilities."""
PAGED_TOKENS = 64
READS = Reads.DEVICE, None, Reads.HOST, Reads.BOTH
"""In order of need: rows of long texts, rows that retrieve nothing, rows of a few hundred keys, long answers."""
DRAFTED = Reads.DEVICE, Reads.HOST
"""Readers of rows that may have drafts by default. The graphs of both take 7.6 s to capture, and 20 MB."""
SHORT_TOKENS = 16
"""Tokens, after its pages, of a text from which nothing is retrieved."""
BAR_DELAY_SECONDS = 2.0
IDLE_SECONDS = 0.5
"""Time without requests after which a background warm-up continues: a client's next request does not wait for it."""


class WarmUpProgress(NamedTuple):
    """Graphs of all warm-ups of an engine: captured ones, and their total."""

    done: int
    total: int

    def __str__(self) -> str:
        return f"{self.done} of {self.total} graphs"


class WarmUp(NamedTuple):
    """See the module. rows: of a step, at most. tokens: of the longest row that is expected; None: what comes grows.

    draws: how rows will choose; log-probabilities are told by graphs of their own, for 5 and for 20. progress: with a
    bar, if it takes longer than two seconds.
    """

    rows: int
    tokens: int | None
    draws: Sequence[SamplingParams]
    progress: bool

    @classmethod
    def of(
        cls, rows: int | None, tokens: int | None, draws: Sequence[SamplingParams], progress: bool, *, most: int
    ) -> Self:
        """most: rows of the engine's steps, as many as None stands for. Raises ConfigError."""
        if rows is not None and not 1 <= rows <= most:
            raise ConfigError(f"rows={rows!r} must lie in 1 .. {most}, the rows of the engine's limits")
        if tokens is not None and tokens < 1:
            raise ConfigError(f"tokens={tokens!r} must be at least 1, or None")
        if not draws:
            raise ConfigError("draws must name at least one way to choose, such as SamplingParams()")
        return cls(most if rows is None else rows, tokens, tuple(draws), progress)

    def pieces(self, loop: AnswerLoop, config: Config, exact: PagedKVPool | None) -> tuple[list[Piece], list[Piece]]:
        """Return the pieces that the first request needs, which have one row, and all other pieces, in order of need.

        exact: pages of paged prefixes; None: off.
        """
        sizes = _sizes(self.rows)
        # the reader of retrieved rows, the host, the device or both, is recorded in a step
        reads = READS if self._cache(loop, config).index.spec.host_reads.rows else (Reads.HOST, None)
        pools = (None,) if exact is None else (None, exact)
        ways = [(read, pool) for read in reads for pool in pools]
        alone = [Piece(read, pool, 1) for read, pool in ways]
        first = [piece for piece in alone if piece.read != Reads.BOTH]
        batches = [Piece(*way, size) for way, size in itertools.product(ways, sizes) if size > 1]
        drafting = DRAFTED if config.drafts == "auto" else READS
        drafted = [
            piece._replace(drafts=count)
            for piece, count in itertools.product(alone, BLOCKS if _drafts(loop, config) else ())
            if piece.read in drafting
        ]
        return first, [*alone[len(first) :], *batches, *drafted]

    def _cache(self, loop: AnswerLoop, config: Config) -> RetrievalCache:
        """An empty one, whose index is that of the longest row that is expected."""
        cache = RetrievalCache(loop.model, config)
        cache.in_batch = True
        tokens = self.tokens or 0
        if layout_of(loop.model) is not None:  # all texts have the same index: no idle ones must go for a long one
            tokens = min(tokens, SKETCH_FROM)
        cache.index.decide(max(config.sink + 2 * config.window + config.spill, tokens))
        return cache

    def read(
        self, loop: AnswerLoop, config: Config, exact: PagedKVPool | None, read: Reads | None
    ) -> tuple[RetrievalCache, Tensor]:
        """A text as short as makes rows retrieve, some of it in pages, and the logits (1, vocabulary) after it.

        read: reader of the retrieved rows; None: a text of which nothing is retrieved. The host reads all retrieved
        rows of few keys, and those without codes.
        """
        cache, late = self._cache(loop, config), read == Reads.BOTH
        tokens = SHORT_TOKENS if read is None else _tokens(cache, coded=read != Reads.HOST)
        count = PAGED_TOKENS + tokens + PAGED_TOKENS * late
        vocabulary = int(loop.model.config.get_text_config(decoder=True).vocab_size)
        ids = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0)).tolist()
        ends = [0, PAGED_TOKENS, PAGED_TOKENS + tokens, count]
        parts = [ids[start:stop] for start, stop in pairwise(ends) if start < stop][exact is None :]
        if exact is not None:
            pages = PageAllocation(exact, parts)
            if pages.take(0, None):
                pages.open(0, cache)
        for part in parts:
            batch = read_batch(loop, cache, part)
            state = loop.read_whole(cache, batch)
            cache.batch.note_ids(batch.ids)
            if cache.batch.paged_prefix is not None:
                cache.batch.paged_prefix = cache.batch.paged_prefix.closed()
            seal(cache, coded=not late)
            cache = cache.fork()  # as a row goes on
        return cache, state.logits


def _drafts(loop: AnswerLoop, config: Config) -> bool:
    """Return whether steps with drafts are captured. Rows on a CPU have none unless they are asked for."""
    return config.drafts is True or (config.drafts == "auto" and not steps_eagerly(loop.model, config.graph))


def _tokens(cache: RetrievalCache, *, coded: bool) -> int:
    """Return the tokens of a text whose rows retrieve. coded: by codes, as those of longer ones do."""
    config, spec = cache.config, cache.index.spec
    wanted = config.retrieve_count(1)
    keys = spec.min_coded_keys(wanted) if coded and wanted is not None else 0
    return config.sink + config.window + max(config.window + config.spill, keys)


class Piece(NamedTuple):
    """Graphs of one batch size for one kind of sequences.

    Attributes:
        read: reader of retrieved rows; None: nothing is retrieved.
        exact: pages that hold the start of the text; None: it has none.
        rows: sequences in the step.
        drafts: tokens of a step with drafts, which is captured if the sequence may have some; 0: of one without.
    """

    read: Reads | None
    exact: PagedKVPool | None
    rows: int
    drafts: int = 0

    def __str__(self) -> str:
        """Return its name in logs."""
        read = "none" if self.read is None else self.read.name.lower()
        drafts = f", {self.drafts} tokens" if self.drafts else ""
        return f"{read}{'' if self.exact is None else ', pages'} x {self.rows}{drafts}"


class _Run:
    """A warm-up and its remaining pieces."""

    def __init__(self, warm_up: WarmUp, needed: Sequence[Piece], later: Sequence[Piece]) -> None:
        """needed: pieces until `ready` is done. later: pieces that follow in the background."""
        self.warm_up, self.pieces = warm_up, deque([*needed, *later])
        self.total, self.needed, self.done = len(self.pieces), len(needed), 0
        self.ready: Future[None] = Future()
        self.text: tuple[RetrievalCache, Tensor] | None = None
        self._text_of: tuple[Reads | None, PagedKVPool | None] | None = None
        self._added, self._begun, self._spent = time.perf_counter(), 0.0, list[str]()
        self.bar = ProgressBar(
            total=len(needed), desc="warming up", delay=BAR_DELAY_SECONDS, leave=False, disable=not warm_up.progress
        )

    def run_next(self, loop: AnswerLoop, config: Config, stepper: Stepper) -> None:
        """Run the next piece. Raises the errors of a prefill and of a step."""
        piece, began = self.pieces[0], time.perf_counter()
        self._begun = self._begun or began
        if self.text is None or self._text_of != piece[:2]:
            self.text = None  # freed before the next one is read
            self.text, self._text_of = self.warm_up.read(loop, config, piece.exact, piece.read), piece[:2]
        read = time.perf_counter()
        draws, tokens = self.warm_up.draws, self.warm_up.tokens or 0
        if not piece.drafts or can_draft(self.text[0]):
            stepper.rehearse(*self.text, piece.rows, draws, tokens, drafts=piece.drafts)
        self._spent.append(f"{piece} {read - began:.1f} + {time.perf_counter() - read:.1f}")
        self.pieces.popleft()
        self.done += 1
        if self.done in (self.needed, self.total):
            self._log()
        if self.done <= self.needed:
            self.bar.update()
        if not self.pieces or self.pieces[0][:2] != piece[:2]:
            self.text = None

    def _log(self) -> None:
        """Log the seconds of the pieces since the last call: to read a text, if there is a new one, and to step."""
        spent, self._spent = "; ".join(self._spent), []
        log.info(
            "%d of %d graphs after %.1f s, which began after %.1f s: reader x rows, seconds of text + steps: %s",
            self.done, self.total, time.perf_counter() - self._added, self._begun - self._added, spent,
        )  # fmt: skip

    def end(self, error: BaseException | None = None) -> None:
        """Drop the text and the remaining pieces; tell the caller, if it still waits."""
        self.text = None
        self.pieces.clear()
        self.tell(error)

    def tell(self, error: BaseException | None = None) -> None:
        """Let the caller go on, or raise an error there. Does nothing the second time."""
        self.bar.close()
        if self.ready.done():
            return
        if error is None:
            self.ready.set_result(None)
        else:
            self.ready.set_exception(error)


class WarmUps:
    """Warm-ups of an engine, in order. Its thread runs their pieces while it has no requests."""

    def __init__(self, loop: AnswerLoop, config: Config, stepper: Stepper, exact: PagedKVPool | None) -> None:
        """exact: pages of paged prefixes; None: off."""
        self._loop, self._config, self._stepper, self._exact = loop, config, stepper, exact
        self._runs: deque[_Run] = deque()
        self._busy_at = 0.0
        self._shape: object = None

    @property
    def progress(self) -> WarmUpProgress | None:
        """Return the progress of all warm-ups; None if there is nothing left to do."""
        runs = list(self._runs)
        return WarmUpProgress(sum(run.done for run in runs), sum(run.total for run in runs)) if runs else None

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the next piece may run; None: there is none."""
        if not self._runs:
            return None
        if not self._runs[-1].ready.done():  # a caller waits for the last one
            return 0.0
        return max(0.0, self._busy_at + IDLE_SECONDS - time.monotonic())

    def add(self, warm_up: WarmUp, *, background: bool) -> Future[None]:
        """Return a future that is done after the warm-up, or has its error.

        background: it is done after the pieces that the first request needs.
        """
        first, others = warm_up.pieces(self._loop, self._config, self._exact)
        run = _Run(warm_up, first, others) if background else _Run(warm_up, [*first, *others], ())
        self._runs.append(run)
        return run.ready

    def pause(self) -> None:
        """Free the text, because requests run now; the next piece reads it again."""
        if self._runs:
            self._runs[0].text, self._busy_at = None, time.monotonic()

    def run_next(self) -> bool:
        """Run the next piece; raises nothing. Return whether it succeeded."""
        run = self._runs[0]
        if run.done and self._stepper.graph_shape != self._shape:
            log.info("warm-up ends: requests of another shape replaced its graphs; steps capture their own")
            self._end(run)
            return True
        try:
            run.run_next(self._loop, self._config, self._stepper)
        except BaseException as error:
            if run.ready.done():
                log.warning("warm-up ends after %d of %d graphs", run.done, run.total, exc_info=error)
            self._end(run, error)
            return False
        self._shape = self._stepper.graph_shape
        if not run.pieces:
            lower_cap_for_graphs(self._loop.model.device)
            self._end(run)
        elif run.done == run.needed:
            self._busy_at = time.monotonic()
            run.tell()
        return True

    def close(self) -> None:
        """End all warm-ups, with an error for callers that wait."""
        while self._runs:
            self._end(self._runs[0], EngineFullError("The engine has ended; make another."))

    def _end(self, run: _Run, error: BaseException | None = None) -> None:
        self._runs.popleft()
        run.end(error)


def _sizes(rows: int) -> list[int]:
    """Numbers of rows of which each needs another graph, the largest last."""
    powers = [1 << exponent for exponent in range((rows - 1).bit_length())]
    return [*powers, rows]
