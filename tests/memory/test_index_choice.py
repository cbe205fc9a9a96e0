"""What options of an index promise of a step's time, and what `auto` makes of it."""

from __future__ import annotations

from typing import Any

import pytest

import retrieval_attn as ra
from retrieval_attn.index.device import PLANNED
from retrieval_attn.memory import index_choice
from retrieval_attn.memory.index_choice import fitting_index, search_seconds
from retrieval_attn.memory.shape import ModelShape, model_shape
from retrieval_attn.memory.units import GIB
from tests.memory.test_activations import hybrid_27b
from tests.memory.test_plan import llama3_8b

TOKENS = 131072
ROWS, FINER = {"int8_rows": True}, {"rescore": 12, "finer_bytes": 64}
QUARTER = {**ROWS, "key_share": 0.25}
HOST = 118 * GIB


def dense_32b() -> ModelShape:
    """The attention of Qwen3-32B."""
    sizes = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "head_dim": 128}
    return model_shape(llama3_8b(intermediate_size=25600, vocab_size=151936, **sizes), None)


def seconds(tokens: int = TOKENS, batch: int = 1, **options: Any) -> float:
    config = ra.Config(index=PLANNED, index_options=options)
    return search_seconds(dense_32b(), config, tokens, batch)


@pytest.mark.parametrize(
    ("options", "milliseconds"),
    [
        ({"key_bytes": 40, "rescore": 4, **ROWS}, 18.3),
        ({"key_bytes": 32, "rescore": 6, **ROWS}, 20.3),
        ({"key_bytes": 24, **FINER, **ROWS}, 22.9),
        ({"key_bytes": 24, **FINER}, 27.0),
    ],
)
def test_steps_that_were_measured(options: dict[str, Any], milliseconds: float) -> None:
    """Medians of 64 layers on an H100, of which 8.87 ms are not for search."""
    assert 8.87 + 64e3 * seconds(**options) == pytest.approx(milliseconds, rel=0.08)


def test_what_takes_longer() -> None:
    assert seconds(**ROWS) < seconds() < seconds(2 * TOKENS)
    assert seconds(**ROWS) < seconds(batch=2, **ROWS) < 2 * seconds(**ROWS)
    assert seconds(key_bytes=24, **FINER, **ROWS) < seconds(key_bytes=24, **FINER)
    assert seconds(key_bytes=24, rescore=12, **ROWS) > seconds(key_bytes=24, **FINER, **ROWS), "all 600 are attended to"


def choice(shape: ModelShape, tokens: int, free: float) -> tuple[dict[str, Any], int]:
    coded, needed = fitting_index(shape, ra.Config(), tokens, int(free * GIB), host_free=HOST)
    assert needed <= free * GIB
    return dict(coded.index_options), coded.prefill_chunk


def test_smaller_chunks_make_room_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with many query heads, which would wait for finer codes and for the host."""
    shape, without = dense_32b(), ({"key_bytes": 16, "rescore": 16, "finer_bytes": 64}, 8192)
    assert choice(shape, TOKENS, 4.8) == ({"key_bytes": 40, "rescore": 4, **ROWS}, 2048)
    assert choice(shape, TOKENS, 4.2) == ({"key_bytes": 32, "rescore": 6, "finer_bytes": 64, **QUARTER}, 2048)
    assert choice(shape, TOKENS, 5.4) == ({"key_bytes": 40, "rescore": 4, **ROWS}, 4096), "no smaller ones than needed"
    monkeypatch.setattr(index_choice, "CHUNKS_FOR_ROWS", 1)
    assert choice(shape, TOKENS, 4.8) == without
    monkeypatch.undo()
    monkeypatch.setattr(index_choice, "WORTH_CHUNKS", 0.0)
    assert choice(shape, TOKENS, 4.8) == without


def test_chunks_stay_where_that_gains_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 query heads wait for few finer codes."""
    shape, tokens = model_shape(hybrid_27b(), None), 1 << 19
    before = choice(shape, tokens, 7.2)
    assert before == ({"key_bytes": 64, "rescore": 6, "finer_bytes": 128, **QUARTER}, 8192)
    monkeypatch.setattr(index_choice, "WORTH_CHUNKS", 2.0)
    assert choice(shape, tokens, 7.2) != before


def test_codes_that_name_by_themselves_stay_as_large_as_they_fit() -> None:
    """Of a million tokens smaller ones would be quicker, and find less."""
    shape = model_shape(llama3_8b(), None)
    coded, _ = fitting_index(shape, ra.Config(host_dtype="int8"), 1 << 20, 40 * GIB, host_free=400 * GIB)
    assert coded.index_options == QUARTER
    smaller = ra.Config(index=PLANNED, index_options={"key_bytes": 40, "rescore": 4, **ROWS})
    seconds_of = [search_seconds(shape, one, 1 << 20) for one in (smaller, coded)]
    assert seconds_of[0] < index_choice.WORTH_CHUNKS * seconds_of[1]
