"""What an engine did while it was watched, counted: proof that a random run went where it should."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from retrieval_attn.attention.layer_kv import LayerKV
from retrieval_attn.engine import saved_text
from retrieval_attn.engine.background_saves import BackgroundSaves
from retrieval_attn.engine.counts import Counts
from retrieval_attn.engine.node import Sizes
from retrieval_attn.engine.radix_cache import RadixCache
from retrieval_attn.engine.request_needs import State
from retrieval_attn.engine.scheduler import Scheduler, SchedulerOutput

__all__ = ["Actions", "watched"]


class Actions:
    """Counts by name. Any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> int:
        """How often it happened."""
        return self._counts[name]

    def note(self, name: str, more: int = 1) -> None:
        """It happened."""
        if more:
            with self._lock:
                self._counts[name] += more

    def __str__(self) -> str:
        return ", ".join(f"{name} {count:,}" for name, count in sorted(self._counts.items()))


@contextmanager
def watched() -> Iterator[Actions]:
    """Counts of all engines of this process meanwhile.

    preempt, resume: of rows. spill: of a layer's window to the host. split: nodes of a tree that begin inside another's
    span. evict, offload: nodes. to disk, from disk: idle texts, written and opened. open: of saved contexts, too.
    cancelled while STATE: by who asked. joint step: of several rows. draft, accepted draft: tokens.
    """
    actions = Actions()

    preempted: set[str] = set()

    def planned(plan: SchedulerOutput, scheduler: Scheduler, *_: Any) -> None:
        now = set(scheduler._places.held[State.PREEMPTED])
        actions.note("preempt", len(now - preempted))
        actions.note("resume", sum(scheduler.state(job) is State.DECODING for job in preempted - now))
        preempted.clear()
        preempted.update(now)
        actions.note("joint step", len(plan.decode) > 1)

    def cancelled(_: Any, scheduler: Scheduler, job: str) -> None:
        actions.note(f"cancelled while {scheduler.state(job).value}")

    def inserted(node: Any, *_: Any, **__: Any) -> None:
        actions.note("split", node.parent.parent is not None and node.at < len(node.parent))

    def evicted(after: Sizes, tree: RadixCache, *_: Any, **__: Any) -> None:
        actions.note("evict", after.total > 0)

    def offloaded(freed: int, *_: Any, **__: Any) -> None:
        actions.note("offload", freed > 0)

    def drafted(_: Any, __: Counts, drafts: int, accepted: int) -> None:
        actions.note("draft", drafts)
        actions.note("accepted draft", accepted)

    watch: list[tuple[Any, str, Callable[..., None] | None, Callable[..., None] | None]] = [
        (Scheduler, "schedule", None, planned),
        (Scheduler, "abort", cancelled, None),
        (RadixCache, "insert", None, inserted),
        (RadixCache, "evict", None, evicted),
        (RadixCache, "offload", None, offloaded),
        (LayerKV, "spill", None, lambda *_, **__: actions.note("spill")),
        (BackgroundSaves, "add_automatic", None, lambda *_, **__: actions.note("to disk")),
        (Counts, "add_drafts", drafted, None),
        (Counts, "note_disk_load", None, lambda *_, **__: actions.note("from disk")),
        (saved_text, "open_chain", None, lambda *_, **__: actions.note("open")),
    ]
    with ExitStack() as stack:
        for owner, name, before, after in watch:
            stack.enter_context(patch.object(owner, name, _beside(getattr(owner, name), before, after)))
        yield actions


def _beside(
    work: Callable[..., Any], before: Callable[..., None] | None, after: Callable[..., None] | None
) -> Callable[..., Any]:
    def watching(*given: Any, **options: Any) -> Any:
        if before is not None:
            before(None, *given, **options)
        found = work(*given, **options)
        if after is not None:
            after(found, *given, **options)
        return found

    return watching
