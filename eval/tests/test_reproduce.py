"""The paper's numbers as data, the commands that are run for them, and what is shown beside them."""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eval.tests.shared import parsed
from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.reproduce import EXPERIMENTS, command, compare
from retrieval_attn_eval.reproduce.experiments import Size, Step
from retrieval_attn_eval.reproduce.paper import CLAIMS, SLIPS, TABLES

# ---- the paper's numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, paper in TABLES.items() if "Avg." in paper.columns])
def test_averages_are_right_but_for_the_known_slips(name: str) -> None:
    """A wrong digit in the transcription, or an unlisted slip of the paper, moves an average."""
    paper = TABLES[name]
    digits = 2 if name == "table3" else 1
    for model, rows in paper.rows.items():
        for method, cells in rows.items():
            for choice in (0, 1):
                numbers = [c[choice] if isinstance(c, tuple) else c for c in cells]
                values = [float(v) for v in numbers if isinstance(v, int | float)]
                average = sum(values[:-1]) / (len(values) - 1)
                slip = SLIPS.get((name, model, method, "Avg."))
                expected = values[-1] if slip is None else slip
                assert abs(average - expected) <= 0.51 * 10**-digits + 1e-9, (model, method, average)


def test_every_slip_is_one() -> None:
    """A listed slip must differ from what is printed, or the note beside the cell would be wrong."""
    for (name, model, method, column), right in SLIPS.items():
        printed = compare._paper_cell(TABLES[name], model, method, column)
        assert isinstance(printed, float) and abs(printed - right) > 0.02


def test_parts_of_table_5_add_up() -> None:
    for cells in TABLES["table5"].rows["Llama-3-8B"].values():
        values = [float(v) for v in cells if isinstance(v, float)]
        assert sum(values[:3]) == pytest.approx(values[3], abs=1e-9)


def test_tables_agree_where_they_repeat_each_other() -> None:
    """Table 4 at 128K is Table 5's total; Table 3 at 128K is Table 9's average; Table 10 repeats Table 2."""
    four, five = TABLES["table4"].rows["Llama-3-8B"], TABLES["table5"].rows["Llama-3-8B"]
    assert all(four[method][-1] == five[method][-1] for method in five)
    three, nine = TABLES["table3"].rows["Llama-3-8B"], TABLES["table9"].rows["Llama-3-8B"]
    for method in ("full", "retrieval"):
        assert float(str(three[method][5])) == pytest.approx(float(str(nine[method][-1])), abs=0.06)
    assert TABLES["table10"].rows["Llama-3-8B"]["full"] == TABLES["table2"].rows["Llama-3-8B"]["full"]


def test_every_experiment_of_the_list_is_there() -> None:
    tables = {f"table{n}" for n in (2, 3, 4, 5, 8, 9, 10, 11)}
    figures = {f"figure{n}" for n in (2, 3, 5, 6, 7, 8)}
    assert set(EXPERIMENTS) == tables | figures
    assert figures == set(CLAIMS)
    assert all(set(known.papers) <= set(TABLES) for known in EXPERIMENTS.values())
    rows = [cells for paper in TABLES.values() for model in paper.rows.values() for cells in model.values()]
    widths = [len(p.columns) for p in TABLES.values() for m in p.rows.values() for _ in m]
    assert [len(cells) for cells in rows] == widths


# ---- commands --------------------------------------------------------------------------------------------


