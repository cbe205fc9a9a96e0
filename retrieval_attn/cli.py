"""The command `retrieval-attn`: one subcommand per module, errors as one line, help that is instant."""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from retrieval_attn.errors import RetrievalAttentionError
from retrieval_attn.imports import quiet

# subcommand -> (module with add_arguments and run, one-line help)
COMMANDS = {
    "read": ("retrieval_attn.commands.read", "read a text file once and save the context"),
    "ask": ("retrieval_attn.commands.ask", "answer a question about a text file or a saved context"),
    "serve": ("retrieval_attn.commands.serve", "answer over HTTP, as OpenAI's API does"),
    "contexts": ("retrieval_attn.commands.contexts", "the saved contexts: list, verify, remove"),
    "chat": ("retrieval_attn.commands.chat", "talk in a terminal, about a document or not, with a model or a server"),
    "trace": ("retrieval_attn.commands.trace", "load for a server: draw, convert and replay traces of requests"),
    "needle": ("retrieval_attn.eval.needle.command", "find a needle in a long text: retrieval beside full attention"),
    "plan": ("retrieval_attn.commands.plan", "what fits in how much GPU and host memory, before anything is loaded"),
    "warm": ("retrieval_attn.commands.warm", "compile ahead, once per machine, what a first answer would wait for"),
    "verify": ("retrieval_attn.commands.verify", "compare a model's retrieval attention with its eager attention"),
    "ruler": ("retrieval_attn.eval.ruler.command", "the 13 RULER tasks at any length, full attention and others"),
    "infinitebench": (
        "retrieval_attn.eval.infinitebench.command",
        "the 12 InfiniteBench tasks, from its files or generated",
    ),
    "extract": ("retrieval_attn.eval.extract.command", "many facts of a long text at once, as JSON"),
    "reproduce": ("retrieval_attn.eval.reproduce.command", "a table or figure of the paper, ours beside its numbers"),
    "lm-eval": ("retrieval_attn.eval.lm_eval.command", "lm-evaluation-harness with retrieval attention"),
    "record": ("retrieval_attn.eval.recording.command", "write down a model's queries, keys and values over a text"),
    "bench": (
        "retrieval_attn.eval.bench.command",
        "times, memory, recall and fidelity, of a session or in parts; the paper's studies",
    ),
}

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Importing and building it loads neither torch nor transformers."""
    parser = argparse.ArgumentParser(
        prog="retrieval-attn", description="Long contexts on one ordinary GPU: keys in host memory, retrieved."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        importlib.import_module(module).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 0 done, 1 the command found a failure, 2 bad input or no access, 130 interrupted.

    141: nobody reads the output any more.
    """
    # torch's OpenMP reads it when it is loaded: threads that spin while they wait take the processor from each other,
    # and from searches, wherever anything else runs
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    quiet()
    args = build_parser().parse_args(argv)
    module, _ = COMMANDS[args.command]
    try:
        return int(importlib.import_module(module).run(args))
    except RetrievalAttentionError as error:
        print(f"retrieval-attn {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # who read the output has gone, as `head` does: nothing to say, here or when Python flushes it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"retrieval-attn {args.command}: {_about(error)}", file=sys.stderr)
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


if __name__ == "__main__":
    program()
