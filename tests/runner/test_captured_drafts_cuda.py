"""Captured steps with drafts as real CUDA graphs: texts, logits and caches as without drafts."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.runner.drafts import BLOCKS
from tests.runner.graph_cases import DEVICE, FINER, MODELS, ROARGRAPH
from tests.runner.test_captured_drafts import Answered, furthest, greedy_answers, idle_pools, read_by
from tests.runner.test_drafts import Script, require_equal
from tests.tiny_models import tiny_model

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_decoders", "small_graphs")]
TOLERANCE = 2e-4


@pytest.fixture(autouse=True)
def _float32_and_cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr("retrieval_attn.runner.drafts.BlockCosts.extra", lambda self, rows, drafts: 0.001 * drafts)
    yield


def on_device(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(tiny_model(name)).to("cuda", dtype)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_as_without_drafts(name: str) -> None:
    """Forced tokens, right and wrong drafts, over several evictions."""
    chance, model = random.Random(3), on_device(name)
    script = [chance.randrange(3, 90) for _ in range(70)]
    read, ids = read_by(model, 700)
    alone = Answered(model, read, ids, 70, script=script)
    if alone.how != "graph":
        pytest.skip(alone.how)
    drafted = Answered(model, read, ids, 70, script=script, drafter=Script(script, random.Random(5)))
    if name in ("gpt_oss", "qwen3_moe") and not drafted.drafted[0]:
        pytest.skip("transformers' experts look at values on the CPU for several tokens: packed ones do not")
    assert 10 < drafted.drafted[1] < drafted.drafted[0]
    assert furthest(drafted, alone) < TOLERANCE
    require_equal(drafted.cache, alone.cache, TOLERANCE)


OPTIONS: list[dict[str, Any]] = [
    {}, ROARGRAPH, DEVICE, {**FINER, "retrieve": 4}, {"index": "full"}, {"retrieve": "auto"}, {"host_dtype": "int8"},
    {"window": 600},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("right", [True, False])
def test_greedy_answers(options: dict[str, Any], right: bool) -> None:
    """float32, by replays."""
    greedy_answers(on_device("llama"), options, right)


def test_bfloat16_blocks_are_as_close_as_rounding() -> None:
    """bf16 blocks against float32 logits: at most twice the error of single steps (same tokens fed)."""
    chance, model = random.Random(3), on_device("llama")
    script = [chance.randrange(3, 90) for _ in range(60)]
    read, ids = read_by(model, 700, window=200)
    exact, half = Answered(model, read, ids, 60, script=script), on_device("llama", torch.bfloat16)
    read, ids = read_by(half, 700, window=200)
    alone = Answered(half, read, ids, 60, script=script)
    drafted = Answered(half, read, ids, 60, script=script, drafter=Script(script))
    errors = [
        torch.stack([(a.float() - b).abs().max() for a, b in zip(one.logits, exact.logits, strict=True)]).mean()
        for one in (alone, drafted)
    ]
    assert drafted.drafted[1] > 40 and errors[1] <= 2 * errors[0]


def test_answers_capture_nothing(needle_model_path: Any) -> None:
    """Blocks are captured while a context is read; greedy answers with a seed, too, are those without drafts."""
    answers = []
    for drafts in (False, True):
        llm = ra.LLM(needle_model_path, device="cuda", dtype="float32", drafts=drafts, window=128, sink=16)
        context = llm.read("A line that is read again and again.\n" * 200, progress=False)
        (pool,) = idle_pools(llm.model)
        captures = pool.captures
        assert set(pool.blocks.graphs) == (set(BLOCKS) if drafts else set())
        asked = "A line that is read again"
        found = [context.ask(asked, max_new_tokens=60, ignore_eos=True)]
        found.append(context.ask(asked, max_new_tokens=60, ignore_eos=True, temperature=1.0, seed=5))
        assert pool.captures == captures and all(one.stats.decoded == "graph" for one in found)
        assert bool(found[0].stats.accepted_tokens) == drafts
        answers.append([one.tokens for one in found])
    assert answers[0] == answers[1]
