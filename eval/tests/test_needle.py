"""The needle suite and its command with the bundled model; what all suites share is tested in test_suite_*.

Lengths are short so that two cores finish in a minute; the default grid is a matter of `make needle`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import retrieval_attn.cli as cli
from eval.tests.shared import bundled_tokenizer, parsed
from retrieval_attn.errors import ConfigError, ContextLengthError, InputDataError, RetrievalAttentionError
from retrieval_attn_eval.models import BUNDLED_MODEL
from retrieval_attn_eval.needle import command as needle
from retrieval_attn_eval.needle.report import agreement_lines, panels_of
from retrieval_attn_eval.needle.suite import NeedleSuite
from retrieval_attn_eval.needle.text import NEEDLE
from retrieval_attn_eval.prompts import Prompts, frame
from retrieval_attn_eval.runs import RunFolderError, load_run
from retrieval_attn_eval.suite import Row, tables
from retrieval_attn_eval.suite.arguments import Options
from retrieval_attn_eval.suite.runner import Selection, SuiteRun
from tests.preloaded import CLI, PreloadedProcess

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = (BUNDLED_MODEL / "model.safetensors").exists()
needs_weights = pytest.mark.skipif(not WEIGHTS, reason="the bundled model's weights are not in this checkout")


def parse(*flags: str) -> argparse.Namespace:
    return parsed(needle, *flags)


def asked(*flags: str) -> tuple[NeedleSuite, Options]:
    args = parse(*flags)
    suite = needle.suite_of(args)
    return suite, Options.of(args, suite)


def rows_of(*flags: str) -> tuple[NeedleSuite, list[Row]]:
    suite, options = asked("--methods", "full", *flags)
    form = frame(suite, bundled_tokenizer(), "auto")
    run = SuiteRun(suite, Selection(options.tasks, options.lengths, options.n, options.seed), form)
    return suite, [row for block in run.blocks for _, row in run.rows(block)]


def ids_of(suite: NeedleSuite, row: Row) -> list[int]:
    assert suite.form is not None
    return list(Prompts(suite.form).of(row).ids.tolist())


# ---- flags -----------------------------------------------------------------------------------------


def test_flags_of_other_needle_tests_work() -> None:
    """Both spellings and the names of the published scripts must reach the same options."""
    ours = asked("--model", "m", "--lengths", "4k,8192", "--depths", "0,50", "--question", "q")
    theirs = asked(
        "--model_name", "m", "--context_lengths", "[4096, 8192]", "--depths", "[0, 50]",
        "--retrieval_question", "q",
    )  # fmt: skip
    assert ours[1] == theirs[1] and ours[0].fingerprint() == theirs[0].fingerprint()
    assert ours[1].lengths == (4096, 8192) and ours[1].tasks == ("0%", "50%")
    assert parse("--max_new_tokens", "9").max_new_tokens == parse("--max-new-tokens", "9").max_new_tokens == 9
    assert parse("--haystack_dir", "h").haystack == "h"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lengths", "4x"), "--lengths='4x' is not a number of tokens"),
        (("--lengths", ","), "holds no length"),
        (("--depths", "0,101"), "from 0 to 100"),
        (("--depths", "nan"), "from 0 to 100"),
        (("--depths", "-1"), "from 0 to 100"),
        (("--depths", "a"), "no list of percents"),
        (("--needle", "It is hidden."), "needs --answer"),
        (("--needle", "{city} {nummer} {number}"), "unknown hole {nummer}"),
        (("--needle", " "), "--needle must hold a sentence"),
        (("--question", ""), "--question must hold"),
        (("--answer", ""), "needs --answer"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1"),
        (("--preset", "figure6"), "choose from figure5, figure7, figure8"),
        (("--needles", "0"), "a number from 1"),
        (("--needles", "[3]"), "JSON list of at least one sentence"),
        (("--needles", "2", "--needle", "a", "--needle", "b", "--needle", "c"), "less than the 3 sentences"),
        (("--needles", "2", "--needle", "Figs.", "--answer", "figs"), "same sentence twice"),
        (("--methods", "streaming"), "'streaming' is unknown; choose from full, streaming_llm"),
        (("--n", "0"), "--n must be at least 1"),
    ],
)
def test_bad_flags(flags: tuple[str, ...], message: str) -> None:
    """Each must be one clear error, never an ignored option or a traceback."""
    with pytest.raises(ConfigError, match=message):
        asked(*flags)


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (("--model", "./no/such/model"), InputDataError, "config.json"),
        (("--haystack", "/no/such/folder"), InputDataError, "found nothing there"),
        (("--lengths", "4k,262144"), ContextLengthError, "needs 262144 positions, .* has 131072"),
        (("--lengths", "64"), ConfigError, "length 64 is too short"),
        (("--lengths", "1k", "--needle", "word " * 1500 + "{number}."), ConfigError, "too short: needle 1"),
        (("--methods", "retrieval", "--retrieve", "0"), ConfigError, "retrieve"),
        (("--methods", "retrieval", "--window", "-1"), ConfigError, "window"),
        (("--methods", "retrieval", "--index", "magic"), ConfigError, "index='magic' is not a known kind"),
    ],
)
def test_bad_input_leaves_nothing_behind(
    tmp_path: Path, flags: tuple[str, ...], error: type[RetrievalAttentionError], message: str
) -> None:
    """Everything is checked before the results folder is made."""
    folder = tmp_path / "run"
    with pytest.raises(error, match=message):
        needle.run(parse("--output-dir", str(folder), *flags))
    assert not folder.exists()


def test_empty_haystack_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the program itself: one line on stderr and exit code 2."""
    (tmp_path / "a.txt").write_text("\n")
    code = cli.main(["needle", "--haystack", str(tmp_path), "--output-dir", str(tmp_path / "run")])
    captured = capsys.readouterr()
    assert code == 2 and not (tmp_path / "run").exists()
    assert captured.err.count("\n") == 1 and "only empty documents" in captured.err


