"""`bench peers`: what is asked of llama-bench, what is read from it, and one line if it is missing or fails."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn_eval.bench import peers
from retrieval_attn_eval.bench.peers import Measured, PeerError, llama_bench, table

PROGRAM = """#!{python}
import json, sys
if "fail.gguf" in sys.argv:
    sys.exit("llama-bench: unknown architecture")
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-o"] == "json" and given["-fa"] == "on" and given["-t"] == "3" and given["-ngl"] == "0", given
reading = given["-n"] == "0"
assert reading or (given["-p"] == "0" and given["-d"] == "2048")
print(json.dumps([{{"avg_ns": 3e9 if reading else 0.4e9}}]))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program with llama-bench's flags and output, whose times are known."""
    path = tmp_path / "llama-bench"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_what_llama_bench_measures(program: str) -> None:
    args = SimpleNamespace(model="model.gguf", tokens=16)
    found = llama_bench(program, args, 2048, 3, on_gpu=False)  # type: ignore[arg-type]
    assert (found.read_seconds, found.token_ms) == (3.0, 25.0) and found.host_gib > 0
    args.model = "fail.gguf"
    with pytest.raises(PeerError, match="status 1: llama-bench: unknown architecture"):
        llama_bench(program, args, 2048, 3, on_gpu=False)  # type: ignore[arg-type]


def test_rounds_in_turn_are_written(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured survives an error of a later round."""
    model, folder, times = tmp_path / "model.gguf", tmp_path / "results", [0.0]
    model.touch()

    def own(_program: str, _args: object, length: int, threads: int, *, on_gpu: bool) -> Measured:
        assert (length, threads, on_gpu) == (2048, 3, False)
        times[0] += 1
        if times[0] > 2:
            raise PeerError("the second round failed")
        return Measured(times[0], 50.0, 1.0)

    monkeypatch.setattr(peers, "ours", own)
    monkeypatch.setattr(peers, "import_gib", lambda: 0.25)
    given = {"lengths": "2k", "tokens": 16, "threads": 3, "device": "cpu", "gpu_memory": None, "model": str(model)}
    args = SimpleNamespace(llama_bench=program, output_dir=str(folder), n=2, **given)
    assert peers.run(args) == 0  # type: ignore[arg-type]
    written = json.loads((folder / "peers.json").read_text())
    assert written["import_gib"] == 0.25
    rows = written["rows"]["2048"]
    assert [one["read_seconds"] for one in rows["ours"]] == [1.0, 2.0] and len(rows["llama.cpp"]) == 2
    assert "| 2,048 | token, ms | 25.00 | 50.00 | 2.00 |" in (folder / "peers.md").read_text()
    args.output_dir, times[0] = str(tmp_path / "more"), 1.0
    with pytest.raises(PeerError):
        peers.run(args)  # type: ignore[arg-type]
    assert len(json.loads((tmp_path / "more" / "peers.json").read_text())["rows"]["2048"]["ours"]) == 1


def test_the_table_has_medians_and_ratios() -> None:
    runs = [Measured(seconds, ms, 1.0) for seconds, ms in ((1.0, 10.0), (9.0, 30.0), (2.0, 20.0))]
    text = table({2048: {"llama.cpp": runs, "ours": [Measured(4.0, 5.0, 1.5)] * 3}}, 0.25)
    assert "| 2,048 | read, s | 2.00 | 4.00 | 2.00 |" in text
    assert "| 2,048 | token, ms | 20.00 | 5.00 | 0.25 |" in text
    assert "| 2,048 | peak host memory, GiB | 1.00 | 1.50 | 1.50 |" in text and "3 rounds" in text
    assert "| 2,048 | beyond bare imports, GiB | 1.00 | 1.25 | 1.25 |" in text
    assert "Bare imports of this package: 0.25 GiB" in text


def test_imports_are_measured_in_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The memory of the process, and one line if it fails."""
    assert 0.05 < peers.import_gib() < 4
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'ModuleNotFoundError: torch' >&2\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(PeerError, match="status 3: ModuleNotFoundError: torch"):
        peers.import_gib()


def test_a_missing_program_or_file_is_one_line(program: str, tmp_path: Path) -> None:
    flags = {"tokens": 4, "n": 1, "lengths": "1k", "model": str(tmp_path / "none.gguf")}
    with pytest.raises(ConfigError, match=r"nowhere was not found. Build llama.cpp"):
        peers.run(SimpleNamespace(llama_bench="nowhere", **flags))  # type: ignore[arg-type]
    with pytest.raises(InputDataError, match=r"there is no file .*none.gguf"):
        peers.run(SimpleNamespace(llama_bench=program, **flags))  # type: ignore[arg-type]
