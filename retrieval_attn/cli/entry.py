"""The command `retrieval-attn`: one subcommand per module, errors as one line, help that is instant."""

from __future__ import annotations

import argparse
import difflib
import errno
import gc
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from retrieval_attn import __version__
from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.imports import quiet


class Command(NamedTuple):
    """A subcommand: the module with add_arguments(parser) and run(args), and its line of help."""

    module: str
    text: str


COMMANDS = {
    "read": Command("retrieval_attn.cli.read", "read a text file once and save the context"),
    "ask": Command("retrieval_attn.cli.ask", "answer a question about a text file or a saved context"),
    "serve": Command("retrieval_attn.cli.serve", "answer over HTTP, as OpenAI's API does"),
    "contexts": Command("retrieval_attn.cli.contexts", "the saved contexts: list, verify, remove"),
    "chat": Command(
        "retrieval_attn.cli.chat.command", "talk in a terminal, with a model or a server, about a document"
    ),
    "plan": Command("retrieval_attn.cli.plan", "what fits in how much GPU and host memory, before anything is loaded"),
    "warm": Command("retrieval_attn.cli.warm", "compile ahead, once per machine, what a first answer would wait for"),
    "verify": Command("retrieval_attn.cli.verify", "compare a model's retrieval attention with its eager attention"),
}
"""Subcommands of this package by name."""

COMMAND_GROUP = "retrieval_attn.commands"
"""Entry points of other distributions that add subcommands: modules with add_arguments, run and HELP."""

EVALUATION = ("bench", "infinitebench", "lm-eval", "load", "longcontext", "needle", "record", "reproduce", "ruler")
"""Subcommands of the distribution retrieval-attn-eval, named in an error if it is not installed."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class CommandParser(argparse.ArgumentParser):
    """A parser that suggests the nearest command for a misspelled one, and prints its help if a command is missing."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2; if a command is missing, print the list of commands."""
        if self._subparsers is not None and message.startswith("the following arguments are required"):
            self.print_help(sys.stderr)
            raise SystemExit(2)
        super().error(message)

    def command(self, name: str) -> CommandParser:
        """Return the parser of a subcommand."""
        assert self._subparsers is not None, f"{self.prog} has no subcommands"
        actions = (one for one in self._subparsers._group_actions if isinstance(one, argparse._SubParsersAction))
        found = next(actions).choices[name]
        assert isinstance(found, CommandParser)
        return found

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with status 2 and the nearest known flags."""
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        near = [found for flag in flags for found in difflib.get_close_matches(flag, self._option_string_actions, 1)]
        self.error(
            f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {', '.join(near)}?" if near else "")
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(str(value), action.choices, n=3)
            advice = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"there is no command {value!r}; {advice}")
        super()._check_value(action, value)


def build_parser(found: Mapping[str, Command] | None = None) -> CommandParser:
    """Build the whole command line, without torch and transformers. found: defaults to `available_commands()`."""
    parser = CommandParser(
        prog="retrieval-attn", description="Long contexts on one ordinary GPU: keys in host memory, retrieved."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in (available_commands() if found is None else found).items():
        sub = commands.add_parser(name, help=text, description=text)
        importlib.import_module(module).add_arguments(sub)
    return parser


def available_commands() -> dict[str, Command]:
    """Module and help line of every subcommand: this package's, then those of installed distributions by name."""
    found = dict(COMMANDS)
    for point in sorted(importlib.metadata.entry_points(group=COMMAND_GROUP), key=lambda point: point.name):
        found.setdefault(point.name, Command(point.module, importlib.import_module(point.module).HELP))
    return found


def _flush_or_drop() -> None:
    """Flush the output, or drop it if it cannot be written, so that Python's flush at exit raises nothing."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 0 done, 1 the command found a failure, 2 bad input or no access, 130 interrupted.

    141: the reader of the output is gone.
    """
    # torch's OpenMP reads it when it is loaded: threads that spin while they wait take the processor from each other,
    # and from searches, wherever anything else runs
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    quiet()
    given = sys.argv[1:] if argv is None else list(argv)
    found = available_commands()
    if given and given[0] in EVALUATION and given[0] not in found:
        print(
            f"retrieval-attn {given[0]}: needs the package retrieval-attn-eval, which is not installed; in a checkout: "
            "pip install ./eval",
            file=sys.stderr,
        )
        return 2
    parser = build_parser(found)
    args, unknown = parser.parse_known_args(given)
    if unknown:
        parser.command(args.command).refuse(unknown)
    try:
        code = int(importlib.import_module(found[args.command].module).run(args))
        sys.stdout.flush()
        return code
    except RetrievalAttentionError as error:
        print(f"retrieval-attn {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _flush_or_drop()  # the reader has ended, as `head` does
        return 141
    except OSError as error:
        print(f"retrieval-attn {args.command}: {_about(error)}", file=sys.stderr)
        _flush_or_drop()
        return 2
    except KeyboardInterrupt:
        print(f"retrieval-attn {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def program() -> NoReturn:
    """`main` as a process, which ends with it.

    To look for garbage in all that transformers and torch made takes Python a second and more, so that at the end it
    does not. Interrupted it ends at once.
    """
    code = main()
    if code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    gc.freeze()
    sys.exit(code)


def _about(error: OSError) -> str:
    """One line: which file, what is wrong with it, what to do."""
    if error.filename is None:
        return f"{error}; see that the files and folders given are there, may be used, and have room"
    cure = {
        errno.ENOENT: "give one that is there",
        errno.EACCES: "change its permissions, or give another one",
        errno.EPERM: "change its permissions, or give another one",
        errno.EROFS: "give a folder that can be written to",
        errno.ENOSPC: "free some space, or give a folder on another disk",
        errno.ENAMETOOLONG: "give a shorter name",
    }.get(error.errno or 0, "give another file or folder")
    name = str(error.filename)
    return f"{name if len(name) <= 120 else name[:117] + '...'}: {error.strerror}; {cure}"
