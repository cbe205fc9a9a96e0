"""Two real processes share a model by heads (transformers' tensor parallel): the same answers as one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from retrieval_attn.index.threads import share
from tests.model.tensor_parallel_ranks import RANKS, answers_of, ask, run_rank
from tests.tiny_models import QUESTION, build_model, needle_text, random_ids

SCRIPT = Path(run_rank.__code__.co_filename)
MODELS = ("llama", "qwen3", "gemma2")
TINY: dict[str, Any] = {"sink": 4, "window": 16, "retrieve": 6}
BUNDLED: dict[str, Any] = {"sink": 8, "window": 64, "retrieve": 50, "index": "flat"}
PROMPT, NEW = 150, 3


class Both:
    """What one process and each of the ranks found, by case."""

    def __init__(self, one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        self.one, self.ranks = one, ranks


def start_ranks(folder: Path, launcher: list[str]) -> list[list[dict[str, Any]]]:
    """Run the cases of `folder` on all ranks; the results of each."""
    done = subprocess.run([*launcher, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=240)
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("rank*.error")))
    assert done.returncode == 0, errors or done.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def make_cases(folder: Path, needle_model: Path) -> dict[str, dict[str, Any]]:
    """One case per tiny model, saved, and one of the bundled model."""
    ids = random_ids(1, PROMPT + NEW)[0].tolist()
    cases: dict[str, dict[str, Any]] = {}
    for name in MODELS:
        # the vocabulary is split too, and must be even
        build_model(name, vocab_size=98).save_pretrained(folder / name)
        cases[name] = {"model": str(folder / name), "ids": ids, "prompt": PROMPT, "config": TINY}
        # the whole of it for one model, the rest of them once in chunks and by graph
        first = name == MODELS[0]
        cases[name].update(chunks=[4096, 37] if first else [37], indexes=["flat", "roargraph"][not first :])
    cases["bundled"] = {"model": str(needle_model), "config": BUNDLED, "text": needle_text(3000), "question": QUESTION}
    return cases


def add_commands(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """A needle test as both ranks run it: one cell, full attention and retrieval, in a folder that has another cell."""
    flags = {"lengths": 500, "methods": "full,retrieval", "question-position": "after", "max-new-tokens": 8}
    flags |= {"window": 64, "sink": 8, "index": "flat", "output-dir": folder / "results"}
    words = [f"--{name}={value}" for name, value in flags.items()]
    for depth in (0, 50):
        cases[f"command at {depth}"] = {"command": ["needle", "--no-plot", *words, f"--depths={depth}"]}


def run_both(folder: Path, cases: dict[str, dict[str, Any]], launcher: list[str], device: str) -> dict[str, Both]:
    (folder / "cases.json").write_text(json.dumps(list(cases.values())))
    ranks = start_ranks(folder, launcher)
    together = {}
    for number, (name, case) in enumerate(cases.items()):
        if "command" in case:
            together[name] = Both({}, [found[number] for found in ranks])
            continue
        model: Any = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32).eval().to(device)
        one = ask(model, case) if "question" in case else answers_of(model, case)
        if "ids" in case:
            model.set_attn_implementation("eager")
            cache, ids = DynamicCache(config=model.config), torch.tensor([case["ids"]], device=device)
            with torch.no_grad():
                one["eager"] = model(input_ids=ids, past_key_values=cache).logits.cpu()
        together[name] = Both(one, [found[number] for found in ranks])
    return together


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def both(folder: Path, needle_model_path: Path) -> Iterator[dict[str, Both]]:
    """Two ranks on the CPU (gloo)."""
    built_for = torch.accelerator.current_accelerator(check_available=False)
    if built_for is not None:
        pytest.skip(f"transformers puts ranks of a PyTorch for {built_for} there; test_device_map.py tests those")
    cases = make_cases(folder, needle_model_path)
    add_commands(folder, cases)
    yield run_both(folder, cases, [sys.executable], "cpu")


def check_logits(found: Both, tolerance: float) -> None:
    for rank in found.ranks:
        for chunk, logits in rank["logits"].items():
            assert (logits - found.one["eager"]).abs().max() <= tolerance, chunk
            assert (logits - found.one["logits"][chunk]).abs().max() <= tolerance, chunk


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_over_all_keys_equal_one_process(both: dict[str, Both], name: str) -> None:
    """Every rank has the whole logits, equal to eager attention in one process: no head is lost or doubled."""
    check_logits(both[name], 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_one_process(both: dict[str, Both], name: str) -> None:
    """Six of 130 keys retrieved, by scan and by graph, a graph that trains on the rank's own query heads."""
    found = both[name]
    for rank in found.ranks:
        assert rank["tokens"] == found.one["tokens"]
    assert all(len(tokens) == 5 for tokens in found.one["tokens"].values())


@pytest.mark.parametrize("name", MODELS)
def test_each_rank_holds_its_own_heads_only(both: dict[str, Both], name: str) -> None:
    """Two key-value heads: one of them on each rank, and half of the bytes."""
    found = both[name]
    assert set(found.one["host_heads"]) == {2}
    for rank in found.ranks:
        assert rank["ranks"] == RANKS
        assert rank["host_heads"] == [1] * len(found.one["host_heads"])
        assert 2 * rank["host_bytes"] == found.one["host_bytes"]


def test_ranks_take_different_cores(both: dict[str, Both]) -> None:
    """A rank's workers are pinned inside its share of the cores, and are no more than that share has."""
    cores = sorted(os.sched_getaffinity(0))
    for number, rank in enumerate(both["llama"].ranks):
        ours = share(cores, len(cores), number, RANKS)
        assert set(rank["cpus"]) <= set(ours)
        assert rank["threads"] <= len(ours)


def test_every_rank_gives_the_same_answer(both: dict[str, Both]) -> None:
    """Context.read and ask on the bundled model, the answer behind the index; and the same words when sampling."""
    found = both["bundled"]
    assert "7391846" in found.one["text"]
    for rank in found.ranks:
        assert rank["text"] == found.one["text"]
        assert 2 * rank["host_bytes"] == found.one["host_bytes"]
    assert found.ranks[0]["sampled"] == found.ranks[1]["sampled"]


def test_a_command_in_several_processes_writes_once(both: dict[str, Both], folder: Path) -> None:
    """One row for each cell and method, also of the run that continues the folder; nothing is left of the others'."""
    for name in ("command at 0", "command at 50"):
        assert [rank["status"] for rank in both[name].ranks] == [0, 0]
        printed = [rank["printed"] for rank in both[name].ranks]
        assert "retrieval" in printed[0]
        assert not printed[1]
    rows = [json.loads(line) for line in (folder / "results" / "predictions.jsonl").read_text().splitlines()]
    assert sorted((row["method"], row["meta"]["depth"]) for row in rows) == [
        (method, depth) for method in ("full", "retrieval") for depth in (0, 50)
    ]
    assert not any(row.get("error") for row in rows)
    starts = json.loads((folder / "results" / "env.json").read_text())
    assert len(starts) == 2
