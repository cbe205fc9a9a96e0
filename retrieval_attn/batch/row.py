"""Row: one request from its start to its end, as the engine drives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor

from retrieval_attn.answer_loop import AnswerLoop
from retrieval_attn.batch.counts import TierTokens
from retrieval_attn.batch.exact import RowPages
from retrieval_attn.batch.held import HeldCache
from retrieval_attn.batch.ids import Ids, int32_row
from retrieval_attn.batch.lease import Lease
from retrieval_attn.batch.node import Namespace, Node, Place
from retrieval_attn.batch.opening import Opening
from retrieval_attn.batch.outbox import Outbox
from retrieval_attn.batch.pending import Claim
from retrieval_attn.batch.reading import PausedRead
from retrieval_attn.batch.request import Reason, Request
from retrieval_attn.batch.saved_text import OpenedText, SavedText
from retrieval_attn.batch.short_read import SHORT_TOKENS, ShortRead, packable, paused
from retrieval_attn.batch.teller import Summary, Teller
from retrieval_attn.batch.ticket import Ticket
from retrieval_attn.batch.tree import Tree
from retrieval_attn.cache.cache import RetrievalCache, seal
from retrieval_attn.config import Config
from retrieval_attn.errors import StoreDamagedError

__all__ = ["Row"]


class Row:
    """See the module. Everything but `ticket` belongs to the engine's thread.

    logits: float32 (1, vocabulary), from which the next token is to be chosen, or None: the last token must be fed
    first. tokens: of the answer. cached_tokens: of the prompt, not read for it; noted_tokens: that the scheduler knows
    the tree to hold. prompt_tokens: with those of the saved context that the request names. lost: that is not opened
    but read.
    """

    def __init__(
        self, request: Request, ticket: Ticket, loop: AnswerLoop, outbox: Outbox, saved: SavedText | None = None,
        pages: RowPages | None = None, before: Row | None = None,
    ) -> None:  # fmt: skip
        """loop: of the model that answers. outbox: takes what the ticket is told. saved: what the prompt begins with.
        pages: for parts of it that are attended to exactly; None: none are. before: had the same request, and keys that
        were found damaged: what it told is not told again.
        """
        self.request, self.ticket = request, ticket
        self.prompt_tokens = request.prompt_tokens + (0 if saved is None else saved.tokens)
        self.cache: RetrievalCache | None = None
        self.logits: Tensor | None = None
        self.read: PausedRead | ShortRead | None = None
        self.tokens: list[int] = []
        self.cached_tokens = self.noted_tokens = self._brought = 0  # _brought: from the store, by this row
        self.ended = False
        self._loop, self.before = loop, before
        self._teller: Teller = (
            Teller(ticket, outbox, loop.tokenizer, request.stop) if before is None else before._teller
        )
        self._stops = loop.eos if request.stop_ids is None else request.stop_ids
        self._saved, self.lost = saved, saved is not None and saved.lost
        self._opening: Opening[tuple[RetrievalCache, OpenedText]] | None = None
        self._opened: OpenedText | None = None
        # arrays, once: a list of 128K ids takes milliseconds to compare
        parts = [*([] if saved is None else [saved.ids]), *map(int32_row, request.parts)]
        self._ids, self._ends = np.concatenate(parts), list(accumulate(map(len, parts)))
        self._done = 0  # parts
        self._pages = pages
        self._lease: Lease | None = None
        self._claim: Claim | None = None
        self._began: float = time.perf_counter() if before is None else before._began
        self._first = self._began
        self._part_began = 0.0

    @property
    def position(self) -> int:
        """Of the newest token, which has been chosen and is fed next."""
        return self.prompt_tokens + len(self.tokens) - 1

    @property
    def shared_tokens(self) -> int:
        """Of the prompt, those that the tree holds for it, whoever read them."""
        return 0 if self._lease is None else self._lease.node.end - self._marks

    @property
    def has_to_wait(self) -> bool:
        """For its saved context, which is being opened, for pages, or for the end of a read whose cells are done: it
        has no use for cells meanwhile.
        """
        read = paused(self.read)
        finishing = read is not None and read.finishing
        return finishing or self._opening is not None or (self._pages is not None and self._pages.waiting)

    @property
    def claim(self) -> Claim | None:
        """To read a part that others may want, or to wait for who reads it."""
        return self._claim

    @property
    def is_read(self) -> bool:
        """Whether the whole prompt was."""
        return self._done == len(self._ends)

    def advance(self, config: Config, tree: Tree | None, *, packs: bool = False) -> None:
        """Begin to read the next part, unless another request reads it, or the tree has it by now; take up one that is
        read. packs: short ones may be read with those of others. Raises what went wrong with the reading.
        """
        if self.read is not None:
            if not self.read.done:
                return
            self._take_part(tree)
        if self._opening is not None:
            if not self._opening.done:
                return
            self._take_opened(tree)
        if self.is_read or self._waits():
            return
        self._look_up(tree)
        if self._pages is not None and not self._pages.take(self._done, tree):
            if self._lease is not None:  # what was found may be given up for others, and is looked up anew
                self._lease.release()
            self._lease, self.cache, self._done, self.cached_tokens = None, None, 0, 0
            return
        if tree is not None and self._done < len(self._ends) - 1 and self._must_wait(tree):
            return
        self._part_began = time.perf_counter()
        if self._saved is not None and self._done == 0:
            if not self.lost:
                self._opening = self._saved.open()
                return
            self.cache, self._opened = self._saved.emptied()
        if self.cache is None:
            self.cache = RetrievalCache(self._loop.model, config)
        self.cache.in_batch = True
        if self._pages is not None:
            self._pages.open(self._done, self.cache)
        part: Sequence[int] = self.request.parts[self._done - self._marks] if self._done >= self._marks else ()
        if self._done < self._marks:
            part = self._ids[self._marks : self._ends[0]].tolist()
        short = len(part) <= min(SHORT_TOKENS, self.cache.config.prefill_chunk)
        self.read = (ShortRead if packs and short and packable(self.cache) else PausedRead)(
            self._loop, self.cache, part
        )

    def chosen(self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> bool:
        """Take the next token; whether the answer ends with it by itself."""
        self.logits = None
        told = [] if self.before is None else self.before.tokens
        if not self.tokens:
            self._first = time.perf_counter() if not told or self.before is None else self.before._first
        if len(self.tokens) < len(told) and token != told[len(self.tokens)]:
            self.finish("error", contradiction(self))
            return True
        if token in self._stops:
            return True
        self.tokens.append(token)
        if len(self.tokens) <= len(told):
            return len(self.tokens) == len(told) and self._teller.stopped
        return self._teller.token(token, logprob, top)

    def finish(self, reason: Reason, error: BaseException | None = None) -> None:
        """Tell who asked, once; later calls change nothing."""
        if self.ended:
            return
        self.ended = True
        counts = self.prompt_tokens, self.cached_tokens
        self._teller.end(reason, error, Summary(self.tokens, *counts, self._began, self._first))

    def leave(self) -> None:
        """Give everything back."""
        if self.read is not None:
            self.read.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if self._claim is not None:
            self._claim.release()
        if self._lease is not None:
            self._lease.release()
        self.read = self._claim = self._lease = self.cache = self.logits = self._opening = self._pages = None

    @property
    def _marks(self) -> int:
        """Of the ids, how many are no tokens: a saved context begins with one."""
        return 0 if self._saved is None else 1

    def _namespace(self, part: int) -> Namespace:
        """A saved context is everybody's who names it, what continues it is not."""
        return None if part < self._marks else self.request.namespace

    def _take_part(self, tree: Tree | None) -> None:
        assert self.read is not None and self.cache is not None
        state, self.read = self.read.result(), None
        if self.cache.batch.exact is not None:
            self.cache.batch.exact = self.cache.batch.exact.closed()
        self.cache.batch.note_ids(state.sequences)
        self._done += 1
        if self.is_read:
            self.logits = state.logits
            return
        self._go_on(self.cache, tree)

    def _take_opened(self, tree: Tree | None) -> None:
        assert self._opening is not None and self._saved is not None
        opening, self._opening = self._opening, None
        cache, self._opened = opening.result()
        cache.in_batch = True
        self._done, self.cached_tokens = 1, self._saved.tokens
        self._brought = self._saved.tokens
        cache.require_room(self.request.prompt_tokens + self.request.max_tokens)
        self._go_on(cache, tree)

    def _go_on(self, whole: RetrievalCache, tree: Tree | None) -> None:
        """A fork goes on, shared or not: what comes next lies in segments of its own, and is searched as such."""
        seal(whole)
        self.cache = whole.fork()
        if tree is not None:
            self._share(tree, whole, time.perf_counter() - self._part_began)

    def _share(self, tree: Tree, whole: RetrievalCache, seconds: float) -> None:
        """What was just read, for others. whole: the cache as it was then, which nobody changes."""
        end = self._ends[self._done - 1]
        match = tree.match(self._ids[: end + 1], self.request.namespace, in_memory=True, leased=True, again=True)
        assert match.lease is not None
        node, place = match.node, match.place
        if match.length == end and match.tokens < len(node) and node.parent is not None:
            place = Place(node.parent, node.at)  # another text goes on where this one ends: they stand side by side
        rest = self._ids[place.length : end]
        if len(rest):
            before = None if self._lease is None else self._lease.node.held  # what it goes on with, wherever it stands
            held, namespace = HeldCache.beyond(whole, before, self._opened), self._namespace(self._done - 1)
            node = tree.insert(place, rest, held, namespace, rebuild_seconds=seconds)
        lease = tree.lease(node)
        match.lease.release()
        if self._claim is not None:
            self._claim.done(node)
            self._claim = None
        if self._lease is not None:
            self._lease.release()
        self._lease = lease

    def _look_up(self, tree: Tree | None) -> None:
        """Continue a fork of the longest known beginning that ends where a part ends, if it is longer than what is
        there.
        """
        if tree is None:
            return
        known = self._ends[self._done - 1] if self._done else 0
        lease = longest_held(tree, self._ids, self._ends[:-1], self.request.namespace, known)
        if lease is not None:
            with lease:
                assert isinstance(lease.node.held, HeldCache)
                self._continue(tree, lease.node, lease.node.held)

    def _continue(self, tree: Tree, node: Node, held: HeldCache) -> None:
        if held.opened is not None:
            held.opened.require_whole()
        lease = tree.lease(node)
        if self._lease is not None:
            self._lease.release()
        self._lease, self._opened, self.cache = lease, held.opened, held.fork()
        self._done = self._ends.index(node.end) + 1
        self.cached_tokens = node.end - self._marks

    def _waits(self) -> bool:
        """Whether another request still reads what this one needs."""
        if self._claim is None or self._claim.mine:
            return False
        if not self._claim.future.done():
            return True
        if not self._claim.mine:
            self._claim = None
        return False

    def _must_wait(self, tree: Tree) -> bool:
        """Claim the next part; whether somebody else reads it."""
        if self._claim is None:
            start = self._ends[self._done - 1] if self._done else 0
            spaces = self.request.namespace, self._namespace(self._done)
            self._claim = claimed(tree, self._ids[: self._ends[self._done]], start, spaces)
        return self._waits()