def test_presets_are_the_papers_grids() -> None:
    """Lengths, depths and methods of the figures; what is given besides wins."""
    _, seven = asked("--preset", "figure7")
    assert seven.lengths == tuple(1 << i for i in range(12, 18)) and len(seven.tasks) == 10 and seven.n == 3
    assert seven.methods == ("streaming_llm", "snapkv", "infllm", "flat", "ivf")
    assert seven.method_options["snapkv"] == {"budget": 2048} and seven.method_options["infllm"] == {"budget": 2688}
    assert asked("--preset", "5")[1].methods == ("full", "retrieval")
    _, eight = asked("--preset", "Figure 8", "--depths", "50", "--n", "2", "--methods", "flat")
    assert eight.lengths[-1] == 1024000 and (eight.tasks, eight.n, eight.methods) == (("50%",), 2, ("flat",))
    assert asked("--preset", "figure5", "--lengths", "1000,8k")[1].lengths == (1000, 8192)


def test_options_of_methods() -> None:
    """As for every suite, but for two: retrieval chooses its index, and full attention keeps no context."""
    _, options = asked("--budget", "740", "--method-option", "full.keep_context=true")
    assert options.method_options == {
        "all": {"budget": 740}, "full": {"keep_context": True}, "retrieval": {"index": "auto"},
    }  # fmt: skip
    assert asked("--index", "flat")[1].method_options["retrieval"] == {"index": "flat"}
    assert asked()[1].method_options["full"] == {"keep_context": False}


