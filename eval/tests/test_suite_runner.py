"""Runs of a suite: every sample once, whatever was killed, sharded or broken before; bad input refused at once."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.tests.shared import bundled_tokenizer, parsed
from eval.tests.toy_suite import ToySuite
from retrieval_attn.errors import ConfigError, ContextLengthError, InputDataError
from retrieval_attn_eval.baselines import Reply
from retrieval_attn_eval.models import BUNDLED_MODEL
from retrieval_attn_eval.prompts import Prompt, PromptFormat, Prompts
from retrieval_attn_eval.runs import RunFolderError
from retrieval_attn_eval.suite import Row, arguments
from retrieval_attn_eval.suite.runner import Selection, SuiteRun
from retrieval_attn_eval.suite.scoring import score_again

SETTINGS = {"suite": "toy", "model": "reader", "seed": 1, "dtype": "none", "device": "none"}
WEIGHTS = (BUNDLED_MODEL / "model.safetensors").exists()


class Reader:
    """A method without a model: it reads the prompt's text and repeats what follows the asked key's needle."""

    def __init__(self, name: str, stop_at: int | None = None, wrong: bool = False) -> None:
        self.name, self.stop_at, self.wrong = name, stop_at, wrong
        self.prompts: list[Prompt] = []
        self.released = 0

    def answers(self, prompt: Prompt, positions: Sequence[str], max_new_tokens: int) -> dict[str, Reply]:
        if self.stop_at is not None and len(self.prompts) >= self.stop_at:
            raise KeyboardInterrupt
        self.prompts.append(prompt)
        if self.wrong:
            raise RuntimeError("out of memory")
        text = bundled_tokenizer().decode(prompt.ids.tolist())
        key = re.findall(r"for (\S+) mentioned", text)[-1]
        found = re.findall(rf"for {key} is: (\S+)\.", text)
        seconds = {"prefill": 0.1, "index": 0.0, "decode": 0.2}
        return {p: Reply(f" {found[0]}", [1, 2], "stop", seconds) for p in positions}

    def release(self) -> None:
        self.released += 1


def make_run(suite: ToySuite | None = None, **options: Any) -> SuiteRun:
    chosen = {"tasks": ("niah_single_1",), "lengths": (500,), "n": 4, "seed": 1, **options}
    positions = chosen.pop("positions", ("inside", "after"))
    room = chosen.pop("max_positions", 131072)
    form = PromptFormat.of(bundled_tokenizer())
    return SuiteRun(suite or ToySuite(), Selection(**chosen), form, positions=positions, max_positions=room)


def ids_of(folder: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_every_sample_method_and_position_once(tmp_path: Path) -> None:
    """A second start of a finished run makes no row and asks nothing."""
    methods = {"a": Reader("a"), "b": Reader("b")}
    outcome = make_run().execute(methods, tmp_path, SETTINGS, progress=False)
    assert len(outcome.rows) == len(set(ids_of(tmp_path))) == 4 * 2 * 2
    assert outcome.errors == 0 and all(row["score"] == 1.0 for row in outcome.rows)
    suite, again = ToySuite(), Reader("a")
    make_run(suite).execute({"a": again, "b": again}, tmp_path, SETTINGS, progress=False)
    assert not again.prompts and not suite.made
    assert len(ids_of(tmp_path)) == 16


def test_methods_share_a_context_and_its_questions(tmp_path: Path) -> None:
    """While a context is there all methods ask all its questions; then, and only then, it is released."""
    order: list[tuple[str, int]] = []

    class Noted(Reader):
        def answers(self, prompt: Prompt, positions: Sequence[str], max_new_tokens: int) -> dict[str, Reply]:
            order.append((self.name, hash(prompt.context_ids.tobytes())))
            return super().answers(prompt, positions, max_new_tokens)

    methods = {"a": Noted("a"), "b": Noted("b")}
    make_run().execute(methods, tmp_path, SETTINGS, progress=False)
    assert [name for name, _ in order] == ["a", "a", "b", "b"] * 2
    assert len({context for _, context in order[:4]}) == 1 and order[4][1] != order[0][1]
    assert methods["a"].released == methods["b"].released == 2


def test_a_killed_run_continues(tmp_path: Path) -> None:
    """Interrupted in the middle of a context, with a torn last line: the rest is made, nothing twice, nothing lost."""
    with pytest.raises(KeyboardInterrupt):
        make_run().execute({"a": Reader("a", stop_at=3)}, tmp_path, SETTINGS, progress=False)
    file = tmp_path / "predictions.jsonl"
    kept = file.read_bytes()
    assert len(kept.splitlines()) == 6
    file.write_bytes(kept[:-10])  # the last answer's line was cut: it is dropped and made again
    second = Reader("a")
    make_run().execute({"a": second}, tmp_path, SETTINGS, progress=False)
    found = ids_of(tmp_path)
    assert len(found) == len(set(found)) == 8
    assert len(second.prompts) == 2
    assert file.read_bytes().startswith(kept[: kept[:-10].rfind(b"\n") + 1])


def test_errors_are_rows_and_tried_again(tmp_path: Path) -> None:
    """A failing method costs its own rows only; the next start repeats exactly those and no good one."""
    broken = Reader("b", wrong=True)
    outcome = make_run().execute({"a": Reader("a"), "b": broken}, tmp_path, SETTINGS, progress=False)
    failed = [row for row in outcome.rows if row["error"]]
    assert outcome.errors == len(failed) == 8 and {row["method"] for row in failed} == {"b"}
    assert failed[0]["error"] == "RuntimeError: out of memory" and "score" not in failed[0]
    assert broken.released == 4 + 2  # after every failure, and after every context
    good, repaired = Reader("a"), Reader("b")
    outcome = make_run().execute({"a": good, "b": repaired}, tmp_path, SETTINGS, progress=False)
    assert (outcome.errors, len(good.prompts), len(repaired.prompts)) == (0, 0, 4)
    assert len({row["id"] for row in outcome.rows}) == len(outcome.rows) == 16


def test_shards_partition_the_run_and_join_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three parts hold every sample once; scoring the folder above gives what one run gives."""
    whole = make_run(n=5).execute({"a": Reader("a")}, tmp_path / "whole", SETTINGS, progress=False)
    parts = [
        make_run(n=5, shard=(i, 3)).execute({"a": Reader("a")}, tmp_path / f"shard-{i}-of-3", SETTINGS, progress=False)
        for i in range(3)
    ]
    together = [row["id"] for part in parts for row in part.rows]
    assert sorted(together) == sorted(row["id"] for row in whole.rows) and len(set(together)) == 10
    assert score_again(tmp_path, ToySuite(), plot=False) == 0
    assert score_again(tmp_path / "whole", ToySuite(), plot=False) == 0
    assert (tmp_path / "summary.csv").read_text() == (tmp_path / "whole" / "summary.csv").read_text()
    assert "built-in prose" in capsys.readouterr().out


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    """Rows of another configuration must never be mixed in; nothing in the folder changes."""
    make_run(n=1).execute({"a": Reader("a")}, tmp_path, SETTINGS, progress=False)
    before = (tmp_path / "predictions.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="seed: 1 there, 2 here"):
        make_run(n=1).execute({"a": Reader("a")}, tmp_path, {**SETTINGS, "seed": 2}, progress=False)
    assert (tmp_path / "predictions.jsonl").read_bytes() == before


@pytest.mark.parametrize("lost", ["score", "task", "position"])
def test_rows_that_lack_a_field_are_named(tmp_path: Path, lost: str) -> None:
    """They ended the report of all others with a traceback."""
    make_run(n=1).execute({"a": Reader("a")}, tmp_path, SETTINGS, progress=False)
    path = tmp_path / "predictions.jsonl"
    first, *others = path.read_text().splitlines()
    row = json.loads(first)
    del row[lost]
    path.write_text("\n".join([json.dumps(row), *others]) + "\n")
    with pytest.raises(RunFolderError, match=f"the row '.*' lacks {lost}; remove it"):
        make_run(n=1).execute({"a": Reader("a")}, tmp_path, SETTINGS, progress=False)


def test_a_folder_can_grow(tmp_path: Path) -> None:
    """More samples, another task or method later: only the new answers are made."""
    make_run(n=2, positions=("inside",)).execute({"a": Reader("a")}, tmp_path, SETTINGS, progress=False)
    first, second = Reader("a"), Reader("b")
    make_run(n=3, positions=("inside",)).execute({"a": first, "b": second}, tmp_path, SETTINGS, progress=False)
    assert (len(first.prompts), len(second.prompts)) == (1, 3)


def test_two_rows_of_one_id_are_refused(tmp_path: Path) -> None:
    """A suite whose ids are not unique would count a sample twice or lose one."""

    class Same(ToySuite):
        def rows(self, *args: Any) -> Any:
            for row in super().rows(*args):
                yield Row.from_dict({**row.to_dict(), "id": "toy/same"})

    with pytest.raises(InputDataError, match="two rows have the id 'toy/same'"):
        make_run(Same()).execute({"a": Reader("a")}, tmp_path, SETTINGS, progress=False)


def test_files_bound_the_number_of_samples() -> None:
    """A file's own size bounds n."""
    assert [len(b.indices) for b in make_run(ToySuite(rows=3), n=None, lengths=(None,)).blocks] == [3]
    assert [b.indices for b in make_run(n=5, shard=(1, 2)).blocks] == [(2, 3, 4)]


@pytest.mark.parametrize(
    ("options", "problem", "words"),
    [
        ({"tasks": ("niah",)}, ConfigError, "'niah' is unknown in toy; choose from niah_single_1"),
        ({"n": None}, ConfigError, "say how many rows with --n"),
        ({"shard": (2, 2)}, ConfigError, "shard 2/2 does not exist"),
        ({"n": 1, "shard": (0, 4)}, ConfigError, "nothing to run"),
        ({"positions": ("before",)}, ConfigError, "'before' is unknown; choose from inside, after"),
        ({"lengths": (9000,), "max_positions": 8192}, ContextLengthError, "length 9000 needs 9000 positions"),
    ],
)
def test_bad_selections(options: dict[str, Any], problem: type[Exception], words: str) -> None:
    """Each is refused before a row is made, with what to do."""
    suite = ToySuite()
    with pytest.raises(problem, match=words):
        make_run(suite, **options)
    assert not suite.made


def test_file_rows_too_long_for_the_model_are_refused_before_anything_runs() -> None:
    """The third row alone is too long; it must be found without answering the first two."""
    suite = ToySuite(rows=3)
    with pytest.raises(ContextLengthError, match=r"positions \(template and 18 answer tokens included\)"):
        make_run(suite, n=None, lengths=(None,), max_positions=600).check_contexts()
    make_run(suite, n=None, lengths=(None,), max_positions=1000).check_contexts()


def test_prompt_ids(tmp_path: Path) -> None:
    """One BOS at the very start, template around the question, answer prefix after the assistant's header."""
    from transformers import AutoTokenizer

    chat = AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))
    chat.chat_template = "{% for m in messages %}<s>[U]{{ m['content'] }}[/U]{% endfor %}[A]"
    form = PromptFormat.of(chat)
    row = Row("id", "t", "One. Two.", "\nWhat?", " It is", ("x",), 4, None)
    prompt = Prompts(form).of(row)
    assert chat.decode(prompt.ids.tolist()) == "<s>[U]One. Two.\nWhat?[/U][A] It is"
    cut = Row.from_dict(row.to_dict())
    with_ids = Row(**{**vars(cut), "context_ids": [5, 6, 7]})
    assert Prompts(form).of(with_ids).context_ids.tolist() == [*form.head, 5, 6, 7]
    assert np.array_equal(Prompts(form).of(with_ids).question_ids, prompt.question_ids)


