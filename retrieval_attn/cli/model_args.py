"""What commands that read or ask have in common: flags of the model and of the read, the text, the model itself."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_attn.compile.collection import no_collection
from retrieval_attn.config import HOST_DTYPES, QUANTIZATIONS, YARN_FLAG, Config, Retrieve, named_options
from retrieval_attn.errors import InputDataError
from retrieval_attn.memory.units import parse_tokens
from retrieval_attn.model.bundled import model_path

if TYPE_CHECKING:
    from retrieval_attn.llm import LLM

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
    parser.add_argument("--yarn", **YARN_FLAG)
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="most to take of the GPU, such as 24GiB (default: no limit)"
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """How a text is read and retrieved from."""
    usual = Config()
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
    parser.add_argument("--index", **INDEX_FLAG)
    parser.add_argument("--host-dtype", **HOST_DTYPE_FLAG)


def add_store_argument(parser: argparse.ArgumentParser) -> None:
    """Where saved contexts are."""
    parser.add_argument(
        "--store",
        metavar="FOLDER",
        help="folder of saved contexts (default: $RETRIEVAL_ATTN_STORE, or the user's data folder)",
    )


def config_of(args: argparse.Namespace) -> Config:
    """The options that `add_config_arguments` added. Raises ConfigError."""
    return Config(
        retrieve=_retrieve(args.retrieve),
        window=parse_tokens(args.window, "--window"),
        host_dtype=args.host_dtype,
        **index_fields(args.index),
    )


def index_fields(text: str) -> dict[str, Any]:
    """The fields of `Config` that `--index` stands for. Raises ConfigError for options that do not exist."""
    name, options = named_options(text)
    if options:
        from retrieval_attn.index.spec import IndexSpec

        IndexSpec.of(name, options)
    return {"index": name, "index_options": options}


def load_llm(args: argparse.Namespace, most: int, config: Config, *, say: bool = True) -> LLM:
    """The model that the flags name, with memory planned for `most` tokens. say: on the error output what it is."""
    with no_collection():
        from retrieval_attn.llm import LLM

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
    what = "the bundled test model; --model names another" if args.model == "bundled" else name
    if say:
        print(f"answered by {what}, on {llm.device}", file=sys.stderr)
    return llm


def text_of(file: str) -> str:
    """The text of a file, "-" the standard input. Raises InputDataError, OSError."""
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    name = "the standard input" if file == "-" else file
    try:
        text = data.decode("utf-8-sig")
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


def _needed(model: str, most: int, yarn: float | None = None) -> int:
    """Tokens to plan memory for: no text has more of them than bytes, and no model more than its positions."""
    from retrieval_attn.model.loading import checkpoint_config
    from retrieval_attn.model.rope import max_positions

    positions = max_positions(checkpoint_config(model, yarn).get_text_config(decoder=True))
    template = 1024
    return most + template if positions is None else min(most + template, positions)