# ---- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--max-new-tokens", "164")])
def test_prompts_fill_the_requested_length(flags: tuple[str, ...]) -> None:
    """Between 99 % and 100 % of the length, question, template and answer included, and the ids are the text's own."""
    suite, rows = rows_of("--lengths", "1k,2k,4k", "--depths", "0,33,50,100", "--n", "2", *flags)
    tokenizer = bundled_tokenizer()
    for row in rows:
        ids, meta, length = ids_of(suite, row), row.meta, row.target_tokens
        assert length is not None and meta["prompt_tokens"] == len(ids)
        assert 0.99 * length <= len(ids) + row.max_new_tokens <= length
        assert meta["achieved_depth"] <= meta["depth"] + 1e-9
        assert meta["depth"] - meta["achieved_depth"] < 4096 / length * 2
        text = tokenizer.decode(ids)
        assert text.count(meta["needles"][0]) == 1 and text.endswith(f"\n\nQuestion: {meta['asked']}\nAnswer:")
        assert row.context in text and row.context.startswith(meta["needles"][0]) == (meta["depth"] == 0)
        assert (meta["needle_token"] == 0) == (meta["depth"] == 0)
        assert row.context.endswith(meta["needles"][0]) == (meta["depth"] == 100)
        again = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert abs(len(again) - len(ids)) <= 2  # reading the text again gives (nearly) the same ids


def test_needles_differ_between_cells_but_not_between_runs() -> None:
    """A needle that never changes can be answered from memory; one that depends on the grid cannot be resumed."""
    small = {row.id: row.answers for row in rows_of("--lengths", "1k", "--depths", "50", "--n", "3")[1]}
    large = {row.id: row.answers for row in rows_of("--lengths", "1k,2k", "--n", "3")[1]}
    assert len(set(large.values())) == len(large) == 2 * 5 * 3
    assert set(small) < set(large) and all(large[i] == answers for i, answers in small.items())
    other = rows_of("--lengths", "1k", "--depths", "50", "--n", "3", "--seed", "1")[1]
    assert not {row.answers for row in other} & set(small.values())


def test_longer_grids_keep_the_prompts_of_shorter_ones() -> None:
    """Rows of a folder that grew must belong to the same prompts; the haystack is read further, not differently."""
    (short, (first, *_)), (long, (same, *_)) = (rows_of("--lengths", n, "--depths", "40") for n in ("1k", "1k,8k"))
    assert ids_of(short, first) == ids_of(long, same)


def test_own_needle_question_and_answers() -> None:
    """The holes are filled alike in all three."""
    own = ("--needle", "The door code of {city} is {number}.", "--question", "Code of {city}?")
    row = rows_of("--lengths", "1k", *own, "--answer", "{number}", "--answer", "{city}")[1][0]
    number, city = row.answers
    assert row.meta["needles"] == [f"The door code of {city} is {number}."]
    assert row.question == f"\n\nQuestion: Code of {city}?\nAnswer:"


def test_several_needles_lie_between_the_depth_and_the_end() -> None:
    """One city, a number each, at d + i (100 - d) / n percent; the first cell's first number is that of one needle."""
    suite, (row,) = rows_of("--lengths", "2k", "--depths", "20", "--needles", "4")
    reached = row.meta["achieved_depths"]
    assert len(row.meta["needles"]) == len(set(row.answers)) == 4 and len(set(reached)) == 4
    for wanted, found in zip((20.0, 40.0, 60.0, 80.0), reached, strict=True):
        assert found <= wanted + 1e-9 and wanted - found < 5
    ids = ids_of(suite, row)
    text = bundled_tokenizer().decode(ids)
    at = [text.index(needle) for needle in row.meta["needles"]]
    assert at == sorted(at) and all(text.count(number) == 1 for number in row.answers)
    assert 0.98 * 2048 <= len(ids) + row.max_new_tokens <= 2048
    assert row.max_new_tokens == 32 + 3 * 16
    assert rows_of("--lengths", "2k", "--depths", "20")[1][0].answers == row.answers[:1]


