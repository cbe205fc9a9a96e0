"""What an engine takes between the replays of its steps, and what drawing the tokens takes.

python -m tools.card.steps --shape llama-3-8b --random-ids --rows 32 --length 2k --tokens 256 --out FOLDER

A gap is from the moment at which a step is over to the launch of the next one, of steps with all rows that come after
each other. Rows whose windows are full make room in such gaps: p99. Drawing is the graph behind a step's, launched by
itself while nothing else runs. Needs a GPU, or --emulate: graphs that are emulated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import retrieval_attn as ra
from retrieval_attn.engine.detokenizer import OutputQueue
from retrieval_attn.engine.engine import default_limits
from retrieval_attn.errors import CaptureError
from retrieval_attn.memory.host_room import available_host_bytes
from retrieval_attn.offload.managed import move_table
from retrieval_attn.runner.graph.decode_graph import DecodeGraph
from retrieval_attn_eval.flags import as_tokens
from tests.emulation.emulated import emulated
from tools.card.near import add_read_window, near_reads, read_simply
from tools.card.subject import in_ms, llm_of, parser_of, request_of, save_found

QUESTION = 16
READ_SECONDS = 1.0
DRAWS = 100
SAMPLED = ra.SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1)


class Clock:
    """Notes when steps of `rows` rows are launched and over. Wraps what an engine calls, while the block runs."""

    def __init__(self, rows: int) -> None:
        self._rows, self._stack = rows, ExitStack()
        self._over: float | None = None
        self._launched = 0.0
        self.gaps: list[float] = []
        self.steps: list[float] = []

    def __enter__(self) -> Clock:
        launch, step = OutputQueue.flush_async, DecodeGraph.step
        clock = self

        def flush_async(outputs: OutputQueue) -> None:
            clock._launched = time.perf_counter()
            if clock._over is not None:  # the first call of this step
                clock.gaps.append(clock._launched - clock._over)
            clock._over = None
            launch(outputs)

        def stepped(bucket: DecodeGraph, inputs: Any, *given: Any, **options: Any) -> Any:
            whole = len(inputs) == clock._rows and bucket.is_captured
            if not whole:
                clock._over = None
            found = step(bucket, inputs, *given, **options)
            if whole:
                clock._over = time.perf_counter()
                clock.steps.append(clock._over - clock._launched)
            return found

        setattr(OutputQueue, "flush_async", flush_async)  # noqa: B010  not an assignment: that is no method's for mypy
        setattr(DecodeGraph, "step", stepped)  # noqa: B010
        self._stack.callback(setattr, OutputQueue, "flush_async", launch)
        self._stack.callback(setattr, DecodeGraph, "step", step)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def drawing(engine: Any, rows: int) -> list[float]:
    """Seconds of the graph that draws for so many rows, launched alone. Nobody may be in a step meanwhile."""
    group = engine._stepper._runner._pool
    if group is None:
        raise CaptureError("No step was a replay: drawing can only be timed where graphs run.")
    bucket = next(one for size, one in sorted(group.graphs.items()) if size >= rows)
    found = []
    for _ in range(DRAWS):
        began = time.perf_counter()
        bucket.draw.launch()
        bucket.decoder.runtime.synchronize()
        found.append(time.perf_counter() - began)
    return found[DRAWS // 10 :]


def answer(engine: ra.Engine, prompts: Sequence[Sequence[int]], tokens: int, draw: ra.SamplingParams) -> None:
    """All prompts, at the same time. Raises what went wrong with one."""
    for ticket in [engine.submit(request_of(ids, tokens, draw, last=QUESTION)) for ids in prompts]:
        if (error := ticket.result().error) is not None:
            raise error


def main() -> int:
    """Measure, and write found.json."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=as_tokens, default=2048, help="of each prompt")
    parser.add_argument("--tokens", type=as_tokens, default=256, help="of each answer")
    parser.add_argument("--emulate", action="store_true", help="graphs that are emulated, without a GPU")
    parser.add_argument("--host-table", action="store_true", help="the input embedding's table in host memory")
    add_read_window(parser)
    args = parser.parse_args()
    found: dict[str, Any] = {"rows": args.rows, "length": args.length}
    with emulated() if args.emulate else ExitStack():
        llm, subject = llm_of(args)
        found["host_table"] = args.host_table and move_table(llm.model)
        usual = default_limits(llm.model, llm.config)
        # what is read beside the first rows need not wait for them: only steps are timed. Prompts that take most of the
        # memory, as some of 128K tokens do, are not read again
        limits = replace(
            usual, rows=args.rows, inter_token_seconds=READ_SECONDS,
            host_bytes=available_host_bytes(), prefix_cache_device_bytes=None,
        )  # fmt: skip
        with ra.Engine(llm, limits=limits, prefix_cache_bytes=limits.host_bytes * 3 // 4) as engine:
            engine.warm_up(tokens=args.length + args.tokens, draws=(ra.SamplingParams(), SAMPLED), progress=False)
            read_simply(subject, args.read_window)
            prompts = [subject.ids(args.length) for _ in range(args.rows)]
            with near_reads(args.read_window):
                answer(
                    engine, prompts, 1, ra.SamplingParams()
                )  # all but QUESTION is known from now on: rows come together
            for name, draw in (("", ra.SamplingParams()), ("sampled_", SAMPLED)):
                with Clock(args.rows) as clock:
                    answer(engine, prompts, args.tokens, draw)
                found |= {f"{name}gap_ms": in_ms(clock.gaps), f"{name}step_ms": in_ms(clock.steps)}
                found[f"{name}draw_ms"] = in_ms(drawing(engine, args.rows))
    save_found(args, subject, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
