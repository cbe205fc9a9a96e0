"""Methods on the command line: kinds of index with options, and published methods."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)
from retrieval_attn.config import named_options
from retrieval_attn.errors import ConfigError
from retrieval_attn.testing import IndexSpec

__all__ = ["MethodSpec", "parse"]


@dataclass(frozen=True)
class MethodSpec:
    """A method as the command line names it: `name` or `name:option=value:option=value`."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and options, as on the command line."""
        return ":".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


def parse(text: str, known: Collection[str] = ()) -> list[MethodSpec]:
    """Parse a comma list such as "roargraph:beam=250,quest": kinds of index and methods of `known`.

    Raises ConfigError for an unknown name, and for options of a method that has none.
    """
    specs = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        try:
            name, options = named_options(item)
        except ConfigError as error:
            raise ConfigError(f"--methods {error}") from error
        if name not in known:
            try:
                IndexSpec.of(name, options)
            except ConfigError as error:
                also = f", or a method: {', '.join(known)}" if known else ""
                raise ConfigError(f"--methods {item}: {error}{also}") from error
        elif options:
            raise ConfigError(f"--methods {item}: {name} takes no options")
        specs.append(MethodSpec(name, options))
    if not specs:
        raise ConfigError(f"--methods {text!r} names none; write flat, or leave it out for the default")
    return specs
