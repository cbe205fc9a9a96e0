"""`retrieval-attn extract`: many facts of a long text as JSON, methods side by side, at any length."""

from __future__ import annotations

import argparse

from retrieval_attn_eval.extract.suite import ExtractSuite
from retrieval_attn_eval.suite import arguments

HELP = "benchmark: extract many facts of a long text at once, as JSON"

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that all suites share."""
    arguments.add_arguments(parser, lengths="4096,8192,16384", n=20)


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if every sample was answered, 1 if some failed.  Raises RetrievalAttentionError."""
    return arguments.run(args, ExtractSuite())
