"""Press Ctrl-C at random moments of read, extend, ask and stream: `python -m tests.fuzz.interrupts --moments 200`.

After each the context must answer as before or, where the work was done in time, as after it, letter by letter; or say
that it is lost and why. A moment is a time (`clock`), or a place of the package's own code where Python looks for
signals (`place`): after a call or at the end of a loop's turn. Exit status 1 for an answer that is wrong, another error
than KeyboardInterrupt, a thread that goes on, or an end that took too long.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import retrieval_attn as ra
from retrieval_attn.index.roargraph import index as roargraph
from tests.fuzz.harness import Tally, conclude
from tests.small_windows import spill_early

PACKAGE = Path(ra.__file__).parent
QUESTION = "What is the special magic Bergen number?"
NEEDLE = "The special magic {} number is: {}. "
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
CONFIG = ra.Config(sink=8, window=64, retrieve=50, prefill_chunk=512)
INDEXES: dict[str, dict[str, Any]] = {
    "auto": {},
    "device": {"index": "device"},
    "sketch": {"index": "sketch"},
    "roargraph": {"index": "roargraph"},
}
OPERATIONS = ("read", "extend", "ask", "stream")
WAYS = ("clock", "place")
SECONDS = 2.0
"""An operation ends within this time after the signal."""


class Subject:
    """One kind of index: contexts to interrupt, and what they answer when nobody interrupts."""

    def __init__(self, model: Any, tokenizer: Any, index: str) -> None:
        self._model, self._tokenizer = model, tokenizer
        roargraph.EXACT_BELOW = 64  # a graph of few keys, too
        self._config = CONFIG.replace(**INDEXES[index])
        self.text = FILLER * 15 + NEEDLE.format("Bergen", 7391846) + FILLER * 15
        self.added = NEEDLE.format("Turin", 1112223) + FILLER * 6
        read = self.read()
        self.read_tokens, self.before = read.num_tokens, self.answer(read)
        read.extend(self.added, progress=False)
        self.extended_tokens, self.after = read.num_tokens, self.answer(read)

    def empty(self) -> ra.Context:
        """A context that has read nothing."""
        return ra.Context(self._model, self._tokenizer, self._config)

    def read(self) -> ra.Context:
        """A context that has read the text."""
        return self.empty().read(self.text, progress=False)

    def answer(self, context: ra.Context) -> list[list[int]]:
        """What it answers: one question through the index alone, one whose tokens attend exactly."""
        ways: tuple[Literal["retrieval", "exact"], ...] = ("retrieval", "exact")
        return [context.ask(QUESTION, max_new_tokens=12, question_attention=way).tokens for way in ways]

    def operation(self, name: str, context: ra.Context) -> Callable[[], object]:
        """What is interrupted."""
        if name == "read":
            return lambda: context.read(self.text, progress=False)
        if name == "extend":
            return lambda: context.extend(self.added, progress=False)
        if name == "ask":
            return lambda: context.ask(QUESTION, max_new_tokens=24)
        return lambda: list(context.stream(QUESTION, max_new_tokens=24))

    def fault(self, name: str, context: ra.Context, done: bool) -> str | None:
        """What is wrong with a context after an operation that was done, or interrupted; None if it is as it should."""
        if name == "read" and context.num_tokens == 0 and not done:
            context.read(self.text, progress=False)
        stages = {self.read_tokens: self.before, self.extended_tokens: self.after}
        wanted = self.extended_tokens if name == "extend" and done else self.read_tokens
        # a signal may come when the work is done and its caller has not got it back
        if context.num_tokens != wanted and not (name == "extend" and context.num_tokens == self.extended_tokens):
            return f"{context.num_tokens} tokens, not {wanted}"
        found = self.answer(context)
        return None if found == stages[context.num_tokens] else f"answers {found}, not {stages[context.num_tokens]}"


class Places:
    """Counts the places of the package's code where Python looks for signals, and sends SIGINT at one of them."""

    def __init__(self, at: int | None) -> None:
        self.count, self._at, self._last = 0, at, {"": 0}
        self.sent: float | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calling thread."""
        sys._getframe().f_trace_opcodes = True  # Python 3.12 counts opcodes only if a frame wants them at this time
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(str(PACKAGE)) or self.sent is not None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        looking = _looking(frame.f_code)
        before = [True]  # the call of this function is one

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                if before[0]:
                    self._pass()
                before[0] = looking[frame.f_lasti]
            return step

        return step

    def _pass(self) -> None:
        self.count += 1
        if self.count - 1 == self._at and self.sent is None:
            self.sent = time.perf_counter()
            signal.raise_signal(signal.SIGINT)


_codes: dict[CodeType, dict[int, bool]] = {}


def _looking(code: CodeType) -> dict[int, bool]:
    """For each place in `code`, whether Python looks for signals after it, and the next place shows it.

    What Python raises after a call belongs to the call, and is raised here at the next place. Where that is no longer
    in the block that the call is in, as behind the last call under a lock, the lock would stay taken as it never does.
    """
    if code not in _codes:
        instructions = list(dis.get_instructions(code))
        entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        blocks = [[entry for entry in entries if entry.start <= one.offset < entry.end] for one in instructions]
        _codes[code] = {
            one.offset: one.opname.startswith("JUMP_BACK") or (one.opname.startswith("CALL") and own == after)
            for one, own, after in zip(instructions, blocks, [*blocks[1:], []], strict=True)
        }
    return _codes[code]


class Clock:
    """Sends SIGINT to this process after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.sent: float | None = None
        self._timer = threading.Timer(seconds, self._send)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Begin to wait."""
        self._timer.start()
        try:
            yield
        finally:
            self._timer.cancel()

    def _send(self) -> None:
        self.sent = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)


def interrupt(
    subject: Subject, name: str, context: ra.Context, moment: Clock | Places, tally: Tally
) -> ra.Context | None:
    """One moment; returns the context if it can be used again."""
    done, error = False, None
    try:
        with moment.watching():
            subject.operation(name, context)()
            done = True
        time.sleep(0.005)  # a signal that is on its way
    except KeyboardInterrupt:
        pass
    except Exception as wrong:
        error = wrong
    ended = time.perf_counter()
    if moment.sent is not None and not done:
        tally.seconds = max(tally.seconds, ended - moment.sent)
        if ended - moment.sent > SECONDS:
            tally.faults.append(f"{name}: ended {ended - moment.sent:.1f} s after the signal")
    running = [one.name for one in threading.enumerate() if one.name.startswith("retrieval_attn-stream")]
    try:
        fault = f"raised {error!r}" if error else f"{running} go on" if running else None
        fault = fault or subject.fault(name, context, done)
    except ra.CacheMismatchError as lost:
        tally.outcomes["refused"] += 1
        print(f"{name}: refused: {lost}", file=sys.stderr)
        return None
    except Exception as wrong:
        fault = f"then raised {wrong!r}"
    tally.note(name, fault, "done in time" if done else "as before")
    return context if not fault and context.num_tokens == subject.read_tokens else None


def run(
    moments: int,
    seed: int,
    indexes: Sequence[str],
    model_path: Path,
    operations: Sequence[str] = OPERATIONS,
    device: str = "cpu",
) -> dict[str, Tally]:
    """Spread `moments` evenly over indexes, operations and ways."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
    model = model.to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    choice = random.Random(seed)
    tallies = {name: Tally() for name in operations}
    subjects = {index: Subject(model, tokenizer, index) for index in indexes}
    cases = [(index, name, way) for index in indexes for way in WAYS for name in operations]
    for number, (index, name, way) in enumerate(cases):
        share = moments // len(cases) + (number < moments % len(cases))
        if not share:
            continue
        subject = subjects[index]
        measure = Places(None)
        context: ra.Context | None = subject.empty() if name == "read" else subject.read()
        assert context is not None
        began = time.perf_counter()
        with measure.watching() if way == "place" else contextlib.nullcontext():
            subject.operation(name, context)()
        length = time.perf_counter() - began
        print(f"{index} {name} by {way}: {length:.2f} s, {measure.count} places", file=sys.stderr)
        context = None
        for _ in range(share):
            if context is None or name == "read":
                context = subject.empty() if name == "read" else subject.read()
            moment = Clock(choice.uniform(0, length)) if way == "clock" else Places(choice.randrange(measure.count))
            context = interrupt(subject, name, context, moment, tallies[name])
    return tallies


def main(argv: list[str] | None = None) -> int:
    """Print a line for each operation. 0: nothing wrong."""
    parser = argparse.ArgumentParser(prog="interrupts", description=__doc__.partition("\n")[0])
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--indexes", default="auto,sketch,roargraph", help="some of them, separated by commas")
    parser.add_argument("--model", type=Path, default=PACKAGE / "model" / "bundled")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    spill_early()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    tallies = run(args.moments, args.seed, args.indexes.split(","), args.model, device=args.device)
    for name, tally in tallies.items():
        print(f"{name:8} {tally.outcomes.total():4} moments: {tally}; ended within {tally.seconds:.2f} s")
    return conclude([fault for tally in tallies.values() for fault in tally.faults])


if __name__ == "__main__":
    sys.exit(main())
