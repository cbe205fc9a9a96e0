"""The needle command end to end with the bundled model, and every kind of bad input.

Lengths are short so that two cores finish in a minute; the default grid is a matter of `make needle`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import retrieval_attn.cli as cli
from retrieval_attn.errors import (
    ConfigError,
    ContextLengthError,
    InputDataError,
    RetrievalAttentionError,
    RunFolderError,
)
from retrieval_attn.eval.needle import command as needle
from retrieval_attn.eval.needle.options import BUNDLED_MODEL, Options
from retrieval_attn.eval.needle.report import comparison_line, score, summarise
from retrieval_attn.eval.needle.text import NEEDLE
from retrieval_attn.eval.prompts import PromptFormat
from retrieval_attn.eval.runs import load_run

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = (BUNDLED_MODEL / "model.safetensors").exists()
needs_weights = pytest.mark.skipif(not WEIGHTS, reason="the bundled model's weights are not in this checkout")


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    needle.add_arguments(parser)
    return parser.parse_args(list(flags))


def prepare(*flags: str) -> needle.Test:
    return needle.Test.prepare(Options.of(parse("--methods", "full", *flags)))


@cache
def bundled_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))


# ---- flags -----------------------------------------------------------------------------------------


def test_flags_of_other_needle_tests_work() -> None:
    """Both spellings and the names of the published scripts must reach the same options."""
    ours = parse("--model", "m", "--lengths", "4k,8192", "--depths", "0,50", "--question", "q", "--haystack", "h")
    theirs = parse(
        "--model_name", "m", "--context_lengths", "[4096, 8192]", "--document_depth_percents", "[0, 50]",
        "--retrieval_question", "q", "--haystack_dir", "h",
    )  # fmt: skip
    assert Options.of(ours) == Options.of(theirs)
    assert Options.of(ours).lengths == (4096, 8192)
    assert parse("--final_context_length_buffer", "7").context_length_buffer == 7
    assert parse("--max_new_tokens", "9").max_new_tokens == parse("--max-new-tokens", "9").max_new_tokens == 9


def test_ranges() -> None:
    """Reference values of the published grid: linspace, and a sigmoid that keeps 0 and 100."""
    options = Options.of(
        parse(
            "--context-lengths-min", "1000", "--context-lengths-max", "2000", "--context-lengths-num-intervals", "3",
            "--document-depth-percent-intervals", "5", "--document-depth-percent-interval-type", "sigmoid",
        )
    )  # fmt: skip
    assert options.lengths == (1000, 1500, 2000)
    assert options.depths == (0.0, 7.586, 50.0, 92.414, 100.0)
    assert Options.of(parse("--document-depth-percent-intervals", "3")).depths == (0.0, 50.0, 100.0)
    assert len(Options.of(parse("--document-depth-percent-min", "0")).depths) == 35


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lengths", "4x"), "length '4x'"),
        (("--lengths", "0"), "length '0'"),
        (("--lengths", ","), "holds no length"),
        (("--lengths", "4k", "--context-lengths-min", "1k"), "exclude each other"),
        (("--context-lengths-min", "9k", "--context-lengths-max", "4k"), "min <= max"),
        (("--depths", "0,101"), "from 0 to 100"),
        (("--depths", "nan"), "from 0 to 100"),
        (("--depths", "-1"), "from 0 to 100"),
        (("--depths", "a"), "no list of percents"),
        (("--depths", "5", "--document-depth-percent-max", "50"), "exclude each other"),
        (("--methods", "full,streaming"), "'streaming' is unknown; choose from full, streaming_llm"),
        (("--methods", ""), "'nothing' is unknown"),
        (("--question-position", "before"), "choose from inside, after"),
        (("--needle", "It is hidden."), "needs --answer"),
        (("--needle", "{city} {nummer} {number}"), "unknown hole {nummer}"),
        (("--needle", " "), "--needle must hold a sentence"),
        (("--question", ""), "--question must hold"),
        (("--answer", ""), "needs --answer"),
        (("--retrieve", "many"), "no number of keys"),
        (("--rounds", "0"), "--rounds must be at least 1"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1"),
        (("--preset", "figure6"), "choose from figure5, figure7, figure8"),
        (("--needles", "0"), "a number from 1"),
        (("--needles", "[3]"), "JSON list of at least one sentence"),
        (("--needles", "2", "--needle", "a", "--needle", "b", "--needle", "c"), "less than the 3 sentences"),
        (("--needles", "2", "--needle", "Figs.", "--answer", "figs"), "same sentence twice"),
        (("--methods", "full", "--budget", "99"), "none of full has an option budget"),
        (("--method-option", "quest.pages=3"), "has no option pages"),
        (("--context-length-buffer", "-1"), "--context-length-buffer must be at least 0"),
    ],
)
def test_bad_flags(flags: tuple[str, ...], message: str) -> None:
    """Each must be one clear error, never an ignored option or a traceback."""
    with pytest.raises(ConfigError, match=message):
        Options.of(parse(*flags))


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (("--model", "./no/such/model"), InputDataError, "config.json"),
        (("--haystack", "/no/such/folder"), InputDataError, "found nothing there"),
        (("--lengths", "4k,262144"), ContextLengthError, "needs 262144 positions, .* has 131072"),
        (("--lengths", "64"), ConfigError, "length 64 is too short"),
        (("--lengths", "1k", "--needle", "word " * 1500 + "{number}."), ConfigError, "too short: needle 1"),
        (("--lengths", "1k", "--context-length-buffer", "1000"), ConfigError, "buffer 1000"),
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


def test_help_needs_no_heavy_import() -> None:
    """--help must be instant: fails as soon as someone imports torch, transformers or matplotlib at the top."""
    code = (
        "import sys, argparse; from retrieval_attn.eval import needle;"
        "needle.add_arguments(argparse.ArgumentParser());"
        "bad = {'torch', 'transformers', 'matplotlib', 'numba', 'faiss'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ---- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--context-length-buffer", "100", "--max-new-tokens", "64")])
def test_prompts_fill_the_requested_length(flags: tuple[str, ...]) -> None:
    """Between 99 % and 100 % of the length, question, template and answer included, and the ids are the text's own."""
    test = prepare("--lengths", "1k,2k,4k", "--depths", "0,33,50,100", "--rounds", "2", *flags)
    room = test.options.max_new_tokens + test.options.buffer
    tokenizer = bundled_tokenizer()
    for cell in test.cells:
        prompt, placed = test.prompt(cell)
        assert 0.99 * cell.length <= len(prompt) + room <= cell.length
        assert placed.depth <= cell.depth + 1e-9 and cell.depth - placed.depth < 4096 / cell.length * 2
        text = tokenizer.decode(prompt.ids.tolist())
        assert text.count(cell.needle) == 1 and text.endswith(f"\n\nQuestion: {cell.question}\nAnswer:")
        assert (placed.needle_start == 0) == (cell.depth == 0)
        assert (placed.needle_stop == len(placed.ids)) == (cell.depth == 100)
        again = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert abs(len(again) - len(prompt)) <= 2  # reading the text again gives (nearly) the same ids


