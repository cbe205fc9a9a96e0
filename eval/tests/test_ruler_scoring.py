"""RULER's scoring rule, aggregates and prompts against hand-made cases."""

from __future__ import annotations

import math
import random

import pytest

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.plans import make_plan
from retrieval_attn_eval.ruler import RulerSuite, specs
from retrieval_attn_eval.ruler.scoring import aggregate, clean, is_null, match_all, match_part
from retrieval_attn_eval.suite.sample import Row


@pytest.mark.parametrize(
    ("prediction", "references", "all_of", "part_of"),
    [
        ("the numbers are 1234567 and 7654321.", ["1234567", "7654321"], 1.0, 1.0),
        ("only 1234567", ["1234567", "7654321"], 0.5, 1.0),
        ("nothing", ["1234567"], 0.0, 0.0),
        ("DENVER Broncos", ["denver broncos", "The Denver Broncos", "Broncos"], 2 / 3, 1.0),
        ("12345678", ["1234567"], 1.0, 1.0),  # substrings count, as in the original
        ("", ["x"], 0.0, 0.0),
        ("a\x00b", ["a\nb"], 1.0, 1.0),  # a control character is a line break
        ("a\tb", ["a\tb"], 0.0, 0.0),  # and the reference keeps its own
    ],
)
def test_match(prediction: str, references: list[str], all_of: float, part_of: float) -> None:
    assert match_all(prediction, references) == pytest.approx(all_of)
    assert match_part(prediction, references) == part_of


def test_lower_case_is_not_case_folding() -> None:
    assert match_all("STRASSE", ["straße"]) == 0.0


def test_control_characters_and_nulls() -> None:
    assert clean(" \x1fanswer\x07\x7f ") == "answer\n\x7f"
    assert [is_null(text) for text in ("", "  \n", "\x00\x01", ".", "\x7f")] == [True, True, True, False, False]


def _row(task: str, *answers: str) -> Row:
    return Row("r/0", task, "", "", "", answers, 8, None)


def test_questions_need_one_reference_and_other_tasks_all() -> None:
    suite = RulerSuite()
    for task in ("qa_1", "qa_2", "qa_synth_1", "qa_synth_2"):
        assert suite.score(_row(task, "one", "two"), "One") == 1.0
    for task in ("niah_multivalue", "vt", "cwe", "fwe"):
        assert suite.score(_row(task, "one", "two"), "One") == 0.5


def test_weighted_averages_of_a_published_row() -> None:
    """The paper prints 95.5 and 96.1 for these six means of Gemini-1.5-Pro."""
    printed = dict(zip(specs.LENGTHS, (96.7, 95.8, 96.0, 95.9, 95.9, 94.4), strict=True))
    found = aggregate({length: {"a": mean / 100} for length, mean in printed.items()})
    assert found.wavg_inc == pytest.approx(95.51, abs=0.005)
    assert found.wavg_dec == pytest.approx(96.05, abs=0.005)
    assert found.effective == found.effective_paper_002 == 131072


def test_effective_length_and_its_two_thresholds() -> None:
    scores = {4096: {"a": 1.0, "b": 0.9}, 8192: {"a": 0.86, "b": 0.842}, 16384: {"a": 0.2, "b": 0.3}, 32768: {}}
    found = aggregate(scores)
    assert found.means == {4096: pytest.approx(95.0), 8192: pytest.approx(85.1), 16384: pytest.approx(25.0)}
    assert (found.effective, found.effective_paper_002, found.same_tasks) == (4096, 8192, True)
    assert aggregate({4096: {"a": 0.1}}).effective is None
    assert not aggregate({4096: {"a": 0.1}, 8192: {"b": 0.1}}).same_tasks
    with pytest.raises(ValueError, match="at least one length"):
        aggregate({4096: {}})


def test_summary_says_when_tasks_are_missing() -> None:
    suite = RulerSuite()
    lines = "\n".join(suite.summary({4096: {"vt": 0.9}, 8192: {"vt": 0.5}}))
    assert "wAvg (inc) 63.33, wAvg (dec) 76.67" in lines
    assert "effective length 4096 (mean >= 85.6)" in lines and "not the 13 tasks" in lines
    assert "not the 13 tasks" not in "\n".join(suite.summary({4096: dict.fromkeys(specs.TASKS, 0.9)}))


def test_budgets_of_a_round_of_samples() -> None:
    assert sum(specs.SPECS[task].max_new_tokens for task in specs.TASKS) == 1288
    assert [specs.SPECS[task].part for task in specs.TASKS].count(True) == 2


@pytest.mark.parametrize("task", [task for task in specs.TASKS if task.startswith("niah")])
def test_needle_prompts_are_those_the_bundled_model_knows(task: str) -> None:
    options = specs.SPECS[task].options
    plan = make_plan(task, random.Random(5))
    many = int(options["queries"]) * int(options["values"]) > 1
    noun = str(options["value"])[: None if many else -1]
    words = {"noun": noun, "some": "Some" if many else "A", "verb": "are" if many else "is"}
    assert plan.instruction == specs.NIAH_INSTRUCTION.format(**words)
    asked = plan.questions[0].text.split(f"{noun} for ")[1].split(" mentioned")[0]
    words |= {"what": "What are all" if many else "What is", "query": asked}
    assert plan.questions[0].text == (specs.NIAH_QUESTION + specs.NIAH_PREFIX).format(**words)
    key = asked.split(", ")[0]
    mine = specs.NEEDLE.format(values=options["value"], key=key, value=plan.questions[0].answers[0])
    assert mine in plan.needles


def test_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'niah' is unknown; choose from niah_single_1, .*, qa_synth_2"):
        specs.spec_of("niah")
    assert math.isclose(len(specs.TASKS), 13)
