"""`bench session`: real processes on a CPU, every row by name, also the one that fails or never ends."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieval_attn as ra
import retrieval_attn_eval.bench.session as session_package
from retrieval_attn.cli import main
from retrieval_attn_eval.bench.session.card import CardMemory, watch
from retrieval_attn_eval.bench.session.children import Process, cache_environment, own_environment, run_process
from retrieval_attn_eval.bench.session.report import markdown, plots, ratios
from retrieval_attn_eval.bench.session.row import Row
from retrieval_attn_eval.bench.session.stages import Session
from retrieval_attn_eval.bench.session.subject import Settings, Subject, number_tokenizer
from tests.test_structure import imported_names

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Settings(
    model="bundled",
    shape="tiny",
    device="cpu",
    dtype="auto",
    length=900,
    gpu_memory=None,
    options=ra.Config(sink=4, window=16, retrieve=8, index="flat", threads=1).to_dict(),
    questions=(8, 20),
    extensions=(32,),
    tokens=3,
    repeats=1,
    random_ids=True,
    seed=0,
    skip=(),
    no_second="",
)


def rows_of(settings: Settings) -> list[Row]:
    """All rows of a session in this process."""
    rows: list[Row] = []
    Session(settings, None, lambda event: rows.append(Row.from_dict(event["row"])) if "row" in event else None).run()
    return rows


@pytest.mark.slow
def test_command_with_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real prompt in a process of its own: table, JSON and PNG; compared with itself every ratio is one."""
    flags = ["--length", "1k", "--questions", "8,40", "--extend", "64", "--tokens", "3", "--n", "1", "--threads"]
    flags = ["bench", "session", "--device", "cpu", "--index", "flat", "--caches", "warm", *flags, "1"]
    assert main([*flags, "--output-dir", str(tmp_path / "one")]) == 0
    report = json.loads((tmp_path / "one" / "session.json").read_text())
    assert {"commit", "machine", "versions", "command", "config", "gpu_memory", "settings"} <= set(report)
    assert report["finished"] and (tmp_path / "one" / "session.png").stat().st_size > 10_000
    (process,) = report["processes"]
    assert (process["caches"], process["device"], process["layers"]) == ("as found", "cpu", 5)
    rows = {row["key"]: row for row in process["rows"]}
    timed = [f"first_token/{way}/{length}" for way in ("exact", "retrieval") for length in (8, 40)]
    timed += ["load", "read", "read_second", "answer/exact", "answer/retrieval/ms_per_token", "switch/exact", "fork"]
    timed += ["switch/retrieval", "extend/64", "extend/64/first", "many/exact/first", "many/ms_per_step"]
    for key in timed:
        assert rows[key]["status"] == "ok" and min(rows[key]["values"]) > 0, rows[key]
        assert "answers do not end by themselves" in rows[key]["simplifications"] or key == "load"
    assert rows["answer/exact"]["first"] > rows["answer/exact/first"]["first"]
    assert rows["memory/card/all"]["status"] == "not measured"
    assert rows["memory/host/all"]["first"] > 0.1
    found = [Process(process["caches"], [Row.from_dict(row) for row in process["rows"]])]
    same = [line for line in ratios(found, report).splitlines() if "| as found |" in line]
    assert len(same) >= len(timed) and all("1.00" in line for line in same)
    report["processes"][0]["caches"] = "warm"
    assert ratios(found, report).count("| as found / warm |") == len(same)
    report["processes"][0]["caches"] = "cold"
    assert "no measure in common" in ratios(found, report)
    assert f"written to {tmp_path / 'one'}" in capsys.readouterr().out


def test_a_failing_row_is_named_and_the_others_run() -> None:
    """A question longer than the model's 65,536 positions."""
    rows = {row.key: row for row in rows_of(replace(SMALL, questions=(8, 70_000), skip=("switch",)))}
    assert rows["first_token/exact/70000"].status == "failed"
    assert rows["first_token/exact/70000"].note.startswith("ContextLengthError: ")
    assert [key for key, row in rows.items() if row.status == "failed"] == [
        "first_token/exact/70000",
        "first_token/retrieval/70000",
    ]
    assert rows["many/exact/first"].status == rows["extend/32"].status == "ok"
    assert rows["many/exact/first"].later is not None
    assert "random token ids in place of a text" in rows["fork"].simplifications


