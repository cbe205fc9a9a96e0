"""Captured steps in which a GPU reads the keys that it named over the bus: as if the host had read them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from retrieval_attn.engine.paged_prefix import PagedKVPool
from retrieval_attn.runner.graph.host_row_gather import Reads
from tests.runner.graph_cases import CONFIG, DEVICE_CASES, Decoded
from tests.runner.test_decode_graph_cuda import on_device
from tests.runner.test_graph_runner import Rows
from tests.runner.test_graph_runner_prefixes import rows_of, trees
from tests.runner.test_host_row_gather import REACHED, case_of, kinds_of
from tests.runner.test_rows import Pair
from tests.tiny_models import build_model

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_decoders")]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("case", DEVICE_CASES)
def test_steps_equal_eager_decoding(case: str) -> None:
    model, options = on_device("llama"), case_of(case)
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 2e-5
    assert any(any(reads) for reads in kinds_of(graphed.decoder))


@pytest.mark.parametrize("host_dtype", ["auto", "int8"])
def test_before_a_spill_nobody_asks_the_host(host_dtype: str) -> None:
    """Then it attends to what has no codes.

    auto: eager steps attend to float32 rows, captured ones to int8 copies, which may choose other tokens.
    """
    options: dict[str, Any] = {
        "config": CONFIG.replace(**{**REACHED, "host_dtype": host_dtype}),
        "prompt": 200,
        "new": 20,
    }
    model = on_device("llama")
    eager = Decoded(model, False, **options)
    graphed = Decoded(model, True, **options, follows=None if host_dtype == "int8" else eager)
    assert graphed.difference(eager) <= (2e-4 if host_dtype == "int8" else 1e-2)
    layers = len(graphed.cache.layers)
    assert set(kinds_of(graphed.decoder)) == {(Reads.DEVICE,) * layers, (Reads.BOTH,) * layers}


@pytest.mark.usefixtures("compiled")
def test_rows_of_a_batch_are_as_alone() -> None:
    model = build_model("llama", max_position_embeddings=8192).cuda()
    rows = Rows(model, [50, 900, 6000], **REACHED)
    for pair in rows.pairs:  # what searches by rounded queries may name another key once in a while
        pair.allow(1e-2, 3)
    rows.steps(rows.pairs[:2], 10)
    rows.steps(rows.pairs, 30)
    assert rows.runner.reason == ""


@pytest.mark.usefixtures("compiled")
def test_rows_over_pages_are_as_alone() -> None:
    """Pages, named keys and late ones; forks, crops and random members."""
    model = build_model("llama", max_position_embeddings=8192).cuda()
    rows = rows_of(model, trees(model, PagedKVPool(1000, 40), **REACHED))
    for pair in rows.pairs:
        pair.allow(1e-2, 3)
    chance = random.Random(3)
    for step in range(24):
        if step in (5, 15):
            rows.pairs.append(Pair(model, rows.pairs[step // 5].row.fork()))
            rows.pairs[-1].token = 7 + step
            rows.pairs[-1].tolerance, rows.pairs[-1].seldom = 1e-2, 3
        present = [pair for pair in rows.pairs if chance.random() < 0.6] or rows.pairs
        rows.steps(present, 1)
        if chance.random() < 0.1:
            chance.choice(rows.pairs).crop(chance.randint(1, 4))
    assert rows.runner.replays == 24 and rows.runner.reason == ""
