"""`retrieval-attn warm`: compile, once per machine, what the first text and the first answer would wait for."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.config import HOST_DTYPES, Config
from retrieval_attn.memory.units import parse_tokens
from retrieval_attn.model.bundled import BUNDLED

if TYPE_CHECKING:
    from retrieval_attn.compile.jobs import CompileJob

HEAD_DIMS = (64, 128)
"""Dimensions of heads that are compiled on a GPU without `--model`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the subcommand."""
    usual = Config()
    parser.add_argument(
        "--model",
        metavar="PATH|ID",
        help="a model whose shapes and dtype are to be served; without one, float32 on a CPU, bfloat16 on a GPU",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of the model: auto, float32, bfloat16 or float16 (auto)")
    parser.add_argument(
        "--host-dtype",
        nargs="+",
        choices=HOST_DTYPES,
        default=[usual.host_dtype],
        help="of keys and values on the host; auto: the model's (default: auto)",
    )
    parser.add_argument(
        "--index", default=usual.index, metavar="NAME", help="auto: all that it may take (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        default="32k",
        metavar="N",
        help="on a GPU: length of the random text that is read, by --model or by one layer (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Compile, and say what was compiled and where it lies. 0: all of it; 1: something failed."""
    from retrieval_attn.compile import cache_dir as place
    from retrieval_attn.compile.jobs import Compilation, missing

    began = time.perf_counter()
    done = _record(args)
    known = _jobs_of(done)
    if known is not None and not missing(known):
        print(f"nothing to do: {len(known)} kernels, with all that they call, lie in {place.folder()}")
        return 0
    formats, on_gpu, read = _wanted(args)
    jobs = _jobs(args.index, formats, on_gpu)
    with Compilation(jobs) as compilation:
        pass
    for job in compilation.jobs:
        reason = compilation.failed.get(job)
        print(f"compiled {job}" if reason is None else f"failed {job}: {reason}")
    if len(jobs) > len(compilation.jobs):
        print(f"{len(jobs) - len(compilation.jobs)} others were compiled before")
    for what, rehearse in read:
        rehearse()
        print(f"captured {what}")
    left = missing(jobs)
    if not left:
        place.require_writable(done.parent)
        done.write_text(json.dumps(jobs), encoding="utf-8")
    print(f"{time.perf_counter() - began:.1f} s; for Numba in {place.numba_folder()}")
    if on_gpu:
        print(f"for Triton in {place.triton_folder()}")
    return 1 if left else 0


def _record(args: argparse.Namespace) -> Path:
    """The file that says what a run with these arguments compiled, for these sources, versions and processor."""
    from retrieval_attn.compile import cache_dir as place

    given = {name: value for name, value in vars(args).items() if name != "command"}
    key = json.dumps([given, place.source_key(__name__), str(place.triton_folder())], sort_keys=True)
    return place.numba_folder() / "warm" / hashlib.sha256(key.encode()).hexdigest()[:24]


def _jobs_of(record: Path) -> list[CompileJob] | None:
    from retrieval_attn.compile.jobs import CompileJob

    try:
        return [
            CompileJob(target, tuple(arguments)) for target, arguments in json.loads(record.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError):
        return None


def _wanted(args: argparse.Namespace) -> tuple[list[str], bool, list[tuple[str, Callable[[], None]]]]:
    """Formats on the host, whether a GPU serves, and there the reads that compile for it, by what they are."""
    from retrieval_attn.model.loading import choose_device, choose_dtype
    from retrieval_attn.offload.staging import host_format

    device = choose_device(args.device)
    on_gpu = device.type == "cuda"
    if args.model is not None and on_gpu:
        from retrieval_attn.llm import LLM

        tokens = parse_tokens(args.tokens, "--tokens")
        llm = LLM(args.model, device=args.device, dtype=args.dtype, max_context=tokens + 1024)
        model_dtype = llm.model.dtype
        models: list[tuple[str, Any, Any]] = [(args.model, llm.model, llm.tokenizer)]
    else:
        model_dtype = _dtype_of(args.model, choose_dtype(args.dtype, device), device)
        models = [_one_layer(dim, model_dtype, device) for dim in HEAD_DIMS] if on_gpu else []
    formats = list(dict.fromkeys(host_format(name, model_dtype).value for name in args.host_dtype))
    reads: list[tuple[str, Callable[[], None]]] = [
        (f"{name} with {fmt} on the host", _WarmRead(model, tokenizer, args, fmt))
        for name, model, tokenizer in models
        for fmt in formats
    ]
    return formats, on_gpu, reads


class _WarmRead:
    """Reading a random text and answering, once; called."""

    def __init__(self, model: Any, tokenizer: Any, args: argparse.Namespace, fmt: str) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._config = Config(index=args.index, host_dtype=fmt)
        self._tokens = parse_tokens(args.tokens, "--tokens")

    def __call__(self) -> None:
        """Read, ask both ways."""
        import torch

        from retrieval_attn.context import Context

        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(3, vocabulary, (self._tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        context = Context(self._model, self._tokenizer, self._config).read(ids)
        context.ask("What is it?", max_new_tokens=4)
        context.ask("What is it?", max_new_tokens=4, question_attention="retrieval")


def _jobs(index: str, formats: list[str], on_gpu: bool) -> list[CompileJob]:
    from retrieval_attn.cpu.ahead import kernel_jobs
    from retrieval_attn.index.formats import Format
    from retrieval_attn.index.spec import IndexSpec

    names = [index, *(["device"] if on_gpu and index == "auto" else [])]
    jobs = [
        job
        for fmt in formats
        for name in names
        for job in kernel_jobs(Format.from_name(fmt), IndexSpec.of(name), serves_graphs=on_gpu)
    ]
    return list(dict.fromkeys(jobs))


def _dtype_of(model: str | None, chosen: Any, device: Any) -> Any:
    """The dtype that the model will have: the chosen one, or where that is "auto", the checkpoint's."""
    import torch

    if isinstance(chosen, torch.dtype):
        return chosen
    if model is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    from transformers import AutoConfig

    from retrieval_attn.model.loading import load

    configured = load(AutoConfig, model).get_text_config(decoder=True).dtype
    return configured if isinstance(configured, torch.dtype) else torch.float32


def _one_layer(head_dim: int, dtype: Any, device: Any) -> tuple[str, Any, Any]:
    """A model of one random layer with heads of this dimension, four of them to a key-value head."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=head_dim,
        max_position_embeddings=1 << 20,
    )
    model: Any = LlamaForCausalLM(config)
    model = model.to(device=device, dtype=dtype).eval()
    return f"one layer, head_dim {head_dim}", model, AutoTokenizer.from_pretrained(str(BUNDLED))
