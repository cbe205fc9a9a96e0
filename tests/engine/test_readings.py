"""How many tokens of short prompts a forward has: as many as its chunks stay short with, beside rows that wait."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from retrieval_attn.engine import prefill_worker as readings
from retrieval_attn.engine.prefill_worker import ALONE_TOKENS, BESIDE_TOKENS, PrefillWorker

INTER_TOKEN_SECONDS = 0.1


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Pack:
    """A forward whose chunks take the same time; chunks: of all its layers."""

    def __init__(self, clock: Clock, tokens: int, chunk_seconds: float, chunks: int = 32) -> None:
        self.tokens, self.chunks_done, self._seconds_per_chunk = tokens, 0, chunks
        self._clock, self._cell_seconds = clock, chunk_seconds
        self.gate = self

    @property
    def chunks_left(self) -> int:
        return self._seconds_per_chunk - self.chunks_done

    def go(self, chunks: int) -> None:
        self.chunks_done += chunks
        self._clock.now += chunks * self._cell_seconds

    def wait(self, timeout: float | None = None) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(readings, "time", found)
    return found


@pytest.fixture
def reading() -> PrefillWorker:
    scheduler: Any = SimpleNamespace(limits=SimpleNamespace(inter_token_seconds=INTER_TOKEN_SECONDS))
    nothing: Any = None
    return PrefillWorker({}, scheduler, threading.Condition(), nothing, None, nothing, nothing)


def test_a_forward_alone_is_large(reading: PrefillWorker) -> None:
    assert reading._tokens_together(alone=True) == ALONE_TOKENS
    assert reading._tokens_together(alone=False) == BESIDE_TOKENS, "nothing is known of chunks yet"


@pytest.mark.parametrize(
    ("tokens", "cell_ms", "wanted"),
    [
        (512, 4.5, 1422),  # what is done once takes the time: three times as many fit an eighth of 100 ms
        (1422, 6.0, ALONE_TOKENS),
        (2000, 25.0, 1000),
        (512, 40.0, BESIDE_TOKENS),  # a processor: as few as ever
    ],
)
def test_cells_beside_rows_may_take_an_eighth_of_their_time(
    reading: PrefillWorker, clock: Clock, tokens: int, cell_ms: float, wanted: int
) -> None:
    reading._go(Pack(clock, tokens, cell_ms / 1000), 12, alone=True)  # type: ignore[arg-type]
    assert reading._tokens_together(alone=False) == pytest.approx(wanted, abs=1)


def test_a_forward_of_few_tokens_tells_nothing_of_many(reading: PrefillWorker, clock: Clock) -> None:
    """Second parts of prompts, 16 tokens: what they took per token would leave room for a few more alone."""
    reading._go(Pack(clock, 1600, 0.008), 12, alone=True)  # type: ignore[arg-type]
    known = reading._tokens_together(alone=False)
    assert known == ALONE_TOKENS
    reading._go(Pack(clock, 16, 0.004), 12, alone=False)  # type: ignore[arg-type]
    assert reading._tokens_together(alone=False) == known


def test_a_warm_up_lets_the_first_prompts_go_together(reading: PrefillWorker) -> None:
    assert not reading._packs
    reading.made_ready()
    assert reading._packs