def test_own_needles_are_hidden_together() -> None:
    """Sentences of one's own, by flag or as a JSON list; those whose places coincide stand side by side."""
    own = ("--lengths", "1k", "--depths", "100", "--question", "Which secrets?", "--answer", "figs", "--answer", "ham")
    suite, (by_flag,) = rows_of("--needle", "One is figs.", "--needle", "One is ham.", *own)
    _, (listed,) = rows_of("--needles", '["One is figs.", "One is ham."]', *own)
    assert by_flag == listed and by_flag.answers == ("figs", "ham")
    assert by_flag.meta["achieved_depths"] == [100.0, 100.0]
    assert " One is figs. One is ham.\n\nQuestion" in bundled_tokenizer().decode(ids_of(suite, by_flag))
    assert isinstance(suite.fingerprint()["needle"], list) and NeedleSuite().fingerprint()["needle"] == NEEDLE


def test_short_haystack_is_repeated_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The sky is blue. The grass is green. One plus one is two. " * 5)
    suite, rows = rows_of("--lengths", "2k", "--haystack", str(tmp_path / "a.txt"))
    assert any("repeated" in note for note in suite.notes)
    assert rows[0].meta["prompt_tokens"] > 1900


def test_answer_in_the_haystack_is_noted(tmp_path: Path) -> None:
    """A haystack that gives the answer away makes any method look good."""
    (tmp_path / "a.txt").write_text("Eat a sandwich in the park. " * 200)
    own = ("--needle", "The best thing is to eat a Sandwich.", "--answer", "sandwich")
    suite, _ = rows_of("--lengths", "1k", "--haystack", str(tmp_path), *own)
    assert any("holds the expected answer" in note for note in suite.notes)


# ---- scoring and report ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "response", "wanted"),
    [(("Abc",), "the aBC!", 1.0), (("a1", "b2"), "A1 only", 0.5), (("x",), "", 0.0), ((), "x", 0.0)],
)
def test_score(expected: tuple[str, ...], response: str, wanted: float) -> None:
    assert NeedleSuite().score(Row("id", "0%", "", "", "", expected, 1, None), response) == wanted


def answer(method: str, position: str, response: str, depth: float = 50.0, error: str | None = None) -> dict[str, Any]:
    return {
        "method": method, "position": position, "task": f"{depth:g}%", "length": 4096, "index": 0, "error": error,
        "response": response, "score": float("7" in response), "output_tokens": 1, "finish_reason": "stop",
        "seconds": {},
    }  # fmt: skip


ANSWERS = [
    answer("full", "inside", " 7"), answer("retrieval", "inside", " 7"),
    answer("full", "after", " 7"), answer("retrieval", "after", " It is 7"),
    answer("full", "after", " 7", 0), answer("retrieval", "after", "", 0),
    answer("full", "after", " 7", 9), answer("retrieval", "after", " 7", 9, error="broken"),
]  # fmt: skip


def test_agreement_counts_text_and_score_apart() -> None:
    """Same score with other words is agreement in score only; cells with an error do not count at all."""
    assert agreement_lines(tables.agreement(ANSWERS)) == [
        "retrieval equals full attention's answer in 1 of 3 cells"
        " (question inside 1 of 1, question after 0 of 2); same score in 2 of 3"
    ]
    assert agreement_lines(tables.agreement(ANSWERS[:1])) == []


def test_panels_show_every_cell_once() -> None:
    """Depths ascend, what was not answered is empty; full attention is shown once where its positions agree."""
    cells = tables.cells(ANSWERS, ("50%",), ("full", "retrieval"))
    found = {panel.title: panel for panel in panels_of(cells)}
    assert found["retrieval, question after the context"].scores == ((0.0,), (None,), (1.0,))
    assert found["retrieval, question after the context"].depths == (0.0, 9.0, 50.0)
    assert len(found) == 3  # one cell inside, three after: two panels of full attention under one title
    once = panels_of(tables.cells([*ANSWERS[:2], *ANSWERS[2:4]], (), ()))
    assert [panel.title.split(",")[0] for panel in once] == ["full attention", "retrieval", "retrieval"]


