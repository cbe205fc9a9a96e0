"""What a token and a read take with weights in 4 bits, by our kernels and by torch's product.

python -m tools.card.int4 --shape qwen3-32b --lengths 4k,128k --tokens 64 --gpu-memory 24GiB --out FOLDER

Shapes: tools/card/four_bits.py. The first length has all keys beside the model (no search), the others what `auto`
takes. Each text is read once; then answers of a stream, three times by layers in our kernels and three times by the
model's modules (norms fused in both), of which the last ones count: a token's time is the mean between an answer's
first piece of text and its last. The card's memory is what nvidia-smi counts, at most since the model was made.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

import retrieval_attn as ra
from retrieval_attn.gpu.memory import cap
from retrieval_attn.memory.units import GIB, parse_bytes
from retrieval_attn.model.fused.layers import fused_layers
from retrieval_attn.model.loading import choose_device
from retrieval_attn.model.quantization import held_bytes
from retrieval_attn.offload.managed import move_table
from retrieval_attn.runner.full_attention import kept_pages
from retrieval_attn.runner.graph import capture
from retrieval_attn.runner.graph import pool as graph_pool
from retrieval_attn_eval.bench.methods import parse
from retrieval_attn_eval.bench.session.subject import number_tokenizer
from retrieval_attn_eval.flags import as_tokens
from tools.card.four_bits import SHAPES, made
from tools.card.near import near_reads
from tools.card.subject import add_card_flags, answered, recorded

WAYS = "kernels", "modules"


@contextmanager
def steps_by(way: str, model: Any) -> Iterator[list[int]]:
    """Steps that are captured within run layers in kernels, or the model's modules; gives how many layers ran so."""
    taken: list[int] = []

    @contextmanager
    def noted(model: Any, rows: int) -> Iterator[int]:
        with fused_layers(model, rows) if way == "kernels" else nullcontext(0) as count:
            taken.append(count)
            yield count

    graph_pool.forget(model)
    with mock.patch.object(capture, "fused_layers", noted):
        yield taken
    graph_pool.forget(model)


def of_length(model: Any, config: ra.Config, length: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way; what went wrong, where something did."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(args.seed + length)
    ids = torch.randint(vocabulary, (length,), generator=generator).tolist()
    context = ra.Context(model, number_tokenizer(vocabulary), config)
    rows = []
    try:
        began = time.perf_counter()
        with near_reads(args.read_window):
            context.read(ids, progress=False)
        seconds = time.perf_counter() - began
        for way in WAYS:
            with steps_by(way, model) as taken:
                found = answered(context, ids, args.tokens)
            fused = max(taken, default=0)
            kept = kept_pages(model)
            pages = None if kept is None else "int8" if kept.layers.int8 else "16 bits"
            chosen = context.cache.index.config
            rows.append({
                "length": length, "index": chosen.index, "options": dict(chosen.index_options), "pages": pages,
                "chunk": chosen.prefill_chunk, "way": way, "fused_layers": fused, "read_seconds": seconds, **found,
            })  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    except (ra.RetrievalAttentionError, torch.OutOfMemoryError) as error:
        rows.append({"length": length, "index": config.index, "problem": f"{type(error).__name__}: {error}"[:300]})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Measure, and write found.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b", choices=SHAPES)
    parser.add_argument("--lengths", default="4k,128k", help="the first one without search (default: %(default)s)")
    parser.add_argument("--indexes", default="auto", help="of the longer texts, one after the other (%(default)s)")
    parser.add_argument("--host-dtype", default="auto", help="storage of host keys (default: the model's dtype)")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--full-attention", default="auto", help="auto, always or never (default: %(default)s)")
    parser.add_argument("--host-table", action="store_true", help="the input embedding's table in host memory")
    add_card_flags(parser)
    args = parser.parse_args()
    device = choose_device(args.device)
    began = time.perf_counter()
    model = made(args.shape, device, args.seed, args.layers)
    found: dict[str, Any] = {
        "shape": args.shape, "layers": args.layers, "read_window": args.read_window,
        "made_seconds": time.perf_counter() - began, "host_table": args.host_table and move_table(model),
        "weights_gib": held_bytes(model) / GIB,
    }  # fmt: skip
    model.generation_config.eos_token_id = []
    gc.collect()
    gc.freeze()
    if device.type == "cuda":
        cap(device, parse_bytes(args.gpu_memory, "gpu_memory"))
    config = ra.Config(
        host_dtype=args.host_dtype, threads=args.threads or None, prefill_chunk=args.prefill_chunk,
        full_attention=args.full_attention,
    )  # fmt: skip
    ra.enable(model, config)
    rows: list[dict[str, Any]] = []
    with recorded(args, found, rows):
        for number, length in enumerate(as_tokens(one) for one in args.lengths.split(",")):
            for spec in parse(args.indexes if number else "full", known=()):
                chosen = config.replace(index=spec.name, index_options=spec.options)
                rows += of_length(model, chosen, length, args)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
