"""The bundled model's tokenizer, and a command's flags read as the program reads them."""

from __future__ import annotations

import argparse
from functools import cache
from typing import Any

from retrieval_attn_eval.models import BUNDLED_MODEL


@cache
def bundled_tokenizer() -> Any:
    """Loaded once. Shared: leave it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))


def parsed(command: Any, *flags: str, **defaults: Any) -> argparse.Namespace:
    """The arguments of a command's module; defaults: of its `add_arguments`."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, **defaults)
    return parser.parse_args(flags)