def found_tokens(row: Row) -> TierTokens:
    """Of a row's prompt, the tokens that were there, by where they were."""
    exact = None if row.cache is None else row.cache.batch.exact
    known = row.cached_tokens - row._brought
    paged = 0 if exact is None else min(exact.tokens, known)
    return TierTokens(paged, known - paged, row._brought)


def damage_of(row: Row) -> StoreDamagedError | None:
    """What was found so far in the files that a row's keys come from; None: nothing, or it has ended."""
    if row._opened is not None and not row.ended:
        try:
            row._opened.require_whole()
        except StoreDamagedError as error:
            return error
    return None


def contradiction(row: Row) -> StoreDamagedError:
    """Why a row cannot go on where the one before it was."""
    assert row.before is not None
    told, name = len(row.before.tokens), row.request.context
    return StoreDamagedError(
        f"The saved context {name!r} is damaged, which was found after {told} tokens of this answer: without the "
        "damage they are others. Ask again; its text has been read again."
    )


def claimed(tree: Tree, ids: Ids, start: int, namespaces: tuple[Namespace, Namespace]) -> Claim | None:
    """A claim to read ids behind the first `start`; None: these were given up meanwhile, and nobody can continue them.

    namespaces: of who asks, and of what is read.
    """
    match = tree.match(ids[: start + 1], namespaces[0], in_memory=True, leased=True, again=True)
    assert match.lease is not None
    with match.lease:
        return tree.pending(match, ids[start:], namespaces[1]) if match.length == start else None


