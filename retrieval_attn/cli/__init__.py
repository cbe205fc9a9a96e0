"""The command line: `retrieval-attn COMMAND`, a module per command."""

from __future__ import annotations

from retrieval_attn.cli.entry import COMMANDS, build_parser, main, program

__all__ = ["COMMANDS", "build_parser", "main", "program"]
