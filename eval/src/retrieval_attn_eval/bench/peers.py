"""`retrieval-attn bench peers`: this package and an installed llama.cpp on the same GGUF file, in turn.

Each round runs `llama-bench`, then a process of `bench session` that uses the public API: reading, time per token at
that depth, peak memory. The table has the median of the rounds and the ratio, ours over llama.cpp's, and the peak
memory of a process that imports this package and does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from retrieval_attn.errors import ConfigError, InputDataError, RetrievalAttentionError
from retrieval_attn_eval.flags import as_tokens, check_at_least, new_folder, parse_lengths

__all__ = ["Measured", "add_arguments", "import_gib", "llama_bench", "ours", "run", "table"]

PROGRAM = "llama-bench"
MISSING = (
    "{given} was not found. Build llama.cpp (cmake -B build && cmake --build build --target llama-bench), then give "
    "the file: --llama-bench build/bin/llama-bench"
)


class PeerError(RetrievalAttentionError):
    """A measured program failed; the message has its last line."""


@dataclass(frozen=True)
class Measured:
    """One run at one length. read_seconds: to prefill it. token_ms: per token that follows. host_gib: peak resident."""

    read_seconds: float
    token_ms: float
    host_gib: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `retrieval-attn bench peers`."""
    add = parser.add_argument
    add("--model", required=True, metavar="FILE", help="a GGUF file, which both programs load")
    add("--llama-bench", default=PROGRAM, metavar="FILE", help="llama.cpp's program (default: %(default)s on the PATH)")
    add("--lengths", default="2k,8k", metavar="N,N", help="tokens of a context (default: %(default)s)")
    add("--tokens", type=as_tokens, default=32, metavar="N", help="tokens of a timed answer (default: %(default)s)")
    add("--n", type=int, default=2, metavar="N", help="rounds, each of both programs (default: %(default)s)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of both; 0: all cores (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--gpu-memory", metavar="SIZE", help="hard cap of this package, such as 24GiB (default: none)")
    add("--output-dir", default="auto", metavar="DIR", help="new folder for the results (default: results/bench/TIME)")


