"""The first answer after a read costs what the second does: what is made once is made while reading."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.runner import ready
from retrieval_attn.runner.graph import signature
from retrieval_attn.runner.graph.slot import StepMemory
from retrieval_attn.runner.ready import THREADS, LayerLaunches, Preparation
from tests.compile.test_kernel_cache import COUNT_COMPILED
from tests.runner.graph_cases import idle_decoders
from tests.test_structure import ROOT
from tests.waiting import WAIT_SECONDS

CONFIG = ra.Config(sink=16, window=48, retrieve=20, index="flat", prefill_chunk=256)
Loaded = tuple[Any, Any]
TEXT = "The number of the grass is 123. The sky is blue and the sea is deep. " * 20


def test_the_step_is_captured_while_reading(
    loaded: Loaded, emulated_graphs: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Asking, forks and a short extension replay what the read captured; nothing of the rehearsal is left in it."""
    model = loaded[0]
    with caplog.at_level(logging.INFO, "retrieval_attn.runner.graph.capture"):
        context = ra.Context(*loaded, CONFIG).read(TEXT, progress=False)
    (decoder,) = idle_decoders(model)
    assert (decoder.captures, decoder.replays) == (1, 1) and caplog.text.count("captured a step of 1 rows in ") == 1
    layer: Any = context.cache.layers[1]
    tokens, columns = context.num_tokens, layer.columns
    first = context.ask("What is the number of the grass?", max_new_tokens=6)
    assert (context.num_tokens, layer.columns) == (tokens, columns)
    context.fork().ask("What is the sky?", max_new_tokens=3)
    context.extend(" The end.", progress=False)
    context.ask("What is the sky?", max_new_tokens=3)
    assert idle_decoders(model) == [decoder] and decoder.captures == 1 and decoder.replays > 5
    eager = ra.Context(*loaded, CONFIG.replace(graph=False)).read(TEXT, progress=False)
    assert len(idle_decoders(model)) == 1
    assert eager.ask("What is the number of the grass?", max_new_tokens=6).tokens == first.tokens


