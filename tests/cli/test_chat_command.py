"""`retrieval-attn chat` as a user has it: the real program with the bundled model in a pseudo-terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrieval_attn.cli import main
from retrieval_attn.cli.chat.loop import HELP
from retrieval_attn.cli.chat.terminal import wrapped
from tests.cli.terminal import CTRL_C, CTRL_D, chatting
from tests.cli.test_local_talk import BERGEN, DOCUMENT, OSLO
from tests.preloaded import CLI, run_preloaded

FEW = ("--max-new-tokens", "12", "--window", "64", "--index", "flat")


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(DOCUMENT)
    return str(path)


@pytest.mark.slow
def test_a_conversation(document: str, tmp_path: Path) -> None:
    """Who answers is said first; questions, commands and mistakes each get their line; Ctrl-D ends it."""
    store = str(tmp_path / "store")
    with chatting("--document", document, "--store", store, *FEW) as terminal:
        terminal.wait_for(r"the bundled test model, which finds planted numbers and can do little else, on cpu\r\n")
        terminal.wait_for(
            r"document: [\d,]+ tokens; room for [\d,]+ tokens of conversation \(--max-context\)\r\nAsk, or /help\."
        )
        terminal.wait_for(">>> ")
        terminal.type(f"{BERGEN}\n")
        terminal.wait_for(r"\n\r?7391846\r\n>>> ")
        for keys, shown in (
            ("/save turn\n", r"saved [\d,]+ tokens as 'turn', [\d.]+ \w+ in [\d.]+ s; /load turn here"),
            ("/fork here\n", "remembered as 'here' until the program ends"),
            ("/stats\n", r"1 question answered\r\nlast answer: [\d,]+ tokens prefilled, \d+ generated"),
            ("/undo\n", "dropped 1 question\r\n"),
            ("/load here\n", r"back at [\d,]+ tokens, 1 question answered"),
            ("/undo some\n", "/undo takes a number of questions, got 'some'"),
            ("/save\n", "This command needs a name without spaces"),
            ("/save ../up\n", r"\.\./up"),
            ("/load other\n", "'other'"),
            ("/what\n", "There is no command /what; /help lists them"),
            ("/help\n", "/save NAME    save this conversation"),
            ("\n", ">>> "),
            ("/load turn\n", r"loaded 'turn': [\d,]+ tokens, none prefilled again"),
            (f"{OSLO[:20]}\\\n", r"\.\.\. "),
            (f"{OSLO[20:]}\n", "\r\n"),
        ):
            behind = len(terminal.seen)
            terminal.type(keys)
            terminal.wait_for(shown, behind=behind)
            terminal.wait_for(r">>> |\.\.\. ", behind=behind)
        terminal.type(CTRL_D)
        terminal.require_success()
    assert "Traceback" not in terminal.seen
    assert terminal.seen.endswith("\r\n"), "the shell's prompt gets a line of its own"


@pytest.mark.slow
def test_a_pasted_paragraph_is_one_question(document: str) -> None:
    """As a terminal sends it, between two marks; its line breaks stay."""
    with chatting(document, *FEW, TERM="xterm") as terminal:
        terminal.wait_for(r"text\.txt is a file: read as --document, with the bundled test model")
        terminal.wait_for(">>> ")
        terminal.type(f"\x1b[200~Read this.\nAnd this.\n{BERGEN}\x1b[201~\n")
        terminal.wait_for(r"7391846\r\n")
        behind = len(terminal.seen)
        terminal.type("/stats\n")
        terminal.wait_for("1 question answered", behind=behind)


@pytest.mark.slow
def test_typing_ahead_and_history(document: str, tmp_path: Path) -> None:
    """Keys that come during an answer are not shown in it, outlive its Ctrl-C, and stand at the next prompt; the next
    chat knows the lines of this one.
    """
    data = tmp_path / "data"
    long = ("--temperature", "9", "--seed", "1", "--max-new-tokens", "3000", "--window", "64", "--index", "flat")
    with chatting("--document", document, *long, XDG_DATA_HOME=str(data)) as terminal:
        terminal.wait_for(">>> ")
        behind = len(terminal.seen)
        terminal.type(f"{BERGEN}\n")
        terminal.wait_for(r"provided text\?\r\n.{20}", behind=behind)
        behind = len(terminal.seen)
        terminal.type("/sta")
        terminal.wait_for(r".{200}", behind=behind)
        assert "/sta" not in terminal.seen[behind:]
        terminal.type(CTRL_C)
        terminal.wait_for(r"stopped", behind=behind)
        terminal.type("ts\n")
        terminal.wait_for(r"\d questions? answered", behind=behind)
        terminal.type("/quit\n")
        terminal.require_success()
    history = data / "retrieval_attn" / "chat_history"
    assert history.read_text().splitlines()[:2] == [BERGEN, "/stats"]
    assert history.stat().st_mode & 0o077 == 0
    with chatting("--window", "64", XDG_DATA_HOME=str(data)) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("\x1b[A\x1b[A\n")
        terminal.wait_for(r"0 questions answered\r\n>>> ")
        terminal.type(CTRL_D)
        terminal.require_success()


def test_messages_are_wrapped_between_words() -> None:
    shown = wrapped(HELP, 60).splitlines()
    assert max(map(len, shown)) < 60
    assert " ".join(" ".join(shown).split()) == " ".join(HELP.split())
    assert next(line for line in shown if line.startswith(" ")).startswith(" " * 14), "the second column continues"
    assert wrapped("one\n\ntwo", 40) == "one\n\ntwo"


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_program(document: str) -> None:
    """At the prompt, in the middle of an answer, and twice at once; the next answer comes as ever."""
    long = ("--temperature", "9", "--seed", "1", "--max-new-tokens", "3000", "--window", "64", "--index", "flat")
    with chatting("--document", document, *long) as terminal:
        terminal.wait_for(">>> ")
        terminal.interrupt(r"/quit or Ctrl-D ends the chat\s+>>> ")  # what is typed before that is shown twice
        for keys in (CTRL_C, CTRL_C + CTRL_C):
            behind = len(terminal.seen)
            terminal.type(f"{BERGEN}\n")
            terminal.wait_for(r"provided text\?\r\n.{20}", behind=behind)
            behind = len(terminal.seen)
            terminal.type(keys)
            terminal.wait_for(r"stopped", behind=behind)
            terminal.wait_for(">>> ", behind=behind)
        behind = len(terminal.seen)
        terminal.type("/stats\n")
        terminal.wait_for(r"\d questions? answered", behind=behind)
        terminal.type("/quit\n")
        terminal.require_success()
    assert "Traceback" not in terminal.seen


@pytest.mark.slow
def test_in_a_pipe(document: str) -> None:
    """Answers alone on the standard output, no prompts; the end of the input ends it."""
    asked = run_preloaded([*CLI, "chat", "--document", document, *FEW], given=f"{BERGEN}\n/stats\n{OSLO}")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.split() == ["7391846", "1234567"] and ">>>" not in asked.stderr + asked.stdout
    assert "1 question answered" in asked.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--document", "missing.txt"], "missing.txt: No such file or directory"),
        (["missing.pdf"], "missing.pdf: no such file; give a model, or an existing text file with --document"),
        (["--device", "gpu0"], "use auto, cpu, cuda or cuda:N"),
        (["--document", "-"], "would take the questions for the document"),
        (["--document", "a", "--load", "b"], "give one of them"),
        (["--load", "never-saved"], "never-saved"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--temperature", "-1"], "temperature must be"),
        (["--url", "localhost"], "must be the address of a server"),
        (["--url", "http://127.0.0.1:9"], "check that a server is running"),
        (["no/such-model"], "No model could be loaded"),
    ],
)
def test_bad_flags(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["chat", *arguments, "--store", str(tmp_path / "store")]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("retrieval-attn chat: ")]
    assert len(said) == 1 and message in said[0]
