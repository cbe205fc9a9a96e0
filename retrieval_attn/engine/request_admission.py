"""Intake: makes rows and jobs of requests, or says why they are none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.engine.output_queue import OutputQueue
from retrieval_attn.engine.paged_prefix import PageAllocation, PagedKVPool
from retrieval_attn.engine.prefix_handle import text_mark
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.request import Request
from retrieval_attn.engine.request_handle import RequestHandle
from retrieval_attn.engine.request_needs import RequestNeeds
from retrieval_attn.engine.running_request import RunningRequest
from retrieval_attn.engine.saved_text import SavedTexts
from retrieval_attn.errors import RetrievalAttentionError, StoreDamagedError
from retrieval_attn.model.weights import weight_state
from retrieval_attn.sampling.penalties import require_known

__all__ = ["RequestAdmission", "retry_without_damaged"]

log = logging.getLogger(__name__)


class RequestAdmission:
    """Of one engine. Any thread."""

    def __init__(
        self, loop: AnswerLoop, outbox: OutputQueue, saved: SavedTexts, shared: tuple[RadixCache | None, PagedKVPool |
        None], require_room: Callable[[int], None],
    ) -> None:  # fmt: skip
        """saved: contexts that requests name. shared: what prompts begin with. require_room: raises ContextLengthError
        for more tokens than the model has positions for.
        """
        self._loop, self._outbox, self._saved = loop, outbox, saved
        self._tree, self._exact = shared
        self._require_room = require_room

    def row(self, request: Request, ticket: RequestHandle, before: RunningRequest | None = None) -> RunningRequest:
        """before: had the request until files of its saved context were found damaged. Raises ContextLengthError,
        AdmissionError, InputDataError for a logit bias of an unknown token, and for a saved context what `LLM.open`
        raises.
        """
        require_known(request.draw, self._loop.vocabulary)
        saved = None if request.context is None else self._saved.find(request.context, lost=before is not None)
        held = 0 if saved is None else saved.tokens - saved.forgotten_tokens
        self._require_room(held + request.prompt_tokens + request.max_tokens)
        paged = self._exact is not None and saved is None and request.prompt_logprobs is None
        pages = PageAllocation(self._exact, request.parts) if self._exact is not None and paged else None
        return RunningRequest(request, ticket, self._loop, self._outbox, saved, pages, before)

    def whole_ids(self, document: Sequence[int], context: str | None) -> list[int]:
        """The ids by which the tree has a text now; context: the name of the saved one that it continues. Raises as
        `row` for that.
        """
        before: Sequence[int] = () if context is None else self._saved.find(context).ids.tolist()
        model, tokens = self._loop.model, len(document) + max(0, len(before) - 1)
        return [*text_mark(model, weight_state(model), tokens).tolist(), *before, *document]

    def job(self, number: str, row: RunningRequest) -> RequestNeeds:
        """The row as the scheduler sees it."""
        request, opened = row.request, 0 if row.lost else row.prompt_tokens - row.request.prompt_tokens
        # a row that may be read again has all of its text for itself then
        alone = self._tree is None or request.prompt_logprobs is not None or row.changes_factors
        known = 0 if self._tree is None or alone else row.sharing.known_tokens(self._tree)
        # one more than there are: a job's last one is not read but fed to a step, and here all of a prompt is read
        tokens = row.prompt_tokens + 1
        return RequestNeeds(number, tokens, request.max_tokens, 0, opened, known, request.owner, request.priority)


def retry_without_damaged(
    row: RunningRequest, error: BaseException, intake: RequestAdmission, enter: Callable[[RunningRequest], None]
) -> bool:
    """Whether another row has the request from now on, which reads what this one found in damaged files. Once."""
    if not isinstance(error, StoreDamagedError) or row.request.context is None or row.before is not None:
        return False
    try:
        enter(intake.row(row.request, row.ticket, row))
    except RetrievalAttentionError as refusal:
        log.warning("request %s cannot begin again: %s", row.ticket.id, refusal)
        return False
    row.ended = True
    return True