def parse(*flags: str) -> argparse.Namespace:
    return parsed(arguments, *flags, lengths="500", n=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--methods", "full,magic"), "'magic' is unknown; choose from full"),
        (("--tasks", "x"), "--tasks 'x'"),
        (("--shard", "3/2"), "--shard '3/2' does not exist"),
        (("--shard", "0/2"), "--shard needs --output-dir"),
        (("--n", "0"), "--n must be at least 1"),
        (("--lengths", "4x"), "'4x' is not a number of tokens"),
        (("--method-option", "page=16"), "METHOD.KEY=VALUE"),
        (("--method-option", "quest.pages=16"), "method quest has no option pages; its options: budget"),
        (("--methods", "full", "--retrieve", "5"), "none of full has an option retrieve"),
    ],
)
def test_bad_flags(flags: tuple[str, ...], words: str) -> None:
    """One line that names the flag and what to give instead, before a tokenizer is loaded."""
    with pytest.raises(ConfigError, match=words):
        arguments.run(parse(*flags), ToySuite())


def test_method_options() -> None:
    """Shared flags reach every method, METHOD.KEY its own; values are JSON where they can be."""
    given = parse("--retrieve", "40", "--sink", "4", "--index", "flat", "--method-option", "quest.page=32")
    found = arguments.Options.of(given, ToySuite()).method_options
    assert found == {"all": {"sink": 4, "retrieve": 40}, "retrieval": {"index": "flat"}, "quest": {"page": 32}}
    for names in ("full, retrieval_tail", "all"):
        found = arguments.Options.of(parse("--index", "flat", "--methods", names), ToySuite()).method_options
        assert found["retrieval_tail"] == {"index": "flat"}