def test_a_step_that_cannot_be_captured_does_not_stop_the_read(
    loaded: Loaded, emulated_graphs: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first answer says why, as before."""
    monkeypatch.setattr(signature, "cache_refusal", lambda cache: "of the weather")
    context = ra.Context(*loaded, CONFIG).read(TEXT, progress=False)
    assert not caplog.records
    context.ask("What is the sky?", max_new_tokens=3)
    assert "of the weather" in caplog.text


def test_the_first_answer_compiles_nothing() -> None:
    """Neither does the read itself, in this process: others compiled for it, and it loads their kernels."""
    code = f"""{COUNT_COMPILED}
import torch
from pathlib import Path
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
import retrieval_attn as ra
config = LlamaConfig(vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16, max_position_embeddings=32768)
model = LlamaForCausalLM(config).eval()
tokenizer = AutoTokenizer.from_pretrained(Path(ra.__file__).parent / "model" / "bundled")
context = ra.Context(model, tokenizer, ra.Config()).read([i % 500 for i in range(5000)], progress=False)
print("read", compiled)
context.continue_with([5, 6, 7] * 4, max_new_tokens=4)
print("answer", compiled)
context.continue_with([5, 6], max_new_tokens=160)
print("a block moved", compiled)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "read []\nanswer []\na block moved []\n", done.stdout + done.stderr


def test_what_cannot_be_prepared_is_left_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """A compiler may raise anything; the rest is done before the reading ends."""
    done: list[str] = []
    with caplog.at_level(logging.INFO), Preparation() as preparation:
        preparation.begin("the first", lambda: 1 / 0)
        preparation.begin("the second", lambda: done.append("second"))
    assert done == ["second"]
    assert "the first could not be prepared" in caplog.text and "ZeroDivisionError" in caplog.text


def test_an_interrupted_reading_does_not_wait_for_preparations() -> None:
    """Nothing more is begun."""
    go, done = threading.Event(), list[str]()
    with pytest.raises(KeyboardInterrupt), Preparation() as preparation:
        for number in range(THREADS):
            preparation.begin(f"a long one, {number}", go.wait)
        preparation.begin("the last", lambda: done.append("not begun"))
        raise KeyboardInterrupt
    go.set()
    for future in preparation._futures:
        future.result(WAIT_SECONDS)
    assert done == []


def test_all_layers_spans_begin_on_aligned_addresses() -> None:
    """A kernel is compiled for addresses that are multiples of 16, and once more for others."""
    spans = StepMemory(layers=3, batch=2, workers=1, device=torch.device("cpu")).spans
    assert spans.shape == (3, 2, 2) and [row.data_ptr() % 16 for row in spans.flatten(0, 1)] == [0] * 6


@pytest.mark.parametrize("rows", [1, 2])
def test_launching_ahead_changes_nothing(loaded: Loaded, rows: int) -> None:
    """Each step's kernels over zeros, with the shapes of a layer that was read, on memory of their own."""
    context = ra.Context(*loaded, CONFIG.replace(index="device", retrieve=4)).read(TEXT, progress=False)
    cache = context.cache.fork()
    cache.batch_repeat_interleave(rows)
    layer: Any = cache.layers[1]
    launches = LayerLaunches(layer, processors=2, forms=[False, True])
    # bits: slots that no token has been written to may hold NaN, which equals nothing
    buffers = [part.view(torch.uint8) for part in layer.window.buffers]
    before = [part.clone() for part in buffers], layer.columns, layer.held.ranges
    for work in launches.works(graphs=True):
        with torch.no_grad():
            work()
    assert all(map(torch.equal, buffers, before[0]))
    assert (layer.columns, layer.held.ranges) == before[1:]
    other: Any = cache.layers[2]
    assert launches.shape == LayerLaunches(other, 2, [False, True]).shape != LayerLaunches(other, 2).shape
    assert launches.works(graphs=False) == [launches.search_question, launches.attend_candidates]


def test_each_shape_is_launched_once_while_the_model_reads(
    loaded: Loaded, emulated_graphs: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By threads, before the step is captured; the second read of a process has nothing to prepare."""
    launched: list[str] = []

    def note(name: str) -> Callable[..., None]:
        real = getattr(LayerLaunches, name)

        def work(self: LayerLaunches) -> None:
            launched.append(name)
            real(self)

        work.__name__ = name
        return work

    names = {"attend", "attend_to_all", "search_step", "search_question", "attend_candidates"}
    for name in names:
        monkeypatch.setattr(LayerLaunches, name, note(name))
    monkeypatch.setattr(ready, "overlaps", lambda device: True)
    monkeypatch.setattr(ready, "_begun", set())
    monkeypatch.setattr(ready, "capture_step", lambda *given: launched.append("capture"))
    monkeypatch.setattr(ready, "REHEARSALS", (ready.capture_step,))
    config = CONFIG.replace(index="device", retrieve=4)
    with caplog.at_level(logging.INFO):
        ra.Context(*loaded, config).read(TEXT, progress=False)
    assert set(launched[:-1]) == names and len(launched) == len(names) + 1 and launched[-1] == "capture"
    lost = [record.getMessage() for record in caplog.records if "could not be prepared" in record.getMessage()]
    assert all("'triton'" in message for message in lost)
    ra.Context(*loaded, config).read(TEXT, progress=False)
    assert launched[len(names) + 1 :] == ["capture"]


@pytest.mark.parametrize("index", ["device", "flat"])
def test_a_context_that_a_graph_waits_for_is_not_bound_twice(loaded: Loaded, emulated_graphs: None, index: str) -> None:
    """Its first answer launches the graph that the first context had captured; another kind of step is rehearsed."""
    config = CONFIG.replace(index=index, retrieve=4)
    one = ra.Context(*loaded, config).read(TEXT, progress=False)
    [decoder] = idle_decoders(loaded[0])
    assert (decoder.captures, decoder.replays) == (1, 1)
    other = ra.Context(*loaded, config).read(TEXT, progress=False)
    assert (decoder.captures, decoder.replays) == (1, 1)
    answers = [context.ask("Well?", max_new_tokens=5, question_attention="retrieval") for context in (one, other)]
    assert decoder.captures == 1 and decoder.replays > 4 and answers[0].tokens == answers[1].tokens
    assert {answer.stats.decoded for answer in answers} == {"graph"}
    ra.Context(*loaded, config).read("too short for anything to be retrieved", progress=False)
    assert len(decoder.graphs) == 2


@pytest.mark.cuda
def test_threads_compile_what_the_device_launches_while_the_model_reads(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, fresh_decoders: None
) -> None:
    """All of it: nothing is left for the end of the read, whose trial, capture and search launch the same kernels."""
    triton: Any = pytest.importorskip("triton")
    compiled: list[tuple[str, str]] = []

    def note(**given: Any) -> None:
        compiled.append((threading.current_thread().name, str(given.get("repr"))))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    model = copy.deepcopy(loaded[0]).to("cuda", torch.float16)
    ids = [3 + i * 7919 % (model.config.vocab_size - 3) for i in range(40_000)]
    context = ra.Context(model, loaded[1], ra.Config()).read(ids, progress=False)
    assert context.cache.index_kinds().keys() == {"device"}
    mine = "retrieval_attn-prepare", "retrieval_attn-code"
    assert compiled and [kernel for thread, kernel in compiled if not thread.startswith(mine)] == []


@pytest.mark.cuda
@pytest.mark.parametrize("append", ["exact", "retrieval"])
def test_the_first_answer_compiles_no_kernel_of_tritons(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, fresh_decoders: None, append: Any
) -> None:
    """On a GPU: codes on the device, both exchanges of a question."""
    triton: Any = pytest.importorskip("triton")
    compiled: list[str] = []
    hook: Callable[..., None] = lambda **given: compiled.append(str(given.get("repr")))  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    model = copy.deepcopy(loaded[0]).to("cuda", torch.bfloat16)
    ids = [3 + i * 7919 % (model.config.vocab_size - 3) for i in range(20_000)]
    context = ra.Context(model, loaded[1], ra.Config()).read(ids, progress=False)
    assert context.cache.index_kinds().keys() == {"device"}
    (decoder,) = idle_decoders(model)
    before, captures = len(compiled), decoder.captures
    context.ask("What is the sky?", max_new_tokens=4, question_attention=append)
    assert compiled[before:] == [] and decoder.captures == captures == 1
