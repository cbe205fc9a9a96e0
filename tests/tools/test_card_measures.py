"""The measures of a card: every number is found in a result file, what fails stops nothing, and tiny ones run here."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from retrieval_attn.gpu.attention import flash
from retrieval_attn.model.fused import layers as fused_layers
from tests.preloaded import forked_processes
from tests.runner.graph_cases import Decoded, enabled
from tests.tiny_models import LAYERS
from tools.card import runs
from tools.card.four_bits import made
from tools.card.int4 import steps_by
from tools.card.measure import Goal, Measure, decode_rate, of_row, ratio, value
from tools.card.near import near_reads
from tools.card.runs import Lane, lanes, run_measure
from tools.card.table import measures
from tools.card.tests import outcomes
from tools.card_measures import chosen, main, run_all

SERVE: dict[str, Any] = {
    "rows": [
        {
            "way": "engine",
            "status": "ok",
            "note": "",
            "rate": 30.0,
            "filled": 0.5,
            "answers": [
                {"arrival": 0.0, "token_ms": [1000, 1500, 2000, 3000]},
                {"arrival": 0.5, "token_ms": [500, 1000, 2000]},
            ],
        },
        {"way": "static", "status": "ok", "note": "", "rate": 20.0, "filled": None, "answers": []},
        {"way": "tree-off", "status": "failed", "note": "gone", "rate": None, "answers": []},
    ]
}


def test_numbers_are_found_in_a_result_file() -> None:
    assert ratio("engine", "static")(SERVE) == 1.5
    assert ratio("engine", "tree-off")(SERVE) is None and ratio("engine", "one")(SERVE) is None
    assert of_row("engine", "filled")(SERVE) == 0.5 and of_row("static", "filled")(SERVE) is None
    # from 1.0 s, the last first token, to 2.5 s: 1.5 and 2.0 of the first request, 1.5 and 2.5 of the second
    assert decode_rate("engine")(SERVE) == pytest.approx(4 / 1.5)
    assert value("a", "b")({"a": {"b": 2}}) == 2 and value("a", "c")({"a": {"b": 2}}) is None


def test_verdicts() -> None:
    least, most = Goal("rate", "tokens/s", value("x"), 5), Goal("gap", "ms", value("x"), 5, least=False)
    assert [least.verdict(found) for found in (5, 4.9, None)] == ["met", "missed", "not run"]
    assert [most.verdict(found) for found in (5, 5.1, None)] == ["met", "missed", "not run"]
    assert least.text == ">= 5 tokens/s" and most.text == "<= 5 ms"
    assert Goal("x", "", value("x")).verdict(1) == "no goal"


def test_every_measure_is_named_once_and_says_its_setting() -> None:
    for tiny in (False, True):
        names = [one.name for one in measures(tiny=tiny)]
        assert len(set(names)) == len(names) == 18
    assert [one.name for one in chosen("steps, beside", tiny=True)] == ["steps", "beside"]
    with pytest.raises(ValueError, match="magic is not known"):
        chosen("magic", tiny=True)
    for one in measures():
        assert any(goal.bound is not None for goal in one.goals)
        assert "random weights" in one.setting or one.name == "cuda_tests"
        assert len({goal.what for goal in one.goals}) == len(one.goals)


def module(folder: Path, name: str, text: str) -> Measure:
    """A measure that is a module of its own."""
    (folder / f"{name}.py").write_text(text)
    goal = Goal("x", "", value("x"), 1)
    return Measure(name, name, (), "--out", "found.json", [goal], 1.0, "a test")


WRITES = """import pathlib, sys
folder = pathlib.Path(sys.argv[2])
folder.mkdir()
(folder / 'found.json').write_text('{"x": 2}')
"""


def test_one_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    good = module(tmp_path, "card_good", WRITES)
    bad = module(tmp_path, "card_bad", "raise SystemExit('no room')")
    late = module(tmp_path, "card_late", f"{WRITES}import time\ndef waits():\n    time.sleep(600)\nwaits()\n")
    long = replace(good, name="card_long", seconds=1000.0)
    began = time.monotonic()
    runs = run_all([bad, good, long], tmp_path / "out", 100, tiny=False, commit="abc")
    assert [run.status for run in runs] == ["failed", "ok", "not run"] and "no room" in runs[0].note
    report = json.loads((tmp_path / "out" / "card.json").read_text())
    assert report["commit"] == "abc" and [one["rows"][0]["verdict"] for one in report["runs"]] == [
        "not run",
        "met",
        "not run",
    ]
    assert "| card_good | x | 2 | >= 1 | met |" in (tmp_path / "out" / "card.md").read_text()
    run = run_measure(late, Lane(), 3.0)
    assert run.status == "failed" and "ended after 3 s" in run.note and run.values == {"x": 2.0}
    assert re.search(r"card_late.py\", line \d+ in waits", run.note)  # where it was
    assert time.monotonic() - began < 60


SMI = """#!{python}
import sys
wanted = sys.argv[2].split(",") if sys.argv[1] == "-i" else ["GPU-a", "GPU-b"]
if "-lms" in sys.argv:
    import time
    while True:
        print(100, flush=True)
        time.sleep(0.05)
