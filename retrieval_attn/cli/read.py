"""`retrieval-attn read FILE --save NAME`: read a text once, so that `ask NAME` never has to."""

from __future__ import annotations

import argparse
import sys
import time

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
from retrieval_attn.memory.units import show_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    parser.add_argument(
        "files", metavar="FILE", nargs="+", help="text files to read, one after the other; - is the standard input"
    )
    parser.add_argument(
        "--save", required=True, metavar="NAME", help="name to save the context under (replaces an existing one)"
    )
    add_encoding_argument(parser)
    add_model_arguments(parser)
    add_store_argument(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Read, save while reading, and print the cost on the error output."""
    from retrieval_attn.store import ContextStore, check_name

    config, store = config_of(args), ContextStore(args.store)
    check_model_flags(args)
    check_name(args.save)  # before a long read
    text = read_documents(args.files, args.encoding, f"retrieval-attn read {{file}} --save {args.save}")
    ids, planned = prompt_of(args, text, args.files, 0)
    llm = load_llm(args, planned, config)
    began = time.perf_counter()
    context = llm.read(ids, save=args.save, store=store)
    print(
        f"{context.num_tokens:,} tokens read and saved as {args.save!r} in {time.perf_counter() - began:.1f} s, "
        f"{show_bytes(store.resolve(args.save).nbytes)}; now: retrieval-attn ask {args.save} QUESTION",
        file=sys.stderr,
    )
    return 0
