"""`retrieval-attn record`: write a model's queries, keys and values over a text to a folder, for index studies."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn_eval.flags import as_tokens, check_at_least
from retrieval_attn_eval.recording.options import RecordOptions, TextSource

HELP = "write a model's queries, keys and values over a text to files"

if TYPE_CHECKING:
    from retrieval_attn_eval.recording.files import Recording

__all__ = ["add_arguments", "record_text", "run"]

STORED_BYTES = 2
"""Bytes of a stored bfloat16 number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn record`."""
    add = parser.add_argument
    add("--model", default="bundled", help="bundled, a folder or a hub id (default: %(default)s)")
    add("--device", default="cpu", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the model; auto: float32 on the CPU, as stored elsewhere (default: %(default)s)",
    )
    add("--tokens", type=as_tokens, default=32768, metavar="N", help="tokens of context (default: %(default)s)")
    add(
        "--haystack",
        metavar="PATH",
        help="text file or folder as context; its last 64 tokens are the question (default: a generated needle task)",
    )
    add("--layers", default="all", metavar="L,L", help="layers to keep (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the text and of the sample of queries (default: %(default)s)")
    add("--output-dir", required=True, metavar="DIR", help="new folder for the recording")
    add("--dry-run", action="store_true", help="say what would be written and how large it is, then stop")


def run(args: argparse.Namespace) -> int:
    """Record and write. Raises RetrievalAttentionError on bad input, before the model is loaded where possible."""
    check_at_least(1, args, "tokens")
    layers = numbers("--layers", args.layers)
    folder = Path(args.output_dir)
    if folder.exists() and any(folder.iterdir()):
        raise InputDataError(f"--output-dir {folder} must be empty or new; name another folder")
    if args.dry_run:
        print(_plan(args, layers))
        return 0
    started = time.perf_counter()
    recording = record_text(
        args.model,
        TextSource(args.tokens, text=args.haystack),
        RecordOptions(layers, seed=args.seed),
        device=args.device,
        dtype=args.dtype,
        progress=True,
    )
    recording.save(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(
        f"{len(recording.heads)} heads of {recording.meta['tokens']:,} + {recording.meta['after']} tokens, "
        f"{size / 2**20:,.0f} MiB in {folder}, {time.perf_counter() - started:.0f} s"
    )
    return 0


def record_text(
    model: str,
    source: TextSource,
    options: RecordOptions,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    progress: bool = False,
) -> Recording:
    """Load the model called `model` and record it over `source`.

    Decode queries come from the task's question and reference answer, fed after the context. Raises InputDataError,
    ConfigError or UnsupportedModelError.
    """
    from transformers import AutoTokenizer

    from retrieval_attn.model.loading import load
    from retrieval_attn_eval.models import load_model, model_digest, model_path
    from retrieval_attn_eval.recording.record import record

    name = model_path(model)
    tokenizer = load(AutoTokenizer, name)
    context, after = _ids(tokenizer, source, options.seed)
    recording = record(load_model(name, device, dtype), context, after, options, progress=progress)
    task = None if source.text else source.task
    about = {"model": model, "digest": model_digest(name), "task": task, "seed": options.seed, "dtype": dtype}
    return type(recording)(recording.heads, {**recording.meta, **about})


def _ids(tokenizer: Any, source: TextSource, seed: int) -> tuple[list[int], list[int]]:
    """Ids of a context of at most `source.tokens` tokens, and of what follows it."""
    tokens, task, text = source.tokens, source.task, source.text
    if text is not None:
        from retrieval_attn_eval.text.haystack import read_haystack

        ids = list(tokenizer(read_haystack(Path(text)), verbose=False)["input_ids"])[: tokens + 64]
        if len(ids) < 128:
            raise InputDataError(f"--haystack {text} must have at least 128 tokens, it has {len(ids)}")
        return ids[:-64], ids[-64:]
    from retrieval_attn_eval.tasks import TASKS, make_sample

    if task not in TASKS:
        raise ConfigError(f"task {task} is not known; use one of {', '.join(TASKS)}")
    try:
        sample = make_sample(task, tokens, seed, tokenizer)
    except ValueError as error:
        raise ConfigError(f"--tokens {tokens}: {error}") from error
    context = list(tokenizer(sample.context, verbose=False)["input_ids"])
    after = list(tokenizer(sample.question + sample.completion, add_special_tokens=False)["input_ids"])
    return context, after


def numbers(flag: str, text: str) -> list[int] | None:
    """ "all" -> None, "0,3" -> [0, 3]; raises ConfigError for anything else."""
    if text == "all":
        return None
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise ConfigError(f"{flag} must be all or whole numbers such as 0,3; got {text!r}")
    return found


def _plan(args: argparse.Namespace, layers: list[int] | None) -> str:
    from transformers import AutoConfig

    from retrieval_attn.model.loading import load
    from retrieval_attn.testing import heads_config
    from retrieval_attn_eval.models import model_path

    config = load(AutoConfig, model_path(args.model)).get_text_config(decoder=True)
    count = len(layers) if layers is not None else config.num_hidden_layers
    sizes = heads_config(config)
    per_layer = sizes.num_key_value_heads
    head_dim = getattr(sizes, "head_dim", None) or config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // per_layer
    vectors = 2 * args.tokens + 2 * group * min(RecordOptions.train, args.tokens)
    size = count * per_layer * vectors * head_dim * STORED_BYTES
    return (
        f"{args.model}, {args.tokens:,} tokens: {count} layers x {per_layer} key-value heads, "
        f"about {size / 2**20:,.0f} MiB into {args.output_dir}"
    )
