"""`plan` counts what index="auto" takes on a GPU of that size, as a read there would, and says it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from eval.tests.test_bench_session import SMALL
from retrieval_attn import llm
from retrieval_attn.gpu.memory import DeviceMemory
from retrieval_attn.index.device import PLANNED
from retrieval_attn.memory import host_room
from retrieval_attn.memory.device import DEVICE_RESERVE, GRAPH_STATES
from retrieval_attn.memory.index_choice import chosen_index
from retrieval_attn.memory.plan import HOST_RESERVE, Plan, plan
from retrieval_attn.memory.units import GIB
from retrieval_attn_eval.bench.session import command
from tests.memory.test_activations import hybrid_27b
from tests.memory.test_plan import llama3_8b, tiny
from tests.pairs import pairwise

AUTO = ra.Config()
LONG = llama3_8b(max_position_embeddings=1 << 24)
LENGTHS = [1 << power for power in (17, 18, 19, 20)]
KEYS = ("keys and values", "index")


def asked(answer: Plan, config: ra.Config = AUTO) -> ra.Config:
    """What a read takes that has what the plan's machine leaves it."""
    free = answer.gpu_memory - answer.shape.weight_bytes - DEVICE_RESERVE
    host_free = answer.host_memory - sum(item.bytes for item in answer.host if item.name not in KEYS)
    return chosen_index(LONG, config, answer.context, free, answer.batch, host_free=host_free)


@pytest.mark.parametrize(
    ("tokens", "gpu", "host", "quantization"),
    pairwise(LENGTHS, ["16.5GiB", "20GiB", "24GiB", "80GiB"], ["32GiB", "64GiB", "256GiB", "1TiB"], [None, "int4"]),
)
def test_the_plan_counts_what_a_read_takes(tokens: int, gpu: str, host: str, quantization: str | None) -> None:
    """The same index, codes, rows and chunk; what the choice says fits the device does so by the plan, and codes and
    rows on the host fit there.
    """
    answer = plan(LONG, tokens, gpu, host, quantization=quantization)
    assert answer.config == asked(answer)
    as_given = plan(LONG, tokens, gpu, host, config=answer.config, quantization=quantization)
    assert (as_given.device, as_given.host) == (answer.device, answer.host) and not as_given.choice
    if answer.config.index == PLANNED:
        assert answer.device_bytes <= answer.gpu_memory
        if {"codes_on_host", "int8_rows"} & set(answer.config.index_options):
            assert answer.host_bytes <= answer.host_memory
    else:
        given = plan(LONG, tokens, gpu, host, quantization=quantization, decide=False)
        assert answer == replace(given, largest_context=answer.largest_context)


@pytest.mark.parametrize(
    ("tokens", "gpu", "said"),
    [
        (1 << 17, "24GiB", "codes of 64 bytes per key on the GPU, int8 rows on the host"),
        (1 << 17, "16.75GiB", "codes of 16 bytes per key on the GPU, finer codes of 64 bytes on the host, "
         "prefill_chunk=1024"),
        (1 << 19, "24GiB", "codes of 32 bytes per key on the GPU, finer codes of 64 bytes on the host"),
        (1 << 20, "24GiB", "codes of 16 bytes per key on the host, which the bus brings for each token, finer codes of "
         "64 bytes on the host"),
    ],
)  # fmt: skip
def test_the_table_says_what_auto_takes(tokens: int, gpu: str, said: str) -> None:
    """In words, within the table's width, and in JSON."""
    answer = plan(LONG, tokens, gpu, "256GiB")
    assert answer.fits and answer.choice == f'index "auto" takes: {said}'
    assert answer.choice in " ".join(str(answer).split())
    rooms = (answer, plan(LONG, tokens, gpu, "1TiB"))
    assert max(len(line) for room in rooms for line in str(room).splitlines()) <= 100
    told = json.loads(json.dumps(answer.to_dict()))
    assert told["choice"] == answer.choice and told["config"]["index"] == PLANNED
    items = {item.name for item in (*answer.device, *answer.host)}
    assert {"codes of keys", "clusters of coded keys"} <= items


def test_a_smaller_chunk_is_taken_where_it_makes_room() -> None:
    """128K in 16.75 GiB were refused, with a chunk to take by hand; a read takes a smaller one by itself."""
    before, now = (plan(LONG, 1 << 17, "16.75GiB", "64GiB", decide=decide) for decide in (False, True))
    assert not before.fits and "use prefill_chunk=5120" in before.reasons[0] and not before.choice
    assert now.fits and now.config.prefill_chunk == 1024 <= now.largest_chunk < 2048
    assert now.require() is now


@pytest.mark.parametrize(
    ("tokens", "gpu", "options", "gpus"),
    [
        (1 << 17, "80GiB", {"index": "sketch"}, 1),
        (1 << 17, "80GiB", {"index_options": {"recall": 0.8}}, 1),
        (1 << 17, "80GiB", {}, 2),
        (1 << 17, "80GiB", {}, (2, "heads")),
        (8192, "80GiB", {}, 1),
        (1 << 17, "12GiB", {}, 1),
    ],
)
def test_all_else_is_counted_as_it_was(tokens: int, gpu: str, options: dict[str, Any], gpus: Any) -> None:
    """Another index, options, several GPUs, a short text, no room: nothing is chosen."""
    config = AUTO.replace(**options)
    answer = plan(LONG, tokens, gpu, "1TiB", config=config, gpus=gpus)
    given = plan(LONG, tokens, gpu, "1TiB", config=config, gpus=gpus, decide=False)
    assert answer.config == config and not answer.choice and "takes:" not in str(answer)
    assert answer == replace(given, largest_context=answer.largest_context)