def test_needles_differ_between_cells_but_not_between_runs() -> None:
    """A needle that never changes can be answered from memory; one that depends on the grid cannot be resumed."""
    small = {c.row_id("m", "p"): c for c in prepare("--lengths", "1k", "--depths", "50", "--rounds", "3").cells}
    large = {c.row_id("m", "p"): c for c in prepare("--lengths", "1k,2k", "--rounds", "3").cells}
    assert len({c.expected for c in large.values()}) == len(large) == 2 * 5 * 3
    assert set(small) < set(large) and all(large[i] == c for i, c in small.items())
    other = prepare("--lengths", "1k", "--depths", "50", "--rounds", "3", "--seed", "1").cells
    assert not {c.expected for c in other} & {c.expected for c in small.values()}
    for cell in large.values():
        assert cell.expected[0] in cell.needle and cell.expected[0] not in cell.question


def test_longer_grids_keep_the_prompts_of_shorter_ones() -> None:
    """Rows of a folder that grew must belong to the same prompts; the haystack is read further, not differently."""
    cells = ("--depths", "40", "--rounds", "2")
    short, long = prepare("--lengths", "1k", *cells), prepare("--lengths", "1k,8k", *cells)
    for a, b in zip(short.cells, long.cells, strict=False):
        if a.round == 0:
            assert short.prompt(a)[0].ids.tolist() == long.prompt(b)[0].ids.tolist()


