"""`retrieval-attn lm-eval ...`: lm-evaluation-harness with the model "retrieval_attn" registered.

Everything after the command's name is lm_eval's own command line (`retrieval-attn lm-eval --help` shows it).
Added where it is missing: `--model retrieval_attn`, `--device auto`, and the bundled model as `pretrained`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.models import BUNDLED_MODEL

HELP = "lm-evaluation-harness with retrieval attention"

__all__ = ["add_arguments", "command_line", "run"]

INSTALL = "in a checkout: pip install './eval[lm-eval]'; elsewhere: pip install 'retrieval-attn-eval[lm-eval]'"
WITHOUT = f"""\
usage: retrieval-attn lm-eval ARGUMENTS...

{HELP}. ARGUMENTS are those of lm_eval, such as: --tasks niah_single_1 --limit 10
Missing ones are added: --model retrieval_attn, --device auto, and the bundled model as pretrained=PATH.

lm-evaluation-harness is not installed; {INSTALL}"""
_OTHER = ("ls", "validate", "-h", "--help")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One list of arguments; none of them is looked at here, --help included."""
    parser.prefix_chars = "\0"
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="lm_eval's own arguments")


def run(args: argparse.Namespace) -> int:
    """lm_eval's exit code.  Raises ConfigError if lm_eval is not installed."""
    if find_spec("lm_eval") is None:
        if not args.arguments or args.arguments[0] in ("-h", "--help"):
            print(WITHOUT)
            return 0
        raise ConfigError(f"lm-eval needs lm-evaluation-harness, which is not installed; {INSTALL}")
    importlib.import_module("retrieval_attn_eval.lm_eval.model")
    before = sys.argv
    sys.argv = ["lm-eval", *command_line(args.arguments)]
    try:
        importlib.import_module("lm_eval.__main__").cli_evaluate()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return 0


def command_line(given: Sequence[str]) -> list[str]:
    """The arguments for lm_eval: `given`, completed to a run of this model."""
    words = list(given)
    if not words or words[0] in _OTHER:
        return words or ["--help"]
    words = words if words[0] == "run" else ["run", *words]
    if not _has(words, "--model", "-M", "--config", "-C"):
        words += ["--model", "retrieval_attn"]
    if not _has(words, "--device", "--config", "-C"):
        words += ["--device", "auto"]
    if not _has(words, "--config", "-C") and not any("pretrained=" in word or '"pretrained"' in word for word in words):
        at = next((i for i, word in enumerate(words) if word in ("--model_args", "-a")), None)
        if at is None:
            words += ["--model_args", f"pretrained={BUNDLED_MODEL}"]
        else:
            words.insert(at + 1, f"pretrained={BUNDLED_MODEL}")
    return words


def _has(words: Sequence[str], *flags: str) -> bool:
    return any(word.partition("=")[0] in flags for word in words)
