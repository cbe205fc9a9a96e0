"""`retrieval-attn ask FILE QUESTION`: read a text, answer one question about it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.config import QUANTIZATIONS, Config, Retrieve
from retrieval_attn.errors import InputDataError
from retrieval_attn.memory.units import parse_tokens, show_bytes

if TYPE_CHECKING:
    from retrieval_attn.answer import Stats

BUNDLED = Path(__file__).parents[1] / "eval" / "needle_model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    usual = Config()
    parser.add_argument("file", metavar="FILE", help="text to read, UTF-8; - is the standard input")
    parser.add_argument("question", metavar="QUESTION", help="what to ask about it")
    parser.add_argument(
        "--model",
        default="bundled",
        metavar="PATH|ID",
        help="folder or hub name of a model; bundled: a small one that finds planted numbers and can do little else "
        "(default: %(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument(
        "--quantization",
        choices=("none", *QUANTIZATIONS),
        default="none",
        help="of the weights when they are loaded; none: as the checkpoint has them (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="most to take of the GPU, such as 24GiB (default: no limit)"
    )
    parser.add_argument("--max-new-tokens", default="256", metavar="N", help="longest answer (default: %(default)s)")
    parser.add_argument(
        "--retrieve",
        default=str(usual.retrieve),
        metavar="K",
        help="keys retrieved per head and token: a number, a share such as 0.01, all, or auto, as measured for each "
        "head (default: %(default)s)",
    )
    parser.add_argument(
        "--window", default=str(usual.window), metavar="N", help="last tokens always attended (%(default)s)"
    )
    parser.add_argument("--index", default=usual.index, metavar="NAME", help="index of the keys (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the random choices of a temperature")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        dest="raw",
        action="store_false",
        help='put text and question into the model\'s chat template, or "Question: ... Answer:" without one (default)',
    )
    form.add_argument(
        "--raw", dest="raw", action="store_true", help="let QUESTION continue the text as it stands, for base models"
    )
    parser.set_defaults(raw=False)


def run(args: argparse.Namespace) -> int:
    """Read, answer on the standard output as the text comes, and say on the error output what it cost."""
    text = _text(args.file)
    config = Config(retrieve=_retrieve(args.retrieve), window=parse_tokens(args.window, "--window"), index=args.index)

    from retrieval_attn.answer import Sampling
    from retrieval_attn.context import Context
    from retrieval_attn.llm import LLM

    most = parse_tokens(args.max_new_tokens, "--max-new-tokens")
    sampling = Sampling(max_new_tokens=most, temperature=args.temperature, seed=args.seed)
    name = str(BUNDLED) if args.model == "bundled" else args.model
    llm = LLM(
        name,
        device=args.device,
        dtype=args.dtype,
        quantization=None if args.quantization == "none" else args.quantization,
        gpu_memory=args.gpu_memory,
        max_context=_needed(name, len(text.encode()) + len(args.question.encode()) + most),
        config=config,
    )
    what = "the bundled test model; --model names another" if args.model == "bundled" else name
    print(f"answered by {what}, on {llm.device}", file=sys.stderr)
    context = Context(llm.model, llm.tokenizer, llm.config)
    ids = context.template.context_ids(text)
    asked = context.template.question_ids(args.question, args.raw)
    if not asked:
        raise InputDataError("QUESTION has no tokens; ask a non-empty question.")
    context.cache.require_room(len(ids) + len(asked) + most)  # known before the text is read, which may take long
    started = time.perf_counter()
    context.read(ids)
    read_seconds = time.perf_counter() - started
    with context.stream(args.question, sampling, raw=args.raw) as stream:
        for piece in stream:
            print(piece, end="", flush=True)
    print(flush=True)
    if stream.answer is not None:
        stats = stream.answer.stats
        _say_tail(stats)
        print(
            f"read {context.num_tokens:,} tokens in {read_seconds:.1f} s; first token after "
            f"{stats.prefill_seconds:.2f} s, {1000 * stats.seconds_per_token:.1f} ms per token for "
            f"{stats.new_tokens} tokens; {show_bytes(stats.host_bytes)} of keys and values on the host, "
            f"{show_bytes(stats.device_bytes)} on the device",
            file=sys.stderr,
        )
    return 0


def _say_tail(stats: Stats) -> None:
    """How much of attention was estimated, where that is known."""
    if stats.tail_share is None or stats.tail_share_most is None:
        return
    most = stats.tail_share_most
    print(
        f"{100 * stats.tail_share:.1f} % of attention was estimated from clusters of keys, most in layer {most.layer}, "
        f"head {most.head}: {100 * most.share:.1f} %",
        file=sys.stderr,
    )


def _text(file: str) -> str:
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    name = "the standard input" if file == "-" else file
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputDataError(
            f"{name} must be text in UTF-8, got byte {data[error.start]:#04x} at {error.start}; convert it, or extract "
            "its text."
        ) from error
    if not text.strip():
        raise InputDataError(f"{name} must have some text, got {len(data)} bytes of nothing to read.")
    return text


def _retrieve(text: str) -> Retrieve | Any:
    """A number, a share, "all" or "auto"; anything else is left to Config, which refuses it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _needed(model: str, most: int) -> int:
    """Tokens to plan memory for: no text has more of them than bytes, and no model more than its positions."""
    from transformers import AutoConfig

    from retrieval_attn.model.loading import load

    config = load(AutoConfig, model).get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    template = 1024
    return most + template if positions is None else min(most + template, positions)
