"""`retrieval-attn ask FILE QUESTION`, and what all commands do with files they cannot have."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from retrieval_attn import answer as stream
from retrieval_attn.cli import main, model_args
from retrieval_attn.cli.ask import _options
from retrieval_attn.cli.documents import read_documents
from retrieval_attn.config import Config
from retrieval_attn.model.bundled import BUNDLED
from tests.preloaded import CLI, PreloadedProcess, run_preloaded
from tests.tiny_models import QUESTION, tiny_model

FILLER = "The grass is green. The sky is blue. The sun is yellow. " * 25
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
    assert not printed.out.startswith(" ")
    said = printed.err.splitlines()
    assert any(line.startswith("model: the bundled test model on cpu (choose another with --model)") for line in said)
    cost = r"[\d,]+ tokens read in [\d.]+ s; first token after [\d.]+ s; \d+ tokens at [\d.]+ tokens/s$"
    assert re.search(cost, said[-2])  # a bar that was cleared may stand before it
    memory = r"KV cache: [\d.]+ MiB in host memory, [\d.]+ \w+ on the cpu; [\d.]+ % of attention was estimated"
    assert re.match(memory, said[-1])
    assert "Loading weights" not in printed.err and "[transformers]" not in printed.err


def test_several_files_are_one_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for name, number in zip(names, (7391846, 1234567), strict=True):
        Path(name).write_text(f"{FILLER}The special magic {Path(name).stem} number is: {number}. {FILLER}")
    assert main(["ask", *names, "What is the special magic b number?", *FEW]) == 0
    assert "1234567" in capsys.readouterr().out
    assert main(["ask", *names]) == 2
    assert "the last argument must be the question, got the file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.pdf", b"%PDF-1.7 \xd0", "pdftotext -layout a.pdf - | retrieval-attn ask - QUESTION"),
        ("my file.pdf", b"%PDF-1.7", "pdftotext -layout 'my file.pdf' - | retrieval-attn ask - QUESTION"),
        ("a.docx", b"PK\x03\x04", "pandoc -t plain a.docx | retrieval-attn ask - QUESTION"),
        ("a.gz", b"\x1f\x8b\x08", "zcat a.gz | retrieval-attn ask - QUESTION"),
        ("elf", b"\x7fELF\x02\0\0", "elf is a binary file, not text"),
        ("empty.txt", b"", "empty.txt is empty"),
        ("blank.txt", b" \n ", "blank.txt is blank"),
        ("mark.txt", b"\xef\xbb\xbf", "mark.txt is empty"),
        ("latin.txt", "Schönes Wetter".encode("latin-1"),
         "latin.txt is not UTF-8, byte 0xf6 at 3; it looks like cp1252: "
         "retrieval-attn ask latin.txt QUESTION --encoding cp1252"),
        ("sjis.txt", "日本語の文章です。".encode("shift_jis"), "--encoding "),
        ("cut.txt", "\N{BYTE ORDER MARK}abc".encode("utf-16-le")[:-1], "cut.txt is not UTF-16"),
    ],
)  # fmt: skip
def test_files_that_are_no_text(
    name: str, data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One line with the next command, before a model is loaded."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    assert main(["ask", name, "Who?", "--model", "no/such-model"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and message in said[0]


@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [
        ("Größe: 3 µm.".encode("utf-16"), None, "Größe: 3 µm."),
        (b"\xfe\xff" + "Größe".encode("utf-16-be"), None, "Größe"),
        ("Größe".encode("utf-32"), None, "Größe"),
        ("Größe".encode("latin-1"), "latin-1", "Größe"),
        ("Größe".encode("utf-16-le"), "utf-16-le", "Größe"),
        (b"a\r\nb", None, "a\r\nb"),
    ],
)
def test_encodings(data: bytes, encoding: str | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    assert read_documents([str(path)], encoding, "ask {file}") == text


def test_html_is_read_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    path.write_text("<!DOCTYPE html><p>The sky is blue.</p>")
    assert read_documents([str(path)], None, "ask {file}") == path.read_text()
    assert "its tags are read as text" in capsys.readouterr().err


def test_flags_are_checked_before_torch_is_imported(tmp_path: Path) -> None:
    """In one new interpreter, one after the other: none of them imports it for the next."""
    cases = [
        (["--index", "foo"], "index='foo' is not a known kind"),
        (["--index", "device:keybytes=40"], "keybytes"),
        (["--retrieve", "0"], "retrieve=0"),
        (["--window", "-1"], "--window='-1'"),
        (["--max-new-tokens", "many"], "--max-new-tokens='many'"),
        (["--temperature", "-1"], "temperature"),
        (["--device", "gpu0"], "use auto, cpu, cuda or cuda:N"),
        (["--dtype", "int3"], "--dtype must be auto, float32, bfloat16 or float16"),
        (["--yarn", "0.5"], "--yarn must be a factor of 1 or more"),
        (["--gpu-memory", "24"], "--gpu-memory='24' is not an amount of memory"),
        (["--gpu-memory", "24GiB", "--device", "cpu"], "the model would run on the CPU"),
        (["--encoding", "utf-99"], "--encoding 'utf-99' is unknown"),
    ]
    path = tmp_path / "book.txt"
    path.write_text("The sky is blue.")
    script = """
