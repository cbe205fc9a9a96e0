"""Deduplicate in-flight prefills: requests with the same prefix wait for one prefill. Imports no torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from retrieval_attn.engine.ids import Ids, common
from retrieval_attn.engine.node import Namespace, Node

__all__ = ["PrefillClaim", "InflightPrefills"]


class PrefillClaim:
    """Claim of one request to prefill a text. The first of equal claims owns the prefill (`is_owner`), the others wait.

    future: resolves to the node after the prefill, and the request matches again; to None once this claim owns the
    prefill. An owner ends by `done` or `release`. A waiting claim may be released, or its future cancelled, at any
    time. Thread-safe.
    """

    __slots__ = ("_pending", "future", "ids", "is_owner", "namespace", "start")

    def __init__(self, pending: InflightPrefills, ids: Ids, start: int, namespace: Namespace) -> None:
        """ids: the whole text, int32. start: leading tokens that are cached."""
        self._pending = pending
        self.ids = ids
        self.start = start
        self.namespace = namespace
        self.is_owner = False
        self.future: Future[Node | None] = Future()

    @property
    def owner(self) -> PrefillClaim | None:
        """The claim whose prefill this one waits for; None: it does not wait."""
        return self._pending.owner_of(self)

    def done(self, node: Node) -> None:
        """Give waiting claims the node, which must be in the tree. A released claim is not changed.

        Without the node in the tree, a new request would prefill the text again.
        """
        self._pending.end(self, node)

    def release(self) -> None:
        """Give up a failed or cancelled prefill, or the wait for one; the next waiting claim becomes owner."""
        self._pending.end(self, None)


class InflightPrefills:
    """All prefills in flight, each with the claims that wait for it, in order.

    A claim waits for a prefill that its next match will find, and only if this saves it at least half of the tokens
    that are prefilled: a short prompt never waits for a long document with the same start. Owners wait for nothing, so
    there is no deadlock.
    """

    def __init__(self, share_tokens: int) -> None:
        self._share_tokens = share_tokens
        self._lock = threading.Lock()
        self._reads: dict[PrefillClaim, dict[PrefillClaim, None]] = {}

    def __len__(self) -> int:
        """Prefills in flight."""
        return len(self._reads)

    @property
    def waiting(self) -> int:
        """Waiting claims."""
        with self._lock:
            return sum(map(len, self._reads.values()))

    def claim(self, ids: Ids, start: int, namespace: Namespace) -> PrefillClaim:
        """Make a claim that owns a prefill or waits for one. ids: the whole text. start: cached tokens."""
        claim = PrefillClaim(self, ids, start, namespace)
        with self._lock:
            self._place(claim)
        if claim.is_owner:
            claim.future.set_running_or_notify_cancel()
            claim.future.set_result(None)
        return claim

    def end(self, claim: PrefillClaim, node: Node | None) -> None:
        """End a claim, with a node, or without one to pass the prefill on. A second call changes nothing.

        Futures resolve after the lock is released, because their callbacks may claim.
        """
        resolve: list[Callable[[], None]] = []
        with self._lock:
            waiting = self._reads.pop(claim, None)
            if waiting is None:
                for others in self._reads.values():
                    others.pop(claim, None)
                resolve.append(lambda: _cancel(claim))
            elif node is not None:
                resolve += [_setter(other, node) for other in waiting if other.future.set_running_or_notify_cancel()]
            else:
                resolve += self._pass_on(waiting)
        for call in resolve:
            call()

    def owner_of(self, claim: PrefillClaim) -> PrefillClaim | None:
        """Return the claim whose prefill this one waits for."""
        with self._lock:
            return next((read for read, waiting in self._reads.items() if claim in waiting), None)

    def _pass_on(self, waiting: Iterable[PrefillClaim]) -> list[Callable[[], None]]:
        """Make the first claim the owner; the others wait for it, or prefill themselves if it does not cover them."""
        resolve: list[Callable[[], None]] = []
        left = deque(waiting)
        while left:
            claim = left.popleft()
            if claim.future.cancelled() or not self._place(claim):
                continue
            if claim.future.set_running_or_notify_cancel():
                resolve.append(_setter(claim, None))
            else:  # cancelled meanwhile
                left.extendleft(reversed(self._reads.pop(claim)))
        return resolve

    def _place(self, claim: PrefillClaim) -> bool:
        """Let a claim wait for a prefill that covers it, or own one. Returns whether it owns one."""
        for read, waiting in self._reads.items():
            if self._serves(read, claim):
                waiting[claim] = None
                return False
        claim.is_owner = True
        self._reads[claim] = {}
        return True

    def _serves(self, read: PrefillClaim, claim: PrefillClaim) -> bool:
        if read.namespace is not None and read.namespace != claim.namespace:
            return False
        last = len(claim.ids) - 1  # the last token is always read: its logits begin the answer
        span = len(read.ids) - read.start
        least = max(read.start + min(self._share_tokens, span), claim.start + max((span + 1) // 2, 1))
        if min(len(read.ids), last) < least:
            return False
        return min(common(read.ids, claim.ids), last) >= least


def _setter(claim: PrefillClaim, node: Node | None) -> Callable[[], None]:
    return lambda: claim.future.set_result(node)


def _cancel(claim: PrefillClaim) -> None:
    claim.future.cancel()
