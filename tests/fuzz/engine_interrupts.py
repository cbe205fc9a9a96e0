"""Ctrl-C at random times: an engine ends soon, no thread stays, and the model answers as before.

python -m tests.fuzz.engine_interrupts --tries 100
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from retrieval_attn.engine.engine import Engine
from retrieval_attn.engine.request import Request
from tests.fuzz.engine_schedules import llm_of

MOST_SECONDS = 2.0
"""From the signal to the end of the engine."""


def tried(llm: Any, seconds: float) -> float:
    """Seconds from an interrupt, sent so long after six endless requests were begun, to the end of their engine."""
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        if issubclass(found.exc_type, KeyboardInterrupt):  # it came in a finalizer, where Python drops it
            sent.clear()
            threading.Timer(0.01, interrupt).start()
        else:
            sys.__unraisablehook__(found)

    timer, sys.unraisablehook = threading.Timer(seconds, interrupt), unraisable
    try:
        with Engine(llm, prefix_cache_bytes=1 << 26) as engine:
            timer.start()
            prompts = [tuple((7 * place + number) % 90 + 4 for place in range(900)) for number in range(6)]
            for ticket in [engine.submit(Request((ids,), 3_000, stop_ids=frozenset())) for ids in prompts]:
                ticket.result()
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    finally:
        sys.unraisablehook = sys.__unraisablehook__
    raise AssertionError("nothing was interrupted")


def main() -> int:
    """Interrupt so often; 1 if it took too long, a thread stayed, or the model answers something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=100, metavar="N")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it with SIGINT ignored
    from retrieval_attn_eval.bench.session.subject import number_tokenizer
    from tests.tiny_models import tiny_model

    model = tiny_model("llama")
    llm = llm_of(model, number_tokenizer(model.get_input_embeddings().weight.shape[0]), "auto")
    request, chance = Request((tuple(range(4, 60)),), 8), random.Random(5)

    def answer() -> tuple[int, ...]:
        with Engine(llm, prefix_cache_bytes=0) as engine:
            return engine.submit(request).result().tokens

    before, longest = answer(), 0.0
    for _ in range(args.tries):
        longest = max(longest, tried(llm, chance.random() * 0.4))
        if [one.name for one in threading.enumerate() if one.name.startswith("retrieval_attn-engine")]:
            print("a thread stayed", file=sys.stderr)
            return 1
    print(f"{args.tries} interrupts, the longest end took {longest:.2f} s")
    return int(longest > MOST_SECONDS or answer() != before)


if __name__ == "__main__":
    sys.exit(main())