# ---- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, str, str]:
    """Flags, folder, output and error output of the whole command on real weights.  2,048 tokens leave 1,400 between
    sink and window: without retrieval the needle at 50 % is gone."""
    folder = tmp_path_factory.mktemp("needle") / "run"
    flags = ["--lengths", "2k", "--depths", "0,50", "--output-dir", str(folder)]
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert cli.main(["needle", *flags]) == 0
    return flags, folder, out.getvalue(), err.getvalue()


@needs_weights
def test_retrieval_finds_what_full_attention_finds(
    finished: tuple[list[str], Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the files, the table, and scoring again without a model."""
    flags, folder, printed, _ = finished
    config, rows = load_run(folder)
    assert len(rows) == 2 * 2 * 2 and config["settings"]["model"] == "bundled"
    assert all(r["score"] == 1.0 and r["finish_reason"] == "stop" and r["error"] is None for r in rows)
    assert all(r["stats"]["keys_scanned"] > 0 for r in rows if r["method"] == "retrieval")
    assert "retrieval equals full attention's answer in 4 of 4 cells" in printed
    names = {"config.json", "env.json", "heatmap.png", "predictions.jsonl"}
    assert {p.name for p in folder.iterdir()} == names | {"summary.csv", "summary.json", "summary.md"}

    before = (folder / "predictions.jsonl").read_bytes()
    (folder / "heatmap.png").unlink()
    (folder / "summary.csv").unlink()
    assert cli.main(["needle", "--score-only", str(folder)]) == 0
    assert "in 4 of 4 cells" in capsys.readouterr().out
    assert (folder / "heatmap.png").exists() and (folder / "summary.csv").read_text().count("\n") == 1 + 2 * 4
    assert (folder / "predictions.jsonl").read_bytes() == before

    with pytest.raises(RunFolderError, match="seed: 42 there, 7 here"):
        needle.run(parse(*flags, "--seed", "7"))
    assert cli.main(["needle", *flags]) == 0  # all there: nothing is run, the report is made again
    assert (folder / "predictions.jsonl").read_bytes() == before


@needs_weights
def test_any_method_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two needles, three methods: full attention and pages find both, a window of 248 tokens not all."""
    folder = tmp_path / "run"
    flags = ["--lengths", "800", "--depths", "20", "--needles", "2", "--methods", "streaming_llm,quest,full"]
    flags += ["--budget", "256", "--method-option", "streaming_llm.sink=8", "--question-position", "after"]
    assert cli.main(["needle", *flags, "--no-plot", "--output-dir", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "quest equals full attention's answer in 1 of 1 cells" in out and "streaming_llm equals" in out
    found = {row["method"]: row for row in load_run(folder)[1]}
    assert [found[name]["score"] for name in ("full", "quest")] == [1.0, 1.0]
    assert len(found["full"]["meta"]["needles"]) == 2 and found["streaming_llm"]["score"] < 1
    assert found["quest"]["stats"]["tokens_attended_per_step"] < 500
    summary = json.loads((folder / "summary.json").read_text())
    assert [panel.title.split(",")[0] for panel in panels_of(summary["cells"])] == [
        "full attention", "streaming_llm", "quest",
    ]  # fmt: skip
    assert summary["agreement"]["quest"]["after"] == {"answers": 1, "same_text": 1, "same_score": 1}


@needs_weights
def test_an_index_that_finds_the_wrong_keys_loses_the_needle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cells with the least fitting keys must fail; else the test above proves nothing.  As the index is not
    the flat one, "inside" reads its own whole prompt here."""
    from retrieval_attn.index import KeyIndex, spec
    from retrieval_attn.index.base import KindFacts
    from retrieval_attn.testing import StoredKeys, called_search, to_float32

    class Backwards(KeyIndex):
        kind = "backwards"

        def __init__(self, keys: StoredKeys) -> None:
            self._keys = keys

        @classmethod
        def build(cls, keys: Any, fmt: Any, options: Any, training: Any) -> Any:
            return cls(StoredKeys(keys, fmt))

        def insert(self, keys: Any) -> None:
            self._keys.add(keys)

        def task(self, request: Any) -> Any:
            def worst(queries: Any, limit: int, threads: int) -> Any:
                scores = queries @ to_float32(self._keys.whole[:limit], request.fmt).T
                return scores.argsort(axis=1)[:, : request.k], scores.size

            return called_search(request, self._keys.head_dim, request.k, worst)

    monkeypatch.setitem(spec._kinds, "backwards", (Backwards, KindFacts()))
    folder = tmp_path / "run"
    flags = ["--lengths", "2k", "--depths", "50", "--methods", "retrieval", "--index", "backwards"]
    assert needle.run(parse(*flags, "--output-dir", str(folder), "--no-plot")) == 0
    rows = load_run(folder)[1]
    assert len(rows) == 2 and not any(r["error"] for r in rows)
    assert sum(r["score"] for r in rows) == 0
    assert not (folder / "heatmap.png").exists()


@needs_weights
def test_the_end_says_what_was_shown(
    finished: tuple[list[str], Path, str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Progress in words, the share of tokens attended, the time, the heatmap, and commands that work as printed."""
    _, folder, printed, progress = finished
    assert "full, retrieval" in progress.splitlines()[0], "the first line comes before anything is loaded"
    assert "0 of 8 answers" in progress
    counts = r"retrieval attended to \d+ of 2,048 tokens \([\d.]+ %\) for each generated token"
    assert re.search(counts, printed)
    assert f"heatmap: {folder / 'heatmap.png'}" in printed and re.search(r"time: \d+ min \d+ s", printed)
    made, ask = re.findall(r"^\(yes .*$|^\S*retrieval-attn ask .*$", printed, re.MULTILINE)
    subprocess.run(["bash", "-c", made], cwd=tmp_path, check=True, timeout=60)
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(ask)[1:]) == 0
    assert capsys.readouterr().out.strip() == "7391846"


def test_progress_names_depths_in_words() -> None:
    assert NeedleSuite(depths=(0.0, 12.5)).label("12.5%") == "depth 12.5 %"


def test_dry_run_shows_depths(capsys: pytest.CaptureFixture[str]) -> None:
    """What the grid reaches and costs, without weights."""
    assert needle.run(parse("--dry-run", "--lengths", "4k,128k", "--depths", "50")) == 0
    printed = capsys.readouterr().out
    assert "8 answers" in printed and "131072" in printed and "depth reached 49.9%" in printed
    assert "319.92 MiB per context" in printed


@needs_weights
def test_kill_and_resume(tmp_path: Path) -> None:
    """kill -9 in the middle costs at most the cell in flight: rows before it stay byte for byte, and the second run
    makes the rest once."""
    folder = tmp_path / "run"
    depths = ",".join(str(d) for d in range(0, 80, 10))
    flags = ["--lengths", "512", "--depths", depths, "--methods", "full", "--no-plot", "--output-dir", str(folder)]
    with open(os.devnull, "w") as nothing:
        files = {1: nothing.fileno(), 2: nothing.fileno()}
        process = PreloadedProcess([*CLI, "needle", *flags], os.environ, ROOT, files)
    rows_file = folder / "predictions.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if rows_file.exists() and rows_file.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.01)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.close()
    before = rows_file.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert 4 <= kept.count(b"\n") < 16

    assert needle.run(parse(*flags)) == 0
    after = rows_file.read_bytes()
    assert after.startswith(kept)
    ids = [json.loads(line)["id"] for line in after.splitlines()]
    assert len(ids) == len(set(ids)) == 16
    assert len(json.loads((folder / "env.json").read_text())) == 2
