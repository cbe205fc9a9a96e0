"""`retrieval-attn load make|convert|replay`: load for any server with OpenAI's API."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.errors import ConfigError
from retrieval_attn.memory.units import parse_tokens
from retrieval_attn_eval.flags import new_folder
from retrieval_attn_eval.replace import replace_file

HELP = "draw, convert and replay traces of requests to a server"

if TYPE_CHECKING:
    from retrieval_attn.testing import Endpoint
    from retrieval_attn_eval.load.line import Line
    from retrieval_attn_eval.load.replay import Replay
    from retrieval_attn_eval.load.sender import Asking
    from retrieval_attn_eval.load.sharegpt import Tokens
    from retrieval_attn_eval.load.words import Rate

INTERRUPTED = 130
REPLAYED = ("speed", "block", "scale", "body", "no_wait", "timeout", "seed")
"""Options of a replay that its results repeat."""
THINK_SECONDS = 60.0
"""Mean time from an answer to the next question of a session."""
TTFT_SECONDS, ITL_SECONDS = 2.0, 0.1
"""Bounds of a good answer: time to first token, and mean time between tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommands."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_make(actions)
    _add_convert(actions)
    _add_replay(actions)


def run(args: argparse.Namespace) -> int:
    """One action; `replay` returns 1 if a request was not answered."""
    return {"make": _make, "convert": _convert, "replay": _replay}[args.action](args)


def _add_make(actions: Any) -> None:
    text = (
        "draw a trace with CachedAttention's statistics to the standard output: 5.75 turns, 47 %% of sessions over 2K"
        " tokens, 30 %% over 4K"
    )
    add = actions.add_parser("make", help=text, description=text.replace("%%", "%")).add_argument
    add("--n", type=int, default=100, metavar="N", help="sessions (default: %(default)s)")
    add("--max-context", default="32k", metavar="N", help="tokens of the longest session (default: %(default)s)")
    _add_arrivals(add)


def _add_convert(actions: Any) -> None:
    text = "convert a published trace, BurstGPT's CSV or ShareGPT's JSON, to the standard output"
    add = actions.add_parser("convert", help=text, description=text).add_argument
    add("file", metavar="FILE", help="a .csv file of BurstGPT, or a .json file of ShareGPT")
    add("--n", type=int, metavar="N", help="maximum number of requests (default: all)")
    add(
        "--model",
        metavar="NAME",
        help='of BurstGPT: only requests to this model, "ChatGPT" or "GPT-4" (default: all); of ShareGPT: folder or hub'
        " name of the model whose tokenizer counts tokens (default: four bytes are one)",
    )
    _add_arrivals(add, "of ShareGPT: ")


def _add_arrivals(add: Any, of: str = "") -> None:
    add("--rate", type=float, default=1.0, metavar="N", help=f"{of}sessions a second, Poisson (default: %(default)s)")
    add("--seed", type=int, default=0, help=f"{of}for what is drawn (default: %(default)s)")


def _add_replay(actions: Any) -> None:
    text = "send a trace's requests to a server when they are due, and measure the answers"
    add = actions.add_parser("replay", help=text, description=text).add_argument
    add("file", metavar="FILE", help="a trace in Mooncake's format, one JSON object a line")
    add("--url", required=True, help="of the server, such as http://127.0.0.1:8000; its key is $OPENAI_API_KEY")
    add("--model", metavar="NAME", help="as the server names it (default: the first that it lists)")
    add("--n", type=int, metavar="N", help="the first N requests of the trace (default: all)")
    add("--speed", type=float, default=1.0, metavar="X", help="how much faster than written (default: %(default)s)")
    add("--block", default="512", metavar="N", help="tokens of a block: prompts shrink with it (default: %(default)s)")
    add("--scale", type=float, default=1.0, metavar="X", help="of answers' lengths (default: %(default)s)")
    add("--body", default="{}", metavar="JSON", help="joins every request, such as '{\"ignore_eos\": true}'")
    add("--no-wait", action="store_true", help="send every turn at its timestamp, answered before it or not")
    add("--timeout", type=float, default=600.0, metavar="S", help="of one request (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts' texts: another one finds nothing cached (%(default)s)")
    add("--output-dir", default="auto", metavar="DIR", help="new folder for replay.json (default: results/load/TIME)")


def _make(args: argparse.Namespace) -> int:
    from retrieval_attn_eval.load.made import make_trace
    from retrieval_attn_eval.load.sessions import Statistics

    _check_numbers(args, {"n": 1})
    found = Statistics(most_tokens=parse_tokens(args.max_context, "--max-context"))
    return _write(make_trace(args.n, _arrivals(args), found, args.seed))


