"""What the reading of a long text does to rows that decode meanwhile.

python -m tools.card.beside --shape llama-3-8b --random-ids --row-length 16k --length 128k --tokens 6000 --out FOLDER

Some rows decode alone, then a long prompt with one token to generate is read beside them; a thread for each row notes
when its tokens come. Gaps count that end after the long request came and before it had its token.
Ticks say what made them long.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import retrieval_attn as ra
from retrieval_attn.engine.engine import default_limits
from retrieval_attn_eval.flags import as_tokens
from tools.card.subject import in_ms, llm_of, parser_of, request_of, save_found
from tools.card.ticks import Ticks

WAIT_SECONDS = 300.0


class Listener:
    """Notes when a request's tokens come, in a thread of its own."""

    def __init__(self, ticket: Any) -> None:
        self.ticket, self.times, self.error = ticket, list[float](), ""
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            for event in self.ticket:
                if event.token >= 0:
                    self.times.append(time.perf_counter())
        except Exception as error:  # told by who waits
            self.error = f"{type(error).__name__}: {error}"

    def gaps(self, begin: float, end: float) -> list[float]:
        """Between tokens, of which the later one came in this time."""
        return [gap for _, gap in self.dated_gaps(begin, end)]

    def dated_gaps(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Seconds from the beginning until a gap ended, and its own."""
        return [(later - begin, later - earlier) for earlier, later in pairwise(self.times) if begin < later <= end]

    def wait(self, tokens: int) -> None:
        """Until so many are there. Raises RuntimeError where they do not come."""
        until = time.perf_counter() + WAIT_SECONDS
        while len(self.times) < tokens:
            if self.error or time.perf_counter() > until or not self._thread.is_alive():
                raise RuntimeError(f"a row has {len(self.times)} tokens, {tokens} were waited for: {self.error}")
            time.sleep(0.001)

    def stop(self) -> None:
        """Nobody listens any more."""
        self.ticket.cancel()
        self._thread.join()


def main() -> int:
    """Measure, and write found.json; 1 where the rows ended before the read."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--row-length", type=as_tokens, default=16384, help="of each row's prompt")
    parser.add_argument("--length", type=as_tokens, default=131072, help="of the prompt that is read beside them")
    parser.add_argument("--tokens", type=as_tokens, default=6000, help="of each row's answer, at most")
    parser.add_argument("--inter-token-seconds", type=float, default=0.06)
    args = parser.parse_args()
    llm, subject = llm_of(args)
    limits = replace(default_limits(llm.model, llm.config), inter_token_seconds=args.inter_token_seconds)
    with ra.Engine(llm, limits=limits) as engine:
        engine.warm_up(rows=args.rows + 1, tokens=args.row_length + args.tokens, progress=False)
        listeners = [
            Listener(engine.submit(request_of(subject.ids(args.row_length), args.tokens))) for _ in range(args.rows)
        ]
        for listener in listeners:
            listener.wait(2)
        decoding = time.perf_counter()
        alone = max(10, args.tokens // 30)
        for listener in listeners:
            listener.wait(alone)
        began = time.perf_counter()
        with Ticks() as ticks:
            end = engine.submit(request_of(subject.ids(args.length), 1)).result()
        ended = time.perf_counter()
        if end.error is not None:
            raise end.error
        running = all(not listener.error and listener.times[-1] > ended - 5 for listener in listeners)
        count = [len(listener.times) for listener in listeners]
        for listener in listeners:
            listener.stop()
    enough = running and all(tokens < args.tokens for tokens in count)
    found = {
        "rows": args.rows, "row_length": args.row_length, "length": args.length, "read_seconds": ended - began,
        "inter_token_seconds": args.inter_token_seconds,
        "gap_ms": in_ms([gap for one in listeners for gap in one.gaps(began, ended)]),
        "alone_ms": in_ms([gap for one in listeners for gap in one.gaps(decoding, began)]),
        "late_s_ms": [
            [round(when, 3), round(1000 * gap, 1)]
            for when, gap in listeners[0].dated_gaps(began, ended) if gap > args.inter_token_seconds
        ],
        "ticks": ticks.report(), "tokens": count, "decoded_all_the_time": enough,
    }  # fmt: skip
    save_found(args, subject, found)
    if not enough:
        print("the rows ended before the read did: give more --tokens", file=sys.stderr)
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
