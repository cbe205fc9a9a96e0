"""`retrieval-attn ask FILE QUESTION`, and what all commands do with files they cannot have."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from retrieval_attn import stream
from retrieval_attn.cli import main, model_args
from retrieval_attn.config import Config
from retrieval_attn.model.bundled import BUNDLED
from tests.tiny_models import QUESTION, tiny_model

FILLER = "The grass is green. The sky is blue. The sun is yellow. " * 60
FEW = ["--max-new-tokens", "12", "--window", "64"]


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(f"{FILLER}The special magic Bergen number is: 7391846. Größe: 3 µm. {FILLER}", encoding="utf-8")
    return str(path)


def test_a_question_about_a_file(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer alone on the standard output; which model it is, and what it cost, on the other."""
    assert main(["ask", document, QUESTION, *FEW]) == 0
    printed = capsys.readouterr()
    assert "7391846" in printed.out and printed.out.endswith("\n")
    said = printed.err.splitlines()
    assert any("bundled" in line and "on cpu" in line for line in said)
    assert re.search(r"[\d.]+ % of attention was estimated from .*, most in layer \d+, head \d+: [\d.]+ %", said[-2])
    assert re.search(  # a bar that was cleared may stand before it
        r"read [\d,]+ tokens in [\d.]+ s; first token after [\d.]+ s, [\d.]+ ms per token for \d+ tokens; "
        r"[\d.]+ MiB of keys and values on the host, [\d.]+ \w+ on the device$",
        said[-1],
    )


