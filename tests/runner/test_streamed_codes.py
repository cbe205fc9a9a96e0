"""Captured steps whose codes lie in host memory and are brought, emulated: as if they lay on the device."""

from __future__ import annotations

from typing import Any

import pytest

from retrieval_attn.gpu.codes.streamer import CodeStreamer
from retrieval_attn.index.device import PLANNED
from tests.runner.graph_cases import CONFIG, DEVICE, DEVICE_CASES, Decoded, enabled
from tests.runner.test_graph_runner import Rows
from tests.tiny_models import build_model

pytestmark = pytest.mark.usefixtures("emulated_graphs")

BROUGHT: dict[str, Any] = {
    **DEVICE, "index": PLANNED, "host_dtype": "int8",
    "index_options": {**DEVICE["index_options"], "codes_on_host": True},
}  # fmt: skip


def case_of(name: str, rows: bool) -> dict[str, Any]:
    """One of DEVICE_CASES, with codes on the host, and rows that the device reads or none."""
    case = DEVICE_CASES[name]
    options = {**case["config"].index_options, "codes_on_host": True, "int8_rows": rows}
    return {**case, "config": case["config"].replace(index=PLANNED, host_dtype="int8", index_options=options)}


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, bool]]]:
    """Of each pass the numbers of searches as it waited for their codes, and whether these were under way before."""
    passes: list[list[tuple[int, bool]]] = []
    begin_step, wait = CodeStreamer.begin_step, CodeStreamer.wait

    def begun(self: CodeStreamer) -> None:
        passes.append([])
        begin_step(self)

    def waited(self: CodeStreamer, number: int, runtime: Any) -> None:
        passes[-1].append((number, number in self._under_way))
        wait(self, number, runtime)

    monkeypatch.setattr(CodeStreamer, "begin_step", begun)
    monkeypatch.setattr(CodeStreamer, "wait", waited)
    return passes


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("case", DEVICE_CASES)
def test_steps_equal_eager_decoding(case: str, rows: bool, order: Any) -> None:
    model, options = enabled("llama"), case_of(case, rows)
    eager, graphed = Decoded(model, False, **options), Decoded(model, True, **options)
    assert graphed.difference(eager) <= 1e-5
    searching = [numbers for numbers in order if numbers]  # the first one makes searches as it comes to them
    parts = len(searching[-1])
    assert len(searching) > 1 and parts in (len(graphed.cache.layers), 2 * len(graphed.cache.layers))
    assert all(numbers == [(number, number > 0) for number in range(parts)] for numbers in searching[1:])


def test_a_step_is_not_one_of_codes_on_the_device() -> None:
    """The decoder of the one has nothing that brings codes."""
    model = enabled("llama")
    options = {**BROUGHT, "index_options": DEVICE["index_options"]}
    there, brought = (Decoded(model, True, config=CONFIG.replace(**one), prompt=200) for one in (options, BROUGHT))
    assert there.decoder is not brought.decoder


@pytest.mark.usefixtures("compiled")
def test_rows_of_a_batch_are_as_alone() -> None:
    """Buckets of two sizes have memory in common."""
    model = build_model("llama", max_position_embeddings=8192)
    rows = Rows(model, [50, 900, 1500], **BROUGHT)
    rows.steps(rows.pairs[:2], 6)
    rows.steps(rows.pairs, 12)
    rows.steps(rows.pairs[:2], 6)
    assert rows.runner.reason == ""
