"""RunningRequest: one request from admission to its last token, as the engine drives it."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.attention.cache import RetrievalCache, seal
from retrieval_attn.config import Config
from retrieval_attn.engine.batched_prefill import SHORT_TOKENS, PrefillRequest, packable, paused
from retrieval_attn.engine.chunked_prefill import ChunkedPrefill
from retrieval_attn.engine.counts import TierTokens
from retrieval_attn.engine.detokenizer import Detokenizer, OutputQueue
from retrieval_attn.engine.ids import Ids, int32_row
from retrieval_attn.engine.paged_prefix import PageAllocation
from retrieval_attn.engine.prefix_handle import PrefixHandle, joined_parts, text_mark
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.request import Finished, Reason, Request, RequestHandle
from retrieval_attn.engine.saved_text import OpenedText, Opening, SavedText
from retrieval_attn.errors import (
    CacheMismatchError,
    InputDataError,
    NotFiniteError,
    RetrievalAttentionError,
    StoreDamagedError,
)
from retrieval_attn.model.image_embedding import PromptImages
from retrieval_attn.model.rope import length_rope
from retrieval_attn.model.weights import require_same, weight_state
from retrieval_attn.offload.threads import foreground
from retrieval_attn.prompt.text_stream import TextStream
from retrieval_attn.runner.decode import PromptState
from retrieval_attn.runner.drafts import Drafts
from retrieval_attn.sampling.grammar import TokenMatcher
from retrieval_attn.sampling.sampler import History, MaskedParams, TokenScore, token_scores

__all__ = ["RunningRequest"]

log = logging.getLogger(__name__)

SCORED_BYTES = 1 << 28
"""Of logits in float32: 523 tokens with a vocabulary of 128,256."""


class RunningRequest:
    """See the module. Everything but `handle` belongs to the engine's thread.

    logits: float32 (1, vocabulary), from which the next token is to be chosen, or None: the last token must be fed
    first. tokens: of the answer. cached_tokens: of the prompt, not read for it; noted_tokens: that the scheduler knows
    the tree to hold. prompt_tokens: with those of the saved context that the request names. lost: that is not opened
    but read. lacks_room: whether it waits for GPU memory of other requests.
    """

    def __init__(
        self, request: Request, handle: RequestHandle, loop: AnswerLoop, outputs: OutputQueue, saved: SavedText | None =
        None, pages: PageAllocation | None = None, before: RunningRequest | None = None, crops: bool = False,
        shared: int = 0, matcher: TokenMatcher | None = None, images: PromptImages | None = None,
    ) -> None:  # fmt: skip
        """loop: of the model that answers. outputs: takes what the handle is told. saved: what the prompt begins with.
        shared: tokens of the request that are those of the saved context; 0: it names the context and continues it.
        pages: for parts of it that are attended to exactly; None: none are. before: had the same request, and keys that
        were found damaged: what it told is not told again. crops: prefix-cache entries may be cropped at any token.
        matcher: state of the request's grammar; None: it has none. images: of the prompt; None: it has none. Raises
        InputDataError for ids of no token.
        """
        self.request, self.handle = request, handle
        self._begun = 0 if saved is None else shared or saved.tokens  # tokens of the saved context
        self.prompt_tokens = request.prompt_tokens + self._begun - shared
        self.context = None if saved is None else saved.name
        self.cache: RetrievalCache | None = None
        self.logits: Tensor | None = None
        self.read: ChunkedPrefill | PrefillRequest | None = None
        self.tokens: list[int] = []
        self.cached_tokens = self.noted_tokens = self._brought = 0  # _brought: from the store, by this row
        self.ended = self.lacks_room = False
        self._lacking_since = 0.0
        self.reason: Reason | None = None  # why it ended; None, too, where another row has the request
        self._loop, self.before = loop, before
        self._detokenizer: Detokenizer = (
            Detokenizer(handle, outputs, TextStream(loop.tokenizer, request.stop, request.min_tokens, request.visible))
            if before is None
            else before._detokenizer
        )
        self._stops = loop.eos if request.stop_ids is None else request.stop_ids
        rope, self.weights = length_rope(loop.model), weight_state(loop.model)
        self._factors = None if rope is None else rope.factors(self.prompt_tokens)
        self.changes_factors = rope is not None and not rope.decodes_on(
            self._factors, self.prompt_tokens + request.max_tokens
        )
        other_factors = saved is not None and rope is not None and rope.factors(saved.tokens) != self._factors
        self._saved, self.lost = saved, saved is not None and (saved.lost or other_factors)
        self._opening: Opening[tuple[RetrievalCache, OpenedText]] | None = None
        self._opened: OpenedText | None = None
        # arrays, once: a list of 128K ids takes milliseconds to compare
        parts = [*([] if saved is None else [saved.ids[: 1 + self._begun]]), *_behind(request.parts, shared)]
        if request.prompt_logprobs is not None:
            parts = _score_pieces(np.concatenate(parts), loop.vocabulary)
        elif crops and pages is None:
            parts = joined_parts(parts)
        self._scores: list[TokenScore] = []  # of the prompt's tokens but the first one, as far as it is read
        mark = text_mark(loop.model, self.weights, self.prompt_tokens)
        parts[0] = np.concatenate((mark, parts[0]))
        ends, marks = list(accumulate(map(len, parts))), len(mark) + (saved is not None)
        self.sharing = PrefixHandle(
            np.concatenate(parts), ends, marks, request.namespace, saved=saved is not None,
            crops=crops and pages is None, session=request.session,
        )  # fmt: skip
        self._images = images
        self.drafts: Drafts | None = None  # once it decodes with some
        self.prompt: Ids = self.sharing.ids[marks:]
        if self.prompt.min() < 0:
            self.prompt = self._plain_ids(self.prompt)
        self._history = History.of(request.draw, self.prompt, self.tokens, self._stops, request.min_tokens)
        self.matcher = matcher
        self.draw = request.draw if matcher is None else MaskedParams.of(request.draw, matcher)
        self._done = self._inside = 0  # parts that the cache holds, and tokens that it holds of the next one
        self._pages = pages
        self._began: float = time.perf_counter() if before is None else before._began
        self._first = self._began
        self._part_began = self._token_seconds = 0.0  # the latter: of reading, one token of its longest part
        self._longest_part = 0

    @property
    def position(self) -> int:
        """Position of the newest token, which has been chosen and is fed next."""
        shift = 0 if self._images is None else self._images.shift
        return self.prompt_tokens + shift + len(self.tokens) - 1

    @property
    def leases_known(self) -> bool:
        """Whether the request uses what the prefix cache holds of its prompt, and needs no memory for it."""
        return self.request.prompt_logprobs is None and not self.changes_factors

    @property
    def history(self) -> History | None:
        """The history that changes the scores of the next token; None: they are the model's."""
        return self._history if self._history is not None and self._history.changes else None

    @property
    def shared_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache holds for this request, read by it or by another."""
        return self.sharing.held_tokens

    @property
    def opened_tokens(self) -> int:
        """Tokens of the prompt that a saved context brings without prefill."""
        return 0 if self.lost else self._begun

    @property
    def has_to_wait(self) -> bool:
        """For its saved context, which is being opened, for pages, or for the end of a read whose chunks are done: it
        has no use for chunks meanwhile.
        """
        read = paused(self.read)
        finishing = read is not None and read.finishing
        waits = self.lacks_room or self._opening is not None or (self._pages is not None and self._pages.waiting)
        return finishing or waits

    @property
    def is_read(self) -> bool:
        """Whether the whole prompt was."""
        return self._done == len(self.sharing.ends)

    def advance(
        self, config: Config, tree: RadixCache | None, *, packs: bool = False, can_wait: bool = False,
        chunk_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """Begin to read the next part, unless another request reads it, or the tree has it by now; take up one that is
        read.

        packs: short ones may be read with those of others. can_wait: other requests run, so that this one waits if it
        lacks GPU memory (`lacks_room`). chunk_tokens: see `ChunkedPrefill`. Raises what went wrong with the reading.
        """
        self.lacks_room = False
        self._advance(config, tree, packs=packs, can_wait=can_wait, chunk_tokens=chunk_tokens)
        self._lacking_since = (self._lacking_since or time.perf_counter()) if self.lacks_room else 0.0

    @property
    def lacking_seconds(self) -> float:
        """Seconds since the request lacks GPU memory; 0: it does not."""
        return time.perf_counter() - self._lacking_since if self._lacking_since else 0.0

    def _advance(
        self, config: Config, tree: RadixCache | None, *, packs: bool, can_wait: bool, chunk_tokens: int | None
    ) -> None:
        if self.request.prompt_logprobs is not None:
            tree, packs = None, False  # all of it is read: scores of a part that another request has read are not kept
        if self.read is not None:
            if not self.read.done:
                return
            self._take_part(tree)
        if self._opening is not None:
            if not self._opening.done:
                return
            self._take_opened(tree)
        sharing = self.sharing
        if self.is_read or sharing.waits():
            return
        self.require_weights()
        if tree is not None:
            self._look_up(tree, can_wait=can_wait)
            self.lacks_room = sharing.lacks_room
            if self.lacks_room:
                return
        if self._pages is not None and not self._pages.take(self._done, tree):
            sharing.forget()  # and look it up again
            self.cache, self._done, self._inside, self.cached_tokens = None, 0, 0, 0
            return
        if tree is not None and self._pages is None and self._images is None:
            sharing.join_rest(self._done, self._known)
        unread = sharing.ends[self._done] - self._known
        shares = tree is not None and (self._done < len(sharing.ends) - 1 or sharing.keeps_last(unread))
        if tree is not None and shares and sharing.claim_part(tree, self._done, self._known):
            return
        self._part_began = time.perf_counter()
        if self._saved is not None and self._done == 0:
            if not self.lost:
                self._opening = self._saved.open()
                return
            self.cache, self._opened = self._saved.emptied()
        if self.cache is None:
            self.cache = RetrievalCache(self._loop.model, config)
        self.cache.in_batch, self.cache.prompt_length = True, self.prompt_tokens
        self.cache.batch.images = self._images  # until the part is read: an entry keeps no images
        if self._pages is not None:
            self._pages.open(self._done, self.cache)
        part: Sequence[int] = sharing.ids[max(self._known, sharing.marks) : sharing.ends[self._done]].tolist()
        short = len(part) <= min(SHORT_TOKENS, self.cache.config.prefill_chunk)
        start = self.cache.get_seq_length()
        pictured = 0 if self._images is None else self._images.most_tokens(start, start + len(part))
        self.lacks_room = can_wait and not self.cache.index.has_room(len(part), pictured)
        if self.lacks_room:
            return
        if packs and short and self._images is None and packable(self.cache):
            self.read = PrefillRequest(self._loop, self.cache, part)
        else:
            scored = self.request.prompt_logprobs
            self.read = ChunkedPrefill(self._loop, self.cache, part, scored, chunk_tokens=chunk_tokens)

    def chosen(self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> bool:
        """Take the next token; whether the answer ends with it by itself."""
        self.logits = None
        told = [] if self.before is None else self.before.tokens
        if not self.tokens:
            self._first = time.perf_counter() if not told or self.before is None else self.before._first
        if len(self.tokens) < len(told) and token != told[len(self.tokens)]:
            self.finish("error", self._contradiction())
            return True
        if token in self._stops:
            return True
        self.tokens.append(token)
        complete = self.matcher is not None and self.matcher.accept(token)
        if len(self.tokens) <= len(told):
            return complete or (len(self.tokens) == len(told) and self._detokenizer.stopped)
        return self._detokenizer.token(token, logprob, top) or complete

    def finish(self, reason: Reason, error: BaseException | None = None) -> None:
        """Tell who asked, once; later calls change nothing."""
        if self.ended:
            return
        self.ended, self.reason = True, reason
        counts, seconds = (self.prompt_tokens, self.cached_tokens), (self._first - self._began, 0.0)
        finished = Finished(reason, "", tuple(self.tokens), *counts, seconds, error, tuple(self._scores))
        self._detokenizer.end(finished, self._began)

    def leave(self, answers: RadixCache | None = None) -> None:
        """Give everything back. answers: keeps prompt and answer for follow-up turns, unless the row has failed."""
        if answers is not None and self.reason not in (None, "error") and self.request.prompt_logprobs is None:
            self._keep(answers)
        if self.read is not None:
            self.read.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if self.matcher is not None:
            self.matcher.close()
        self.sharing.leave()
        self.read = self.cache = self.logits = self._opening = self._pages = None

    def _keep(self, tree: RadixCache) -> None:
        """Keep the tokens of prompt and answer that the KV cache holds, in whole steps, in the prefix cache."""
        if self.cache is None or not self.is_read or self.cache.batch.broken:
            return
        if (
            self.cache.batch.factors != self._factors
        ):  # an answer beyond a switch: no prompt finds it by this one's mark
            return
        try:
            self.sharing.put_answer(tree, self.cache, self.tokens, self._opened, self._token_seconds)
        except Exception as error:  # the answer was told: a follow-up turn reads it, and the others go on
            log.warning("the answer of request %s is not kept: %s: %s", self.handle.id, type(error).__name__, error)

    def _plain_ids(self, prompt: Ids) -> Ids:
        """Return the prompt's ids as the model's vocabulary has them, for penalties."""
        if self._images is None:
            raise InputDataError("The prompt has negative token ids, which only its images can have; give the images.")
        return np.asarray(self._images.encoder.reader.plain(prompt.tolist()), np.int32)

    def require_weights(self) -> None:
        """Raise CacheMismatchError if the model has other weights, or acting adapters, than when this was submitted."""
        require_same(self.weights, weight_state(self._loop.model), f"Request {self.handle.id} was submitted")

    @property
    def choice_error(self) -> RetrievalAttentionError:
        """Error of a step in which no token could be chosen."""
        if self.matcher is not None and self.matcher.error:
            return InputDataError(f"The grammar of the answer failed: {self.matcher.error}")
        return NotFiniteError("the model gave logits that are not finite")

    @property
    def cached_by_tier(self) -> TierTokens:
        """Prompt tokens with cached KV, by tier."""
        paged_prefix = None if self.cache is None else self.cache.batch.paged_prefix
        known = self.cached_tokens - self._brought
        paged = 0 if paged_prefix is None else min(paged_prefix.tokens, known)
        return TierTokens(paged, known - paged, self._brought)

    def damage(self) -> RetrievalAttentionError | None:
        """Return the error of damaged KV: damaged files of its saved context, or weights that changed since it was
        computed. None for intact KV and for a request that has ended.
        """
        if self.ended:
            return None
        try:
            if self._opened is not None:
                self._opened.lineage.require_whole()
            self.require_weights()
        except (StoreDamagedError, CacheMismatchError) as error:
            return error
        return None

    def _contradiction(self) -> StoreDamagedError:
        """Return the error of an answer that differs, after a retry without damaged files, from tokens already sent."""
        assert self.before is not None
        sent, name = len(self.before.tokens), self.before.context
        return StoreDamagedError(
            f"The saved context {name!r} has damaged files, found after {sent} tokens of this answer were sent; "
            "without the damage the answer differs. Send the request again: the context's text was prefilled again."
        )

    @property
    def _known(self) -> int:
        """Ids that the cache holds."""
        return (self.sharing.ends[self._done - 1] if self._done else 0) + self._inside

    def _take_part(self, tree: RadixCache | None) -> None:
        assert self.read is not None and self.cache is not None
        state, self.read = self.read.result(), None
        self.cache.batch.images = None
        self._note_scores(state)
        self.require_weights()
        if self.cache.batch.paged_prefix is not None:
            self.cache.batch.paged_prefix = self.cache.batch.paged_prefix.closed()
        self.cache.batch.note_ids(state.sequences)
        tokens, seconds = self.sharing.ends[self._done] - self._known, time.perf_counter() - self._part_began
        if tokens > self._longest_part:
            self._longest_part, self._token_seconds = tokens, seconds / tokens
        self._done, self._inside = self._done + 1, 0
        if not self.is_read or (tree is not None and self.sharing.keeps_last(tokens)):
            self._go_on(self.cache, tree)
        if self.is_read:
            self.logits = state.logits

    def _note_scores(self, state: PromptState) -> None:
        """Keep the scores of the part that was read, and of the next part's first token."""
        count, end = self.request.prompt_logprobs, self.sharing.ends[self._done]
        if count is None:
            return
        self._scores += state.scores
        if end < len(self.sharing.ids):
            following = torch.tensor([int(self.sharing.ids[end])], device=state.logits.device)
            self._scores += token_scores(state.logits, following, count)

    def _take_opened(self, tree: RadixCache | None) -> None:
        assert self._opening is not None and self._saved is not None
        opening, self._opening = self._opening, None
        cache, self._opened = opening.result()
        foreground.note()
        cache.in_batch = True
        self._done, self.cached_tokens = 1, self._begun
        self._brought = self._begun
        cache.require_room(max(0, self.prompt_tokens - self._saved.tokens) + self.request.max_tokens)
        if tree is None or self._begun == self._saved.tokens:
            self._go_on(cache, tree)
            return
        seal(cache)
        seconds = time.perf_counter() - self._part_began
        self.cache = self.sharing.put_opened(tree, cache, self._saved.ids, self._opened, seconds)

    def _go_on(self, whole: RetrievalCache, tree: RadixCache | None) -> None:
        """A fork goes on, shared or not: what comes next lies in segments of its own, and is searched as such."""
        seal(whole)
        self.cache = whole.fork()
        if tree is not None:
            self.sharing.put(tree, whole, self._done, self._opened, time.perf_counter() - self._part_began)

    def _look_up(self, tree: RadixCache, *, can_wait: bool) -> None:
        """Continue a fork of the longest known beginning, if it is longer than what is there."""
        found = self.sharing.find(tree, self._known, can_wait=can_wait)
        if found is None:
            return
        self.cache, self._opened = found
        foreground.note()
        ends, held = self.sharing.ends, self.sharing.held_end
        self._done = bisect_right(ends, held)
        self._inside = held - (ends[self._done - 1] if self._done else 0)
        self.cached_tokens = held - self.sharing.marks


def _behind(parts: Sequence[Sequence[int]], tokens: int) -> list[Ids]:
    """Return the parts of a prompt without its first `tokens` tokens."""
    found: list[Ids] = []
    for part in map(int32_row, parts):
        if len(part) > tokens:
            found.append(part[tokens:])
        tokens = max(0, tokens - len(part))
    return found


def _score_pieces(ids: Ids, vocabulary: int) -> list[Ids]:
    """The parts in which a prompt is read whose tokens are scored: the logits of a part are held at once.

    They are of one size: a short part would go through retrieval (`attention/retrieval.DECODE_TOKENS`).
    """
    tokens = max(1, SCORED_BYTES // (4 * vocabulary))
    return np.array_split(ids, -(-len(ids) // tokens))
