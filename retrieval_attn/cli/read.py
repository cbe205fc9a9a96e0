"""`retrieval-attn read FILE --save NAME`: read a text once, so that `ask NAME` never has to."""

from __future__ import annotations

import argparse
import sys
import time

from retrieval_attn.cli.model_args import (
    add_config_arguments,
    add_model_arguments,
    add_store_argument,
    config_of,
    load_llm,
    text_of,
)
from retrieval_attn.memory.units import show_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    parser.add_argument("file", metavar="FILE", help="text to read, UTF-8; - is the standard input")
    parser.add_argument(
        "--save", required=True, metavar="NAME", help="what the context is called from then on; what had it gives way"
    )
    add_model_arguments(parser)
    add_store_argument(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Read, save while reading, and say on the error output what it cost."""
    from retrieval_attn.store import ContextStore, check_name

    text, config, store = text_of(args.file), config_of(args), ContextStore(args.store)
    check_name(args.save)  # before a long read
    llm = load_llm(args, len(text.encode()), config)
    began = time.perf_counter()
    context = llm.read(text, save=args.save, store=store)
    print(
        f"read and saved {context.num_tokens:,} tokens as {args.save!r} in {time.perf_counter() - began:.1f} s, "
        f"{show_bytes(store.resolve(args.save).nbytes)}; retrieval-attn ask {args.save} QUESTION",
        file=sys.stderr,
    )
    return 0
