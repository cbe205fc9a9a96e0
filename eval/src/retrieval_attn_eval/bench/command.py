"""`retrieval-attn bench`: indexes and studies on attention keys; sessions, servers, peers and fidelity of models."""

from __future__ import annotations

import argparse
import importlib

HELP = "time, memory, recall and fidelity of sessions, servers and indexes"

__all__ = ["add_arguments", "run"]

_WHAT = {
    "fidelity": (
        "retrieval_attn_eval.bench.fidelity.command",
        "how far every method's next-token distribution is from full attention's",
    ),
    "index": ("retrieval_attn_eval.bench.index", "recall, work, time and memory of every index on attention keys"),
    "peers": (
        "retrieval_attn_eval.bench.peers",
        "this package and an installed llama.cpp on the same GGUF file, in turn",
    ),
    "serve": (
        "retrieval_attn_eval.bench.serve.command",
        "throughput and token latency of concurrent requests, compared with sequential and static batches",
    ),
    "session": (
        "retrieval_attn_eval.bench.session.command",
        "what a user waits for, through the public API, with compile caches cold and warm",
    ),
    "study": (
        "retrieval_attn_eval.bench.studies",
        "figures 2, 3a, 3b and 6 of the RetrievalAttention paper, on your heads",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Subcommands of `retrieval-attn bench`."""
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (module, text) in _WHAT.items():
        importlib.import_module(module).add_arguments(commands.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Run the chosen one; see its module."""
    return int(importlib.import_module(_WHAT[args.what][0]).run(args))
