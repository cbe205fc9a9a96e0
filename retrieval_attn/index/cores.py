"""Which CPU cores this process's threads should use when it is one of several ranks on its machine.

A launcher such as torchrun starts one process per GPU and says so in the environment. Each would otherwise take all
cores, and pin its workers to the same ones. So the cores are divided: evenly, in whole physical cores, neighbours
(one socket's) to one rank. Ranks that the launcher has bound to cores of their own keep what they were given.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def allowed_cores(process: int = 0) -> list[int]:
    """Cores that a process (0: this one) may run on, ascending. Raises OSError for one that is gone."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(process))
    return list(range(os.cpu_count() or 1))


def local_ranks(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Number of this process among the ranks on this machine, and how many they are; (0, 1) without a launcher.

    By torchrun's variables LOCAL_RANK and LOCAL_WORLD_SIZE; without the second, WORLD_SIZE counts as local.
    """
    try:
        rank = int(environment["LOCAL_RANK"])
        ranks = int(environment.get("LOCAL_WORLD_SIZE") or environment["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks else (0, 1)


def usable_cores() -> list[int]:
    """Cores for this process's threads, ascending, at least one: all it may use, or this rank's share of them."""
    allowed = allowed_cores()
    rank, ranks = local_ranks()
    if ranks == 1:
        return allowed
    try:
        launcher = allowed_cores(os.getppid())
    except OSError:
        launcher = allowed
    return share(allowed, len(launcher), rank, ranks)


def share(allowed: Collection[int], launcher: int, rank: int, ranks: int) -> list[int]:
    """The part of `allowed` that rank `rank` of `ranks` should use, if their launcher may use `launcher` cores.

    Ranks that were bound to as many cores as there are for each keep them all; those that share cores by as many as
    the numbers say divide them. With fewer cores than ranks several ranks get the same one.
    """
    together = min(ranks, max(1, round(len(allowed) * ranks / max(launcher, len(allowed)))))
    ordered = sorted(allowed, key=_place)
    place = rank % together
    low, high = len(ordered) * place // together, len(ordered) * (place + 1) // together
    return sorted(ordered[low:high]) or [ordered[low % len(ordered)]]


def _place(core: int) -> tuple[int, int, int]:
    """Socket, physical core, core: threads of one physical core are neighbours. Unknown topology: by number."""
    try:
        folder = TOPOLOGY / f"cpu{core}" / "topology"
        socket = int((folder / "physical_package_id").read_text())
        return socket, int((folder / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core
