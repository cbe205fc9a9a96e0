"""Captured steps whose codes are brought over the bus, a layer ahead: as if they lay on the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.runner.graph_cases import DEVICE_CASES, Decoded
from tests.runner.test_decode_graph_cuda import on_device
from tests.runner.test_graph_runner import Rows
from tests.runner.test_streamed_codes import BROUGHT, case_of
from tests.tiny_models import build_model

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("fresh_decoders")]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("case", DEVICE_CASES)
def test_steps_equal_eager_decoding(case: str, rows: bool) -> None:
    model, options = on_device("llama"), case_of(case, rows)
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 2e-5
    assert graphed.decoder.replays > 0


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.usefixtures("compiled")
def test_rows_of_a_batch_are_as_alone(rows: bool) -> None:
    """Layers enough to take turns twice; buckets of two sizes have memory in common."""
    model = build_model("llama", max_position_embeddings=8192, num_hidden_layers=6).cuda()
    options = {**BROUGHT, "index_options": {**BROUGHT["index_options"], "int8_rows": rows}}
    bound = Rows(model, [50, 900, 6000], **options)
    for pair in bound.pairs:
        pair.allow(1e-2, 3)
    bound.steps(bound.pairs[:2], 10)
    bound.steps(bound.pairs, 30)
    bound.steps(bound.pairs[:2], 10)
    assert bound.runner.reason == ""
