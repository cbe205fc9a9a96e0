"""Hurt a store of contexts in every way: `python -m tests.fuzz.store_faults --kills 1000 --crashes 1000 --flips 10000`.

A run saves, grows, renames, removes and collects small contexts. `kills`: a process ends by kill -9 before, in or after
one of its file operations; all of them in turn, then random ones. `errors`: each operation fails once, or all from it
on, with no room or a disk error. `crashes`: a power cut after a random operation, of which unsynced ones are lost.
`flips`: one bit of a file changes, or a file is cut, or grows. `races`: processes save, load, remove and collect side
by side. Afterwards the old contexts or the new ones must be there, whole, and the store must work on. Exit status 1
if not.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from retrieval_attn.errors import StoreError, UnknownContextError
from retrieval_attn.store import Bundle, ContextStore
from retrieval_attn.store.crc_kernels import prepare
from retrieval_attn.store.disk import Disk
from tests.fuzz.crash_replay import RecordingDisk, Replay
from tests.fuzz.harness import Tally, conclude

IDENTITY = '{"format":"float32","model":"a"}'
OPTIONS = {"index": "flat"}
LAYERS = 2
OPERATIONS = tuple(name for name in vars(Disk) if not name.startswith("_"))
WAITS = ("flush", "fsync", "fsync_folder")


class FaultDisk(Disk):
    """Counts operations and lets `act` do the one at `at`: act(name, call, arguments). Waits for no disk."""

    def __init__(self, at: int | None = None, act: Callable[..., Any] | None = None) -> None:
        self.count, self._at, self._act = 0, at, act
        self.names: list[str] = []


def _counted(name: str) -> Callable[..., Any]:
    plain = getattr(Disk, name)

    def operation(self: FaultDisk, *arguments: Any, **options: Any) -> Any:
        def call() -> Any:
            return None if name in WAITS else plain(self, *arguments, **options)

        number, self.count = self.count, self.count + 1
        self.names.append(name)
        if self._act is not None and self._at is not None and number >= self._at:
            return self._act(number - self._at, name, call, arguments)
        return call()

    return operation


for _name in OPERATIONS:
    setattr(FaultDisk, _name, _counted(_name))


# What is saved


def ids(label: str) -> np.ndarray:
    return np.frombuffer(label.encode() * 40, np.uint8).astype(np.int32)


def layer(label: str, number: int) -> Bundle:
    draw = np.random.default_rng([number, *label.encode()])
    keys = draw.standard_normal((2, 300, 32), np.float32)
    arrays = {"0/keys": keys[:, :280], "0/values": keys[:, 20:], "codes": draw.integers(0, 255, 999, np.uint8)}
    return Bundle({"label": label, "number": number}, arrays)


def save(store: ContextStore, label: str, parent: str | None = None) -> str:
    with store.writer(IDENTITY, parent, ids(label), OPTIONS) as writer:
        for number in range(LAYERS):
            writer.add(f"layer-{number:03}", layer(label, number))
        return writer.publish({"label": label})


def give_up(store: ContextStore) -> None:
    with store.writer(IDENTITY, None, ids("given up"), OPTIONS) as writer:
        writer.add("layer-000", layer("given up", 0))


def load(store: ContextStore, digest: str) -> str | None:
    """Load a chain and compare all of it; what is wrong."""
    for node in store.chain(digest):
        label = node.plain["label"]
        if not np.array_equal(node.ids, ids(label)):
            return f"{label} has other token ids"
        for number in range(LAYERS):
            found, wanted = node.bundle(f"layer-{number:03}", verify=True), layer(label, number)
            same = all(np.array_equal(found.arrays[name], array) for name, array in wanted.arrays.items())
            if not same or found.plain != wanted.plain or list(found.arrays) != list(wanted.arrays):
                return f"{label} differs in layer {number}"
    return None


class Scenario:
    """Steps, and the names that there are after each."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = ContextStore(folder)
            root = save(store, "root")
            turn, other = save(store, "turn", root), save(store, "other")
            store.close()
        self.steps: list[Callable[[ContextStore], object]] = [
            lambda store: store.name("a", save(store, "root"), {}),
            lambda store: store.name("a", save(store, "turn", root), {}),
            lambda store: store.name("c", save(store, "other"), {}),
            lambda store: store.remove("c"),
            lambda store: store.gc(),
            lambda store: store.name("b", root, {}),
            give_up,
            lambda store: store.name("a", save(store, "other"), {}),
            lambda store: store.gc(),
        ]
        self.states: list[dict[str, str]] = [
            {},
            {"a": root},
            {"a": turn},
            {"a": turn, "c": other},
            {"a": turn},
            {"a": turn},
            {"a": turn, "b": root},
            {"a": turn, "b": root},
            {"a": other, "b": root},
            {"a": other, "b": root},
        ]

    def run(self, store: ContextStore, first: int = 0) -> Iterator[int]:
        """Do the steps from `first` on; yields the number of each that is done."""
        for number in range(first, len(self.steps)):
            self.steps[number](store)
            yield number

    def fault(self, folder: Path, step: int) -> str | None:
        """What is wrong in a store of which `step` was under way; None if nothing is, and the store works on."""
        store = ContextStore(folder, disk=FaultDisk())
        try:
            state = {one.name: one.digest for one in store.list()}
            if state not in self.states[step : step + 2]:
                return f"holds {state}, a third state"
            for digest in state.values():
                wrong = load(store, digest)
                if wrong:
                    return wrong
            if damage := store.verify():
                return f"verify finds {damage}"
            store.gc()
            # before there is a VERSION the folder may be somebody's, and gc touches nothing
            if left := os.listdir(folder / "tmp") if (folder / "VERSION").exists() else []:
                return f"gc leaves {left}"
            if store.verify() or {one.name: one.digest for one in store.list()} != state:
                return "gc changed what there is"
            for _ in self.run(store, step + (state == self.states[step + 1])):
                pass
            state = {one.name: one.digest for one in store.list()}
            if state != self.states[-1] or store.verify() or any(load(store, digest) for digest in state.values()):
                return "it does not work on"
            nodes = sorted(path.name for path in (folder / "nodes").glob("*/*"))
            if nodes != sorted(set(state.values())) or os.listdir(folder / "tmp"):
                return f"it has the nodes {nodes} and {os.listdir(folder / 'tmp')}"
        except Exception as error:
            return f"raised {error!r}"
        finally:
            store.close()
        return None

    def operations(self, folder: Path) -> tuple[list[str], list[int]]:
        """Names of all operations of a run, and how many are done after each step."""
        disk = FaultDisk()
        store = ContextStore(folder, disk=disk)
        after = [disk.count for _ in self.run(store)]
        return disk.names, after


