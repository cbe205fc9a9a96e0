"""Flags that say what a `Subject` is: which model, and how it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["add_model_flags", "add_running_flags"]

Add = Callable[..., Any]
"""`add_argument` of a parser."""


def add_model_flags(add: Add) -> None:
    """The model, or the shape of one with random weights."""
    add("--model", default="bundled", metavar="PATH|ID", help="bundled, a folder or a hub id (default: %(default)s)")
    add(
        "--shape",
        metavar="NAME",
        help="random weights instead: llama-3-8b, llama-2-7b, llama3-8b-slice (two layers) or tiny",
    )
    add("--layers", type=int, metavar="N", help="of --shape, only the first ones (default: all of them)")


def add_running_flags(add: Add) -> None:
    """Device, numbers, memory, index and threads: what `settings_of` takes."""
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of weights and keys")
    add("--gpu-memory", metavar="SIZE", help="hard cap for the process, such as 24GiB (default: none)")
    add("--index", default="auto", metavar="NAME", help="index of the keys (default: %(default)s)")
    add("--host-dtype", default="auto", help="storage of host keys; auto: the model's (default: %(default)s)")
    add("--retrieve", default="auto", metavar="K", help="keys retrieved: a number, all or auto (%(default)s)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of the search; 0: all (default: %(default)s)")