def run(args: argparse.Namespace) -> int:
    """Measure and report. Raises ConfigError, InputDataError, PeerError."""
    check_at_least(1, args, "tokens", "n")
    lengths = parse_lengths(args.lengths, "--lengths")
    program = shutil.which(args.llama_bench)
    if program is None:
        raise ConfigError(MISSING.format(given=args.llama_bench))
    if not Path(args.model).is_file():
        raise InputDataError(f"--model must be a GGUF file, which both programs load; there is no file {args.model}")
    folder = new_folder(args.output_dir, "bench")
    folder.mkdir(parents=True, exist_ok=True)
    from retrieval_attn.model.loading import choose_device
    from retrieval_attn_eval.runs import environment, write_atomically

    on_gpu = choose_device(args.device).type == "cuda"
    imports = import_gib()
    threads = args.threads or len(os.sched_getaffinity(0))
    found: dict[int, dict[str, list[Measured]]] = {length: {"llama.cpp": [], "ours": []} for length in lengths}
    for number in range(args.n):
        for length in lengths:
            for name, measure in (("llama.cpp", llama_bench), ("ours", ours)):
                began = time.perf_counter()
                one = measure(program, args, length, threads, on_gpu=on_gpu)
                found[length][name].append(one)
                print(
                    f"round {number + 1} of {args.n}, {length:,} tokens, {name}: read {one.read_seconds:.2f} s, "
                    f"{one.token_ms:.2f} ms per token ({time.perf_counter() - began:.0f} s)",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            rows = {str(at): {name: [asdict(one) for one in runs] for name, runs in both.items()}
                    for at, both in found.items()}  # fmt: skip
            settings = {**vars(args), "threads": threads, "on_gpu": on_gpu}
            about = environment() | {"settings": settings, "import_gib": imports, "rows": rows}
            write_atomically(folder / "peers.json", json.dumps(about, indent=1, default=str) + "\n")
    text = table(found, imports)
    write_atomically(folder / "peers.md", text + "\n")
    print(f"{text}\n\nwritten to {folder}")
    return 0


def llama_bench(program: str, args: argparse.Namespace, length: int, threads: int, *, on_gpu: bool) -> Measured:
    """Run llama-bench once: prefill of `length` tokens, then an answer at that depth. Raises PeerError."""
    command = [
        program, "-m", args.model, "-o", "json", "-r", "1", "-t", str(threads), "-fa", "on",
        "-ngl", "99" if on_gpu else "0",
    ]  # fmt: skip
    read, _ = _result([*command, "-p", str(length), "-n", "0"])
    token, peak = _result([*command, "-p", "0", "-n", str(args.tokens), "-d", str(length)])
    return Measured(read["avg_ns"] / 1e9, token["avg_ns"] / 1e6 / args.tokens, peak / 2**30)


def import_gib() -> float:
    """Return the peak resident memory of a process that imports `retrieval_attn`, in GiB. Raises PeerError."""
    said, wrong, code, peak = _ran([sys.executable, "-c", "from retrieval_attn import LLM"])
    if code:
        raise PeerError(f"importing retrieval_attn ended with status {code}: {_last_line(wrong, said)}")
    return peak / 2**30


def _result(command: Sequence[str]) -> tuple[dict[str, Any], int]:
    """The one row that llama-bench prints, and its peak resident memory in bytes."""
    said, wrong, code, peak = _ran(command)
    try:
        (row,) = json.loads(said)
        return {"avg_ns": float(row["avg_ns"])}, peak
    except (ValueError, KeyError, TypeError):
        raise PeerError(f"{command[0]} ended with status {code}: {_last_line(wrong, said)}") from None


def _last_line(*texts: str) -> str:
    """Return the last line of the first text that has any, at most 300 characters."""
    return next((text.strip() for text in texts if text.strip()), "no output").splitlines()[-1][:300]


def _ran(command: Sequence[str]) -> tuple[str, str, int, int]:
    """Run a program; return its output, its errors, its status and its peak resident memory in bytes."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(command, stdout=out, stderr=err)
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            child.kill()
            raise
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        said, wrong = out.read().decode("utf-8", "replace"), err.read().decode("utf-8", "replace")
    return said, wrong, child.returncode, usage.ru_maxrss * 1024


def ours(_program: str, args: argparse.Namespace, length: int, threads: int, *, on_gpu: bool) -> Measured:
    """Run `bench session` once: a context of `length` tokens and answers to a question. Raises PeerError."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "session"
        command = [
            sys.executable, "-m", "retrieval_attn.cli", "bench", "session", "--model", args.model, "--length",
            str(length), "--tokens", str(args.tokens), "--n", "1", "--threads", str(threads), "--device",
            "cuda" if on_gpu else "cpu", "--stages", "answer,memory", "--caches", "warm", "--no-plot", "--output-dir",
            str(results),
        ]  # fmt: skip
        command += [] if args.gpu_memory is None else ["--gpu-memory", args.gpu_memory]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not (results / "session.json").is_file():
            last = _last_line(done.stderr, done.stdout)
            raise PeerError(f"bench session ended with status {done.returncode}: {last}")
        (process,) = json.loads((results / "session.json").read_text(encoding="utf-8"))["processes"]
    rows = {row["key"]: row for row in process["rows"]}
    token = rows["answer/exact/ms_per_token"]
    return Measured(
        rows["read"]["first"], token["first"] if token["later"] is None else token["later"],
        rows["memory/host/all"]["first"],
    )  # fmt: skip


def table(found: Mapping[int, Mapping[str, Sequence[Measured]]], imports: float) -> str:
    """Return the medians of each program, with the ratio of ours over llama.cpp's, as Markdown.

    imports: peak memory of a process that only imports this package, in GiB.
    """
    lines = ["| context | measure | llama.cpp | ours | ratio |", "|---:|:---|---:|---:|---:|"]
    for length, both in found.items():
        for name, unit, digits in (("read_seconds", "read, s", 2), ("token_ms", "token, ms", 2),
                                   ("host_gib", "peak host memory, GiB", 2)):  # fmt: skip
            theirs, own = (median(getattr(one, name) for one in both[who]) for who in ("llama.cpp", "ours"))
            lines.append(f"| {length:,} | {unit} | {theirs:.{digits}f} | {own:.{digits}f} | {own / theirs:.2f} |")
        theirs, own = (median(one.host_gib for one in both[who]) for who in ("llama.cpp", "ours"))
        more = own - imports
        lines.append(f"| {length:,} | beyond bare imports, GiB | {theirs:.2f} | {more:.2f} | {more / theirs:.2f} |")
    rounds = len(next(iter(found.values()))["ours"])
    return "\n".join([
        *lines,
        "",
        f"Median of {rounds} rounds in turn on one GGUF file; ratio: ours over llama.cpp's, below 1 is better for "
        "us. llama.cpp: full attention over an f16 KV cache by llama-bench's own loop over random "
        "tokens. Ours: retrieval through the public API with default settings on prose; the second answer to a "
        "question, without its first token. "
        f"Bare imports of this package: {imports:.2f} GiB, of which llama.cpp has none.",
    ])  # fmt: skip
