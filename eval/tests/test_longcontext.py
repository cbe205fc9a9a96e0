"""The long-context forms: answers recomputed from the text, scores of right and wrong answers, published files."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eval.tests.shared import bundled_tokenizer, parsed
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn_eval.longcontext import command
from retrieval_attn_eval.longcontext.files import FILES
from retrieval_attn_eval.longcontext.scoring import SCORERS
from retrieval_attn_eval.longcontext.suite import GENERATED, SPECS, LongContextSuite
from retrieval_attn_eval.prompts import PromptFormat
from retrieval_attn_eval.suite.sample import Row

LENGTH = 4096
SEEDS = 4
RECORDS = '{"k": "a", "v": "1"}', '{"k": "b", "v": "2"}'


def made(task: str, count: int = SEEDS, suite: LongContextSuite | None = None) -> list[Row]:
    suite = suite or LongContextSuite()
    suite.form = PromptFormat.of(bundled_tokenizer(), "never")
    return list(suite.rows(task, LENGTH, range(count), bundled_tokenizer(), 42))


def whole_answer(row: Row) -> str:
    """The answer of a perfect model."""
    single = SPECS[row.task].family in ("mrcr", "oolong_number", "oolong_label")
    return row.answers[0] if single else f"{', '.join(row.answers)}]"


@pytest.mark.parametrize("task", GENERATED)
def test_rows_fill_their_length_and_the_truth_scores_one(task: str) -> None:
    rows = made(task)
    assert len({row.prompt for row in rows}) == SEEDS
    assert [row.prompt for row in made(task)] == [row.prompt for row in rows], "the same in every run"
    for row in rows:
        used = len(bundled_tokenizer()(row.prompt)["input_ids"]) + row.max_new_tokens
        assert 0.95 * LENGTH <= used <= LENGTH
        answer = whole_answer(row)
        assert len(bundled_tokenizer()(answer, add_special_tokens=False)["input_ids"]) <= row.max_new_tokens
        suite = LongContextSuite()
        assert suite.score(row, f" {answer}") == 1.0
        assert suite.score(row, "") < 0.1
        assert suite.score(row, answer[: len(answer) // 3] + "#") < 0.9


@pytest.mark.parametrize("needles", [2, 4, 8])
def test_mrcr_asks_for_one_of_identical_requests(needles: int) -> None:
    for row in made(f"mrcr_{needles}"):
        turns = re.findall(r"User: Write a (.+) about (\w+)\.\nAssistant: (.+)", row.context)
        found = re.search(r"Prepend (\w{10}) to the (\d)\w\w \(1 indexed\) (.+) about (\w+)\. Do not", row.question)
        assert found is not None and row.answer_prefix.endswith(found[1])
        same = [text for kind, topic, text in turns if (kind, topic) == (found[3], found[4])]
        assert len(same) == needles and len(set(same)) == needles
        assert row.answers == (same[int(found[2]) - 1],)
        others = Counter((kind == found[3], topic == found[4]) for kind, topic, _ in turns)
        assert others[True, False] and others[False, True], "some turns share the kind, some the topic"


@pytest.mark.parametrize("operation", ["bfs", "parents"])
def test_graphs_have_the_answer_that_a_search_finds(operation: str) -> None:
    for row in made(f"graphwalks_{operation}", 8):
        edges = re.findall(r"(\w+) -> (\w+)", row.context.partition("The graph has these edges:")[2])
        found = re.search(r"node (\w+)", row.question)
        assert found is not None
        if operation == "parents":
            truth = {first for first, second in edges if second == found[1]}
        else:
            near = {second for first, second in edges if first == found[1]}
            truth = {second for first, second in edges if first in near} - near - {found[1]}
        assert set(row.answers) == truth and 1 <= len(truth) <= 6


def test_oolong_answers_are_counts_of_the_text() -> None:
    for task in ("oolong_count", "oolong_user", "oolong_most"):
        for row in made(task, 8):
            items = re.findall(r"User: (\d+) \|\| Item: .+ \|\| Label: (\w+)", row.context)
            labels = Counter(label for _, label in items)
            assert len(items) == row.meta["items"] > 20
            if task == "oolong_most":
                assert set(row.answers) == {one for one in labels if labels[one] == max(labels.values())}
                continue
            named = re.search(r"(?:label|user) (\w+)\?", row.question)
            assert named is not None
            counted = Counter(user for user, _ in items) if task == "oolong_user" else labels
            assert row.answers == (str(counted[named[1]]),)


def test_extraction_fields_are_in_the_text() -> None:
    for row in made("text2json_4"):
        for answer in row.answers:
            record = json.loads(answer)
            (line,) = [line for line in row.context.split("\n") if record["parcel"] in line]
            assert all(value in line for value in record.values())


@pytest.mark.parametrize(
    ("family", "text", "answers", "score"),
    [
        ("mrcr", "abcd\nUser: more", ("abcd",), 1.0),
        ("mrcr", "ab", ("abcd",), 2 * 2 / 6),
        ("graphwalks", "a, b]", ("a", "b", "c"), 0.8),
        ("graphwalks", "I think.\nFinal Answer: [a, x]", ("a",), 2 / 3),
        ("graphwalks", "]", (), 1.0),
        ("oolong_number", " 12 items", ("10",), 0.75**2),
        ("oolong_number", "1,000", ("1000",), 1.0),
        ("oolong_number", "none", ("0",), 0.0),
        ("oolong_label", " Sport.", ("sport", "travel"), 1.0),
        ("oolong_label", "not sport", ("sport",), 0.0),
        ("text2json", '{"k": "a", "v": "1"}, {"k": "b", "v": "3"}]', RECORDS, 0.5),
        ("text2json", '{"k": "a", "v": "1"}, {"k": "b', RECORDS, 0.5),
        ("longbench", "B)", ("B",), 1.0),
        ("longbench", "Well. The correct answer is (C).", ("C",), 1.0),
        ("longbench", "Because", ("B",), 0.0),
        ("nolima", "It is yuki", ("Yuki",), 1.0),
        ("helmet", "Lyon", ("Paris", "City of Light"), 0.0),
    ],
)  # fmt: skip
def test_scores(family: str, text: str, answers: tuple[str, ...], score: float) -> None:
    assert SCORERS[family](text, answers) == pytest.approx(score)


def published(folder: Path) -> dict[str, Any]:
    """Write small files with the published fields. Return their records."""
    long_text = "".join(f"Sentence number {n} says nothing of use. " for n in range(2000))
    choice = {f"choice_{letter}": f"the {letter}" for letter in "ABCD"}
    records: dict[str, Any] = {
        "longbench_v2": [
            {"_id": "1", "context": long_text, "question": "Which?", **choice, "answer": "B"},
            {"_id": "2", "context": "Short.", "question": "Which?", **choice, "answer": "D"},
        ],
        "helmet": [
            {"question": "Who?", "answers": ["Ann", "Anna"], "ctxs": [{"title": "T", "text": "Ann did it."}]},
            {"question": "key1", "answer": "value1", "context": '{"key1": "value1"}'},
        ],
        "nolima": [
            {
                "needle": "Actually, {CHAR} lives next to the {1}.",
                "questions": {"onehop": "Which character has been to {2}?"},
                "character_set": ["Yuki", "Stuart"],
                "tests": {"T1": {"input_args": ["opera house", "Dresden"]}, "T2": {"input_args": ["tower", "Pisa"]}},
            }
        ],
    }
    for task, found in records.items():
        lines = "\n".join(map(json.dumps, found)) if FILES[task].endswith("jsonl") else json.dumps(found)
        (folder / FILES[task]).write_text(lines, encoding="utf-8")
    return records


def test_files_become_rows(tmp_path: Path) -> None:
    published(tmp_path)
    suite = LongContextSuite(tmp_path)
    assert suite.tasks() == (*GENERATED, "longbench_v2", "helmet", "nolima")
    assert [suite.count(task) for task in FILES] == [2, 2, 2] and suite.count("mrcr_2") is None
    cut, short = made("longbench_v2", 2, suite)
    used = len(bundled_tokenizer()(cut.prompt)["input_ids"]) + cut.max_new_tokens
    assert cut.meta["truncated"] and 0.98 * LENGTH <= used <= LENGTH
    assert not short.meta["truncated"] and short.answers == ("D",) and "(D) the D" in short.question
    documents, pairs = made("helmet", 2, suite)
    assert documents.context.endswith("Document (Title: T): Ann did it.") and documents.answers == ("Ann", "Anna")
    assert '{"key1": "value1"}' in pairs.context and suite.score(pairs, "value1") == 1.0
    for row, place, known in zip(made("nolima", 2, suite), ("opera house", "tower"), ("Dresden", "Pisa"), strict=True):
        assert f"Actually, {row.answers[0]} lives next to the {place}." in row.context and known in row.question
        assert row.answers[0] in ("Yuki", "Stuart") and "{" not in row.context + row.question


def test_bad_files_and_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"needed one of longbench_v2\.json"):
        LongContextSuite(tmp_path)
    with pytest.raises(ConfigError, match=r"helmet needs helmet\.jsonl"):
        LongContextSuite().available("helmet")
    (tmp_path / FILES["helmet"]).write_text('{"question": "Who?"}')
    with pytest.raises(InputDataError, match="record 1: needed the published fields"):
        LongContextSuite(tmp_path)
    (tmp_path / FILES["helmet"]).write_text("{")
    with pytest.raises(InputDataError, match="needed a JSON list or JSON lines"):
        LongContextSuite(tmp_path)


def test_the_command_shows_what_it_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tasks", "mrcr_2,oolong_most", "--lengths", "2k", "--n", "1", "--device", "cpu", "--dry-run")
    assert command.run(parsed(command, *flags)) == 0
    told = capsys.readouterr().out
    assert "mrcr_2" in told and "oolong_most" in told
