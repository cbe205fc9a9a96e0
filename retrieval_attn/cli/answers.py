"""Answers as they are printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["without_leading_space"]


def without_leading_space(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the pieces of an answer without the white space that it begins with."""
    begun = False
    for piece in pieces:
        text = piece if begun else piece.lstrip()
        if text:
            begun = True
            yield text