def test_eager_steps_have_neither_rows_nor_codes_on_the_host() -> None:
    """As `IndexChoice` says: without a graph no device reads rows."""
    for tokens, found in ((1 << 17, PLANNED), (1 << 20, "auto")):
        answer = plan(LONG, tokens, "24GiB", "1TiB", config={"graph": False})
        assert answer.config.index == found and not answer.config.index_options


def test_copies_of_states_have_room_beside_a_read() -> None:
    """A second text is read while a captured step holds them: what was chosen fits beside them, and what the first read
    would take in their place does not. From 57 GiB on both are the same.
    """
    tokens, config = 1 << 18, hybrid_27b()
    smaller = 0
    for quarter in (*range(4 * 52, 4 * 57, 3), 4 * 57, 4 * 64 - 1):
        answer = plan(config, tokens, quarter * GIB // 4, "128GiB")
        copies = sum(item.bytes for item in answer.device if item.name == "states of a captured step")
        assert copies == GRAPH_STATES * answer.shape.states_bytes > 400e6
        free = answer.gpu_memory - answer.shape.weight_bytes - DEVICE_RESERVE
        first = chosen_index(config, AUTO, tokens, free, host_free=100 * GIB)
        if answer.config.index == PLANNED:
            assert answer.fits and first.index == PLANNED
        if first != answer.config:
            smaller += 1
            assert not plan(config, tokens, answer.gpu_memory, "128GiB", config=first).fits
    assert smaller


@pytest.mark.parametrize(("gpu", "host"), [("24GiB", "64GiB"), ("24GiB", "1TiB"), ("16.75GiB", "1TiB")])
def test_the_largest_context_is_that_of_what_auto_takes(gpu: str, host: str) -> None:
    """Once the host is the limit, twice the GPU; each length has codes of its own size."""
    answer = plan(LONG, 1 << 17, gpu, host)
    most = answer.largest_context
    at, above = (plan(LONG, tokens, gpu, host) for tokens in (most, most + 1))
    assert at.fits and not above.fits and at.largest_context == most > 1 << 17
    assert at.config != answer.config


def test_a_model_without_keys_is_left_alone() -> None:
    """There is nothing to choose an index for."""
    config = tiny(layer_types=["sliding_attention"] * 3, sliding_window=16)
    assert not plan(config, 1 << 15, host_memory="4GiB").choice


def test_a_plan_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Lengths are tried that nobody asked for."""
    caplog.set_level(logging.INFO)
    plan(LONG, 1 << 17, "24GiB", "64GiB")
    assert not caplog.records


def test_a_host_without_a_gpu_counts_its_own_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a read whose index is not decided, a graph or codes have room, whatever a GPU would take."""
    needed = plan(LONG, 1 << 17, host_memory=1, decide=False)
    least = needed.host_bytes - HOST_RESERVE - needed.shape.host_table_bytes
    assert least > plan(LONG, 1 << 17, host_memory=1).host_bytes
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: least)
    host_room.require_host_room(LONG, AUTO, 1 << 17, 1, hidden_on_host=False)
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: least - 1)
    with pytest.raises(ra.MemoryPlanError, match="auto: "):
        host_room.require_host_room(LONG, AUTO, 1 << 17, 1, hidden_on_host=False)


def test_prompts_that_go_together_are_counted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their index is not decided: no chunk is made smaller for it."""
    given: list[bool] = []

    def noted(*args: Any, **options: Any) -> Plan:
        given.append(options["decide"])
        return plan(*args, **options)

    monkeypatch.setattr(llm, "plan", noted)
    model: Any = LONG
    needed = plan(LONG, 1 << 17, host_memory=1, decide=False)
    free = needed.device_bytes - needed.shape.weight_bytes - DEVICE_RESERVE
    assert llm._fits(model, AUTO, 1 << 17, 1, free) and not llm._fits(model, AUTO, 1 << 17, 1, free - 1)
    assert given == [False, False]


def test_a_model_is_loaded_where_a_read_would_take_a_smaller_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused; here the folder has no weights, and the plan is what comes before them."""
    LONG.save_pretrained(tmp_path)
    capped: list[int | None] = []
    card = DeviceMemory(80 * GIB, 80 * GIB, 0)
    monkeypatch.setattr(llm, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(llm, "device_memory", lambda device: card)
    monkeypatch.setattr("retrieval_attn.memory.plan.host_memory_bytes", lambda: 64 * GIB)

    def cap(device: torch.device, limit: int | None) -> None:
        capped.append(limit)
        raise InterruptedError

    monkeypatch.setattr(llm, "cap", cap)
    with pytest.raises(InterruptedError):
        ra.LLM(tmp_path, gpu_memory="16.75GiB", max_context=131072)
    assert capped == [67 * GIB // 4]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_session_on_a_cpu_has_the_hosts_index(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU's memory that anything could lie in. Random weights have their embedding where they are made."""
    given: list[tuple[bool, str]] = []

    def noted(*args: Any, **options: Any) -> Plan:
        given.append((options["decide"], options["embedding"]))
        return plan(*args, **options)

    monkeypatch.setattr(ra, "plan", noted, raising=False)
    monkeypatch.setattr("retrieval_attn.model.loading.choose_device", lambda name: torch.device(place))
    for shape in (SMALL.shape, None):
        command._checked(replace(SMALL, shape=shape))
    assert given == [(place == "cuda", "device"), (place == "cuda", "auto")]