def test_own_needle_question_and_answers() -> None:
    flags = (
        "--needle",
        "The door code of {city} is {number}.",
        "--question",
        "Code of {city}?",
        "--answer",
        "{number}",
    )
    cell = prepare("--lengths", "1k", *flags, "--answer", "{city}").cells[0]
    number, city = cell.expected
    assert cell.needle == f"The door code of {city} is {number}." and cell.question == f"Code of {city}?"


def test_several_needles_lie_between_the_depth_and_the_end() -> None:
    """One city, a number each, at d + i (100 - d) / n percent; the first cell's first number is that of one needle."""
    test = prepare("--lengths", "2k", "--depths", "20", "--needles", "4")
    cell = test.cells[0]
    prompt, placed = test.prompt(cell)
    assert len(cell.drawn.needles) == len(set(cell.expected)) == 4 and len(set(placed.depths)) == 4
    for wanted, reached in zip((20.0, 40.0, 60.0, 80.0), placed.depths, strict=True):
        assert reached <= wanted + 1e-9 and wanted - reached < 5
    text = bundled_tokenizer().decode(prompt.ids.tolist())
    at = [text.index(needle) for needle in cell.drawn.needles]
    assert at == sorted(at) and all(text.count(number) == 1 for number in cell.expected)
    assert 0.98 * cell.length <= len(prompt) + test.options.max_new_tokens <= cell.length
    assert test.options.max_new_tokens == 32 + 3 * 16
    assert prepare("--lengths", "2k", "--depths", "20").cells[0].expected == cell.expected[:1]


def test_own_needles_are_hidden_together(tmp_path: Path) -> None:
    """Sentences of one's own, by flag or as a JSON list; those whose places coincide stand side by side."""
    own = ("--question", "Which secrets?", "--answer", "figs", "--answer", "ham")
    flags = prepare("--lengths", "1k", "--depths", "100", "--needle", "One is figs.", "--needle", "One is ham.", *own)
    listed = prepare("--lengths", "1k", "--depths", "100", "--needles", '["One is figs.", "One is ham."]', *own)
    assert [c.drawn for c in flags.cells] == [c.drawn for c in listed.cells]
    prompt, placed = flags.prompt(flags.cells[0])
    assert placed.depths == (100.0, 100.0) and flags.cells[0].expected == ("figs", "ham")
    assert " One is figs. One is ham.\n\nQuestion" in bundled_tokenizer().decode(prompt.ids.tolist())
    assert isinstance(flags.settings()["needle"], list) and prepare("--lengths", "1k").settings()["needle"] == NEEDLE


def test_presets_are_the_papers_grids() -> None:
    """Lengths, depths and methods of the figures; what is given besides wins."""
    seven = Options.of(parse("--preset", "figure7"))
    assert seven.lengths == tuple(1 << i for i in range(12, 18)) and len(seven.depths) == 10 and seven.rounds == 3
    assert seven.methods == ("streaming_llm", "snapkv", "infllm", "flat", "ivf")
    assert seven.others["snapkv"] == {"budget": 2048} and seven.others["infllm"] == {"budget": 2688}
    assert Options.of(parse("--preset", "5")).methods == ("full", "retrieval")
    eight = Options.of(parse("--preset", "Figure 8", "--depths", "50", "--rounds", "2", "--methods", "flat"))
    assert eight.lengths[-1] == 1024000 and (eight.depths, eight.rounds, eight.methods) == ((50.0,), 2, ("flat",))
    ranged = Options.of(
        parse("--preset", "figure5", "--context-lengths-max", "8k", "--context-lengths-num-intervals", "2")
    )
    assert ranged.lengths == (1000, 8192)


