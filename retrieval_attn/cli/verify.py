"""`retrieval-attn verify MODEL`: is retrieval attention exact on this model?"""

from __future__ import annotations

import argparse

from retrieval_attn.cli.model_args import require_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    parser.add_argument("model", help="folder, GGUF file or hub name of the model, or bundled")
    parser.add_argument(
        "--tokens", default="64", metavar="N", help="random tokens to compare on (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")


def run(args: argparse.Namespace) -> int:
    """Load the model, compare, print one line. Exit code 1 when it is not exact."""
    from retrieval_attn.memory.units import parse_tokens

    tokens = parse_tokens(args.tokens, "--tokens")
    require_model(args.model)
    from retrieval_attn.model.loading import load_model
    from retrieval_attn.runner.switch import verify

    model = load_model(args.model, device=args.device, dtype=args.dtype)
    report = verify(model, tokens=tokens)
    print(report)
    return 0 if report.ok else 1
