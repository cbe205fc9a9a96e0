"""`retrieval-attn plan`: what a model needs at a context length, before anything is loaded."""

from __future__ import annotations

import argparse
import json

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` to `parser`."""
    parser.description = (
        "Say what a model needs at a context length and what fits. Reads a config, loads no weights."
    )
    parser.add_argument(
        "model", help="folder with a config.json, or the name of a model in the local hub cache"
    )
    parser.add_argument(
        "--context", type=int, default=131072, metavar="TOKENS", help="per sequence (%(default)s)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once (%(default)s)")
    parser.add_argument(
        "--gpu-memory", default="24GiB", metavar="SIZE", help="such as 24GiB or 24GB (%(default)s)"
    )
    parser.add_argument("--host-memory", metavar="SIZE", help="such as 64GiB (this machine's)")
    parser.add_argument("--dtype", help="bfloat16, float16 or float32, of weights and KV (the config's)")
    parser.add_argument(
        "--prefill-chunk", type=int, metavar="TOKENS", help="tokens through a layer at once (8192)"
    )
    parser.add_argument("--sink", type=int, metavar="TOKENS", help="first tokens kept on the GPU (128)")
    parser.add_argument("--window", type=int, metavar="TOKENS", help="last tokens kept on the GPU (512)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 if it fits, 1 if it does not. Raises RetrievalAttentionError on bad input."""
    from retrieval_attn.config import resolve
    from retrieval_attn.memory_plan import plan

    given = {name: getattr(args, name) for name in ("prefill_chunk", "sink", "window")}
    config = resolve(None, {name: value for name, value in given.items() if value is not None})
    answer = plan(
        args.model,
        context=args.context,
        gpu_memory=args.gpu_memory,
        host_memory=args.host_memory,
        batch=args.batch,
        dtype=args.dtype,
        config=config,
    )
    print(json.dumps(answer.to_dict(), indent=2) if args.json else answer)
    return 0 if answer.fits else 1
