"""Long texts that are read quickly: all layers read all chunks, but a chunk attends to what is near it.

For memory, and for times per token by codes or by all keys, which do not depend on what keys hold: a million tokens are
read in a minute, not in ten. A measure that used it says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from retrieval_attn.gpu.attention import flash
from retrieval_attn.gpu.attention.flash import Call
from retrieval_attn_eval.flags import as_tokens

__all__ = ["add_read_window", "near_reads", "read_simply"]


def add_read_window(parser: argparse.ArgumentParser) -> None:
    """The flag --read-window."""
    parser.add_argument(
        "--read-window", type=as_tokens, metavar="TOKENS",
        help="simplified reads: chunks attend to so many tokens before them (default: to all)",
    )  # fmt: skip


def read_simply(subject: Any, window: int | None) -> None:
    """Note among what is simplified that texts were read so."""
    if window is not None:
        subject.simplifications.append(f"chunks were read with the {window} tokens before them alone")


@contextmanager
def near_reads(window: int | None) -> Iterator[None]:
    """Within, a chunk of several tokens attends to itself and the `window` tokens before it; None: to all."""
    if window is None:
        yield
        return

    def call(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = False, *others: Any) -> Call:
        kept = query.shape[2] + window
        if causal and key.shape[2] > kept:
            key, value = key[:, :, -kept:], value[:, :, -kept:]
        return Call(query, key, value, scale, causal, *others)

    with mock.patch.object(flash, "Call", call):
        yield
