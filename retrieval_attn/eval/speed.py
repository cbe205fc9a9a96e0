"""`retrieval-attn speed decode`: milliseconds per token and bytes touched, retrieval beside full attention.

Writes a table in Markdown and a JSON file into a new folder, prints the table, and ends with one line of
JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.errors import ConfigError, RetrievalAttentionError, RunFolderError

if TYPE_CHECKING:
    from retrieval_attn.eval.speed_decode import Row, Spread

__all__ = ["add_arguments", "main", "run", "retrieve_count"]

LENGTHS = "4096,8192,16384,32768,65536"
MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn speed`."""
    add = parser.add_argument
    add("what", choices=["decode"], help="what to measure")
    add(
        "--model",
        default="bundled",
        help="bundled, a folder, a hub id, or random:llama3-8b-slice (default: %(default)s)",
    )
    add("--device", default="cpu", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="weights and cache; auto: float32 on the CPU, as stored elsewhere (default: %(default)s)",
    )
    add("--lengths", default=LENGTHS, metavar="N,N", help="tokens of context (default: %(default)s)")
    add(
        "--read",
        type=int,
        default=4096,
        metavar="N",
        help="tokens to read for real; longer contexts repeat their keys (default: %(default)s)",
    )
    add("--tokens", type=int, default=16, metavar="N", help="decode steps per turn (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="turns per method (default: %(default)s)")
    add(
        "--retrieve",
        default="100",
        metavar="K",
        help="a number, a share such as 0.01, or all (default: %(default)s)",
    )
    add(
        "--sink",
        type=int,
        default=128,
        metavar="N",
        help="first tokens always attended (default: %(default)s)",
    )
    add(
        "--window",
        type=int,
        default=512,
        metavar="N",
        help="last tokens always attended (default: %(default)s)",
    )
    add("--index", default="flat", metavar="NAME", help="index over the keys (default: %(default)s)")
    add("--host-dtype", default="auto", help="storage of host keys; auto: the model's (default: %(default)s)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads; 0: all cores (default: %(default)s)")
    add("--seed", type=int, default=0, help="of prompt, fed tokens and random weights (default: %(default)s)")
    add(
        "--output-dir",
        default="auto",
        metavar="DIR",
        help="new folder for the results; auto: results/speed/TIME (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 if the answers disagree (nothing is timed or written then).

    Raises RetrievalAttentionError on bad input, before a model is loaded where that can be known.
    """
    lengths = _lengths(args.lengths)
    for name in ("read", "tokens", "rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}.")
    if args.threads < 0:
        raise ConfigError(f"--threads must be 0 (all cores) or more, got {args.threads}.")
    if args.index not in ("auto", "flat") and max(lengths) > args.read:
        raise ConfigError(
            f"--index {args.index} depends on the keys it holds, and contexts beyond --read {args.read} "
            "repeat them; "
            f"give --read {max(lengths)}."
        )
    folder = _new_folder(args.output_dir)
    from retrieval_attn.eval.runs import environment, write_atomically
    from retrieval_attn.eval.speed_decode import Disagreement

    found = environment()
    try:
        rows, about = _measure(args, lengths)
    except Disagreement as error:
        print(f"retrieval-attn speed: {error}", file=sys.stderr)
        return 1
    report = {"what": "decode", **about, **found, "rows": [asdict(row) for row in rows]}
    text = markdown(rows, report)
    folder.mkdir(parents=True)
    write_atomically(folder / "speed.json", json.dumps(report, indent=2) + "\n")
    write_atomically(folder / "speed.md", text)
    print(text)
    print(f"written to {folder}")
    print(json.dumps(report))
    return 0


def markdown(rows: Sequence[Row], report: dict[str, Any]) -> str:
    """Header lines and table as docs/numbers.md wants them."""
    machine, versions = report["machine"], report["versions"]
    shown = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "numba"))
    lines = [
        f"- command: `{' '.join(report['command'])}`",
        f"- machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"{report['threads']} threads, "
        f"device {report['device']}",
        f"- versions: {shown}",
        f"- commit: {report['commit']}",
        f"- model: {report['model']}, {report['dtype']}, weights {report['weight_bytes'] / MIB:,.0f} MiB; "
        f"{report['read']:,} tokens read, longer contexts repeat their keys",
        f"- per length {report['rounds']} turns of {report['tokens']} tokens per method, alternating; full "
        "attention is "
        "transformers' SDPA with DynamicCache, which copies its keys and values for every token",
        "",
        "| context | full, ms/token | retrieval, ms/token | full / retrieval | sinks + window only, ms | "
        "full KV, MiB/token "
        "| retrieval, MiB/token | host read, GB/s | same token |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        touched = (row.host_bytes + row.device_bytes) / MIB
        cells = (
            f"{row.context:,}",
            _shown(row.full),
            _shown(row.retrieval),
            f"{row.full.median / row.retrieval.median:.2f}",
            _shown(row.static),
            f"{row.full_bytes / MIB:,.2f}",
            f"{touched:,.2f}",
            f"{row.host_gb_per_second:.1f}",
            "-" if row.same_token is None else f"{row.same_token:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    worst = max(row.logit_error for row in rows)
    lines += [
        "",
        "Times: median (10th to 90th percentile). Bytes: keys and values read for attention, weights not "
        'counted. Checked before timing: logits with retrieve="all" equal those of full attention, largest '
        f"relative difference {worst:.1e}.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m retrieval_attn.eval.speed`: the same command without the others. 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m retrieval_attn.eval.speed", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except RetrievalAttentionError as error:
        print(f"retrieval-attn speed: {error}", file=sys.stderr)
        return 2


def _measure(args: argparse.Namespace, lengths: list[int]) -> tuple[list[Row], dict[str, Any]]:
    import torch
    from tqdm import tqdm

    import retrieval_attn as ra
    from retrieval_attn.eval.speed_decode import measure, read_prompt
    from retrieval_attn.model.loading import choose_device

    threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    config = ra.Config(
        sink=args.sink,
        window=args.window,
        retrieve=retrieve_count(args.retrieve),
        index=args.index,
        host_dtype=args.host_dtype,
        threads=args.threads or None,
        # The tail may not overflow inside a turn, or one token would pay for a block of them.
        spill=max(args.tokens + 1, 128),
    )
    device = str(choose_device(args.device))
    model, tokenizer = _load(args, device)
    read = min(args.read, max(lengths))
    prompt = _prompt(args, tokenizer, model, read + args.tokens + 1)
    source, ids = read_prompt(model, prompt[:, :read], config), prompt[0, read:]
    rows = []
    for length in tqdm(lengths, desc="decode", unit="length", file=sys.stderr):
        row = measure(model, source, length, config, ids=ids, rounds=args.rounds)
        rows.append(row)
    about = {
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device if device == "cpu" else torch.cuda.get_device_name(device),
        "threads": threads,
        "config": config.to_dict(),
        "weight_bytes": sum(weight.nbytes for weight in model.parameters()),
        "read": read,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "seed": args.seed,
    }
    return rows, about


def _load(args: argparse.Namespace, device: str) -> tuple[Any, Any]:
    """The model and its tokenizer; a random model has none."""
    if args.model.startswith("random:"):
        import torch

        from retrieval_attn.eval.speed_decode import random_model

        dtype = {"auto": torch.float32 if device == "cpu" else torch.bfloat16}.get(args.dtype)
        name = args.model.removeprefix("random:")
        return random_model(name, dtype or getattr(torch, args.dtype), args.seed).to(device), None
    from transformers import AutoTokenizer

    from retrieval_attn.eval.methods import load_model
    from retrieval_attn.eval.needle.options import BUNDLED_MODEL

    name = str(BUNDLED_MODEL) if args.model == "bundled" else args.model
    model = load_model(name, device, args.dtype)
    return model, AutoTokenizer.from_pretrained(name)


def _prompt(args: argparse.Namespace, tokenizer: Any, model: Any, tokens: int) -> Any:
    """(1, tokens) ids: prose for a model with a tokenizer, random ids for a random model."""
    import torch

    if tokenizer is None:
        generator = torch.Generator().manual_seed(args.seed)
        return torch.randint(model.config.vocab_size, (1, tokens), generator=generator).to(model.device)
    from retrieval_attn.eval.text.haystack import shipped_prose

    ids = tokenizer(shipped_prose(tokens * 8, args.seed))["input_ids"][:tokens]
    assert len(ids) == tokens, f"the prose gave {len(ids)} tokens, {tokens} were needed"
    return torch.tensor([ids], device=model.device)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(item) for item in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise ConfigError(f'--lengths must be whole numbers of tokens such as "4096,65536", got {text!r}.')
    return lengths


def retrieve_count(text: str) -> Any:
    """A retrieve as it is written on the command line. Raises ConfigError."""
    if text == "all":
        return "all"
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise ConfigError(f'--retrieve must be a number, a share or "all", got {text!r}.') from None


def _new_folder(name: str) -> Path:
    """A folder that does not exist yet: results are never overwritten. Raises RunFolderError."""
    from retrieval_attn.eval.runs import utc_now

    folder = Path("results/speed", utc_now().replace(":", "")) if name == "auto" else Path(name)
    if folder.exists():
        raise RunFolderError(f"{folder} exists; results are never overwritten: choose a new --output-dir.")
    return folder


def _shown(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