@cache
def parser() -> argparse.ArgumentParser:
    from retrieval_attn.cli import build_parser

    return build_parser()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_commands_are_what_the_program_takes(name: str, full: bool) -> None:
    """A renamed flag, method or option would otherwise show after hours, on a GPU."""
    from eval.tests.toy_suite import ToySuite
    from retrieval_attn_eval.bench import methods as bench_methods
    from retrieval_attn_eval.needle.command import suite_of
    from retrieval_attn_eval.suite.arguments import Options
    from retrieval_attn_eval.suite.runner import POSITIONS

    steps = EXPERIMENTS[name].steps(Size(full))
    assert steps and len({step.folder for step in steps}) == len(steps)
    for step in steps:
        args = parser().parse_args([*step.words, "--output-dir", "x"])
        if step.words[0] in ("ruler", "infinitebench"):
            args.tasks = "all"
            assert set(Options.of(args, ToySuite()).positions) <= set(POSITIONS)
        elif step.words[0] == "needle":
            options = Options.of(args, suite_of(args))
            assert options.lengths[-1] == ((1024000 if name == "figure8" else 1 << 17) if full else 4096)
            if "snapkv" in options.methods:
                assert options.method_options["snapkv"] == {"budget": 2048 if full else 256}
        elif step.words[:2] == ("bench", "session"):
            assert bench_methods.parse(args.index) and args.tail == "without"


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_print_shows_commands_and_the_papers_numbers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs nothing anywhere."""
    assert command.run(parsed(command, name, "--dry-run")) == 0
    shown = capsys.readouterr().out
    assert "$ retrieval-attn" in shown
    assert "appendix" in shown or "section" in shown
    assert "- (" not in shown  # no empty column of ours


def test_without_a_gpu_nothing_is_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's size of the latency tables, and of a million tokens, ends before a command runs."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags in (("table8", "--full"), ("figure8", "--full"), ("table4", "--full"), ("Table-5", "--full")):
        with pytest.raises(ConfigError, match="the paper's size needs a CUDA device"):
            command.run(parsed(command, *flags))


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_scaled_down_everything_runs_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every command is reached, and asks for no more than the bundled model has positions for."""
    import torch

    ran: list[Step] = []

    def execute(step: Step, folder: Path) -> int:
        ran.append(step)
        return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "_execute", execute)
    monkeypatch.setattr(compare, "comparison", lambda *given: "")
    assert command.run(parsed(command, name, "--output-dir", str(tmp_path))) == 0
    assert len(ran) == len(EXPERIMENTS[name].steps(Size(False)))
    for step in ran:
        flag = next(word for word in step.words if word in ("--lengths", "--length"))
        lengths = step.words[step.words.index(flag) + 1].lower().split(",")
        assert all(int(n[:-1]) <= 16 if n.endswith("k") else int(n) <= 8192 for n in lengths)


def test_unknown_names_list_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="'table7' is unknown; choose list or one of table2, table3"):
        command.run(parsed(command, "table7"))
    assert command.run(parsed(command, "list")) == 0
    assert (
        "table8    Table 8: decode latency on an A100, and from 100K to 1M  [--full needs a GPU]"
        in capsys.readouterr().out
    )


def test_steps_are_run_by_this_python(tmp_path: Path) -> None:
    """The exit code of a real command comes back: 0 for a dry run, 2 for bad input; finished results are kept."""
    source = ("--source", "synthetic:mid", "--n", "1")
    dry = ("bench", "study", "--figures", "2", "--length", "64", *source, "--dry-run")
    assert command._execute(Step(dry, "a"), tmp_path) == 0
    assert command._execute(Step(("no-such-command",), "b"), tmp_path) == 2
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "study.json").write_text("{}")
    assert command._execute(Step(("no-such-command",), "b"), tmp_path) == 0


def test_a_benchmark_that_was_stopped_starts_again(tmp_path: Path) -> None:
    """It writes after every row: half a table is not taken for the table, and not thrown away."""
    for number in (1, 2):
        write(tmp_path / "decode", "session.json", {"finished": False})
        assert command._execute(Step(("no-such-command",), "decode"), tmp_path) == 2
        aside = tmp_path / f"decode-unfinished-{number}" / "session.json"
        assert json.loads(aside.read_text()) == {"finished": False}
    write(tmp_path / "decode", "session.json", {"finished": True})
    assert command._execute(Step(("no-such-command",), "decode"), tmp_path) == 0


# ---- results beside the paper's ------------------------------------------------------------------------


def cell(method: str, task: str, score: float, length: int = 4096) -> dict[str, Any]:
    return {"method": method, "task": task, "length": length, "score": score, "error_of_score": 0.01, "n": 2,
            "position": "inside"}  # fmt: skip


def write(folder: Path, name: str, values: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(values))


def test_tasks_beside_table_2(tmp_path: Path) -> None:
    """Both budgets in one cell, the average only of what was run, other models' numbers by name."""
    write(
        tmp_path / "run", "summary.json", {"cells": [cell("full", "passkey", 1.0), cell("full", "kv_retrieval", 0.5)]}
    )
    write(tmp_path / "run-2k", "summary.json", {"cells": [cell("full", "kv_retrieval", 0.75)]})
    steps = EXPERIMENTS["table2"].steps(Size(False))
    text = compare.comparison("table2", EXPERIMENTS["table2"], tmp_path, steps, "Yi-9B")
    line = next(line for line in text.splitlines() if line.startswith("| full"))
    assert line == (
        "| full | 128K | - (100) | 100.0 ±1.0 (100) | 50.0 ±1.0 / 75.0 ±1.0 (30.5) | - (25.5) | - (36.5) | - (9.8) |"
        " - (67) | 75.0 of 2 (52.8) |"
    )


