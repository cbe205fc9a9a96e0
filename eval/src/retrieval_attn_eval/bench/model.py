"""The model of a benchmark under its memory cap: its flags, its contexts, and what a report says about it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from retrieval_attn.errors import ConfigError, ContextLengthError, InputDataError, MemoryPlanError
from retrieval_attn_eval.flags import as_tokens, check_at_least, check_matplotlib, parse_lengths

if TYPE_CHECKING:
    from retrieval_attn_eval.bench.source import Source

__all__ = ["Bench", "about", "add_model_arguments", "check_arguments", "lengths_of", "with_room"]

HEAD_BYTES = 2560
"""Memory that making one synthetic head takes, per token."""


def add_model_arguments(parser: argparse.ArgumentParser, lengths: str) -> None:
    """Flags that every benchmark of a whole model takes."""
    add = parser.add_argument
    add("--model", default="bundled", help="bundled, a folder or a hub id (default: %(default)s)")
    add(
        "--shape",
        metavar="NAME",
        help="random weights instead: llama-3-8b, llama-2-7b, llama3-8b-slice (two layers) or tiny",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of weights and keys")
    add(
        "--lengths",
        default=lengths,
        metavar="N,N",
        help="tokens of context; k and m count 1024s (default: %(default)s)",
    )
    add("--gpu-memory", metavar="SIZE", help="hard cap for the process, such as 24GiB; what needs more does not run")
    add("--sink", type=as_tokens, default=128, metavar="N", help="first tokens always attended (default: %(default)s)")
    add("--window", type=as_tokens, default=512, metavar="N", help="last tokens always attended (default: %(default)s)")
    add("--retrieve", default="100", metavar="K", help="keys retrieved: a number or all (default: %(default)s)")
    add(
        "--tail",
        default="auto",
        choices=["auto", "off"],
        help="estimate what is not retrieved, or leave it out as the paper does (default: %(default)s)",
    )
    add("--train", type=int, default=2048, metavar="N", help="training queries per query head (default: %(default)s)")
    add("--chunk", type=as_tokens, default=8192, metavar="N", help="tokens of a prefill chunk (default: %(default)s)")
    add("--host-dtype", default="auto", help="storage of host keys; auto: the model's (default: %(default)s)")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads; 0: all cores (default: %(default)s)")
    add("--batch", type=int, default=1, metavar="N", help="sequences, each with its own context (default: %(default)s)")
    add("--seed", type=int, default=0, help="of texts, keys and random weights (default: %(default)s)")
    add("--no-plot", action="store_true", help="write no PNG files")
    add("--output-dir", default="auto", metavar="DIR", help="new folder for the results (default: results/bench/TIME)")


def check_arguments(args: argparse.Namespace) -> None:
    """Numbers that every benchmark of a whole model takes. Raises ConfigError."""
    check_at_least(1, args, "tokens", "batch", "chunk", "train", "distinct_layers")
    if args.threads < 0:
        raise ConfigError(f"--threads must be 0 (all cores) or more, got {args.threads}")
    if not args.no_plot:
        check_matplotlib()


class Bench:
    """A model under its memory cap, and contexts for it."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load or make the model. Raises RetrievalAttentionError for what cannot be had."""
        import torch

        import retrieval_attn as ra
        from retrieval_attn.memory.units import parse_bytes
        from retrieval_attn.model.loading import choose_device
        from retrieval_attn.testing import cap, device_memory, start_peak
        from retrieval_attn_eval.flags import parse_retrieve

        self.args = args
        self.checked: dict[str, float] = {}  # logit error of the methods that were found right, by label
        self.noise: float | None = None  # what rounding does to the logits, once it was measured
        self._short: Source | None = None
        self.device = choose_device(args.device)
        self.limit = None if args.gpu_memory is None else parse_bytes(args.gpu_memory, "gpu_memory")
        if self.limit is not None and self.device.type != "cuda":
            raise MemoryPlanError(f"--gpu-memory {args.gpu_memory} was given, but the model would run on {self.device}")
        if self.device.type == "cuda":
            cap(self.device, self.limit)
        self.threads = args.threads or torch.get_num_threads()
        if args.threads:
            torch.set_num_threads(args.threads)
        graph: Any = getattr(args, "graph", "auto")
        graph = False if graph == "off" else graph
        self.config = ra.Config(
            sink=args.sink,
            window=args.window,
            retrieve=parse_retrieve(args.retrieve),
            tail=False if args.tail == "off" else "auto",
            prefill_chunk=args.chunk,
            host_dtype=args.host_dtype,
            threads=args.threads or None,
            graph=graph,
        )
        self.name = f"random:{args.shape}" if args.shape else args.model
        start_peak(self.device)
        self.model, self.tokenizer = self._load()
        self.weight_bytes = sum(weight.nbytes for weight in self.model.parameters())
        self.context_bytes = device_memory(self.device).context if self.device.type == "cuda" else 0

    def _load(self) -> tuple[Any, Any]:
        import torch

        args = self.args
        if args.shape:
            from retrieval_attn_eval.bench.random_model import random_model

            auto = torch.float32 if self.device.type == "cpu" else torch.bfloat16
            dtype = auto if args.dtype == "auto" else getattr(torch, args.dtype)
            try:
                return random_model(args.shape, dtype, args.seed, self.device).to(self.device), None
            except torch.OutOfMemoryError as error:
                raise MemoryPlanError(
                    f"--shape {args.shape} does not fit --gpu-memory {args.gpu_memory}: {error}"
                ) from error
        from transformers import AutoTokenizer

        from retrieval_attn_eval.models import load_model, model_path

        name = model_path(args.model)
        return load_model(name, str(self.device), args.dtype), AutoTokenizer.from_pretrained(name)

    def ids(self, tokens: int) -> Any:
        """(batch, tokens) ids on the device: prose, or random ids for random weights; another text in each row."""
        import torch

        rows = []
        for row in range(self.args.batch):
            if self.tokenizer is None:
                generator = torch.Generator().manual_seed(self.args.seed + row)
                rows.append(torch.randint(self.model.config.vocab_size, (tokens,), generator=generator))
                continue
            from retrieval_attn_eval.text.haystack import shipped_prose

            text = shipped_prose(tokens * 8, self.args.seed + row)
            rows.append(torch.tensor(self.tokenizer(text)["input_ids"][:tokens]))
            if len(rows[-1]) < tokens:
                raise InputDataError(f"the prose gave {len(rows[-1])} tokens, {tokens} were needed; use --keys mid")
        return torch.stack(rows).to(self.device)

    @property
    def keys(self) -> str:
        """read, mid or hard."""
        wanted: str = self.args.keys
        return wanted if wanted != "auto" else ("mid" if self.args.shape else "read")

    def short_source(self) -> Source:
        """The context that answers are checked on: little more than sinks and window."""
        if self._short is None:
            self._short = self.source(self.config.sink + self.config.window + 384)
        return self._short

    def source(self, tokens: int) -> Source:
        """A context of `tokens` tokens."""
        from retrieval_attn.memory.units import host_memory_bytes
        from retrieval_attn_eval.bench.keys import ReadSource, SyntheticSource

        if self.keys == "read":
            return ReadSource(self.model, self.ids(tokens), self.args.chunk)
        return SyntheticSource(
            self.model,
            tokens,
            self.args.batch,
            distinct=self.args.distinct_layers or 1 << 30,
            train=self.args.train,
            level=self.keys,
            seed=self.args.seed,
            threads=max(1, min(self.threads, host_memory_bytes() // 4 // (HEAD_BYTES * tokens))),
        )


def lengths_of(text: str) -> list[int]:
    """Token counts of a comma list, ascending.  Raises ConfigError."""
    return sorted(parse_lengths(text))


def with_room(lengths: list[int], limit: int, tokens: int) -> list[int]:
    """The lengths, those at the very end of a model's `limit` positions shortened by what decoding takes.

    tokens: steps that are timed; checks decode some more.  Raises ContextLengthError, before anything is measured.
    """
    most = limit - min(4 * (tokens + 16), limit // 8)
    long = [length for length in lengths if length > limit]
    if long:
        raise ContextLengthError(
            f"--lengths {','.join(map(str, long))}: needed as many positions, the model has {limit};"
            " give shorter lengths or another model"
        )
    return sorted({min(length, most) for length in lengths})


def about(bench: Bench) -> dict[str, Any]:
    """What every report of a whole model says about its run."""
    import torch

    on_gpu = bench.device.type == "cuda"
    return {
        "model": bench.name,
        "dtype": str(bench.model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(bench.device) if on_gpu else "cpu",
        "threads": bench.threads,
        "config": bench.config.to_dict(),
        "weight_bytes": bench.weight_bytes,
        "context_bytes": bench.context_bytes,
        "gpu_memory": bench.limit,
        "batch": bench.args.batch,
        "seed": bench.args.seed,
        "noise": bench.noise,
    }