import contextlib, io, json, sys
from retrieval_attn.cli import main
found = []
for flags in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["ask", *sys.argv[2:], *flags])
    found.append((code, said.getvalue(), "torch" in sys.modules))
print(json.dumps(found))
"""
    command = [sys.executable, "-c", script, json.dumps([flags for flags, _ in cases]), str(path), "Who?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    for (flags, message), (code, said, has_torch) in zip(cases, json.loads(done.stdout), strict=True):
        assert code == 2 and message in said and len(said.splitlines()) == 1 and not has_torch, (flags, said)


def test_a_text_that_is_too_long_names_the_factor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model is loaded, with the factor that suffices and the part that fits; transformers adds no line."""
    path = tmp_path / "book.txt"
    path.write_text("The grass is green. " * 32_000)
    assert main(["ask", str(path), "Who?"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("retrieval-attn ask:")]) == 1
    found = re.search(
        r"book.txt has ([\d,]+) tokens, with question and answer ([\d,]+); this model has ([\d,]+)", said[-1]
    )
    assert found, said
    tokens, needed, limit = (int(number.replace(",", "")) for number in found.groups())
    factor = re.search(r"Use --yarn (\d+), the first (\d+) % of the text", said[-1])
    assert factor and (int(factor[1]) - 1) * limit < needed <= int(factor[1]) * limit
    assert int(factor[2]) * tokens <= 100 * (limit - (needed - tokens))
    assert not any("transformers" in line for line in said)


