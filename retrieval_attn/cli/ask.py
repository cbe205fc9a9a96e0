"""`retrieval-attn ask FILE|NAME QUESTION`: read a text, or open a saved context, and answer one question about it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.cli.model_args import (
    add_config_arguments,
    add_model_arguments,
    add_store_argument,
    config_of,
    load_llm,
    text_of,
)
from retrieval_attn.errors import ConfigError, InputDataError, StoreError
from retrieval_attn.memory.units import parse_tokens, show_bytes

if TYPE_CHECKING:
    from retrieval_attn.answer import Stats
    from retrieval_attn.config import Config
    from retrieval_attn.context import Context
    from retrieval_attn.store import ContextStore, NamedContext


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    parser.add_argument(
        "file", metavar="FILE|NAME", help="text to read, UTF-8; - is the standard input; or a context that was saved"
    )
    parser.add_argument("question", metavar="QUESTION", help="what to ask about it")
    add_model_arguments(parser)
    add_store_argument(parser)
    parser.add_argument("--max-new-tokens", default="256", metavar="N", help="longest answer (default: %(default)s)")
    add_config_arguments(parser)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the random choices of a temperature")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        dest="raw",
        action="store_false",
        help='put text and question into the model\'s chat template, or "Question: ... Answer:" without one (default)',
    )
    form.add_argument(
        "--raw", dest="raw", action="store_true", help="let QUESTION continue the text as it stands, for base models"
    )
    parser.set_defaults(raw=False)


def run(args: argparse.Namespace) -> int:
    """Read or open, answer on the standard output as the text comes, and say on the error output what it cost."""
    store, saved = _saved(args.file, args.store)
    config = config_of(args)
    if saved is None:
        text = text_of(args.file)
        length = len(text.encode())
    else:
        options, length = _options(config), int(saved.plain["tokens"])
    most = parse_tokens(args.max_new_tokens, "--max-new-tokens")

    from retrieval_attn.answer import Sampling
    from retrieval_attn.context import Context

    sampling = Sampling(max_new_tokens=most, temperature=args.temperature, seed=args.seed)
    llm = load_llm(args, length + len(args.question.encode()) + most, config)
    if saved is None:
        context = Context(llm.model, llm.tokenizer, llm.config)
        ids = context.template.context_ids(text)
        _require_room(context, len(ids), args, most)  # known before the text is read, which may take long
    started = time.perf_counter()
    if saved is None:
        context.read(ids)
    else:
        context = llm.open(saved.name, store=store, **options)
        _require_room(context, 0, args, most)
    seconds = time.perf_counter() - started
    with context.stream(args.question, sampling, raw=args.raw) as stream:
        for piece in stream:
            print(piece, end="", flush=True)
    print(flush=True)
    context.kept.wait(progress=True)  # damage that is found only now has its message, below an answer that may be wrong
    if stream.answer is not None:
        stats = stream.answer.stats
        _say_tail(stats)
        done = "read" if saved is None else "opened"
        print(
            f"{done} {context.num_tokens:,} tokens in {seconds:.1f} s; first token after {stats.prefill_seconds:.2f} "
            f"s, {1000 * stats.seconds_per_token:.1f} ms per token for {stats.new_tokens} tokens; "
            f"{show_bytes(stats.host_bytes)} of keys and values on the host, {show_bytes(stats.device_bytes)} on the "
            "device",
            file=sys.stderr,
        )
    return 0


def _saved(file: str, folder: str | None) -> tuple[ContextStore | None, NamedContext | None]:
    """The store and the saved context that `file` names; None where it is a file to read."""
    if file == "-" or Path(file).exists():
        return None, None
    from retrieval_attn.store import ContextStore

    store = ContextStore(folder)
    try:
        return store, store.resolve(file)
    except StoreError:
        if os.sep in file or Path(file).suffix:
            return None, None  # reading it says what is wrong
        raise


def _options(config: Config) -> dict[str, Any]:
    """What the flags say about a context that is opened. Raises ConfigError for what its read has decided."""
    usual = type(config)()
    for name in ("window", "index"):
        if getattr(config, name) != getattr(usual, name):
            raise ConfigError(f"--{name} was decided when the saved context was read; read the text again to change it")
    return {} if config.retrieve == usual.retrieve else {"retrieve": config.retrieve}


def _require_room(context: Context, tokens: int, args: argparse.Namespace, most: int) -> None:
    asked = context.template.question_ids(args.question, args.raw)
    if not asked:
        raise InputDataError("QUESTION has no tokens; ask a non-empty question.")
    context.cache.require_room(tokens + len(asked) + most)


def _say_tail(stats: Stats) -> None:
    """How much of attention was estimated, where that is known."""
    if stats.tail_share is None or stats.tail_share_most is None:
        return
    most = stats.tail_share_most
    print(
        f"{100 * stats.tail_share:.1f} % of attention was estimated from clusters of keys, most in layer {most.layer}, "
        f"head {most.head}: {100 * most.share:.1f} %",
        file=sys.stderr,
    )
