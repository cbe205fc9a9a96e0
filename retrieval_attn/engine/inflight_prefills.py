"""Pending: texts that are being read now, so that equal ones that arrive meanwhile wait for one read. No torch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import TracebackType

from retrieval_attn.engine.ids import Ids, common
from retrieval_attn.engine.node import Namespace, Node

__all__ = ["PrefillClaim", "InflightPrefills"]


class PrefillClaim:
    """One request's wish for a text: the first of equal ones reads it (`mine`), the others wait.

    future: resolves to the node once it was read, and the waiting request matches again; to None once the work is this
    claim's. A claim that is `mine` ends by `done` or `release`; leaving `with` releases it. A claim that waits may be
    released, or its future cancelled, at any time. Any thread may call any of this.
    """

    __slots__ = ("_pending", "future", "ids", "mine", "namespace", "start")

    def __init__(self, pending: InflightPrefills, ids: Ids, start: int, namespace: Namespace) -> None:
        """ids: the whole text, int32; start: tokens of it that need not be read."""
        self._pending = pending
        self.ids = ids
        self.start = start
        self.namespace = namespace
        self.mine = False
        self.future: Future[Node | None] = Future()

    @property
    def reader(self) -> PrefillClaim | None:
        """Whose read this one waits for; None where it waits for none."""
        return self._pending.reader_of(self)

    def done(self, node: Node) -> None:
        """The text was read and is in the tree: all who wait get the node. Nothing happens if it was released before.

        Insert first: who comes between would read it again.
        """
        self._pending.end(self, node)

    def release(self) -> None:
        """Reading failed or was cancelled, or the waiting request left: the next one that waits gets the work."""
        self._pending.end(self, None)

    def __enter__(self) -> PrefillClaim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class InflightPrefills:
    """All texts that are being read, each with those who wait for it, in the order in which they came.

    A claim waits for a read that its match will find (of which it has the first share_tokens, or all), and only where
    at least half of the tokens that are being read spare it its own reading: a short prompt never waits for a long
    document that begins with the same words. A read waits for nothing, so all come to an end.
    """

    def __init__(self, share_tokens: int) -> None:
        self._share_tokens = share_tokens
        self._lock = threading.Lock()
        self._reads: dict[PrefillClaim, dict[PrefillClaim, None]] = {}

    def __len__(self) -> int:
        """Reads under way."""
        return len(self._reads)

    @property
    def waiting(self) -> int:
        """Claims that wait for a read."""
        with self._lock:
            return sum(map(len, self._reads.values()))

    def claim(self, ids: Ids, start: int, namespace: Namespace) -> PrefillClaim:
        """A claim that is `mine`, or waits for one that is. ids: the whole text; start: tokens that are there."""
        claim = PrefillClaim(self, ids, start, namespace)
        with self._lock:
            self._place(claim)
        if claim.mine:
            claim.future.set_running_or_notify_cancel()
            claim.future.set_result(None)
        return claim

    def end(self, claim: PrefillClaim, node: Node | None) -> None:
        """A claim is over: with a node, or without one, so that the work is passed on. The second time nothing happens.

        Futures resolve when the lock is free again, for what hangs on them may claim more.
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

    def reader_of(self, claim: PrefillClaim) -> PrefillClaim | None:
        """The claim that reads what this one waits for."""
        with self._lock:
            return next((read for read, waiting in self._reads.items() if claim in waiting), None)

    def _pass_on(self, waiting: Iterable[PrefillClaim]) -> list[Callable[[], None]]:
        """Give the work to the first of them; the others wait for it, or read themselves where it does not serve."""
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
        """Let it wait for a read that serves it, or read itself; whether the work is its own."""
        for read, waiting in self._reads.items():
            if self._serves(read, claim):
                waiting[claim] = None
                return False
        claim.mine = True
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
