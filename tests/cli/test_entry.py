"""The command line before any command runs: version, lists of commands, misspelled words, and flags."""

from __future__ import annotations

import pytest

import retrieval_attn
from retrieval_attn.cli import COMMANDS, main


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the program, require exit status 2, and return its error output."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"retrieval-attn {retrieval_attn.__version__}\n"


def test_without_a_command_the_list_of_commands_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused([], capsys)
    for name, (_, text) in COMMANDS.items():
        assert name in said and text[:30] in said


def test_contexts_without_an_action_lists_its_actions(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["contexts"], capsys)
    assert all(f"    {action} " in said for action in ("ls", "verify", "gc", "rm"))


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["asks"], "there is no command 'asks'; did you mean ask?"),
        (["contexts", "list"], "there is no command 'list'; did you mean ls?"),
        (["xyzzy"], "choose from read, ask, serve"),
        (["ask", "book.txt", "Who?", "--modle", "x"], "did you mean --model?"),
        (["plan", "bundled", "--max-contxt=1k"], "did you mean --max-context?"),
        (["plan", "bundled", "--zzz"], "unrecognized arguments: --zzz\n"),
    ],
)
def test_misspelled_words(arguments: list[str], advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert advice in refused(arguments, capsys)