def test_options_reach_every_method() -> None:
    """Shared ones go where they are known, a budget becomes keys of retrieval, a method's own stay with it."""
    flags = ("--methods", "all", "--budget", "740", "--method-option", "quest.page=8", "--append", "exact")
    options = Options.of(parse(*flags, "--method-option", "retrieval.inside=context", "--threads", "1"))
    assert options.retrieval == {"sink": 128, "window": 512, "retrieve": 100, "threads": 1}
    assert options.others["quest"] == {"budget": 740, "page": 8} and options.others["retrieval"] == {
        "inside": "context"
    }
    assert options.others["flat"] == {"append": "exact", "budget": 740, "threads": 1}
    assert options.given["flat"] == {"budget": 740, "threads": 1}
    assert Options.of(parse()).others == {} and Options.of(parse("--methods", "snapkv")).given == {"snapkv": {}}


def test_short_haystack_is_repeated_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The sky is blue. The grass is green. One plus one is two. " * 5)
    test = prepare("--lengths", "2k", "--haystack", str(tmp_path / "a.txt"))
    assert any("repeated" in note for note in test.notes)
    assert len(test.prompt(test.cells[0])[0]) > 1900


def test_answer_in_the_haystack_is_noted(tmp_path: Path) -> None:
    """A haystack that gives the answer away makes any method look good."""
    (tmp_path / "a.txt").write_text("Eat a sandwich in the park. " * 200)
    needle_flags = ("--needle", "The best thing is to eat a Sandwich.", "--answer", "sandwich")
    test = prepare("--lengths", "1k", "--haystack", str(tmp_path), *needle_flags)
    assert any("holds the expected answer" in note for note in test.notes)


class TestPromptFormat:
    """Special tokens: exactly one BOS if the tokenizer uses one, wherever the template leaves it."""

    @staticmethod
    def tokenizer(*, adds_bos: bool, template: str | None) -> Any:
        from tokenizers import processors

        made = bundled_tokenizer().__class__.from_pretrained(str(BUNDLED_MODEL))
        if adds_bos:
            made.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", made.bos_token_id), ("</s>", made.eos_token_id)]
            )
        made.chat_template = template
        return made

    @pytest.mark.parametrize("adds_bos", [False, True])
    @pytest.mark.parametrize(
        "template",
        [None, "<s>[{% for m in messages %}{{ m.content | trim }}{% endfor %}]", "[{{ messages[0].content }}]"],
    )
    def test_one_bos_and_no_eos(self, adds_bos: bool, template: str | None) -> None:
        made = self.tokenizer(adds_bos=adds_bos, template=template)
        form = PromptFormat.of(made)
        body = made("Some text.", add_special_tokens=False)["input_ids"]
        import numpy as np

        prompt = form.prompt(np.asarray(body), "Why?")
        ids = prompt.ids.tolist()
        wanted = adds_bos or (template or "").startswith("<s>")
        assert ids.count(made.bos_token_id) == wanted and made.eos_token_id not in ids
        assert not wanted or ids[0] == made.bos_token_id
        text = made.decode(ids).removeprefix("<s>").strip()
        assert text == ("Some text.\n\nQuestion: Why?\nAnswer:" if template is None else "[Some text.\n\nWhy?]")
        assert prompt.question_ids.tolist() == made(prompt.question_text, add_special_tokens=False)["input_ids"]

    def test_template_can_be_left_out(self) -> None:
        made = self.tokenizer(adds_bos=False, template="[{{ messages[0].content }}]")
        assert not PromptFormat.of(made, "never").chat

    def test_template_without_the_text_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="shows it 0 times"):
            PromptFormat.of(self.tokenizer(adds_bos=False, template="hello"))