def _convert(args: argparse.Namespace) -> int:
    from retrieval_attn_eval.load.burstgpt import read_burstgpt
    from retrieval_attn_eval.load.sharegpt import read_sharegpt

    _check_numbers(args, {"n": 1})
    path = Path(args.file)
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".json"):
        raise ConfigError(f"{path}: needed a .csv file of BurstGPT or a .json file of ShareGPT; rename it")
    if suffix == ".csv":
        lines = list(read_burstgpt(path, args.n, args.model))
    else:
        lines = list(read_sharegpt(path, _tokens(args.model), _arrivals(args), args.seed, args.n))
    return _write(sorted(lines, key=lambda line: line.seconds))


def _arrivals(args: argparse.Namespace) -> Any:
    from retrieval_attn_eval.load.made import Arrivals

    _check_numbers(args, {"rate": None})
    return Arrivals(rate=args.rate, think_seconds=THINK_SECONDS)


def _tokens(tokenizer: str | None) -> Tokens:
    from retrieval_attn_eval.load.sharegpt import counted_bytes

    if tokenizer is None:
        return counted_bytes
    from transformers import AutoTokenizer

    from retrieval_attn.model.loading import load

    loaded = load(AutoTokenizer, tokenizer)
    return lambda text: loaded(text, add_special_tokens=False)["input_ids"]


def _write(lines: Sequence[Line]) -> int:
    from retrieval_attn_eval.load.line import written

    for text in written(lines):
        print(text)
    sessions = len({line.session for line in lines if line.session is not None})
    last = lines[-1].seconds - lines[0].seconds if lines else 0.0
    print(
        f"{len(lines):,} requests of {sessions:,} sessions in {last:,.0f} s, "
        f"{sum(line.prompt_tokens for line in lines):,} tokens of prompts, "
        f"{sum(line.answer_tokens for line in lines):,} of answers",
        file=sys.stderr,
    )
    return 0


def _replay(args: argparse.Namespace) -> int:
    import asyncio

    from retrieval_attn.testing import Endpoint, model_names
    from retrieval_attn_eval.load.line import read_trace
    from retrieval_attn_eval.load.replay import Replay
    from retrieval_attn_eval.load.sender import Asking

    _check_numbers(args, {"n": 1, "speed": None, "scale": None, "timeout": None})
    folder = new_folder(args.output_dir, "load")
    body, endpoint = _body(args.body), Endpoint.of(args.url)
    lines = read_trace(Path(args.file), args.n, parse_tokens(args.block, "--block"))
    asking = Asking(args.model or model_names(endpoint, args.timeout)[0], args.scale, body)
    replay = Replay(lines, speed=args.speed, waits=not args.no_wait)
    started, interrupted = time.strftime("%Y%m%d-%H%M%S"), False
    try:
        rate = asyncio.run(_replayed(args, endpoint, asking, replay))
    except KeyboardInterrupt:
        if not replay.replies:
            raise
        rate, interrupted = None, True
    about = {"what": "replay", "started": started, "trace": args.file, "url": endpoint.base, "model": asking.model}
    options = {name: getattr(args, name) for name in REPLAYED} | {
        "words_per_token": None if rate is None else rate.words
    }
    report = _report(replay, about | options | {"interrupted": interrupted, "of": len(lines)})
    file = _save(report, folder)
    print(f"written to {file}", file=sys.stderr)
    return INTERRUPTED if interrupted else int(bool(report["errors"]))


async def _replayed(args: argparse.Namespace, endpoint: Endpoint, asking: Asking, replay: Replay) -> Rate:
    """By which prompts were made."""
    from retrieval_attn_eval.load.sender import Sender
    from retrieval_attn_eval.load.words import Words

    async with Sender(endpoint, asking, args.timeout) as sender:
        rate = await sender.rate()
        await replay.run(sender, Words(args.seed, rate))
    return rate


def _body(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--body {text!r} must be JSON, {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"--body {text!r} must be a JSON object, whose members join every request")
    return body


def _report(replay: Replay, about: dict[str, Any]) -> dict[str, Any]:
    """Prints the table; returns all of it with every reply."""
    from retrieval_attn_eval.load.reply import Bounds
    from retrieval_attn_eval.load.report import summary, table

    found = summary(replay.replies, Bounds(TTFT_SECONDS, ITL_SECONDS))
    print(table(found))
    return {**about, **found, "replies": [one.to_dict() for one in sorted(replay.replies, key=lambda one: one.due)]}


def _save(report: dict[str, Any], folder: Path) -> Path:
    path = folder / "replay.json"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda out: out.write(json.dumps(report, indent=1).encode()))
    return path


def _check_numbers(args: argparse.Namespace, least: Mapping[str, int | None]) -> None:
    """Raise ConfigError unless each number of `args` is finite and at least its bound; a bound of None: above 0."""
    for name, bound in least.items():
        value = getattr(args, name)
        if value is None:
            continue
        if not math.isfinite(value) or (value <= 0 if bound is None else value < bound):
            needed = "more than 0" if bound is None else f"at least {bound}"
            raise ConfigError(f"--{name.replace('_', '-')} must be {needed}, got {value}; give another number")
