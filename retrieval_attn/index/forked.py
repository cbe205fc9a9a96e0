"""Threads do not survive a fork: a process that was forked from one that computed is told so, and does not hang.

OpenMP, in torch and in Numba's kernels, waits for ever in such a process or ends it, and so does everything over it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from retrieval_attn.errors import BackendError


@dataclass
class _ForkState:
    """computed: threads of libraries were started here. forked: they were started in a process before this one."""

    computed: bool = False
    forked: bool = False


_process = _ForkState()


def refuse_forked() -> None:
    """Raise BackendError in a process that was forked from one that computed."""
    if _process.forked:
        raise BackendError(
            f"Process {os.getpid()} was forked from one that had computed with threads, and threads do not survive a "
            "fork: torch would wait for them for ever. Fork before the first context is read, or start processes "
            'with multiprocessing.get_context("spawn").'
        )


def use_threads() -> None:
    """This process is about to compute with threads. Raises as `refuse_forked`."""
    refuse_forked()
    _process.computed = True


def _after_fork() -> None:
    _process.forked, _process.computed = _process.forked or _process.computed, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