# ---- scoring ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "response", "wanted"),
    [(["Abc"], "the aBC!", 1.0), (["a1", "b2"], "A1 only", 0.5), (["x"], "", 0.0), ([], "x", 0.0)],
)
def test_score(expected: list[str], response: str, wanted: float) -> None:
    assert score(expected, response) == wanted


def row(method: str, position: str, response: str, **other: Any) -> dict[str, Any]:
    length, depth = other.pop("length", 4096), other.pop("depth", 50.0)
    base = {
        "id": f"needle/{length}/{depth:g}/0/{method}/{position}", "method": method, "position": position,
        "length": length, "depth": depth, "round": 0, "response": response, "score": float("7" in response),
        "achieved_length": length, "achieved_depth": depth, "finish_reason": "stop", "seconds": {}, "error": None,
    }  # fmt: skip
    return {**base, **other}


def test_comparison_counts_text_and_score_apart() -> None:
    """Same score with other words is agreement in score only; cells with an error do not count at all."""
    rows = [
        row("full", "inside", " 7"), row("retrieval", "inside", " 7"),
        row("full", "after", " 7"), row("retrieval", "after", " It is 7"),
        row("full", "after", " 7", depth=0.0), row("retrieval", "after", "", depth=0.0),
        row("full", "after", " 7", depth=9.0), row("retrieval", "after", " 7", depth=9.0, error="broken"),
    ]  # fmt: skip
    assert comparison_line(rows) == (
        "retrieval equals full attention's answer in 1 of 3 cells"
        " (question inside 1 of 1, question after 0 of 2); same score in 2 of 3"
    )
    found = summarise(rows)
    assert found["methods"]["retrieval/after"] == {
        "n": 2, "mean_score": 0.5, "errors": 1, "empty_answers": 1, "stopped_by_length": 0,
        "mean_seconds": {"prefill": None, "index": None, "decode": None},
    }  # fmt: skip
    assert comparison_line(rows[:1]) == ""


# ---- runs ------------------------------------------------------------------------------------------


@needs_weights
def test_retrieval_finds_what_full_attention_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command on real weights.  2,048 tokens leave 1,400 between sink and window: without retrieval the
    needles at 33 and 66 % are gone.  Also the files, the table, and scoring again without a model."""
    folder = tmp_path / "run"
    flags = ["--lengths", "2k", "--depths", "0,33,66", "--output-dir", str(folder)]
    assert cli.main(["needle", *flags, "--save-contexts"]) == 0
    printed = capsys.readouterr().out
    config, rows = load_run(folder)
    assert len(rows) == 3 * 2 * 2 and config["settings"]["model"] == "needle_model"
    assert all(r["score"] == 1.0 and r["finish_reason"] == "stop" and r["error"] is None for r in rows)
    assert all(r["retrieval"]["keys_scanned"] > 0 for r in rows if r["method"] == "retrieval")
    assert "retrieval equals full attention's answer in 6 of 6 cells" in printed
    names = {"config.json", "contexts", "env.json", "heatmap.png", "predictions.jsonl", "summary.csv", "summary.json"}
    assert {p.name for p in folder.iterdir()} == names
    saved = json.loads((folder / "contexts" / "2048_33_0.json").read_text())["ids"]
    assert len(saved) == next(r["prompt_tokens"] for r in rows if r["depth"] == 33)

    before = (folder / "predictions.jsonl").read_bytes()
    (folder / "heatmap.png").unlink()
    (folder / "summary.csv").unlink()
    assert cli.main(["needle", "--score-only", str(folder)]) == 0
    assert "in 6 of 6 cells" in capsys.readouterr().out
    assert (folder / "heatmap.png").exists() and (folder / "summary.csv").read_text().count("\n") == 1 + 3 * 4
    assert (folder / "predictions.jsonl").read_bytes() == before

    with pytest.raises(RunFolderError, match="seed: 42 there, 7 here"):
        needle.run(parse(*flags, "--seed", "7"))
    assert cli.main(["needle", *flags, "--limit", "1"]) == 0  # all there: nothing is run, the report is made again
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
    assert len(found["full"]["needles"]) == 2 and found["streaming_llm"]["score"] < 1
    assert found["quest"]["retrieval"]["tokens_attended_per_step"] < 500
    summary = json.loads((folder / "summary.json").read_text())
    assert [panel["title"].split(",")[0] for panel in summary["panels"]] == ["full attention", "streaming_llm", "quest"]
    assert summary["against_full"]["quest"]["after"] == {"cells": 1, "same_text": 1, "same_score": 1}


@needs_weights
def test_an_index_that_finds_the_wrong_keys_loses_the_needle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cells with the least fitting keys must fail; else the test above proves nothing.  As the index is not
    the flat one, "inside" reads its own whole prompt here."""
    from retrieval_attn.index import FlatIndex, SearchResult, spec

    class Backwards(FlatIndex):
        kind = "backwards"

        @classmethod
        def search_heads(cls, indexes: Any, queries: Any, k: int, *, limit: int | None = None) -> SearchResult:
            return FlatIndex.search_heads(indexes, -queries, k, limit=limit)

    monkeypatch.setitem(spec._kinds, "backwards", Backwards)
    folder = tmp_path / "run"
    flags = ["--lengths", "2k", "--depths", "33,66", "--methods", "retrieval", "--index", "backwards"]
    assert needle.run(parse(*flags, "--output-dir", str(folder), "--no-plot")) == 0
    rows = load_run(folder)[1]
    assert len(rows) == 4 and not any(r["error"] for r in rows)
    assert sum(r["score"] for r in rows) == 0
    assert not (folder / "heatmap.png").exists()


