"""Retrieval samples: exact fill, needles in place, token joins, and the bundled model answering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from retrieval_attn_eval.tasks import TASKS, Sample, make_sample, score


@pytest.fixture(scope="module")
def samples(tokenizer: Any) -> list[Sample]:
    return [make_sample(task, 4096, seed, tokenizer) for task in TASKS for seed in (0, 1)]


def test_fill_is_close_and_never_over(samples: list[Sample], tokenizer: Any) -> None:
    """1 % or one unit (a JSON pair or a sentence with two UUIDs) may be missing; never a token too many."""
    for sample in samples:
        used = len(tokenizer.encode(sample.prompt))
        assert used == sample.num_tokens
        total = used + sample.max_new_tokens
        assert 4096 - max(41, 52 if "uuid" in sample.task or sample.task == "niah_multikey_3" else 41) <= total
        assert total <= 4096, (sample.task, total)


def test_samples_are_deterministic_and_differ_by_seed(tokenizer: Any) -> None:
    for task in TASKS:
        first = make_sample(task, 1024, 3, tokenizer)
        assert first == make_sample(task, 1024, 3, lambda text: len(tokenizer.encode(text)))
        assert first.prompt != make_sample(task, 1024, 4, tokenizer).prompt


def test_answers_are_in_the_context_the_stated_times(samples: list[Sample]) -> None:
    """Once each; a pass key is said twice, a variable is assigned and then read by the next."""
    for sample in samples:
        counts = [sample.context.count(answer) for answer in sample.answers]
        expected = [1] * len(counts)
        if sample.task in ("passkey", "number_string"):
            expected = [2]
        if sample.task == "vt":
            expected = [2, 2, 2, 2, 1]
        assert counts == expected, sample.task
        assert sample.prompt == sample.context + sample.question
        if sample.task != "vt":
            assert not any(answer in sample.question for answer in sample.answers)


def test_score_counts_answers_and_ignores_case(samples: list[Sample]) -> None:
    for sample in samples:
        assert score(sample, sample.completion.upper()) == 1.0
        assert score(sample, "") == 0.0
    four = next(s for s in samples if s.task == "niah_multivalue")
    assert score(four, four.answers[0] + " and " + four.answers[2]) == 0.5


def test_depth_places_the_needle(tokenizer: Any) -> None:
    places = []
    for depth in (0.0, 0.5, 1.0):
        sample = make_sample("city_number", 2048, 5, tokenizer, depth=depth)
        places.append(sample.context.index(sample.answers[0]) / len(sample.context))
    assert places[0] < 0.02
    assert 0.4 < places[1] < 0.6
    assert places[2] > 0.97


def test_own_haystack_is_used_and_repeated(tokenizer: Any) -> None:
    sample = make_sample("city_number", 2048, 5, tokenizer, haystack="A short text. It has two sentences.")
    assert sample.context.count("It has two sentences.") > 50
    assert sample.num_tokens + sample.max_new_tokens > 2027


def test_unknown_task_and_too_small_target_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="unknown"):
        make_sample("riddle", 1024, 0, tokenizer)
    with pytest.raises(ValueError, match="too small"):
        make_sample("vt", 64, 0, tokenizer)


def test_joining_texts_never_changes_tokens(samples: list[Sample], tokenizer: Any) -> None:
    """Context and question are fed apart by the product, so their tokens must be the tokens of the whole."""
    for sample in samples:
        whole = tokenizer.encode(sample.prompt + sample.completion)
        parts = [sample.context, sample.question, sample.completion]
        assert sum((tokenizer.encode(part) for part in parts), []) == whole, sample.task
        assert tokenizer.decode(whole) == sample.prompt + sample.completion


def test_uuids_are_aligned_pairs_and_digits_are_single(tokenizer: Any) -> None:
    tokens = tokenizer.tokenize(" dead beef 0a1b2c3d-4e5f-4a6b-8c7d-deadbeef0123 1234567")
    assert tokens[-7:] == list("1234567")
    uuid = tokens[-28:-8]
    assert "".join(uuid) == "0a1b2c3d-4e5f-4a6b-8c7d-deadbeef0123"
    assert all(len(token) == 2 for token in uuid if token != "-")


def test_model_folder_is_small_and_complete(needle_model_path: Path) -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    files = [path for path in needle_model_path.iterdir() if path.is_file()]
    assert names | {"README.md"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= 12 * 10**6


@pytest.mark.parametrize("task", ["city_number", "niah_single_2", "passkey"])
def test_bundled_model_answers_at_2k(task: str, tokenizer: Any, needle_model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(needle_model_path, dtype=torch.float32, local_files_only=True)
    sample = make_sample(task, 2048, 0, tokenizer)
    ids = torch.tensor([tokenizer.encode(sample.prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=sample.max_new_tokens, do_sample=False
    )
    new = out[0, ids.shape[1] :].tolist()
    assert tokenizer.decode(new, skip_special_tokens=True) == sample.completion
    assert new[-1] == tokenizer.eos_token_id