def test_other_tokens_after_a_switch_are_a_failed_row() -> None:
    """What is not the same answer has no speed. The model's head is turned over between the two questions."""
    settings = replace(SMALL, skip=("answer", "questions", "fork", "extend", "many", "memory"))
    rows: list[Row] = []
    turned: list[str] = []

    def tell(event: dict[str, Any]) -> None:
        if "row" in event:
            rows.append(Row.from_dict(event["row"]))
        if event.get("begin") == "switch/exact":
            there = session.context(1)
            ask = there.ask

            def ask_and_turn(*args: Any, **options: Any) -> ra.Answer:
                answer = ask(*args, **options)
                turned.append(options["question_attention"])
                if len(turned) == 1:
                    session.subject.model.lm_head.weight.data.neg_()
                return answer

            there.ask = ask_and_turn  # type: ignore[method-assign]

    session = Session(settings, None, tell)
    session.run()
    found = {row.key: row for row in rows}
    assert turned == ["exact", "retrieval"]
    assert (found["switch/exact"].status, found["switch/exact"].first) == ("failed", None)
    assert found["switch/exact"].note.startswith("WrongAnswer: a question chose")
    assert found["switch/retrieval"].status == "ok"


def test_what_needs_a_context_does_not_run_without_one() -> None:
    rows = {row.key: row for row in rows_of(replace(SMALL, length=70_000))}
    assert rows["read"].status == "failed" and rows["read"].note.startswith("ContextLengthError")
    assert (rows["fork"].status, rows["fork"].note) == ("not run", "the context was not read")
    rows = {
        row.key: row
        for row in rows_of(replace(SMALL, no_second="no room", skip=("answer", "questions", "many", "extend")))
    }
    assert (rows["switch/exact"].status, rows["switch/exact"].note) == ("not run", "no room")
    assert not [key for key in rows if key.startswith(("first_token", "many", "extend"))]