@pytest.mark.parametrize("file", ["file", "-"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows writes it at the start of a file in UTF-8."""
    data = b"\xef\xbb\xbf" + "Größe: 3 µm.".encode()
    (tmp_path / "text.txt").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert read_documents(["-" if file == "-" else str(tmp_path / "text.txt")], None, "{file}") == "Größe: 3 µm."


def test_the_text_comes_in_pieces(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Terminal(io.StringIO):
        def flush(self) -> None:
            written.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["ask", document, QUESTION, *FEW]) == 0
    assert len(set(written)) > 3 and written == sorted(written, key=len)


def test_a_given_number_of_keys_is_taken_for_a_saved_context() -> None:
    """Also the default one, where the context was read with another."""
    assert _options(Config(), None) == {}
    assert [_options(Config(retrieve=keys), str(keys)) for keys in ("auto", 40)] == [
        {"retrieve": "auto"},
        {"retrieve": 40},
    ]


def test_standard_input_and_raw_text(
    document: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base model continues the text itself; all keys may be attended."""
    for retrieve in ("all", "40"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(document).read_bytes())))
        asked = " The special magic Bergen number is:"
        assert main(["ask", "-", asked, "--raw", "--retrieve", retrieve, "--max-new-tokens", "8"]) == 0
        assert "7391846" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt", "Who?"], "missing.txt: no such file, and no context 'missing.txt' in the store"),
        (["folder", "Who?"], "folder is a folder; give its text files: retrieval-attn ask folder/*.txt QUESTION"),
        (["x" * 300, "Who?"], "...: no such file"),
        (["latin.txt", "Who?"], "latin.txt is not UTF-8, byte 0xf6 at 3"),
        (["blank.txt", "Who?"], "blank.txt is blank"),
        (["good.txt", " "], "ask a non-empty question"),
        (["good.txt", "Who?", "--retrieve", "some"], "retrieve='some'"),
        (["good.txt/inside", "Who?"], "good.txt/inside: no such file"),
        (["/proc/self/mem", "Who?"], "Input/output error"),
        (["good.txt", "Who? " * 70_000], "this model has 131,072 positions. Use --yarn "),
        (["good.txt", "Who?", "--retrieve", "0"], "retrieve=0"),
        (["good.txt", "Who?", "--max-new-tokens", "many"], "--max-new-tokens='many' is not a number of tokens"),
        (["good.txt", "Who?", "--window", "-1"], "--window='-1'"),
        (["good.txt", "Who?", "--temperature", "-1"], "temperature"),
        (["good.txt", "Who?", "--index", "rorgraph"], "rorgraph"),
        (["good.txt", "Who?", "--index", "device:keybytes=40"], "keybytes"),
        (["good.txt", "Who?", "--index", "device:40"], "device:40: options are written name=value, got '40'"),
        (["good.txt", "Who?", "--model", "no/such-model"], "No model could be loaded"),
        (["good.txt", "Who?", "--device", "gpu0"], "not a torch device; use auto"),
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
    command = [*CLI, "plan", str(tmp_path), "--max-context", "2k"]
    with open("/dev/full", "w") as full:
        done = run_preloaded(command, stdout=full.fileno(), finalizes=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "No space left on device" in done.stderr


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
    assert printed.out == "".join(seen[:2]).lstrip()
    assert printed.err.splitlines()[-1] == "retrieval-attn ask: interrupted"
    assert not [thread for thread in threading.enumerate() if "stream" in thread.name]


def test_ctrl_c_from_a_keyboard(document: str) -> None:
    """The signal itself, while the worker is inside compiled code: status 130, and no crash at the end."""
    words = [*CLI, "ask", document, "Who?", "--temperature", "9", "--seed", "1", "--max-new-tokens", "2000"]
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as output, tempfile.TemporaryFile("w+") as said:
        try:
            asked = PreloadedProcess(words, os.environ, tempfile.gettempdir(), {1: writing, 2: said.fileno()})
        finally:
            os.close(writing)
        try:
            assert output.read(1)
            asked.send_signal(signal.SIGINT)
            assert asked.wait(60) == 130
        finally:
            asked.send_signal(signal.SIGKILL)
            asked.close()
        said.seek(0)
        assert said.read().splitlines()[-1] == "retrieval-attn ask: interrupted"


def test_an_index_with_options() -> None:
    """Of a command line they come as the API takes them; without any they are the index's own."""
    parser = argparse.ArgumentParser()
    model_args.add_config_arguments(parser)
    given = parser.parse_args(["--index", "device:key_bytes=40:int8_rows=True", "--host-dtype", "int8"])
    options = {"key_bytes": 40, "int8_rows": True}
    assert model_args.config_of(given) == Config(index="device", index_options=options, host_dtype="int8")
    assert model_args.config_of(parser.parse_args([])) == Config()


def test_memory_is_planned_for_the_text_and_not_for_all_positions() -> None:
    """On a small GPU a short text must not be refused for what the model's longest would need."""
    assert model_args._needed(str(BUNDLED), 500) == 1524
    assert model_args._needed(str(BUNDLED), 10**9) < 10**9


def test_output_that_nobody_reads(tmp_path: Path) -> None:
    """`retrieval-attn plan MODEL | head -1`: no traceback."""
    tiny_model("llama").config.save_pretrained(tmp_path)
    command = [*CLI, "plan", str(tmp_path), "--max-context", "2k"]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_preloaded(command, stdout=writing, finalizes=True)
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
from retrieval_attn.cli import entry
atexit.register(print, "the end")
entry.main = lambda: print("said") or {code}
entry.program()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (said, code), done.stderr
