"""`retrieval-attn plan MODEL`: what fits in how much GPU and host memory, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from typing import Any

from retrieval_attn.cli.model_args import (
    DTYPES,
    HOST_DTYPE_FLAG,
    INDEX_FLAG,
    index_fields,
    require_model,
    tokens_or_zero,
)
from retrieval_attn.config import QUANTIZATIONS, Config
from retrieval_attn.errors import ConfigError
from retrieval_attn.memory.plan import DEFAULT_CONTEXT, plan, plan_fitting
from retrieval_attn.memory.shape import SPLITS
from retrieval_attn.memory.units import parse_tokens, show_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn plan`."""
    usual = Config()
    parser.add_argument(
        "model", help="folder with a config.json, GGUF file, hub name (config.json alone is downloaded), or bundled"
    )
    parser.add_argument(
        "--max-context",
        metavar="TOKENS",
        help="tokens per sequence; k and m count 1024s (default: the model's positions, or as many as fit)",
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=1, metavar="N", help="sequences in a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--gpu-memory", default="24GiB", metavar="SIZE", help="such as 24GiB or 24GB (default: %(default)s)"
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of that size (default: %(default)s)")
    parser.add_argument(
        "--split",
        choices=SPLITS,
        default="layers",
        help="how several GPUs share the model: device_map or tensor parallel (default: %(default)s)",
    )
    parser.add_argument("--host-memory", default="auto", metavar="SIZE", help="such as 64GiB; auto: this machine's")
    parser.add_argument(
        "--dtype", default="auto", help="of weights and KV: bfloat16, float16 or float32 (default: %(default)s)"
    )
    parser.add_argument(
        "--quantization",
        choices=("none", *QUANTIZATIONS),
        default="none",
        help="of the weights when they are loaded; none: as the checkpoint has them (default: %(default)s)",
    )
    for name, text in (("sink", "first tokens, kept on the GPU"), ("window", "last tokens, kept on the GPU")):
        parser.add_argument(
            f"--{name}", default=str(getattr(usual, name)), metavar="TOKENS", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument("--host-dtype", **HOST_DTYPE_FLAG)
    whose = (
        "index over the host's keys, with options as in device:key_bytes=40:int8_rows=True; auto: what a read on "
        "one such GPU would take (default: %(default)s)"
    )
    parser.add_argument("--index", **{**INDEX_FLAG, "help": whose})
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 if it fits, 1 if it does not. Raises RetrievalAttentionError on bad input."""
    require_model(args.model)
    if args.dtype not in DTYPES:
        raise ConfigError(f"--dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {args.dtype!r}")
    most = None if args.max_context is None else parse_tokens(args.max_context, "--max-context")
    sizes: dict[str, Any] = dict(
        gpu_memory=args.gpu_memory,
        host_memory=None if args.host_memory == "auto" else args.host_memory,
        batch=args.max_num_seqs,
        dtype=args.dtype,
        quantization=None if args.quantization == "none" else args.quantization,
        gpus=(args.gpus, args.split),
        config=Config(
            sink=tokens_or_zero(args.sink, "--sink"),
            window=tokens_or_zero(args.window, "--window"),
            host_dtype=args.host_dtype,
            **index_fields(args.index),
        ),
    )
    answer = plan_fitting(args.model, **sizes) if most is None else plan(args.model, most, **sizes)
    print(json.dumps(answer.to_dict(), indent=2) if args.json else answer)
    reason = answer.context_reason(answer.shape.max_positions or DEFAULT_CONTEXT)
    if reason and most is None and answer.fits and not args.json:
        print(f"\nmax_context {show_tokens(answer.context)}: {reason}.")
    return 0 if answer.fits else 1