def test_lengths_beside_table_3_with_its_slip(tmp_path: Path) -> None:
    curves = [{"method": "retrieval", "length": 4096, "score": 0.9, "error_of_score": None, "position": "inside"}]
    write(tmp_path / "run", "summary.json", {"cells": [], "curves": curves})
    steps = EXPERIMENTS["table3"].steps(Size(False))
    text = compare.comparison("table3", EXPERIMENTS["table3"], tmp_path, steps, "Llama-3-8B")
    assert "| retrieval | 640+100 | 90.0 (92.64) |" in text
    assert "retrieval, Avg.: the paper prints another number than its row's mean, 84.65" in text


def test_table_3_has_a_row_with_a_tail_beside_the_papers(tmp_path: Path) -> None:
    """Ours alone, with the same budget; timed steps of the paper's tables have none."""
    (step,) = EXPERIMENTS["table3"].steps(Size(True))
    assert "retrieval,retrieval_tail" in step.words[step.words.index("--methods") + 1]
    for name in ("retrieval", "retrieval_tail"):
        assert {f"{name}.{option}" for option in ("sink=128", "window=512", "retrieve=100")} <= set(step.words)
    curves = [
        {"method": name, "length": 4096, "score": score, "error_of_score": None, "position": "inside"}
        for name, score in (("retrieval", 0.9), ("retrieval_tail", 0.95))
    ]
    write(tmp_path / "run", "summary.json", {"cells": [], "curves": curves})
    text = compare.comparison("table3", EXPERIMENTS["table3"], tmp_path, [step], "Llama-3-8B")
    assert "| retrieval_tail | - | 95.0 (-) |" in text and "| retrieval | 640+100 | 90.0 (92.64) |" in text
    for decode in EXPERIMENTS["table4"].steps(Size(True)):
        assert decode.words[decode.words.index("--tail") + 1] == "without"


def test_stand_ins_are_not_put_beside_the_papers_questions(tmp_path: Path) -> None:
    """Built-in questions have a column of their own; Q1 stays empty."""
    cells = [cell("full", "niah_single_1", 1.0), cell("full", "qa_synth_1", 0.5), cell("full", "cwe", 0.25)]
    write(tmp_path / "run", "summary.json", {"cells": cells})
    steps = EXPERIMENTS["table9"].steps(Size(False))
    text = compare.comparison("table9", EXPERIMENTS["table9"], tmp_path, steps, "Llama-3-8B")
    head = next(line for line in text.splitlines() if line.startswith("| method"))
    line = next(line for line in text.splitlines() if line.startswith("| full"))
    shown = dict(zip(head.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=True))
    assert (shown["S1"], shown["QA1-synth"], shown["Q1"]) == ("100.0 ±1.0 (100)", "50.0 ±1.0 (-)", "- (58.5)")
    assert shown["CW"] == "25.0 ±1.0 (1)"


def test_every_task_has_its_column() -> None:
    """All 13 tasks of the benchmark are columns of Table 9, the paper's InfiniteBench tasks of Table 2."""
    from retrieval_attn_eval.infinitebench.catalogue import PAPER_TASKS
    from retrieval_attn_eval.ruler.specs import TASKS

    for name, tasks in (("table9", TASKS), ("table2", PAPER_TASKS)):
        titles = compare._titles(EXPERIMENTS[name].steps(Size(False))[0])
        assert {titles[task] for task in tasks} == set(TABLES[name].columns) - {"Avg."}


def decoded(folder: Path, method: str, length: int, **parts: float | None) -> None:
    """Write a session's results: milliseconds per token, and of search and attention."""
    rows = [{"key": f"answer/retrieval/{name}", "later": value} for name, value in parts.items()]
    write(folder / "decode" / f"{method}-{length}", "session.json", {"processes": [{"rows": rows}]})


def test_latency_beside_tables_4_and_5(tmp_path: Path) -> None:
    """Milliseconds become the table's seconds; a session without results, or without an answer, says so."""
    decoded(tmp_path, "full", 4096, ms_per_token=7.0)
    decoded(tmp_path, "ivf", 4096, ms_per_token=None)
    decoded(tmp_path, "retrieval", 4096, ms_per_token=3.0, search_ms=1.0, attend_ms=0.5)
    steps = EXPERIMENTS["table4"].steps(Size(False))
    text = compare.comparison("table4", EXPERIMENTS["table4"], tmp_path, steps, "Llama-3-8B")
    assert "0.0070 (OOM)" in text and "not run (0.14)" in text and "failed (" in text and "0.0030 (" in text
    steps = EXPERIMENTS["table5"].steps(Size(False))
    text = compare.comparison("table5", EXPERIMENTS["table5"], tmp_path, steps, "Llama-3-8B")
    assert "| retrieval | - | 0.0010 (0.064) | 0.0005 on the host (0.081) | 0.0015 (0.043) | 0.0030 (0.188) |" in text


