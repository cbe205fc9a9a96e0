"""`retrieval-attn ask FILE|NAME QUESTION`: read texts, or open a saved context, and answer one question about them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from retrieval_attn.cli.documents import STANDARD_INPUT, add_encoding_argument, read_documents
from retrieval_attn.cli.model_args import (
    add_config_arguments,
    add_model_arguments,
    add_store_argument,
    check_model_flags,
    config_of,
    load_llm,
    prompt_of,
)
from retrieval_attn.cli.output import without_leading_space
from retrieval_attn.errors import ConfigError, InputDataError, StoreError, UnknownContextError
from retrieval_attn.memory.units import parse_tokens, show_bytes

if TYPE_CHECKING:
    from retrieval_attn.answer import Stats
    from retrieval_attn.config import Config
    from retrieval_attn.store import ContextStore, NamedContext


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    parser.add_argument(
        "files",
        metavar="FILE|NAME",
        nargs="+",
        help="text files to read, one after the other (- is the standard input), or the name of a saved context",
    )
    parser.add_argument("question", metavar="QUESTION", help="question about the text")
    add_encoding_argument(parser)
    add_model_arguments(parser)
    add_store_argument(parser)
    parser.add_argument("--max-new-tokens", default="256", metavar="N", help="longest answer (default: %(default)s)")
    add_config_arguments(parser)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the random choices of a temperature")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="let QUESTION continue the text without a chat template, for base models (default: the model's chat "
        'template, or "Question: ... Answer:" without one)',
    )


def run(args: argparse.Namespace) -> int:
    """Read or open, stream the answer to the standard output, and print its cost on the error output."""
    config, most = config_of(args), parse_tokens(args.max_new_tokens, "--max-new-tokens")
    check_model_flags(args)
    from retrieval_attn.sampling.sampling_params import Sampling

    sampling = Sampling(max_new_tokens=most, temperature=args.temperature, seed=args.seed)
    if not args.question.strip():
        raise InputDataError("QUESTION is blank; ask a non-empty question")
    store, saved = _saved(args)
    if saved is None:
        text = read_documents(args.files, args.encoding, f"retrieval-attn ask {{file}} QUESTION{' --raw' * args.raw}")
        ids, planned = prompt_of(args, text, args.files, most, args.question)
    else:
        options = _options(config, args.retrieve)
        planned = int(saved.plain["tokens"]) + len(args.question.encode()) + most
    llm = load_llm(args, planned, config)
    started = time.perf_counter()
    if saved is None:
        from retrieval_attn.context import Context

        context = Context(llm.model, llm.tokenizer, llm.config).read(ids)
        source = f"{context.num_tokens:,} tokens read"
    else:
        context = llm.open(saved.name, store=store, **options)
        context.cache.require_room(len(context.template.question_ids(args.question, args.raw)) + most)
        source = f"{context.num_tokens:,} tokens reused from {saved.name!r}, opened"
    source = f"{source} in {time.perf_counter() - started:.1f} s"
    with context.stream(args.question, sampling, raw=args.raw) as stream:
        for piece in stream if args.raw else without_leading_space(stream):
            print(piece, end="", flush=True)
    print(flush=True)
    context.kept.wait(progress=True)  # damage that is found only now has its message, below an answer that may be wrong
    if stream.answer is not None:
        _print_cost(stream.answer.stats, source, llm.device.type)
    return 0


def _saved(args: argparse.Namespace) -> tuple[ContextStore | None, NamedContext | None]:
    """Return the store and the saved context that the only FILE names; None, None if files are to be read.

    Raises InputDataError for a name that is neither, and for a question that is missing.
    """
    if os.path.isfile(args.question):
        raise InputDataError(
            f"the last argument must be the question, got the file {args.question}; put the question behind it, in "
            "quotation marks"
        )
    missing = [file for file in args.files if file != STANDARD_INPUT and not os.path.lexists(file)]
    if not missing:
        return None, None
    if len(args.files) > 1:
        raise InputDataError(
            f"{_short(missing[0])}: no such file; all but the last argument are files, and a question of several words "
            "needs quotation marks"
        )
    from retrieval_attn.store import ContextStore

    store = ContextStore(args.store)
    try:
        return store, store.resolve(missing[0])
    except UnknownContextError as error:
        raise InputDataError(f"{_short(missing[0])}: no such file, and {error}") from None
    except StoreError as error:
        if error.reason != "name":
            raise
        raise InputDataError(f"{_short(missing[0])}: no such file; give one that exists") from None


def _short(name: str) -> str:
    return name if len(name) <= 120 else f"{name[:117]}..."


def _options(config: Config, retrieve: str | None) -> dict[str, Any]:
    """Return the options for opening a context. Raises ConfigError for flags that its read has decided.

    retrieve: the flag; None: not given.
    """
    usual = type(config)()
    for name in ("window", "index"):
        if getattr(config, name) != getattr(usual, name):
            raise ConfigError(f"--{name} was decided when the saved context was read; read the text again to change it")
    return {} if retrieve is None else {"retrieve": config.retrieve}


def _print_cost(stats: Stats, source: str, device: str) -> None:
    """Print tokens, seconds and memory, and the share of attention that was estimated if it is known."""
    rate = f" at {1 / stats.seconds_per_token:.1f} tokens/s" if stats.seconds_per_token else ""
    first = f"first token after {stats.prefill_seconds:.2f} s"
    print(f"{source}; {first}; {stats.new_tokens} tokens{rate}", file=sys.stderr)
    host, window = show_bytes(stats.host_bytes), show_bytes(stats.device_bytes)
    share = ""
    if stats.tail_share is not None:
        share = f"; {100 * stats.tail_share:.1f} % of attention was estimated from cluster means, the rest exact"
    print(f"KV cache: {host} in host memory, {window} on the {device}{share}", file=sys.stderr)