print("\\n".join(wanted))
"""
WHERE = """import json, os, pathlib, sys, time
from retrieval_attn.memory.host_room import available_host_bytes
folder = pathlib.Path(sys.argv[2])
folder.mkdir()
time.sleep(1)
own = {"x": 1, "card": os.environ["CUDA_VISIBLE_DEVICES"], "cores": sorted(os.sched_getaffinity(0))}
(folder / "found.json").write_text(json.dumps({**own, "memory": available_host_bytes()}))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cards_are_used_side_by_side_each_with_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI.format(python=sys.executable))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RETRIEVAL_ATTN_HOST_MEMORY", "8GiB")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cores = os.sched_getaffinity(0)
    wanted = [module(tmp_path, f"card_where_{number}", WHERE) for number in range(4)]
    runs = run_all(wanted, tmp_path / "out", 100, tiny=False, commit="abc", cards=2)
    found = [run.found or {} for run in runs]
    assert [run.status for run in runs] == ["ok"] * 4 and {one["card"] for one in found} == {"GPU-a", "GPU-b"}
    places = {(one["card"], *one["cores"]) for one in found}
    assert len(places) == 2 and os.sched_getaffinity(0) == cores  # a card has its cores, and nobody else's changed
    (_, *first), (_, *second) = places
    assert not set(first) & set(second) and all(3 << 30 < one["memory"] < 4 << 30 for one in found)
    with pytest.raises(ValueError, match="--cards 3 needs as many GPUs"):
        run_all(wanted, tmp_path / "none", 100, tiny=False, commit="abc", cards=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert [lane.card for lane in lanes(1)] == ["GPU-b"]


def test_outcomes_of_tests_are_told_by_their_lines() -> None:
    lines = """4 workers [5 items]
[gw1] [ 20%] PASSED tests/a.py::test_one[x y]
[gw0] [ 40%] SKIPPED tests/a.py::test_two
[gw2] [ 60%] FAILED tests/b.py::test_three
tests/c.py::test_four
[gw2] [ 80%] PASSED tests/c.py::test_five
[gw2] [ 80%] ERROR tests/c.py::test_five
FAILED tests/b.py::test_three - AssertionError: PASSED tests/d.py::no"""
    found = outcomes(lines.splitlines())
    assert found["passed"] == ["tests/a.py::test_one[x y]"] and found["skipped"] == ["tests/a.py::test_two"]
    assert found["error"] == ["tests/c.py::test_five"]
    assert found["failed"] == ["tests/b.py::test_three"]


@pytest.mark.usefixtures("emulated_graphs")
def test_steps_run_by_kernels_or_by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured within is what was asked for, one after the other over one model."""
    monkeypatch.setattr(fused_layers, "_runs_kernels", lambda model: True)
    model = enabled("llama")
    for way, layers in (("kernels", LAYERS), ("modules", 0), ("kernels", LAYERS)):
        with steps_by(way, model) as taken:
            assert Decoded(model, True).steps.replays
        assert set(taken) == {layers}


@pytest.mark.parametrize(("queries", "window", "seen"), [(64, 100, 164), (64, None, 300), (1, 100, 300)])
def test_near_reads_attend_to_what_is_near(queries: int, window: int | None, seen: int) -> None:
    """A chunk attends to so many keys within, a token to all; afterwards all attend to all."""
    query, key, value = (
        torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (queries, 300, 300)
    )

    def attended(first: int) -> flash.Partial:
        return flash.attend(query, key[:, :, first:], value[:, :, first:], scale=1.0, causal=True)

    wanted, all_keys = attended(300 - seen), attended(0)
    with near_reads(window):
        torch.testing.assert_close(attended(0), wanted)
    torch.testing.assert_close(attended(0), all_keys)
    assert (seen == 300) == torch.equal(wanted.lse, all_keys.lse)


def test_models_are_made_in_four_bits() -> None:
    """Layers' matrices are quantised, the output, the embedding and those of few rows are not."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    model = made("tiny-hybrid", torch.device("cpu"), layers=4)
    kinds = {name: type(one.weight).__name__ for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    plain = {name for name, kind in kinds.items() if kind == "Parameter"}
    assert plain == {"lm_head", *(name for name in kinds if name.endswith(("in_proj_a", "in_proj_b")))}
    assert {kinds[name] for name in kinds.keys() - plain} == {"Int4OpaqueTensor"}
    assert not any(weight.is_meta for weight in (*model.parameters(), *model.buffers()))
    assert model(torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()


@pytest.mark.slow
def test_tiny_measures_run_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each kind of measure: all of their numbers are found. int4_8b is int4_27b_hybrid of a smaller model."""
    monkeypatch.setattr(runs, "subprocess", forked_processes())
    assert (
        main(["--tiny", "--only", "cuda_tests,document_exact,steps,int4_27b_hybrid", "--out", str(tmp_path / "out")])
        == 0
    )
    report = json.loads((tmp_path / "out" / "card.json").read_text())
    for run in report["runs"]:
        assert run["status"] == "ok" and all(row["found"] is not None for row in run["rows"]), run
    assert "| document_exact | tokens a second while all decode |" in capsys.readouterr().out
