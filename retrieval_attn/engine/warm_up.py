"""WarmUp: what the first requests of an engine would wait for, made before they come: graphs, kernels.

A short text of random ids is read and forked; its forks step in every number of rows that has graphs of its own. Then
they go, and nothing is left of them.
"""

from __future__ import annotations

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
from retrieval_attn.runner.graph.host_row_gather import Reads
from retrieval_attn.sampling.sampling_params import SamplingParams

__all__ = ["DRAWS", "WarmUp", "WarmUps"]

DRAWS = (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9, top_k=40))
"""One for each way of choosing that has a graph of its own, but for log-probabilities."""
PAGED_TOKENS = 64
READS = Reads.HOST, Reads.DEVICE, Reads.BOTH
BAR_DELAY_SECONDS = 2.0


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

    def run(self, loop: AnswerLoop, config: Config, stepper: Stepper, exact: PagedKVPool | None) -> None:
        """In the thread that steps, while there are no rows. Raises what reading or stepping raise."""
        sizes = _sizes(self.rows)
        # who reads what is named, the host, the device, or both, is recorded in a step
        reads = READS if self._cache(loop, config).index.spec.host_reads.rows else READS[:1]
        ways = [(pool, read) for pool in ((None,) if exact is None else (None, exact)) for read in reads]
        total = len(ways) * (1 + len(sizes))
        with ProgressBar(
            total=total, desc="warming up", delay=BAR_DELAY_SECONDS, leave=False, disable=not self.progress
        ) as bar:
            for pool, read in ways:
                text = self._read(loop, config, pool, read)
                bar.update()
                for size in sizes:
                    stepper.rehearse(*text, size, self.draws, self.tokens or 0)
                    bar.update()
                del text
        lower_cap_for_graphs(loop.model.device)

    def _cache(self, loop: AnswerLoop, config: Config) -> RetrievalCache:
        """An empty one, whose index is that of the longest row that is expected."""
        cache = RetrievalCache(loop.model, config)
        cache.in_batch = True
        cache.index.decide(max(config.sink + 2 * config.window + config.spill, self.tokens or 0))
        return cache

    def _read(
        self, loop: AnswerLoop, config: Config, exact: PagedKVPool | None, read: Reads
    ) -> tuple[RetrievalCache, Tensor]:
        """A text as short as makes rows retrieve, some of it in pages, and the logits (1, vocabulary) after it.

        read: who reads what its rows name. The host reads all that is named of few keys, and those without codes.
        """
        cache, late = self._cache(loop, config), read == Reads.BOTH
        tokens = _tokens(cache, coded=read != Reads.HOST)
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
            if cache.batch.exact is not None:
                cache.batch.exact = cache.batch.exact.closed()
            seal(cache, coded=not late)
            cache = cache.fork()  # as a row goes on
        return cache, state.logits


def _tokens(cache: RetrievalCache, *, coded: bool) -> int:
    """Of a text whose rows retrieve. coded: by codes, as those of longer ones do."""
    config, spec = cache.config, cache.index.spec
    keys = spec.min_coded_keys(config.retrieve) if coded and isinstance(config.retrieve, int) else 0
    return config.sink + config.window + max(config.window + config.spill, keys)


class WarmUps:
    """Those that an engine's thread was asked for, in order. True while there are any."""

    def __init__(self) -> None:
        self._asked: deque[tuple[WarmUp, Future[None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def add(self, warm_up: WarmUp) -> Future[None]:
        """What is done once it was, or that has what went wrong."""
        done: Future[None] = Future()
        self._asked.append((warm_up, done))
        return done

    def run_next(self, loop: AnswerLoop, config: Config, stepper: Stepper, exact: PagedKVPool | None) -> bool:
        """See `WarmUp.run`; raises nothing. Whether it went well."""
        warm_up, done = self._asked.popleft()
        try:
            warm_up.run(loop, config, stepper, exact)
        except BaseException as error:
            done.set_exception(error)
            return False
        done.set_result(None)
        return True

    def close(self) -> None:
        """Nobody does the others."""
        while self._asked:
            self._asked.popleft()[1].set_exception(EngineFullError("The engine has ended; make another."))


def _sizes(rows: int) -> list[int]:
    """Numbers of rows of which each needs another graph, the largest last."""
    powers = [1 << exponent for exponent in range((rows - 1).bit_length())]
    return [*powers, rows]