def known_tokens(row: Row, tree: Tree) -> int:
    """Of a row that has not begun, tokens of its prompt that the tree has now, whole parts of it. Any thread."""
    if len(row._ends) < 2:
        return 0
    found = tree.match(row._ids[: row._ends[-2] + 1], row.request.namespace, in_memory=True, again=True).length
    return max((end - row._marks for end in row._ends[:-1] if end <= found), default=0)


def begins_as(row: Row, other: Row, tokens: int) -> bool:
    """Whether so many tokens are whole parts of both prompts, the same ones, and both may have them from the tree."""
    spaces = row.request.namespace, other.request.namespace
    if row._marks or other._marks or spaces[0] != spaces[1] or tokens not in row._ends[:-1]:
        return False
    return tokens in other._ends[:-1] and np.array_equal(row._ids[:tokens], other._ids[:tokens])


def longest_held(tree: Tree, ids: Ids, ends: list[int], namespace: Namespace, known: int) -> Lease | None:
    """A lease on the longest node of a text that ends where one of its parts does, behind `known` tokens; None: none is
    in memory. ids: of the whole text. A match is counted once for a text, where nothing of it is known.
    """
    stop, again = len(ids), known > 0
    while stop > known:
        match = tree.match(ids[:stop], namespace, in_memory=True, leased=True, again=again)
        assert match.lease is not None
        with match.lease:
            node, tokens = match.node, match.tokens
            while node.parent is not None and not (tokens == len(node) and node.end in ends):
                node, tokens = node.parent, node.at
            # a longer text that goes on otherwise hides one that ends within it
            hidden = max((end for end in ends if max(known, node.end) < end <= match.length), default=0)
            if not hidden:
                return tree.lease(node) if node.end > known and isinstance(node.held, HeldCache) else None
        stop, again = min(hidden + 1, stop - 1), True
    return None
