"""What scripts of measures have in common: flags, a model with random weights, percentiles, the result file."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import retrieval_attn as ra
from retrieval_attn.cli.model_args import index_fields
from retrieval_attn.memory.units import GIB, parse_bytes
from retrieval_attn_eval.bench.serve.drive import Served
from retrieval_attn_eval.bench.session.card import watch
from retrieval_attn_eval.bench.session.flags import add_model_flags, add_running_flags
from retrieval_attn_eval.bench.session.subject import Settings, Subject
from retrieval_attn_eval.flags import as_tokens, parse_retrieve
from tests.emulation.emulated import emulated
from tools.card.near import add_read_window
from tools.card.runs import card_names

__all__ = ["add_card_flags", "answered", "in_ms", "llm_of", "parser_of", "recorded", "request_of", "save_found"]

ANSWERS = 3
QUESTION = 16


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Flags of the model, and --out."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser.add_argument)
    add_running_flags(parser.add_argument)
    parser.add_argument("--random-ids", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    return parser


def add_card_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of scripts that make a model of a shape on one card."""
    parser.add_argument("--layers", type=int, metavar="N", help="only the first ones (default: all of them)")
    parser.add_argument("--tokens", type=as_tokens, default=64, help="of an answer (default: %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpu-memory", default="24GiB", metavar="SIZE", help="hard cap (default: %(default)s)")
    parser.add_argument("--prefill-chunk", type=as_tokens, default=8192, help="see Config (default: %(default)s)")
    add_read_window(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--emulate", action="store_true", help="graphs that are emulated, without a GPU")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")


@contextmanager
def recorded(args: argparse.Namespace, found: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[None]:
    """Sample the card's memory in this context; write found.json with `rows` at its end, after an error too."""
    sampler = watch(next(iter(card_names("uuid")), None))
    try:
        with emulated() if args.emulate else nullcontext():
            yield
        found["card_gib"] = None if sampler is None else sampler.peak() / GIB
    finally:
        if sampler is not None:
            sampler.close()
        save_found(args, None, {**found, "rows": rows})


def llm_of(args: argparse.Namespace) -> tuple[Served, Subject]:
    """A model, as the flags of `parser_of` say, and its texts."""
    config = ra.Config(
        host_dtype=args.host_dtype, retrieve=parse_retrieve(args.retrieve), threads=args.threads or None,
        **index_fields(args.index),
    )  # fmt: skip
    gpu_memory = None if args.gpu_memory is None else parse_bytes(args.gpu_memory, "gpu_memory")
    settings = Settings(
        model=args.model, shape=args.shape, layers=args.layers, device=args.device, dtype=args.dtype,
        length=args.length, gpu_memory=gpu_memory, options=config.to_dict(), questions=(), extensions=(), repeats=1,
        tokens=args.tokens, random_ids=args.random_ids, seed=args.seed, skip=(), no_second="",
    )  # fmt: skip
    subject = Subject(settings)
    gc.freeze()  # as a server does: a collection that visits modules and model takes .3 s
    return Served(subject.model, subject.tokenizer, config), subject


def request_of(ids: Sequence[int], tokens: int, draw: ra.SamplingParams | None = None, last: int = 0) -> ra.Request:
    """A prompt of its own, and an answer of so many tokens. last: of the prompt, a part for itself: others may continue
    what is before.
    """
    cut = len(ids) - last
    return ra.Request(
        tuple(tuple(part) for part in (ids[:cut], ids[cut:]) if len(part)),
        max_tokens=tokens,
        draw=draw or ra.SamplingParams(),
        stop_ids=frozenset(),
    )


def answered(context: ra.Context, ids: list[int], tokens: int) -> dict[str, Any]:
    """Milliseconds of the last of some answers, and of the whole of the first one."""
    found: dict[str, Any] = {}
    for _ in range(ANSWERS):
        times = [time.perf_counter()]
        for _ in context.stream_with(
            ids[:QUESTION], ra.Sampling(max_new_tokens=tokens), question_attention="retrieval"
        ):
            times.append(time.perf_counter())
        found.setdefault("first_answer_ms", 1000 * (times[-1] - times[0]))
        found["first_ms"] = 1000 * (times[1] - times[0])
        found["token_ms"] = 1000 * (times[-1] - times[1]) / max(len(times) - 2, 1)
        found["gap_ms"] = in_ms([later - sooner for sooner, later in zip(times[1:], times[2:], strict=False)])
    return found


def in_ms(seconds: Sequence[float]) -> dict[str, float]:
    """count, p50, p90, p99 and max, in milliseconds; of nothing only its count."""
    if not len(seconds):
        return {"count": 0}
    p50, p90, p99 = (float(one) for one in np.percentile(seconds, [50, 90, 99]) * 1000)
    return {"count": len(seconds), "p50": p50, "p90": p90, "p99": p99, "max": max(seconds) * 1000}


def save_found(args: argparse.Namespace, subject: Subject | None, found: dict[str, Any]) -> None:
    """Write found.json."""
    said = {} if subject is None else {"facts": subject.about(), "simplifications": subject.simplifications}
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**found, **said}, indent=1) + "\n"
    (args.out / "found.json").write_text(text, encoding="utf-8")
    print(text)
