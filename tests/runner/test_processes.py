"""What a program does around this package: its own threads' numbers, forks, copies and files of whole models."""

from __future__ import annotations

import copy
import gc
import io
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.runner.prefill import wrapped_chunk
from tests.preloaded import run_preloaded
from tests.tiny_models import build_model, random_ids

CONFIG = ra.Config(sink=4, window=16, retrieve=10)


def test_counts_of_threads_and_a_fork(needle_model_path: Path) -> None:
    """Reading leaves torch the number of threads it had (Numba's OpenMP set its own), and a process that is forked
    after it gets an error (it waited for threads that it does not have for ever).
    """
    program = f"""
        import os, sys, torch
        torch.set_num_threads(1)
        import retrieval_attn as ra
        llm = ra.LLM({str(needle_model_path)!r}, device="cpu", sink=8, window=64, retrieve=20)
        context = llm.read("The sky is blue. " * 60, progress=False)
        answer = context.ask("Who?", max_new_tokens=4)
        print("threads", torch.get_num_threads())
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            for use in (lambda: context.ask("Who?", max_new_tokens=4), lambda: llm.read("Who?"), context.fork):
                try:
                    use()
                except ra.BackendError as error:
                    print("child:", error)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        print("same", context.ask("Who?", max_new_tokens=4).tokens == answer.tokens)
    """
    done = run_preloaded(["-c", textwrap.dedent(program)])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "threads 1" and lines[-1] == "same True"
    assert len(lines) == 5
    assert all("was forked from a process whose threads had computed" in line for line in lines[1:4])


def generated(model: Any) -> list[int]:
    ids = random_ids(1, 600)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0)
    return [int(token) for token in out[0, 600:]]


@pytest.mark.parametrize("way", ["deepcopy", "file"])
def test_an_enabled_model_is_copied_and_saved_whole(way: str) -> None:
    """With its options and wrapped layers, which belong to the copy from then on; files raised a TypeError."""
    model = ra.enable(build_model("llama"), CONFIG, prefill_chunk=300)
    expected = generated(model)
    if way == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    del model
    gc.collect()  # the copy's layers looked at the model that they were copied from
    assert wrapped_chunk(other) == 300
    assert generated(other) == expected
    ra.disable(other)
    assert wrapped_chunk(other) is None and other.config._attn_implementation == "eager"
    assert generated(other) == generated(build_model("llama"))