def test_dry_run_counts_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """True token counts, fill and a cost, without weights and without writing anything."""
    assert arguments.run(parse("--dry-run", "--tasks", "niah_single_1"), ToySuite()) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.strip().startswith("niah_single_1"))
    assert line.split()[1:3] == ["500", "2"] and 400 < int(line.split()[3]) < 500
    assert "2 samples, 8 answers" in shown and "KiB" in shown or "MiB" in shown


@pytest.mark.skipif(not WEIGHTS, reason="the bundled model's weights are not in this checkout")
def test_the_bundled_model_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags to report with real methods: answers are right, files are there, scoring again changes nothing."""
    out = tmp_path / "run"
    flags = ("--tasks", "niah_single_1", "--n", "1", "--output-dir", str(out), "--question-position", "after")
    assert arguments.run(parse(*flags, "--methods", "full,retrieval"), ToySuite()) == 0
    rows = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert [(row["method"], row["score"], row["finish_reason"]) for row in rows] == [
        ("full", 1.0, "stop"),
        ("retrieval", 1.0, "stop"),
    ]
    assert rows[0]["response"].strip() == rows[0]["answers"][0]
    names = {"summary.json", "summary.csv", "summary.md", "by_length.png", "by_task.png", "config.json", "env.json"}
    assert names <= {path.name for path in out.iterdir()}
    before = (out / "summary.json").read_text()
    (out / "summary.json").unlink()
    assert arguments.run(parse("--score-only", str(out)), ToySuite()) == 0
    assert (out / "summary.json").read_text() == before
    assert "| full |" in capsys.readouterr().out