@needs_weights
def test_a_failing_cell_is_recorded_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in one cell must not end the run, must not pass for an answer, and must make the exit code 1."""
    from retrieval_attn.eval.methods import FullAttention

    folder = tmp_path / "run"
    args = parse("--lengths", "1k", "--depths", "0,50", "--methods", "full", "--output-dir", str(folder), "--no-plot")
    real = FullAttention.answers
    calls = []

    def sometimes(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no room for 4 GiB")
        return real(self, *arguments)

    monkeypatch.setattr(FullAttention, "answers", sometimes)
    assert needle.run(args) == 1
    failed = [r for r in load_run(folder)[1] if r["error"]]
    assert [r["error"] for r in failed] == ["MemoryError: no room for 4 GiB"] * 2
    assert needle.run(args) == 0
    assert len(calls) == 3 and not any(r["error"] for r in load_run(folder)[1])


@needs_weights
def test_dry_run_writes_and_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from retrieval_attn.eval import methods

    def refuse(*_: Any) -> None:
        raise AssertionError("--dry-run loaded the weights")

    monkeypatch.setattr(methods, "load_model", refuse)
    folder = tmp_path / "run"
    assert needle.run(parse("--dry-run", "--lengths", "4k,128k", "--depths", "50", "--output-dir", str(folder))) == 0
    printed = capsys.readouterr().out
    assert not folder.exists()
    assert "8 answers" in printed and "131072" in printed and "320.0 MiB per context" in printed


@needs_weights
def test_kill_and_resume(tmp_path: Path) -> None:
    """kill -9 in the middle costs at most the cell in flight: rows before it stay byte for byte, and the second run
    makes the rest once."""
    folder = tmp_path / "run"
    depths = ",".join(str(d) for d in range(0, 60, 5))
    flags = ["--lengths", "1k", "--depths", depths, "--methods", "full", "--no-plot", "--output-dir", str(folder)]
    command = [sys.executable, "-m", "retrieval_attn.cli", "needle", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows_file = folder / "predictions.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if rows_file.exists() and rows_file.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.01)
    assert process.poll() is None, "the run ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows_file.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert 4 <= kept.count(b"\n") < 24

    assert needle.run(parse(*flags)) == 0
    after = rows_file.read_bytes()
    assert after.startswith(kept)
    ids = [json.loads(line)["id"] for line in after.splitlines()]
    assert len(ids) == len(set(ids)) == 24
    assert len(json.loads((folder / "env.json").read_text())) == 2
