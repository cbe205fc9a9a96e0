"""What a token and a question take with all keys beside the model (index "full"), and what `auto` or another takes.

python -m tools.card.full_keys --shape llama-3-8b --random-ids --lengths 8k,16k,32k,64k,128k --tokens 64 --out FOLDER

`retrieval`: sinks and a window of 512 stay, the index that `auto` takes has the rest. `full`: every key is attended to,
in the same graph. `auto`: one or the other (`Config.full_attention`). `always` and `int8`: all keys in
pages wherever they fit, in the model's dtype and in int8, which the host then stores, too.
Through the public API: `Context.read`, then a stream of an answer three times, of which the last one counts; a token's
time is the mean between its first piece of text and its last. Memory is what torch had reserved at most.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

import torch

import retrieval_attn as ra
from retrieval_attn.memory.units import show_bytes
from retrieval_attn_eval.bench.methods import parse
from retrieval_attn_eval.flags import as_tokens
from tools.card.near import add_read_window, near_reads, read_simply
from tools.card.subject import answered, llm_of, parser_of, save_found

WAYS: dict[str, dict[str, Any]] = {
    "retrieval": {"index": "auto", "full_attention": "never"},
    "always": {"index": "auto", "full_attention": "always"},
    "int8": {"index": "auto", "full_attention": "always", "host_dtype": "int8"},
}


def measured(context: ra.Context, ids: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Read, and answer; milliseconds of the last answer."""
    began = time.perf_counter()
    with near_reads(args.read_window):
        context.read(ids, progress=False)
    return {"read_seconds": time.perf_counter() - began, **answered(context, ids, args.tokens)}


def main() -> int:
    """Measure, and write found.json."""
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", default="8k,16k,32k,64k,128k")
    parser.add_argument("--tokens", type=as_tokens, default=64)
    parser.add_argument(
        "--systems", default="retrieval,auto,full", help="or device:key_bytes=32 and such (%(default)s)"
    )
    add_read_window(parser)
    args = parser.parse_args()
    lengths = [as_tokens(one) for one in args.lengths.split(",")]
    args.length = max(lengths)
    ways = parse(args.systems, known=tuple(WAYS))
    llm, subject = llm_of(args)
    read_simply(subject, args.read_window)
    rows = []
    for length in lengths:
        ids = subject.ids(length)
        for spec in ways:
            options = WAYS.get(spec.name, {"index": spec.name, "index_options": spec.options})
            config = llm.config.replace(**options)
            rows.append({"length": length, "way": spec.label, **one_row(llm, config, ids, args)})
            print(rows[-1], file=sys.stderr, flush=True)
    save_found(args, subject, {"rows": rows})
    return 0


def one_row(llm: Any, config: ra.Config, ids: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Of one way and length: twice, for the first one compiles; what went wrong, where something did."""
    for _ in range(2):
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            found = measured(ra.Context(llm.model, llm.tokenizer, config), ids, args)
        except (ra.RetrievalAttentionError, torch.OutOfMemoryError) as error:
            return {"problem": f"{type(error).__name__}: {error}"[:300]}
    if torch.cuda.is_available():
        found["reserved"] = show_bytes(torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
    return found


if __name__ == "__main__":
    sys.exit(main())
