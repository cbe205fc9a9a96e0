"""ChatLoop: answers the user's lines and runs commands that begin with a slash."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from retrieval_attn.cli.chat.backend import ChatBackend
from retrieval_attn.cli.chat.terminal import Terminal
from retrieval_attn.cli.output import without_leading_space
from retrieval_attn.errors import ConfigError, RetrievalAttentionError

HELP = """\
/save NAME    save this conversation and its document
/load NAME    continue from a saved or forked conversation
/fork NAME    remember this point until the program ends, at a server also its saved context; /load NAME returns to it
/undo [N]     drop the last N questions with their answers; without N all of them
/stats        show the size of the conversation and the cost of the last answer
/help         show this list
/quit         end the chat, as Ctrl-D does
Ctrl-C stops an answer. Pasted text is one question, with its line breaks.
A typed line that ends in \\ continues in the next one."""
STOPPED = " [stopped]"


class ChatLoop:
    """A chat: answers on the standard output, messages on the error output."""

    def __init__(self, talk: ChatBackend, terminal: Terminal) -> None:
        """terminal: source of the lines."""
        self._talk, self._terminal = talk, terminal
        self._forks: dict[str, Any] = {}
        self._commands: dict[str, Callable[[str], str | None]] = {
            "/save": lambda name: talk.save(_required(name)),
            "/load": self._load,
            "/fork": self._fork,
            "/undo": self._undo,
            "/stats": lambda _: talk.stats(),
            "/help": lambda _: HELP,
        }

    def run(self) -> int:
        """Answer until /quit or the end of the input. Return the exit status."""
        while True:
            try:
                line = self._line()
            except EOFError:
                self._terminal.end_line()
                return 0
            except KeyboardInterrupt:
                self._terminal.say("\n/quit or Ctrl-D ends the chat")
                continue
            if line == "/quit":
                return 0
            try:
                with self._terminal.typing_ahead():
                    self._do(line)
            except KeyboardInterrupt:
                self._terminal.say("stopped")
            except (RetrievalAttentionError, OSError) as error:
                self._terminal.say(f"{error}")

    def _line(self) -> str:
        line = self._terminal.read_line(False)
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._terminal.read_line(True)
        return line.strip()

    def _do(self, line: str) -> None:
        if not line.startswith("/"):
            if line:
                self._answer(line)
            return
        word, _, rest = line.partition(" ")
        command = self._commands.get(word)
        if command is None:
            raise ConfigError(f"There is no command {word}; /help lists them. A question cannot begin with a slash.")
        if said := command(rest.strip()):
            self._terminal.say(said)

    def _answer(self, question: str) -> None:
        pieces = self._talk.answer(question)
        try:
            with contextlib.closing(pieces):
                for piece in without_leading_space(pieces):
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(STOPPED, flush=True)
        except BaseException:
            print(flush=True)
            raise
        else:
            print(flush=True)

    def _load(self, name: str) -> str:
        mark = self._forks.get(_required(name))
        return self._talk.load(name) if mark is None else self._talk.go_back(mark)

    def _fork(self, name: str) -> str:
        self._forks[name], told = self._talk.fork(_required(name))
        return f"{told}; /load {name} returns to it"

    def _undo(self, count: str) -> str:
        if count and (not count.isdecimal() or int(count) < 1):
            raise ConfigError(f"/undo takes a number of questions, got {count!r}; without one it drops all")
        dropped = self._talk.forget(int(count) if count else None)
        return f"dropped {dropped} question{'' if dropped == 1 else 's'}"


def _required(name: str) -> str:
    if not name or " " in name:
        raise ConfigError(f"This command needs a name without spaces, got {name!r}; /help lists the commands")
    return name
