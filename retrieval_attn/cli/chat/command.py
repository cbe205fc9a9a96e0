"""`retrieval-attn chat MODEL`: a conversation in a terminal, with a model in this process or with a server."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from retrieval_attn.cli.documents import add_encoding_argument, read_documents
from retrieval_attn.cli.model_args import (
    add_config_arguments,
    add_model_arguments,
    add_store_argument,
    check_model_flags,
    config_of,
    load_llm,
    prompt_of,
)
from retrieval_attn.compile.gc_pause import no_gc
from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.memory.units import parse_tokens
from retrieval_attn.model.gguf.file import resolve

if TYPE_CHECKING:
    from retrieval_attn.cli.chat.backend import ChatBackend
    from retrieval_attn.sampling.sampling_params import Sampling

ROOM = 16 * 1024
"""Tokens of questions and answers that memory is planned for, without `--max-context`."""
DOCUMENT_SUFFIXES = (".txt", ".md", ".html", ".htm", ".pdf", ".docx", ".odt", ".epub")
TEST_MODEL = "the bundled test model, which finds planted numbers and can do little else"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    add_model_arguments(parser, positional=True)
    parser.add_argument(
        "--url",
        help="of a server to talk to, such as http://127.0.0.1:8000; MODEL is as it names it (default: its first), its "
        "key is $OPENAI_API_KEY, and flags of model and read are without effect",
    )
    parser.add_argument(
        "--document", metavar="FILE", help="text to read before the first question; MODEL may be such a file, too"
    )
    add_encoding_argument(parser)
    parser.add_argument("--load", metavar="NAME", help="a saved context to go on from")
    add_store_argument(parser)
    parser.add_argument("--max-new-tokens", default="1k", metavar="N", help="longest answer (default: %(default)s)")
    parser.add_argument(
        "--max-context", metavar="N", help="tokens of document and conversation (default: 16k for the conversation)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the random choices of a temperature")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until /quit or the end of the input."""
    _take_document(args)
    if args.document is not None and args.load is not None:
        raise ConfigError("--document and --load both say what the conversation is about; give one of them")
    if args.document == "-":
        raise ConfigError("--document - would take the questions for the document; give a file")
    if args.url is None:
        check_model_flags(args)
    from retrieval_attn.cli.chat.loop import ChatLoop
    from retrieval_attn.cli.chat.terminal import Terminal
    from retrieval_attn.sampling.sampling_params import Sampling

    most = parse_tokens(args.max_new_tokens, "--max-new-tokens")
    sampling = Sampling(max_new_tokens=most, temperature=args.temperature, seed=args.seed)
    usage = "retrieval-attn chat --document {file}"
    text = "" if args.document is None else read_documents([args.document], args.encoding, usage)
    talk = _local(args, sampling, text) if args.url is None else _remote(args, sampling, text)
    terminal = Terminal()
    with closing(talk):
        if args.load is not None:
            terminal.say(talk.load(args.load))
        terminal.say(f"{talk.about}\nAsk, or /help. Ctrl-C stops an answer, /quit ends.")
        return ChatLoop(talk, terminal).run()


def _take_document(args: argparse.Namespace) -> None:
    """Use a text file in the place of MODEL as the document; a GGUF file is a model.

    Raises InputDataError for a file that does not exist.
    """
    path = Path(args.model)
    if path.is_file() and args.document is None and resolve(path, download=False) is None:
        args.document, args.model = args.model, "bundled"
        print(
            f"{args.document} is a file: read as --document, with the bundled test model; for another model: "
            f"retrieval-attn chat MODEL --document {args.document}",
            file=sys.stderr,
        )
    elif path.suffix.lower() in DOCUMENT_SUFFIXES and not path.exists():
        raise InputDataError(f"{args.model}: no such file; give a model, or an existing text file with --document")


def _local(args: argparse.Namespace, sampling: Sampling, text: str) -> ChatBackend:
    with no_gc():
        from retrieval_attn.cli.chat.local import LocalBackend
    from retrieval_attn.store import ContextStore

    config, store = config_of(args), ContextStore(args.store)
    most = None if args.max_context is None else parse_tokens(args.max_context, "--max-context")
    tokens = ROOM
    if args.load is not None:
        # an unknown name is an error before the model is loaded
        saved = store.resolve(args.load).plain.get("tokens")
        tokens += saved if isinstance(saved, int) else 0
    ids, read = prompt_of(args, text, [args.document], 0) if text else ([], 0)
    llm = load_llm(args, read + tokens if most is None else most, config, say=False)
    talk = LocalBackend(llm, TEST_MODEL if args.model == "bundled" else args.model, sampling, store)
    if ids:
        talk.read(ids)
    return talk


def _remote(args: argparse.Namespace, sampling: Sampling, text: str) -> ChatBackend:
    from retrieval_attn.cli.chat.remote import RemoteBackend
    from retrieval_attn.remote import Endpoint, model_names

    endpoint = Endpoint.of(args.url)
    named = [] if args.model == "bundled" else [args.model]
    return RemoteBackend(endpoint, (named or model_names(endpoint))[0], sampling, text)