@contextlib.contextmanager
def empty(base: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=base))
    try:
        yield folder / "store"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Kinds of faults


def kills(count: int, choice: random.Random, base: Path) -> Tally:
    """kill -9 at operations: each before, in and after, in a random order; then at random ones again."""
    scenario, tally = Scenario(), Tally()
    with empty(base) as folder:
        names, after = scenario.operations(folder)
    moments = [(at, how) for at, name in enumerate(names) for how in _ways(name)]
    print(f"kills: {len(names)} operations, {len(moments)} moments", file=sys.stderr)
    choice.shuffle(moments)
    while len(moments) < count:
        moments.append(choice.choice(moments))
    for at, how in moments[:count]:
        with empty(base) as folder:
            status = _in_child(functools.partial(_die, scenario, folder, at, how))
            where = f"killed {how} operation {at}, {names[at]}"
            if not os.WIFSIGNALED(status):
                tally.note(where, f"the process ended with status {status}", "")
                continue
            step = sum(done <= at for done in after)
            tally.note(where, scenario.fault(folder, step), names[at])
    return tally


def _ways(name: str) -> tuple[str, ...]:
    return ("before", "in", "after") if name == "write" else ("before", "after")


def _die(scenario: Scenario, folder: Path, at: int, how: str) -> None:
    def act(past: int, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> None:
        if how == "after":
            call()
        elif how == "in":
            os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in scenario.run(ContextStore(folder, disk=FaultDisk(at, act))):
        pass


def _in_child(work: Callable[[], None]) -> int:
    """Run `work` in a fork of this process, which has one thread; its status as the system has it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"a child raised {error!r}", file=sys.stderr, flush=True)
            os._exit(3)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def errors(count: int, choice: random.Random, base: Path) -> Tally:
    """Operations fail before or after they did their work, alone or with all that follow: a random share of these."""
    scenario, tally = Scenario(), Tally()
    with empty(base) as folder:
        names, _ = scenario.operations(folder)
    ways = list(itertools.product((errno.ENOSPC, errno.EIO), ("before", "after"), (False, True)))
    moments = [(at, *way) for at in range(len(names)) for way in ways]
    choice.shuffle(moments)
    for at, code, how, on in moments[:count]:
        with empty(base) as folder:
            where = f"{errno.errorcode[code]} {how} operation {at}, {names[at]}{' and on' if on else ''}"
            tally.note(where, _fail(scenario, folder, (at, code, how, on)), names[at])
    return tally


def _fail(scenario: Scenario, folder: Path, moment: tuple[int, int, str, bool]) -> str | None:
    at, code, how, on = moment

    def act(past: int, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if past and not on:
            return call()
        if name == "close" or how == "after":
            result = call()
            if name in ("create", "lock") and result is not None:
                os.close(result)
        elif name == "write":
            os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
        raise OSError(code, os.strerror(code))

    disk = FaultDisk(at, act)
    store, step = ContextStore(folder, disk=disk), 0
    try:
        for number in scenario.run(store):
            step = number + 1
        # cleaning up may fail in silence: the next gc does it
    except StoreError as error:
        if (error.reason == "full") != (code == errno.ENOSPC):
            return f"{errno.errorcode[code]} became a StoreError with the reason {error.reason!r}"
    except BaseException as error:
        return f"raised {error!r}"
    store.close() if not on else None
    disk._act = None
    with contextlib.suppress(StoreError):
        store.close()
    for pin in store._pins:  # a process that goes on with a healthy disk
        pin.release()
    del store
    return scenario.fault(folder, min(step, len(scenario.steps) - 1))


def crashes(count: int, choice: random.Random, base: Path) -> Tally:
    """Power cuts: see `crash_replay`."""
    scenario, tally = Scenario(), Tally()
    with empty(base) as folder:
        folder.parent.mkdir(exist_ok=True)
        disk = RecordingDisk()
        store = ContextStore(folder, disk=disk)
        after = [len(disk.operations) for _ in scenario.run(store)]
        root = folder.parent
        store.close()
    for _ in range(count):
        at = choice.randrange(len(disk.operations) + 1)
        replay = Replay(root)
        for operation in disk.operations[:at]:
            replay.take(*operation)
        step = min(sum(done <= at for done in after), len(scenario.steps) - 1)
        with empty(base) as folder:
            replay.crash(folder.parent, choice)
            last = disk.operations[at - 1][0] if at else "nothing"
            tally.note(f"power cut after operation {at}, {last}", scenario.fault(folder, step), last)
    return tally


def flips(count: int, choice: random.Random, base: Path) -> Tally:
    """One bit of a file changes; for one in ten, the file is cut or grows."""
    tally = Tally()
    with empty(base) as folder:
        store = ContextStore(folder)
        root = save(store, "root")
        store.name("a", save(store, "turn", root), {"template": "x"})
        store.name("b", root, {})
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        for number in range(count):
            path = files[number % len(files)]
            whole = path.read_bytes()
            where, changed = _change(whole, number % 10 == 9, choice)
            path.write_bytes(changed)
            tally.note(f"{where} of {path.relative_to(folder)}", _missed(folder, path), _kind(path, where))
            path.write_bytes(whole)
            for mark in folder.glob("nodes/*/*/DAMAGED"):
                mark.unlink()
        if ContextStore(folder).verify():
            tally.faults.append("the store is not whole in the end")
    return tally


def _change(whole: bytes, cut: bool, choice: random.Random) -> tuple[str, bytes]:
    if cut and choice.random() < 0.3:
        more = choice.randrange(1, 5000)
        return f"{more} bytes more", whole + bytes(more)
    if cut:
        size = choice.choice((0, choice.randrange(len(whole)), len(whole) - 1))
        return f"first {size} bytes", whole[:size]
    # half of the flips among the first and the last bytes, where headers and tables are
    places = (
        choice.randrange(len(whole)),
        choice.randrange(min(400, len(whole))),
        -choice.randrange(1, min(30, len(whole))),
    )
    place = choice.choice((places[0], places[0], places[1], places[2]))
    changed = bytearray(whole)
    changed[place] ^= 1 << choice.randrange(8)
    return f"bit {place}", bytes(changed)


def _kind(path: Path, where: str) -> str:
    name = path.parent.name if path.parent.name == "contexts" else path.name
    return name if where.startswith("bit") else "cut or longer"


def _missed(folder: Path, path: Path) -> str | None:
    """What was not noticed of a changed file, or noticed in another way than by an error of the store."""
    store = ContextStore(folder)
    named = {"a.json": {"a"}, "b.json": {"b"}}.get(path.name)
    try:
        found = store.verify()
        if path.name in ("LOCK", "VERSION"):
            return "verify finds nothing"
        if not found:
            return "verify finds nothing"
        hurt = {name for damage in found for name in damage.names}
        node = path.parent.name
        wanted = named or {one.name for one in store.list() if node in one.chain}
        if hurt != wanted:
            return f"verify names {hurt}, not {wanted}"
    except StoreError:
        if path.name != "VERSION":
            raise
        return None
    for name in hurt:
        try:
            wrong = load(store, store.resolve(name).digest)
        except StoreError:
            continue
        return f"{name} loads ({wrong})"
    return None


def races(seconds: float, choice: random.Random, base: Path) -> Tally:
    """Four processes share a store: one also collects; each checks all that it loads."""
    tally = Tally()
    if not seconds:
        return tally
    with empty(base) as folder:
        seeds = [choice.randrange(2**31) for _ in range(4)]
        children = []
        for number, seed in enumerate(seeds):
            child = os.fork()
            if child == 0:
                code = 3
                try:
                    code = _race(folder, number, random.Random(seed), time.monotonic() + seconds)
                except BaseException as error:
                    print(f"a racing process raised {error!r}", file=sys.stderr, flush=True)
                os._exit(code)
            children.append(child)
        for child in children:
            status = os.waitpid(child, 0)[1]
            tally.note("race", f"a process ended with status {status}" if status else None, "processes")
        store = ContextStore(folder)
        for damage in store.verify():
            tally.faults.append(f"race: {damage}")
        for one in store.list():
            store.remove(one.name)
        store.gc()
        if left := [path.name for path in (folder / "nodes").glob("*/*")] + os.listdir(folder / "tmp"):
            tally.faults.append(f"race: {left} are left")
    return tally


def _race(folder: Path, number: int, choice: random.Random, until: float) -> int:
    store = ContextStore(folder)
    while time.monotonic() < until:
        name, label = f"n{choice.randrange(3)}", f"text {choice.randrange(3)}"
        try:
            root = save(store, label)
            if choice.random() < 0.5:
                root = save(store, f"{label} and more", root)
            store.name(name, root, {})
            found = choice.choice(store.list() or [store.resolve(name)])
            wrong = load(store, found.digest)
            if wrong:
                print(wrong, file=sys.stderr)
                return 1
            if choice.random() < 0.3:
                store.remove(name)
            if number == 0 or choice.random() < 0.2:
                store.gc()
        except UnknownContextError:
            continue  # another one removed it
    store.close()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Print a line for each kind. 0: nothing wrong."""
    parser = argparse.ArgumentParser(prog="store_faults", description=__doc__.partition("\n")[0])
    for name, what in (("kills", "kill -9"), ("errors", "failing operations"), ("crashes", "power cuts")):
        parser.add_argument(f"--{name}", type=int, default=0, help=f"how many of {what}")
    parser.add_argument("--flips", type=int, default=0, help="how many changed files")
    parser.add_argument("--races", type=float, default=0, metavar="SECONDS", help="of processes that share a store")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the stores are made; default: the system's for such files")
    args = parser.parse_args(argv)
    prepare()
    logging.getLogger("retrieval_attn").setLevel(logging.ERROR)
    faults = []
    for name, work in (("kills", kills), ("errors", errors), ("crashes", crashes), ("flips", flips), ("races", races)):
        count = getattr(args, name)
        if not count:
            continue
        with tempfile.TemporaryDirectory(dir=args.folder) as base:
            began = time.perf_counter()
            tally = work(count, random.Random(args.seed), Path(base))
            seconds = time.perf_counter() - began
        print(f"{name}: {tally.outcomes.total()} in {seconds:.0f} s: {tally}", flush=True)
        faults += tally.faults
    heavy = {"torch", "transformers"} & set(sys.modules)
    faults += [f"{name} was imported" for name in sorted(heavy)]
    return conclude(faults)


if __name__ == "__main__":
    sys.exit(main())
