"""Intake: makes rows and jobs of requests, or says why they are none."""

from __future__ import annotations

from collections.abc import Callable

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.batch.exact import ExactPool, RowPages
from retrieval_attn.batch.job import Job
from retrieval_attn.batch.outbox import Outbox
from retrieval_attn.batch.request import Request
from retrieval_attn.batch.row import Row, known_tokens
from retrieval_attn.batch.saved_text import SavedTexts
from retrieval_attn.batch.ticket import Ticket
from retrieval_attn.batch.tree import Tree

__all__ = ["Intake"]


class Intake:
    """Of one engine. Any thread."""

    def __init__(
        self, loop: AnswerLoop, outbox: Outbox, saved: SavedTexts, shared: tuple[Tree | None, ExactPool | None],
        require_room: Callable[[int], None],
    ) -> None:  # fmt: skip
        """saved: contexts that requests name. shared: what prompts begin with. require_room: raises ContextLengthError
        for more tokens than the model has positions for.
        """
        self._loop, self._outbox, self._saved = loop, outbox, saved
        self._tree, self._exact = shared
        self._require_room = require_room

    def row(self, request: Request, ticket: Ticket) -> Row:
        """Raises ContextLengthError, AdmissionError, and for a saved context what `LLM.open` raises."""
        saved = None if request.context is None else self._saved.find(request.context)
        held = 0 if saved is None else saved.tokens - saved.forgotten_tokens
        self._require_room(held + request.prompt_tokens + request.max_tokens)
        pages = None if self._exact is None or saved is not None else RowPages(self._exact, request.parts)
        return Row(request, ticket, self._loop, self._outbox, saved, pages)

    def job(self, number: str, row: Row) -> Job:
        """The row as the scheduler sees it."""
        request, opened = row.request, row.prompt_tokens - row.request.prompt_tokens
        known = 0 if self._tree is None else known_tokens(row, self._tree)
        # one more than there are: a job's last one is not read but fed to a step, and here all of a prompt is read
        tokens = row.prompt_tokens + 1
        return Job(number, tokens, request.max_tokens, 0, opened, known, request.owner, request.priority)
