"""`python -m retrieval_attn.compile.stall_log`: looks at another process's beacon, and logs what it does where it is
late (`stall_watch.py` starts it).

For every thread: name, state, processor, where in the system it sleeps, what it got of a core and waited for one within
50 ms, and the libraries that its stack goes through. Ends with the process that it looks at.
"""

from __future__ import annotations

import bisect
import mmap
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from retrieval_attn.compile import beacon

LOOK_SECONDS = 0.02
SAMPLE_SECONDS = 0.05
LOCK_SECONDS = 0.25
"""Who has not had Python's lock for so long waits for code that keeps it: a switch is due after 5 ms."""
AGAIN = 4.0
"""The same wait is reported again when it has become so many times as long."""
STACK_BYTES = 1 << 14
FRAMES = 24


class Task(NamedTuple):
    """What the system says of one thread. run, queued: nanoseconds on a core, and of waiting for one, so far."""

    name: str
    state: str
    cpu: int
    nice: int
    run: int
    queued: int
    sleeps: int
    preempted: int
    cores: str
    wchan: str
    syscall: str


class Watched:
    """The process that is looked at, by what the system shows of it."""

    def __init__(self, pid: int) -> None:
        self._at = Path(f"/proc/{pid}")
        self._maps: tuple[list[int], list[tuple[int, int, str]]] = ([], [])

    def text(self, name: str) -> str:
        """A file of the process, "" where it cannot be read."""
        try:
            return (self._at / name).read_text().strip()
        except OSError:
            return ""

    def tasks(self) -> dict[int, Task]:
        """All threads by number."""
        try:
            numbers = sorted(int(name) for name in os.listdir(self._at / "task"))
        except OSError:
            return {}
        return {number: task for number in numbers if (task := self._task(f"task/{number}")) is not None}

    def _task(self, at: str) -> Task | None:
        head, _, rest = self.text(f"{at}/stat").rpartition(")")
        fields = rest.split()
        if len(fields) < 37:
            return None
        status = dict(re.findall(r"^(\w+):\s*(.*)$", self.text(f"{at}/status"), re.MULTILINE))
        run, queued, *_ = [*map(int, self.text(f"{at}/schedstat").split()), 0, 0]
        return Task(
            name=head.partition("(")[2],
            state=fields[0],
            cpu=int(fields[36]),
            nice=int(fields[16]),
            run=run,
            queued=queued,
            sleeps=int(status.get("voluntary_ctxt_switches", 0)),
            preempted=int(status.get("nonvoluntary_ctxt_switches", 0)),
            cores=status.get("Cpus_allowed_list", "?"),
            wchan=self.text(f"{at}/wchan"),
            syscall=self.text(f"{at}/syscall"),
        )

    def memory(self, address: int, count: int) -> bytes:
        """Bytes of the process, none where this is not allowed."""
        try:
            with open(self._at / "mem", "rb", 0) as file:
                return os.pread(file.fileno(), count, address)
        except (OSError, OverflowError):
            return b""

    def words(self, address: int, count: int) -> Sequence[int]:
        """int64 words of the process, fewer where this is not allowed."""
        found = self.memory(address, 8 * count)
        return struct.unpack(f"={len(found) // 8}q", found[: len(found) // 8 * 8])

    def read_maps(self) -> None:
        """Note where code of which library lies."""
        found = []
        for line in self.text("maps").splitlines():
            span, access, offset, *rest = line.split(maxsplit=5)
            if "x" in access:
                first, stop = (int(side, 16) for side in span.split("-"))
                path = rest[2] if len(rest) > 2 else "compiled"
                found.append((first, (stop, int(offset, 16), Path(path).name)))
        self._maps = [first for first, _ in found], [end for _, end in found]

    def frames(self, syscall: str) -> list[str]:
        """Code that a sleeping thread's stack points to, the newest first: calls, and some of earlier ones."""
        parts = syscall.split()
        if len(parts) < 2 or not parts[-1].startswith("0x"):
            return []  # it runs
        stack, at = int(parts[-2], 16), int(parts[-1], 16)
        held = self.memory(stack, STACK_BYTES)
        places = [self._place(word) for word in (at, *struct.unpack(f"={len(held) // 8}Q", held[: len(held) // 8 * 8]))]
        return [place for place in places if place][:FRAMES]

    def _place(self, address: int) -> str:
        number = bisect.bisect_right(self._maps[0], address) - 1
        if number < 0 or address >= self._maps[1][number][0]:
            return ""
        _, offset, name = self._maps[1][number]
        return f"{name}+{address - self._maps[0][number] + offset:#x}"


class Reporter:
    """Writes what a process does to a file."""

    def __init__(self, watched: Watched, into: TextIO) -> None:
        self._watched, self._into = watched, into

    def report(self, slot: Sequence[int], pools: Sequence[Sequence[int]], seconds: float) -> None:
        """slot: words of a beacon's slot whose thread has been at one thing for so long. pools: as the beacon has
        them.
        """
        watched = self._watched
        before, began = watched.tasks(), time.monotonic()
        watched.read_maps()
        lines = [
            f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {say(slot)} since {seconds:.3f} s",
            f"load {Path('/proc/loadavg').read_text().strip()}; processor pressure {self._pressure('cpu')}; memory "
            f"pressure {self._pressure('memory')}",
            "; ".join(re.findall(r"^(?:VmRSS|VmSize|VmLck|VmPin|Threads):.*$", watched.text("status"), re.MULTILINE)),
            *[line for pool in pools if pool[0] for line in self._pool(*pool[:3])],
        ]
        time.sleep(max(0.0, SAMPLE_SECONDS - (time.monotonic() - began)))
        after = watched.tasks()
        lines.append("   tid state core cores nice run/ms queued/ms sleeps preempted name wchan: stack, newest first")
        for number, now in after.items():
            was = before.get(number, now)
            marks = "*" if number == slot[beacon.THREAD] else " "
            run, queued = (now.run - was.run) / 1e6, (now.queued - was.queued) / 1e6
            lines.append(
                f"{marks}{number:8} {now.state} {now.cpu:3} {now.cores:>7} {now.nice:3} {run:6.1f} {queued:6.1f} "
                f"{now.sleeps - was.sleeps:4} {now.preempted - was.preempted:4} "
                f"{now.name} {now.wchan}: {' < '.join(watched.frames(now.syscall)) or now.syscall.split(' ')[0]}"
            )
            kernel = watched.text(f"task/{number}/stack")
            lines += [f"          {line}" for line in kernel.splitlines()[:8]]
        self.line("\n".join(lines))

    def line(self, text: str) -> None:
        """Write it at once: the process may be killed."""
        self._into.write(text + "\n")
        self._into.flush()

    def _pool(self, control: int, busy: int, workers: int) -> list[str]:
        claim = self._watched.words(control + 128, 1)
        head = [*self._watched.words(control + 272, 1), *self._watched.words(control + 384, 1)]
        at_work = [
            f"worker {number} in task {word[0] - 1}"
            for number in range(workers)
            if (word := self._watched.words(busy + 128 * number, 1)) and word[0]
        ]
        if not claim or len(head) < 2:
            return [f"a pool of {workers} threads, whose words may not be read"]
        return [
            f"a pool: job {claim[0] >> 32}, {head[0]} tasks, {head[1]} ended, {claim[0] & 0xFFFFFFFF} not begun; "
            + (", ".join(at_work) or "nobody works")
        ]

    @staticmethod
    def _pressure(name: str) -> str:
        try:
            return Path(f"/proc/pressure/{name}").read_text().split("total")[0].strip()
        except OSError:
            return "unknown"


def say(slot: Sequence[int]) -> str:
    """What the thread of a slot does."""
    return (
        f"thread {slot[beacon.THREAD]} {beacon.PHASES[slot[beacon.PHASE]]}, call {slot[beacon.CALL]} of "
        f"{slot[beacon.CALLS]}, replay {slot[beacon.GENERATION]}"
    )


def watch(
    words: mmap.mmap, late_seconds: float, reporter: Reporter, asks: Callable[[], None], ended: Callable[[], bool]
) -> None:
    """Look until it has ended. asks: have the process itself say what it can, after each report."""
    told: dict[int, tuple[list[int], float]] = {}  # of each slot that is late: its words, and when to tell it again
    while not ended():
        time.sleep(LOOK_SECONDS)
        now = time.monotonic_ns()
        view = struct.unpack(f"={beacon.BYTES // 8}q", words[: beacon.BYTES])
        pools = [view[beacon.SLOTS * beacon.SLOT_WORDS + beacon.POOL_WORDS * i :][:3] for i in range(beacon.POOLS)]
        for number in range(beacon.SLOTS):
            slot = list(view[number * beacon.SLOT_WORDS :][: beacon.SLOT_WORDS])
            seconds = (now - slot[beacon.SINCE]) / 1e9
            before, next_seconds = told.get(number, (slot, late_seconds))
            if before != slot:
                waited = (slot[beacon.SINCE] - before[beacon.SINCE]) / 1e9
                reporter.line(f"== over: {say(before)}, at most {waited:.3f} s in all")
                del told[number]
            elif slot[beacon.PHASE] != beacon.IDLE and seconds > next_seconds:
                told[number] = slot, AGAIN * seconds
                reporter.report(slot, pools, seconds)
                asks()


def main(arguments: Sequence[str]) -> int:
    """pid, file descriptors of the beacon and of the pipe, log file, seconds, number of the signal."""
    pid, file, pipe, signal_number = int(arguments[0]), int(arguments[1]), int(arguments[2]), int(arguments[5])
    words = mmap.mmap(file, beacon.BYTES, prot=mmap.PROT_READ)

    def asks() -> None:
        moment = time.monotonic_ns()
        os.write(pipe, moment.to_bytes(8, "little"))
        while struct.unpack_from("=q", words, 8 * beacon.HEARD)[0] != moment:
            if time.monotonic_ns() - moment > 1e9 * LOCK_SECONDS:
                # faulthandler's, which needs no lock. It may end a process whose threads run Python: they do not now
                os.kill(pid, signal_number)
                return
            time.sleep(0.001)

    with open(arguments[3], "a") as log:
        reporter = Reporter(Watched(pid), log)
        try:
            watch(words, float(arguments[4]), reporter, asks, lambda: os.getppid() != pid)
        except (ProcessLookupError, BrokenPipeError):
            return 0  # it ended meanwhile
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
