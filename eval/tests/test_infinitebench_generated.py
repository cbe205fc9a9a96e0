"""Generated InfiniteBench samples: right answers, exact fill, and each sample from its seed and number alone."""

from __future__ import annotations

import ast
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.infinitebench import InfiniteBench
from retrieval_attn_eval.infinitebench.catalogue import GENERATED
from retrieval_attn_eval.infinitebench.drafts import DRAFTS
from retrieval_attn_eval.infinitebench.functions import LAYERS, functions_of
from retrieval_attn_eval.infinitebench.profiles import PROFILES
from retrieval_attn_eval.infinitebench.record import Record
from retrieval_attn_eval.plans import NOISE_LINE
from retrieval_attn_eval.suite.sample import Row

few = settings(max_examples=40)
seeds = st.integers(min_value=0, max_value=2**31)
numbers = st.integers(min_value=0, max_value=2000)


def _greedy_tokenizer(merges: int) -> Any:
    """A tokenizer whose counts of parts do not add up: it merges what it likes, across words and lines."""
    from tokenizers import Tokenizer, models, trainers
    from transformers import PreTrainedTokenizerFast

    text = (NOISE_LINE + "\n") * 2 + ", ".join(str(n) for n in range(100)) + "def func_12(x):\n    return x + 3\n"
    inner = Tokenizer(models.BPE(unk_token="?"))
    trainer = trainers.BpeTrainer(
        vocab_size=merges, special_tokens=["?"], initial_alphabet=[chr(c) for c in range(32, 127)]
    )
    inner.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")


def _draft(task: str, seed: int, i: int, count: int) -> Record:
    draft = DRAFTS[task](task, seed, i)
    return draft.record(max(count, draft.least))


@few
@given(seeds, numbers, st.integers(min_value=1, max_value=80), st.sampled_from(["passkey", "number_string"]))
def test_a_hidden_number_stands_once_among_its_noise(seed: int, i: int, count: int, task: str) -> None:
    record = _draft(task, seed, i, count)
    (key,) = record.answers
    what = "pass key" if task == "passkey" else "sequence of digits"
    needle = f"The {what} is {key}. Remember it. {key} is the {what}.\n"
    assert record.context.count(needle) == 1 and record.context.count(key) == 2
    assert record.context.replace(needle, "") == (NOISE_LINE + "\n") * count
    assert record.question == f"What is the {what}?"
    assert len(key) == (5 if task == "passkey" else 10) and key.isdigit()
    if task == "number_string":  # five of its digits repeat the one beside them
        assert len(re.sub(r"(\d)\1+", r"\1", key)) <= 5


@few
@given(seeds, numbers, st.integers(min_value=2, max_value=60))
def test_key_value_samples_hold_the_pair_once(seed: int, i: int, count: int) -> None:
    record = _draft("kv_retrieval", seed, i, count)
    pairs = json.loads(record.context.removeprefix("JSON data:\n"))
    key = re.fullmatch(r'\nKey: "(.+)"\nThe value associated with the specified key is: ', record.question)
    assert key is not None and len(pairs) == count and pairs[key[1]] == record.answers[0]
    assert record.context.count(record.answers[0]) == 1 and record.context.count(key[1]) == 1


@few
@given(seeds, numbers, st.sampled_from([16, 61, 300, 301]))
def test_the_number_to_find_is_right(seed: int, i: int, count: int) -> None:
    """All seven questions; among 300 numbers the largest and the smallest occur more than once."""
    for number in range(i, i + 7):
        record = _draft("math_find", seed, number, count)
        values = ast.literal_eval(record.context)
        kind = re.search(r"The (.+) of the list is: ", record.question)
        assert kind is not None and len(values) == count and all(0 <= value <= 99 for value in values)
        ranked = sorted(set(values))
        expected = {
            "largest number": ranked[-1],
            "second largest number": ranked[-2],
            "third largest number": ranked[-3],
            "smallest number": ranked[0],
            "second smallest number": ranked[1],
            "third smallest number": ranked[2],
            "median number": statistics.median(values),
        }
        assert float(record.answers[0]) == expected[kind[1]]


@few
@given(seeds, numbers, st.integers(min_value=2, max_value=200))
def test_running_values_are_right_and_stay_in_range(seed: int, i: int, count: int) -> None:
    record = _draft("math_calc", seed, i, count)
    terms = re.fullmatch(r"(\d+)((?: [+-] \d+)+)", record.context)
    assert terms is not None
    value, found = int(terms[1]), []
    for sign, term in re.findall(r" ([+-]) (\d+)", terms[2]):
        value += int(term) if sign == "+" else -int(term)
        found.append(str(value))
        assert 0 <= value <= 99
    assert tuple(found) == record.answers and len(found) == count


@few
@given(seeds, numbers, st.integers(min_value=10, max_value=120))
def test_running_the_functions_gives_the_answer(seed: int, i: int, count: int) -> None:
    _, record = functions_of(seed, i, count)
    call = re.search(r"func_\d+\(-?\d+\)", record.question)
    assert call is not None and record.context.count("def ") == count
    assert record.context.count(f"def {call[0].split('(')[0]}(x)") == 1
    scope: dict[str, Any] = {}
    exec(record.context.split(":\n\n", 1)[1], scope)  # the context is a Python module; this one was made here
    assert str(eval(call[0], scope)) == record.answers[0]
    names = [int(name) for name in re.findall(r"def func_(\d+)", record.context)]
    assert names == sorted(set(names)) and record.meta["layers"] == LAYERS[i % len(LAYERS)]