def test_a_method_that_does_not_fit_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latency steps are independent: one that fails is named, the others run; another failing step ends the run."""
    ran: list[Step] = []

    def execute(step: Step, folder: Path) -> int:
        ran.append(step)
        return 2

    monkeypatch.setattr(command, "_execute", execute)
    assert command.run(parsed(command, "table4", "--output-dir", str(tmp_path))) == 0
    assert ran == EXPERIMENTS["table4"].steps(Size(False))
    with pytest.raises(ConfigError, match="ended with 2"):
        command.run(parsed(command, "table3", "--output-dir", str(tmp_path)))


def test_table_10_has_a_row_of_its_own_for_budgets_per_layer(tmp_path: Path) -> None:
    write(
        tmp_path / "run", "summary.json", {"cells": [cell("full", "passkey", 1.0), cell("retrieval", "passkey", 0.5)]}
    )
    write(tmp_path / "run-by-layer", "summary.json", {"cells": [cell("retrieval", "passkey", 0.75)]})
    steps = EXPERIMENTS["table10"].steps(Size(False))
    text = compare.comparison("table10", EXPERIMENTS["table10"], tmp_path, steps, "Llama-3-8B")
    assert "| retrieval | - | - (100) | 50.0 ±1.0 (100) |" in text
    assert "| retrieval, budget per layer | - | - (100) | 75.0 ±1.0 (100) |" in text


def test_table_11_joins_accuracy_and_latency(tmp_path: Path) -> None:
    write(
        tmp_path / "run",
        "summary.json",
        {"cells": [cell("quest", "kv_retrieval", 0.5), cell("full", "kv_retrieval", 1.0)]},
    )
    decoded(tmp_path, "full", 4096, ms_per_token=7.0)
    decoded(tmp_path, "retrieval", 4096, ms_per_token=3.0)
    steps = EXPERIMENTS["table11"].steps(Size(False))
    text = compare.comparison("table11", EXPERIMENTS["table11"], tmp_path, steps, "Llama-3-8B")
    assert (
        "| full | - | 100.0 ±1.0 (35) | 0.0070 (248) |" in text and "| quest | - | 50.0 ±1.0 (13) | - (1.36) |" in text
    )
    assert "| retrieval | - | - (23.5) | 0.0030 (1.62) |" in text


def test_studies_beside_the_figures(tmp_path: Path) -> None:
    """The least share of keys that reaches recall 0.95, or "never"."""
    rows = [
        {"variant": v, "recall": r, "scanned": s}
        for v, r, s in [("ivf", 0.9, 0.1), ("ivf", 0.96, 0.4), ("ivf", 0.99, 0.6), ("hnsw", 0.8, 0.02)]
    ]
    figures = {"2": {"k": 1000, "keys": 8192, "dynamic": 0.9, "static": None}, "6": {"queries": rows}}
    write(tmp_path / "run", "study.json", {"figures": figures})
    text = compare.comparison(
        "figure6", EXPERIMENTS["figure6"], tmp_path, EXPERIMENTS["figure6"].steps(Size(False)), ""
    )
    assert "| ivf | 40.00 % | 0.990 | 30-50 % |" in text and "| hnsw | never | 0.800 | - |" in text
    assert "| 1,000 of 8,192 keys, chosen for every token | 90.0 | 89 |" in text
    assert "section 4.4, Figure 6" in text


def test_needle_panels_are_shown_with_their_means(tmp_path: Path) -> None:
    cells = [
        {"method": "snapkv", "position": "inside", "length": 4096, "task": task, "score": score, "n": 1}
        for task, score in (("0%", 1.0), ("50%", 0.5))
    ]
    write(tmp_path / "run", "summary.json", {"cells": cells})
    steps = EXPERIMENTS["figure7"].steps(Size(False))
    text = compare.comparison("figure7", EXPERIMENTS["figure7"], tmp_path, steps, "")
    assert "snapkv, question inside the prompt: mean 75.0, n = 2" in text and "  50%  0.50" in text
    assert "appendix A.2, Figure 7" in text
