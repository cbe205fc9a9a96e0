"""Flags of the model and of the read, their checks, and the model that they name."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.cli.output import Spinner
from retrieval_attn.compile.gc_pause import no_gc
from retrieval_attn.config import HOST_DTYPES, QUANTIZATIONS, YARN_FLAG, Config, Retrieve, named_options
from retrieval_attn.errors import ConfigError, ContextLengthError, InputDataError
from retrieval_attn.memory.units import parse_bytes, parse_tokens
from retrieval_attn.model.bundled import NAME, model_path
from retrieval_attn.model.gguf.file import resolve

if TYPE_CHECKING:
    from retrieval_attn.llm import LLM

DTYPES = ("auto", "float32", "bfloat16", "float16")
_GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
"""Device files, one of which a Linux machine with a usable GPU has: Nvidia's, those of Windows' Linux, AMD's."""

INDEX_FLAG: dict[str, Any] = {
    "default": Config().index,
    "metavar": "NAME[:OPTION=VALUE]",
    "help": "index of the keys, with options as in device:key_bytes=40:int8_rows=True (default: %(default)s)",
}
"""Of `--index`, as argparse takes it."""
HOST_DTYPE_FLAG: dict[str, Any] = {
    "choices": HOST_DTYPES,
    "default": Config().host_dtype,
    "help": "of keys and values on the host; auto: the model's (default: %(default)s)",
}
"""Of `--host-dtype`."""


def add_model_arguments(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Which model, and where it runs. positional: the model's name comes without a flag."""
    place: dict[str, Any] = {"nargs": "?", "metavar": "MODEL"} if positional else {"metavar": "PATH|ID"}
    parser.add_argument(
        "model" if positional else "--model",
        default="bundled",
        **place,
        help="folder, GGUF file or hub name of a model; bundled: a small one that finds planted numbers and can do "
        "little else (default: %(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument(
        "--quantization",
        choices=("none", *QUANTIZATIONS),
        default="none",
        help="of the weights when they are loaded; none: as the checkpoint has them (default: %(default)s)",
    )
    parser.add_argument("--yarn", **YARN_FLAG)
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="most to take of the GPU, such as 24GiB (default: no limit)"
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """How a text is read and retrieved from."""
    usual = Config()
    parser.add_argument(
        "--retrieve",
        metavar="K",
        help="keys retrieved per head and token: a number, all, or auto: 100 on average, as measured for each head "
        f"(default: {usual.retrieve})",
    )
    parser.add_argument(
        "--window", default=str(usual.window), metavar="N", help="last tokens always attended (%(default)s)"
    )
    parser.add_argument("--index", **INDEX_FLAG)
    parser.add_argument("--host-dtype", **HOST_DTYPE_FLAG)


def add_store_argument(parser: argparse.ArgumentParser) -> None:
    """Where saved contexts are."""
    parser.add_argument(
        "--store",
        metavar="FOLDER",
        help="folder of saved contexts (default: $RETRIEVAL_ATTN_STORE, or the user's data folder)",
    )


def tokens_or_zero(text: str, flag: str) -> int:
    """Parse a token count that may be 0. Raises ConfigError."""
    return 0 if text.strip() == "0" else parse_tokens(text, flag)


def config_of(args: argparse.Namespace) -> Config:
    """The options that `add_config_arguments` added. Raises ConfigError."""
    return Config(
        retrieve=Config().retrieve if args.retrieve is None else _retrieve(args.retrieve),
        window=parse_tokens(args.window, "--window"),
        host_dtype=args.host_dtype,
        **index_fields(args.index),
    )


def index_fields(text: str) -> dict[str, Any]:
    """The fields of `Config` that `--index` stands for. Raises ConfigError for options that do not exist."""
    name, options = named_options(text)
    if options or name != Config().index:
        from retrieval_attn.index.spec import IndexSpec

        IndexSpec.of(name, options)
    return {"index": name, "index_options": options}


def check_model_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that no model or this machine cannot have. Loads neither torch nor a model."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", args.device):
        raise ConfigError(f"--device {args.device!r} is not a torch device; use auto, cpu, cuda or cuda:N")
    if args.dtype not in DTYPES:
        raise ConfigError(f"--dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {args.dtype!r}")
    if args.yarn is not None and not (math.isfinite(args.yarn) and args.yarn >= 1):
        raise ConfigError(f"--yarn must be a factor of 1 or more, such as 4, got {args.yarn:g}")
    if args.gpu_memory is not None:
        parse_bytes(args.gpu_memory, "--gpu-memory")
    if args.model is not None:
        require_model(args.model)
    if args.device.startswith("cuda") and _has_no_gpu():
        raise ConfigError(f"--device {args.device} was given, but this machine has no GPU; use --device cpu")
    if args.gpu_memory is not None and (args.device == "cpu" or _has_no_gpu()):
        raise ConfigError(
            f"--gpu-memory {args.gpu_memory} was given, but the model would run on the CPU; leave it out, or use "
            "--device cuda on a machine with a GPU"
        )


