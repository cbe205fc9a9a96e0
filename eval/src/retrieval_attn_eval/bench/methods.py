"""The decode methods that are compared, by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import retrieval_attn_eval.baselines.faiss_index  # noqa: F401  (registers ivf and hnsw)
from retrieval_attn.config import Config, named_options
from retrieval_attn.errors import ConfigError
from retrieval_attn.testing import IndexSpec
from retrieval_attn_eval.baselines.registry import POLICIES
from retrieval_attn_eval.bench.baselines import ByPolicy, FullEager, FullGraph, FullResident, Offloaded, Quantized
from retrieval_attn_eval.bench.method import Method, MethodSpec, Retrieval, Static

METHODS: dict[str, type[Method]] = {
    "static": Static,
    "full-resident": FullResident,
    "full-graph": FullGraph,
    "full-eager": FullEager,
    "offloaded": Offloaded,
    "quantized": Quantized,
    **{name: ByPolicy for name in POLICIES if name != "infinigen"},  # it hooks the inputs of layers
}
DEFAULT = "roargraph,flat,ivf,static,full-resident,full-graph,full-eager,offloaded,quantized"
SHORT = {"flat-int8": ("flat", {"codes": "int8"})}


def parse(text: str, known: Collection[str] = METHODS) -> list[MethodSpec]:
    """Methods of a comma list such as "roargraph:beam=250,static": kinds of index and those of `known`. Raises
    ConfigError for names not known.
    """
    specs = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        try:
            name, options = named_options(item)
        except ConfigError as error:
            raise ConfigError(f"--methods {error}") from error
        if name not in known:
            kind, given = SHORT.get(name, (name, {}))
            try:
                IndexSpec.of(kind, {**given, **options})
            except ConfigError as error:
                raise ConfigError(f"--methods {item}: {error}, or a method: {', '.join(known)}") from error
        elif options and name != "quantized":
            raise ConfigError(f"--methods {item}: {name} takes no options")
        specs.append(MethodSpec(name, options))
    if not specs:
        raise ConfigError(f"--methods {text!r} names none; write flat, or leave it out for the default")
    return specs


def kind_of(spec: MethodSpec) -> type[Method]:
    """The class of a spec's method; an index kind is retrieval with that index."""
    return METHODS.get(spec.name, Retrieval)


def make(spec: MethodSpec, model: Any, config: Config) -> Method:
    """The method of a spec."""
    named = index_of(spec)
    if named is None:
        return METHODS[spec.name](spec, model, config)
    kind, options = named
    return Retrieval(spec, model, config.replace(index=kind, index_options=options))


def index_of(spec: MethodSpec) -> tuple[str, dict[str, Any]] | None:
    """Kind and options of the index that a spec names; None for a method without one."""
    if spec.name in METHODS:
        return None
    kind, given = SHORT.get(spec.name, (spec.name, {}))
    return kind, {**given, **spec.options}
