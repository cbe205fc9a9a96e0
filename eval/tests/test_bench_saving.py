"""Stage `saving` of `bench session`: saving and opening through the public API, a failed row included."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.tests.test_bench_session import SMALL
from retrieval_attn.cli import build_parser, main
from retrieval_attn.errors import ConfigError, ContextLengthError
from retrieval_attn.store import ContextStore
from retrieval_attn_eval.bench.session import children, process
from retrieval_attn_eval.bench.session.children import Process
from retrieval_attn_eval.bench.session.command import run
from retrieval_attn_eval.bench.session.page_cache import context_files, in_ram, make_cold, read_through
from retrieval_attn_eval.bench.session.row import Row
from retrieval_attn_eval.bench.session.saving import NAME, Job, Saved
from retrieval_attn_eval.bench.session.saving_report import saving_table
from tests.preloaded import forked_processes

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = replace(SMALL, questions=(32,), extensions=(64,), tokens=8)


def child(job: Job, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Rows and facts of a process's job, here."""
    given, events = folder / "job.json", folder / "events.jsonl"
    given.write_text(json.dumps(job.to_dict()))
    events.write_text("")
    assert process.main(str(given), str(events)) == 0
    found = [json.loads(line) for line in events.read_text().splitlines()]
    assert found[-1] == {"end": True}
    facts: dict[str, Any] = {}
    for event in found:
        facts |= event.get("facts", {})
    return [Row.from_dict(event["row"]) for event in found if "row" in event], facts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[Row], dict[str, Any]]:
    """What the process that saves found, and the job of those that open."""
    folder = tmp_path_factory.mktemp("contexts")
    job = Job("save", SETTINGS, str(folder / "store"), turns=2, turn_tokens=32)
    rows, facts = child(job, folder)
    return replace(job, questions=tuple(facts["questions"]), expected=facts["expected"]), rows, facts


def test_saving_tells_all_its_rows(saved: tuple[Job, list[Row], dict[str, Any]]) -> None:
    job, rows, facts = saved
    assert [row.status for row in rows] == ["ok"] * len(rows)
    keys = "load read read_saving ratio all_saved save bytes turn turn_bytes first/retrieval first/exact"
    assert [row.key for row in rows] == keys.split()
    by_key = {row.key: row for row in rows}
    assert by_key["ratio"].later == pytest.approx(
        (by_key["read_saving"].later or 0) / (by_key["read"].later or 1), rel=1e-6
    )
    assert len(by_key["turn"].values) == 2
    store = ContextStore(job.store)
    assert [context.name for context in store.list()] == [NAME], "what was saved to be timed is gone"
    assert store.resolve(NAME).nbytes > (by_key["bytes"].later or 0) * (1 << 30) > 0
    assert [len(facts["expected"][way]) for way in ("exact", "retrieval")] == [2, 2]


@pytest.fixture(scope="module")
def opened(saved: tuple[Job, list[Row], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """What a process found that opens while the files are in RAM."""
    return child(replace(saved[0], kind="warm"), tmp_path_factory.mktemp("warm"))[0]


@pytest.mark.parametrize("kind", ["warm", "cold"])
def test_what_was_saved_is_opened(
    saved: tuple[Job, list[Row], dict[str, Any]], opened: list[Row], tmp_path: Path, kind: str
) -> None:
    """With the tokens of the context that never was on disk; other tokens are a failed row, not a time."""
    job, files = saved[0], context_files(saved[0].store, NAME)
    if kind == "cold" and (make_cold(files) or 0) > 0.05:
        pytest.skip("this file system keeps its pages")
    rows = opened if kind == "warm" else child(replace(job, kind=kind), tmp_path)[0]
    assert [row.status for row in rows] == ["ok"] * len(rows)
    by_key = {row.key: row for row in rows}
    for way in ("exact", "retrieval"):
        whole, parts = by_key[f"resume/{way}"], (by_key[f"open/{way}"], by_key[f"opened_first/{way}"])
        assert len(whole.values) == 2
        assert whole.values[0] == pytest.approx(sum(part.values[0] for part in parts))
    if kind == "warm":
        assert job.expected is not None
        wrong = {**job.expected, "retrieval": [[-1], [-1]]}
        rows, _ = child(replace(job, kind=kind, expected=wrong), tmp_path)
        assert (rows[-1].key, rows[-1].status) == ("resume/retrieval", "failed")
        assert "the saved one [-1]" in rows[-1].note and not rows[-1].values


def test_report(saved: tuple[Job, list[Row], dict[str, Any]], opened: list[Row]) -> None:
    """A failed row is named; rates are of the context's bytes."""
    job, rows, facts = saved
    failed = Row("resume/exact", "open", "s", status="failed", note="StoreError: gone")
    processes = [Process("save", rows, facts), Process("warm", opened), Process("cold", [failed])]
    found = Saved(900, processes, {"nbytes": 2e9, "cold_seconds": 4.0})
    text = saving_table(found)
    assert "| disk: on disk, read all files | s |  | 4 | 0.50 |  |" in text
    assert "| on disk: open | s | failed |" in text and "- 900 tokens, open: StoreError: gone" in text
    json.dumps(found.to_dict())
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job


def test_files_are_read_and_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert read_through([path]) > 0
    assert in_ram([path]) in (1.0, None)
    assert in_ram([]) is None


def arguments(*flags: str) -> argparse.Namespace:
    words = ["bench", "session", "--stages", "saving", "--device", "cpu", "--no-plot"]
    return build_parser().parse_args([*words, *flags])


def test_refusals_come_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    out = ("--output-dir", str(tmp_path / "out"))
    for flags, error in (
        (("--store", str(tmp_path / "full"), *out), ConfigError),
        (("--n", "0", *out), ConfigError),
        (("--length", "130900", *out), ContextLengthError),  # no room for the turns
    ):
        with pytest.raises(error):
            run(arguments(*flags))
    assert not (tmp_path / "out").exists() and (tmp_path / "full" / "letter.txt").exists()


@pytest.mark.slow
def test_command_with_the_bundled_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes: one saves, two others open; no session process runs."""
    monkeypatch.setattr(children, "subprocess", forked_processes())
    flags = ["bench", "session", "--stages", "saving", "--device", "cpu", "--index", "flat", "--length", "1k"]
    out = ["--n", "1", "--no-plot", "--output-dir", str(tmp_path / "one"), "--store", str(tmp_path / "store")]
    assert main([*flags, *out]) == 0
    report = json.loads((tmp_path / "one" / "session.json").read_text())
    assert report["finished"] and report["processes"] == []
    saving = report["saving"]
    assert [process["caches"] for process in saving["processes"]] == ["save", "warm", "cold"]
    assert all(row["status"] == "ok" for process in saving["processes"] for row in process["rows"])
    assert saving["disk"]["nbytes"] > 1 << 20 and saving["disk"]["cold_seconds"] > 0
    assert not list((tmp_path / "store").iterdir())
    assert "| in RAM: open and first token" in capsys.readouterr().out