def require_model(name: str) -> None:
    """Raise InputDataError for a path at which there is no model. Loads neither torch nor transformers.

    Hub names are not looked up. What is damaged or of an unknown kind is refused when it is loaded.
    """
    path = Path(name).expanduser()
    if name == NAME or not (path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") > 2):
        return
    if not path.exists():
        raise InputDataError(f"there is no {name!r}; give the folder of a model, a GGUF file or a hub name")
    if not (path / "config.json").is_file() and resolve(path, download=False) is None:
        what = "a folder without a config.json" if path.is_dir() else "no GGUF file"
        raise InputDataError(f"{name!r} is {what}; give the folder of a model, a GGUF file or a hub name")


def _has_no_gpu() -> bool:
    """Whether this machine certainly has no GPU that torch can use; torch alone can tell that there is one."""
    return sys.platform == "linux" and not any(map(os.path.exists, _GPU_FILES))


def prompt_of(
    args: argparse.Namespace, text: str, files: Sequence[str], answer: int, question: str = ""
) -> tuple[list[int], int]:
    """Return the token ids of a text, and the tokens of it with its question and answer, before the model is loaded.

    answer: longest answer in tokens. Raises ContextLengthError for more tokens than the model has positions.
    """
    with Spinner(f"loading the tokenizer of {_shown(args)}"):
        with no_gc():
            from transformers import AutoTokenizer

            from retrieval_attn.model.loading import load
            from retrieval_attn.template import PromptTemplate
        template = PromptTemplate.of(load(AutoTokenizer, model_path(args.model)))
        limit = _positions(model_path(args.model), args.yarn)
    with Spinner(f"tokenizing {len(text):,} characters"):
        ids = template.context_ids(text)
        room = answer + (len(template.question_ids(question, getattr(args, "raw", False))) if question else 0)
    needed = len(ids) + room
    if limit is not None and needed > limit:
        raise ContextLengthError(_too_long(args, files, len(ids), room, limit), limit=limit, tokens=needed)
    return ids, needed


def _too_long(args: argparse.Namespace, files: Sequence[str], tokens: int, room: int, limit: int) -> str:
    """The message for a text that the model cannot read, with the factor or the part that fits."""
    what = "the text" if files == ["-"] else files[0] if len(files) == 1 else f"the text of {len(files)} files"
    factor = math.ceil((tokens + room) * (args.yarn or 1.0) / limit)
    part = f"the first {100 * (limit - room) // tokens} % of the text, " if 0 < limit - room < tokens else ""
    behind = f", with question and answer {tokens + room:,}" if room else ""
    return (
        f"{what} has {tokens:,} tokens{behind}; this model has {limit:,} positions. "
        f"Use --yarn {factor}, {part}or a model with a longer context"
    )


def load_llm(args: argparse.Namespace, most: int, config: Config, *, say: bool = True) -> LLM:
    """Return the model that the flags name, with memory planned for `most` tokens.

    say: print on the error output which model runs where.
    """
    with Spinner(f"loading {_shown(args)}"):
        with no_gc():
            from transformers.utils.logging import disable_progress_bar

            from retrieval_attn.llm import LLM

        disable_progress_bar()
        name = model_path(args.model)
        llm = LLM(
            name,
            device=args.device,
            dtype=args.dtype,
            quantization=None if args.quantization == "none" else args.quantization,
            yarn=args.yarn,
            gpu_memory=args.gpu_memory,
            max_context=_needed(name, most, args.yarn),
            config=config,
        )
    if say:
        choose = " (choose another with --model)" if args.model == NAME else ""
        print(f"model: {_shown(args)} on {llm.device}{choose}", file=sys.stderr)
    return llm


def _shown(args: argparse.Namespace) -> str:
    return "the bundled test model" if args.model == NAME else str(args.model)


def _retrieve(text: str) -> Retrieve | Any:
    """A number, "all" or "auto"; anything else is left to Config, which refuses it."""
    try:
        return int(text)
    except ValueError:
        return text


def _needed(model: str, most: int, yarn: float | None = None) -> int:
    """Return the tokens to plan memory for, the chat template included: at most the model's positions."""
    positions, template = _positions(model, yarn), 1024
    return most + template if positions is None else min(most + template, positions)


def _positions(model: str, yarn: float | None) -> int | None:
    """Return how many positions the model has; None if any number."""
    from retrieval_attn.model.loading import checkpoint_config
    from retrieval_attn.model.rope import max_positions

    return max_positions(checkpoint_config(model, yarn).get_text_config(decoder=True))
