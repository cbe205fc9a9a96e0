"""Reads a text through an engine, in turn with the requests of others, and saves what was read under a name."""

from __future__ import annotations

from typing import NamedTuple

from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Request
from retrieval_attn.errors import AdmissionError, InputDataError

__all__ = ["WrittenContext", "keep"]

HELD_TOKENS = 64
"""While so many are generated, the tree cannot give the text up; they are cancelled when it is saved."""


class WrittenContext(NamedTuple):
    """A saved context as it was written: its digest, its tokens, and the bytes that this save wrote."""

    digest: str
    tokens: int
    nbytes: int


def keep(
    engine: Engine, name: str, ids: tuple[int, ...], context: str | None = None, namespace: str | None = ""
) -> WrittenContext:
    """Wait until a text was read and saved. context: a saved one that it continues; then only the text is written.

    Raises as `Engine.submit` and `Engine.save`, and what goes wrong with the reading.
    """
    request = Request(
        (ids, ids[-1:]), HELD_TOKENS, stop_ids=frozenset(), namespace=namespace, owner=namespace or "", context=context
    )
    ticket = engine.submit(request)
    try:
        for _ in ticket:
            break  # it is read, and its beginning is in the tree while the request is there
        try:
            saved = engine.save(name, ids, namespace=namespace, context=context, wait=False).wait()
        except InputDataError as error:  # it was given up: texts of other requests took its room
            raise AdmissionError(f"The text was read, and could not be kept to save it: {error}") from error
        return WrittenContext(saved.digest, saved.tokens, saved.nbytes)
    finally:
        ticket.cancel()
