"""The decode step as a real CUDA graph: equal to eager decoding, captured once, constant memory, errors, Ctrl-C."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.errors import CaptureError
from retrieval_attn.offload.threads import IDLE_SECONDS
from retrieval_attn.runner.decode import DecodeSteps
from tests.runner.graph_cases import CASES, CONFIG, MODELS, NEW, Decoded, broken_search, decoder_of, idle_decoders
from tests.runner.test_decode_graph import Counting
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _float32_is_float32(fresh_decoders: None, small_graphs: None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def on_device(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of the tiny model on the GPU, retrieving."""
    return ra.enable(copy.deepcopy(tiny_model(name)).to("cuda", dtype), CONFIG)


@pytest.mark.parametrize("name", MODELS)
def test_replays_equal_eager_decoding(name: str) -> None:
    """float32, across spills."""
    model = on_device(name)
    eager = Decoded(model, False)
    graphed = Decoded(model, "auto")
    if graphed.steps.reason:
        assert name in ("gpt_oss", "qwen3_moe"), graphed.steps.reason  # experts may look at values on the CPU
        pytest.skip(f"eager: {graphed.steps.reason}")
    assert graphed.difference(eager) <= 2e-5
    assert graphed.decoder.captures == 1 and graphed.decoder.replays == NEW


@pytest.mark.parametrize("case", CASES)
def test_batches_and_options_equal_eager_decoding(case: str) -> None:
    model = on_device("llama")
    eager, graphed = Decoded(model, False, **CASES[case]), Decoded(model, True, **CASES[case])
    assert graphed.difference(eager) <= 2e-5


def test_bfloat16_is_as_close_as_rounding() -> None:
    """bf16 replays against float32 logits: at most twice the error of eager bf16 (same tokens fed)."""
    exact = Decoded(on_device("llama"), False, new=1)
    model = on_device("llama", torch.bfloat16)
    eager, graphed = Decoded(model, False, new=1), Decoded(model, True, new=1)
    rounding = (eager.logits[1].float() - exact.logits[1]).abs().max()
    assert (graphed.logits[1].float() - exact.logits[1]).abs().max() <= 2 * rounding


def test_thousands_of_tokens_in_constant_memory() -> None:
    """2,000 replays of one capture; host threads and device memory as after the first hundred."""
    model = on_device("llama")
    decoded = Decoded(model, True, new=100)
    steps = DecodeSteps(model, decoded.cache, True)
    gc.collect()  # models of earlier tests lie in cycles: what they hold must not be freed between the two looks
    time.sleep(2 * IDLE_SECONDS)  # a reading's threads end when they have had nothing to do for so long
    seen = []
    with torch.no_grad():
        for token in range(2000):
            place = torch.tensor([decoded.cache.get_seq_length()], device="cuda")
            logits = steps.step(torch.tensor([3 + token % 90], device="cuda"), place, None)
            assert bool(torch.isfinite(logits).all())
            steps.confirm()
            if token in (100, 1999):
                torch.cuda.synchronize()
                seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), threading.active_count()))
    decoder = decoder_of(steps)
    steps.close()
    assert seen[0] == seen[1]
    assert decoder.captures == 1 and decoder.replays == 2100 and decoder is decoded.decoder


@torch.no_grad()
def test_an_error_of_a_search_names_its_layer() -> None:
    """A search that fails inside the graph; the same graph goes on when it works again."""
    broken_search(on_device("llama"), True)


def test_a_step_that_synchronises_runs_eagerly_and_breaks_nothing() -> None:
    """The failed capture leaves no stream capturing; the next model is captured all the same."""
    model = on_device("llama")
    model.model.layers[1].mlp = Counting(model.model.layers[1].mlp, reads=True)
    with pytest.raises(CaptureError, match="cannot run as a graph"):
        Decoded(model, True, new=2)
    eager = Decoded(model, "auto", new=3)
    assert eager.steps.reason and eager.difference(Decoded(model, False, new=3)) <= 2e-5
    torch.multinomial(torch.ones(4, device="cuda"), 1)  # the generator of random numbers knows that it is over
    other = on_device("qwen3")
    assert Decoded(other, True).difference(Decoded(other, False)) <= 2e-5


def test_contexts_decode_by_graphs_unless_told_otherwise(needle_model_path: Path) -> None:
    """LLM and Context.ask: the same answer with and without; no question captures anything."""
    llm = ra.LLM(needle_model_path, device="cuda", config=ra.Config(prefill_chunk=4096))
    vocabulary = llm.model.config.vocab_size
    ids = torch.randint(3, vocabulary, (8192,), generator=torch.Generator().manual_seed(1)).tolist()
    context = llm.read(ids, progress=False)
    (decoder,) = idle_decoders(llm.model)
    assert decoder.captures == decoder.replays == 1  # while reading
    first = context.ask("What is the number?", max_new_tokens=40)
    replays = decoder.replays - 1
    assert replays > 0 and context.ask("What is the number?", max_new_tokens=40).tokens == first.tokens
    assert decoder.captures == 1 and decoder.replays == 1 + 2 * replays


INTERRUPTED = """
import threading, torch, sys
from tests.runner.test_decode_graph_cuda import on_device, Decoded
model = on_device("llama")
model.config.max_position_embeddings = 10**9
Decoded(model, True, new=10)
threads = threading.active_count()
print("ready", flush=True)
try:
    Decoded(model, True, new=10**6)
except KeyboardInterrupt:
    torch.cuda.synchronize()
    import gc; gc.collect()
    assert threading.active_count() == threads, threading.enumerate()
    after = Decoded(model, True, new=10)
    assert after.difference(Decoded(model, False, new=10)) <= 2e-5
    print("interrupted", flush=True)
"""


def test_an_interrupt_ends_a_running_graph() -> None:
    """SIGINT while replays run: no hang, no thread left over, and the model decodes on."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        if line.strip() == "ready":
            break
        printed.append(line)
    else:
        pytest.fail("".join(printed))
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "interrupted" in output, output