def test_a_process_that_dies_or_never_ends_leaves_a_failed_row(tmp_path: Path) -> None:
    told: list[Row] = []
    found = Process("cold")
    run_process(found, SMALL.to_dict(), {"PYTHONHOME": str(tmp_path)}, 60.0, told.append)  # Python without its library
    assert [(row.key, row.status) for row in found.rows] == [("start", "failed")] and told == found.rows
    assert "the process ended with status 1" in found.rows[0].note
    found = Process("cold")
    run_process(found, SMALL.to_dict(), own_environment(), 0.3, told.append)
    assert found.rows[-1].status == "failed" and "took more than 0.3 s" in found.rows[-1].note


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stages", "reading"], "--stages 'reading': 'reading' is unknown"),
        (["--stages", "read"], "--stages 'read': 'read' is unknown"),
        (["--caches", "hot"], "--caches must be one of"),
        (["--baseline", "no_such.json"], "--baseline no_such.json: needed a session.json"),
        (["--length", "128k"], "positions, the model has 131072"),
        (["--gpu-memory", "24GiB", "--device", "cpu"], "--gpu-memory was given, but the model would run on cpu"),
        (["--shape", "llama-3-8b", "--length", "2000k", "--device", "cpu"], "the host needs"),
        (["--shape", "huge"], "--shape huge is not known"),
        (["--shape", "tiny"], "--shape tiny has 128 token ids, the prose needs 4096; give --random-ids"),
        (["--timeout", "0"], "--timeout must be more than 0"),
        (["--n", "0"], "--n must be at least 1"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "session", *flags, "--output-dir", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_questions_have_exactly_the_tokens_that_are_asked_for() -> None:
    subject = Subject(replace(SMALL, shape=None, random_ids=False))
    for tokens in (1, 8, 33, 300):
        text = subject.question(tokens)
        assert len(subject.tokenizer(text, add_special_tokens=False)["input_ids"]) == tokens
    assert subject.question(8) != subject.question(8)
    assert len(subject.ids(777)) == 777


def test_numbers_and_ids_are_the_same() -> None:
    tokenizer = number_tokenizer(300)
    ids = torch.randint(300, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    text = tokenizer.decode(ids)
    assert text == " ".join(map(str, ids)) and tokenizer(text)["input_ids"] == ids


def test_all_compile_caches_move_and_models_stay(tmp_path: Path) -> None:
    used = dict.fromkeys(("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"), "/used")
    made = cache_environment(tmp_path, {"XDG_CACHE_HOME": "/models", "KEPT": "1", **used})
    assert made["KEPT"] == "1" and made["HF_HOME"] == "/models/huggingface" and "/used" not in made.values()
    for name in ("RETRIEVAL_ATTN_CACHE", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME"):
        assert Path(made[name]).parent == tmp_path
    places = "from retrieval_attn.compile import cache_dir as place; print(place.numba_folder(), place.triton_folder())"
    environment = cache_environment(tmp_path, {**own_environment(), **used})
    done = subprocess.run([sys.executable, "-c", places], env=environment, capture_output=True, text=True, check=True)
    assert all(Path(name).is_relative_to(tmp_path) for name in done.stdout.split())
    assert cache_environment(tmp_path, {"HF_HOME": "/hub"})["HF_HOME"] == "/hub"


def test_card_memory_is_the_most_of_what_the_program_prints(tmp_path: Path) -> None:
    """The program stands in for nvidia-smi, which only a machine with a card has: 100, then 300 MiB, then 200."""
    program = tmp_path / "smi"
    used = tmp_path / "used"
    used.write_text("100")
    loop = f"while True: print(open({str(used)!r}).read() or 0, flush=True); time.sleep(.01)"
    program.write_text(f"#!{sys.executable}\nimport time\n{loop}\n")
    program.chmod(0o755)
    with CardMemory("GPU-1", str(program)) as card:
        assert card.before == 100 << 20
        card.start()
        used.write_text("300")
        assert card.peak() == 300 << 20
        used.write_text("200")
        card.peak()
        card.start()
        assert card.peak() == 200 << 20
    with pytest.raises(RuntimeError, match="told no memory"):
        CardMemory("GPU-1", "true")
    assert watch(None) is None


def test_report_of_failed_and_missing_rows() -> None:
    """Reasons and simplifications are numbered notes; each stands there once."""
    common = {"simplifications": ("random weights",)}
    cold = Process("cold", [Row("a", "first", "s", 12.3456, 1.0, (12.3, 1.0), device_bytes=3 << 30, **common)])  # type: ignore[arg-type]
    failed = Row("first_token/exact/8", "token", "s", status="failed", note="ValueError: x")
    warm = Process("warm", [Row("a", "first", "s", 2.0, None, (2.0,), **common), failed])  # type: ignore[arg-type]
    report: dict[str, Any] = {
        "machine": {"cpu": "C", "cores": 2, "memory_gib": 4.0},
        "versions": dict.fromkeys(("python", "torch", "transformers", "numba"), "1"),
        "gpu_memory": None,
        "command": ["bench"],
        "commit": "abc",
        "model": "m",
        "settings": {"length": 5},
        "config": {},
        "processes": [cold.to_dict()],
    }
    text = markdown([cold, warm], report)
    assert "| first | s | 12.3 | 1 | 2 |  | 3.00 |  | 1 |" in text
    assert "| token | s |  |  | failed (2) |  |  |  |  |" in text
    assert text.endswith("1. random weights\n2. token: ValueError: x\n")
    assert not plots([cold, warm], "m")[0].lines
    assert "| first | cold | 1.00 | 1.00 | 1.00 |" in ratios([cold], report)


PUBLIC = {
    "retrieval_attn",  # names that the package exports
    "retrieval_attn.errors",
    "retrieval_attn.memory.units",
    "retrieval_attn.model.loading",  # "auto" as a device
    "retrieval_attn.testing",  # the cap that LLM sets, for random weights; files of a store, for cold starts
}
SESSION = Path(session_package.__file__).parent


def test_modules_of_a_session_are_found() -> None:
    assert {"stages.py", "subject.py", "saving_stages.py"} <= {path.name for path in SESSION.glob("*.py")}


@pytest.mark.parametrize("path", sorted(SESSION.glob("*.py")), ids=lambda path: path.name)
def test_a_session_uses_the_public_api_only(path: Path) -> None:
    for name in imported_names(path):
        assert not name.startswith("retrieval_attn") or name in PUBLIC or name.startswith("retrieval_attn_eval"), name