@pytest.mark.parametrize("file", ["file", "-"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows writes it at the start of a file in UTF-8."""
    data = b"\xef\xbb\xbf" + "Größe: 3 µm.".encode()
    (tmp_path / "text.txt").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert model_args.text_of("-" if file == "-" else str(tmp_path / "text.txt")) == "Größe: 3 µm."


def test_the_text_comes_in_pieces(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Terminal(io.StringIO):
        def flush(self) -> None:
            written.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["ask", document, QUESTION, *FEW]) == 0
    assert len(set(written)) > 3 and written == sorted(written, key=len)


def test_standard_input_and_raw_text(
    document: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base model continues the text itself; all keys may be attended, and so may a share of them."""
    for retrieve in ("all", "0.2", "40"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(document).read_bytes())))
        asked = " The special magic Bergen number is:"
        assert main(["ask", "-", asked, "--raw", "--retrieve", retrieve, "--max-new-tokens", "8"]) == 0
        assert "7391846" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt", "Who?"], "missing.txt: No such file or directory; give one that is there"),
        (["folder", "Who?"], "folder: Is a directory; give another file"),
        (["x" * 300, "Who?"], "File name too long"),
        (["latin.txt", "Who?"], "latin.txt must be text in UTF-8, got byte 0xf6 at 3"),
        (["blank.txt", "Who?"], "must have some text, got 3 bytes"),
        (["good.txt", " "], "ask a non-empty question"),
        (["good.txt", "Who?", "--retrieve", "some"], "retrieve='some'"),
        (["x" * 300, "Who?"], "...: File name too long; give a shorter name"),
        (["good.txt/inside", "Who?"], "good.txt/inside: Not a directory; give another file"),
        (["/proc/self/mem", "Who?"], "Input/output error"),
        (["good.txt", "Who? " * 70_000], "0 cached and"),
        (["good.txt", "Who?", "--retrieve", "0"], "retrieve=0"),
        (["good.txt", "Who?", "--max-new-tokens", "many"], "--max-new-tokens='many' is not a number of tokens"),
        (["good.txt", "Who?", "--window", "-1"], "--window='-1'"),
        (["good.txt", "Who?", "--temperature", "-1"], "temperature"),
        (["good.txt", "Who?", "--index", "rorgraph"], "rorgraph"),
        (["good.txt", "Who?", "--index", "device:keybytes=40"], "keybytes"),
        (["good.txt", "Who?", "--index", "device:40"], "device:40: options are written name=value, got '40'"),
        (["good.txt", "Who?", "--model", "no/such-model"], "No model could be loaded"),
        (["good.txt", "Who?", "--device", "gpu0"], "not a torch device"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("latin.txt").write_bytes("schön".encode("latin-1"))
    Path("blank.txt").write_text(" \n ")
    Path("good.txt").write_text("The sky is blue.")
    assert main(["ask", *arguments]) == 2
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if line.startswith("retrieval-attn ask: ")]
    assert len(said) == 1 and message in said[0], printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("file/inside", "file/inside: Not a directory; give another file or folder"),
        ("x" * 300, "File name too long; give a shorter name"),
        ("/proc/nothing", "/proc/nothing: No such file or directory; give one that is there"),
    ],
)
def test_folders_for_results_that_cannot_be_had(
    folder: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["needle", "--output-dir", folder, "--lengths", "1k", "--depths", "50", "--methods", "flat"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Of the output: one line, and no traceback when Python ends either."""
    tiny_model("llama").config.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "retrieval_attn.cli", "plan", str(tmp_path), "--context", "2k"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "No space left on device" in done.stderr


def test_chat_and_raw_exclude_each_other(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ask", document, "Who?", "--chat", "--raw"])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_interrupted_it_stops_and_says_so(
    document: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the middle of an answer: what came is printed, the worker has ended, status 130."""
    inner, seen = stream.Stream.__next__, []

    def interrupted(self: Any) -> str:
        seen.append(inner(self))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return seen[-1]

    monkeypatch.setattr(stream.Stream, "__next__", interrupted)
    assert main(["ask", document, "Who?", "--temperature", "9", "--max-new-tokens", "400"]) == 130
    printed = capsys.readouterr()
    assert printed.out == "".join(seen[:2])
    assert printed.err.splitlines()[-1] == "retrieval-attn ask: interrupted"
    assert not [thread for thread in threading.enumerate() if "stream" in thread.name]


def test_ctrl_c_from_a_keyboard(document: str) -> None:
    """The signal itself, while the worker is inside compiled code: status 130, and no crash at the end."""
    command = [sys.executable, "-m", "retrieval_attn.cli", "ask", document, "Who?", "--temperature", "9", "--seed", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}

    def as_in_a_terminal() -> None:
        """A shell starts what runs in its background with the signal ignored, and children inherit that."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen([*command, "--max-new-tokens", "2000"], preexec_fn=as_in_a_terminal, **pipes) as asked:
        assert asked.stdout is not None and asked.stdout.read(1)
        asked.send_signal(signal.SIGINT)
        _, said = asked.communicate(timeout=60)
    assert asked.returncode == 130
    assert said.decode().splitlines()[-1] == "retrieval-attn ask: interrupted"


def test_an_index_with_options() -> None:
    """Of a command line they come as the API takes them; without any they are the index's own."""
    parser = argparse.ArgumentParser()
    model_args.add_config_arguments(parser)
    given = parser.parse_args(["--index", "device:key_bytes=40:int8_rows=True:key_share=0.25", "--host-dtype", "int8"])
    options = {"key_bytes": 40, "int8_rows": True, "key_share": 0.25}
    assert model_args.config_of(given) == Config(index="device", index_options=options, host_dtype="int8")
    assert model_args.config_of(parser.parse_args([])) == Config()


def test_memory_is_planned_for_the_text_and_not_for_all_positions() -> None:
    """On a small GPU a short text must not be refused for what the model's longest would need."""
    assert model_args._needed(str(BUNDLED), 500) == 1524
    assert model_args._needed(str(BUNDLED), 10**9) < 10**9


def test_output_that_nobody_reads(tmp_path: Path) -> None:
    """`retrieval-attn plan MODEL | head -1`: no traceback."""
    tiny_model("llama").config.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "retrieval_attn.cli", "plan", str(tmp_path), "--context", "2k"]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_folder_with_code_of_its_own_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither by plan nor by loading: no question is asked, and nothing on the standard input can say yes."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Model"}}'
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "text.txt").write_text("The sky is blue.")
    for arguments in (["plan", str(tmp_path)], ["ask", str(tmp_path / "text.txt"), "Who?", "--model", str(tmp_path)]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("retrieval-attn") == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("code", "said"), [(130, "said\n"), (1, "said\nthe end\n")])
def test_an_interrupted_program_ends_at_once(code: int, said: str) -> None:
    """What was printed is kept; Python does not take down a second's worth of libraries."""
    script = f"""
import atexit
from retrieval_attn import cli
atexit.register(print, "the end")
cli.main = lambda: print("said") or {code}
cli.program()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (said, code), done.stderr