@few
@given(seeds, numbers, st.sampled_from(list(DRAFTS)), st.integers(16, 40), st.integers(1, 40))
def test_a_longer_sample_begins_like_a_shorter_one(seed: int, i: int, task: str, count: int, more: int) -> None:
    """However many units are drawn at a time."""
    at_once, stepwise = DRAFTS[task](task, seed, i), DRAFTS[task](task, seed, i)
    for part in range(1, count + more + 1):
        stepwise.units(part)
    assert at_once.record(count + more) == stepwise.record(count + more)
    assert at_once.units(count) == stepwise.units(count + more)[:count]


def _prompt_tokens(suite: InfiniteBench, row: Row, tokenizer: Any) -> int:
    form = suite.form
    assert form is not None
    return len(form.head) + sum(
        len(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0
        for text in (row.context, row.question + form.tail + row.answer_prefix)
    )


@pytest.mark.parametrize("profile", list(PROFILES))
@pytest.mark.parametrize("length", [1024, 4000])
def test_rows_fill_their_length_from_below(profile: str, length: int, tokenizer: Any) -> None:
    """The count in the row is that of its text; at most 1 % or one unit (44 tokens of a pair) stays free."""
    suite = InfiniteBench(profile=profile)
    for task in suite.tasks():
        if profile == "official-chat" and task == "code_run" and length == 1024:
            continue  # half of the length is kept for the answer there
        for row in suite.rows(task, length, range(4), tokenizer, 1):
            tokens = _prompt_tokens(suite, row, tokenizer)
            assert tokens == row.meta["prompt_tokens"], row.id
            assert length - max(length // 100, 44) <= tokens + row.max_new_tokens <= length, row.id
            assert not row.meta["truncated"] and row.target_tokens == length


@pytest.mark.parametrize("merges", [150, 400])
def test_tokens_that_do_not_add_up_are_counted_as_a_whole(merges: int) -> None:
    """With the larger vocabulary a line of noise adds no token at all, which once made an endless loop."""
    tokenizer = _greedy_tokenizer(merges)
    suite = InfiniteBench(profile="official-completion")
    for task in ("passkey", "math_find", "code_run", "math_calc"):
        for row in suite.rows(task, 900, range(2), tokenizer, 1):
            tokens = _prompt_tokens(suite, row, tokenizer)
            assert tokens == row.meta["prompt_tokens"]
            assert 840 <= tokens + row.max_new_tokens <= 900, row.id


def test_a_row_depends_on_its_seed_and_number_alone(tokenizer: Any) -> None:
    for task in GENERATED:
        rows = list(InfiniteBench().rows(task, 1024, range(6), tokenizer, 5))
        again = list(InfiniteBench().rows(task, 1024, [4, 2], tokenizer, 5))
        assert again == [rows[4], rows[2]]
        other = next(InfiniteBench().rows(task, 1024, [4], tokenizer, 6))
        assert other.context != rows[4].context and other.id != rows[4].id
        assert len({row.id for row in rows}) == len({row.context for row in rows}) == 6


_DIGEST = """
import hashlib, sys
from retrieval_attn_eval.infinitebench.drafts import DRAFTS
from retrieval_attn_eval.infinitebench.functions import functions_of
records = [DRAFTS[task](task, 7, i).record(50) for task in DRAFTS for i in range(3)]
records += [functions_of(7, i, 50)[1] for i in range(3)]
digest = hashlib.sha256(repr(records).encode()).hexdigest()
"""


def test_another_process_makes_the_same_samples_without_torch() -> None:
    """Whatever its hash seed is."""
    here: dict[str, Any] = {}
    exec(_DIGEST, here)
    program = _DIGEST + "print(digest, 'torch' in sys.modules, 'transformers' in sys.modules)"
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [here["digest"], "False", "False"]


def test_places_and_kinds_are_even_from_the_start() -> None:
    """59 samples visit the 59 places of the published sweep, 500 the 500 of kv_retrieval, 7 all questions."""
    places = {_draft("passkey", 0, i, 58).meta["depth"] for i in range(59)}
    assert len(places) == 59 and min(places) == 0 and max(places) == 100
    first = sorted(_draft("passkey", 0, i, 58).meta["depth"] for i in range(10))
    assert all(b - a < 25 for a, b in zip([0, *first], [*first, 100], strict=True))
    records = [_draft("kv_retrieval", 0, i, 100) for i in range(50)]
    golds = [list(json.loads(r.context.removeprefix("JSON data:\n")).values()).index(r.answers[0]) for r in records]
    assert golds == [r.meta["depth"] for r in records]  # 100 pairs: the depth in percent is the pair's place
    for n in (10, 50):
        assert all(b - a < 300 / n for a, b in zip([0, *sorted(golds[:n])], [*sorted(golds[:n]), 100], strict=True))
    assert len({_draft("math_find", 0, i, 20).question for i in range(7)}) == 7


@pytest.mark.parametrize("task", GENERATED)
def test_a_length_too_short_says_how_much_more_is_needed(task: str, tokenizer: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"{task}: .*needs (\d+); give a length of at least \d+ tokens more"
    ) as error:
        list(InfiniteBench().rows(task, 100, [0], tokenizer, 0))
    more = int(re.findall(r"\d+", str(error.value))[-1])
    # half of a short length is kept for math_calc's answer, so there twice as much is needed
    assert list(InfiniteBench().rows(task, 100 + 3 * more, [0], tokenizer, 0))
    with pytest.raises(ConfigError, match="needs a length"):
        list(InfiniteBench().rows(task, None, [0], tokenizer, 0))


def test_a_task_that_cannot_be_generated_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="passkey, number_string, kv_retrieval, code_run, math_calc, math_find"):
        list(InfiniteBench().rows("longbook_qa_eng", 1024, [0], tokenizer, 0))
