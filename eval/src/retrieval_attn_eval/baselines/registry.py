"""Every method by its name.  Loads neither torch nor a model until one is made."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from retrieval_attn.config import Config
from retrieval_attn.errors import ConfigError
from retrieval_attn_eval.baselines.options import (
    SINK,
    WINDOW,
    InfiniGen,
    InfLLM,
    MagicPIG,
    Options,
    PyramidKV,
    Quest,
    SnapKV,
    StreamingLLM,
)
from retrieval_attn_eval.baselines.reply import Method

__all__ = [
    "METHODS",
    "POLICIES",
    "budget_options",
    "build_methods",
    "check_options",
    "make_method",
    "option_names",
    "parse_method_options",
    "settle_options",
]

POLICIES: dict[str, type[Options]] = {
    kind.method: kind for kind in (StreamingLLM, SnapKV, PyramidKV, InfLLM, Quest, InfiniGen, MagicPIG)
}
_AS_PUBLISHED = {name: {"index": name, "retrieve": 100, "tail": False} for name in ("flat", "ivf", "hnsw")}
_INDEXES: dict[str, dict[str, Any]] = {
    **_AS_PUBLISHED,
    "retrieval": {"index": "roargraph", "retrieve": 100, "tail": False},
    "retrieval_tail": {"index": "roargraph", "retrieve": 100, "tail": True},
}
"""Options that a name stands for. What the paper compares drops the keys that it does not retrieve, as published;
retrieval_tail estimates them.
"""
_OF_RETRIEVAL = ("append", "inside", "beta")
_COPY_BELOW_BYTES = 1 << 30

METHODS: tuple[str, ...] = ("full", *POLICIES, *_INDEXES)
"""Names of all methods, the exact one first."""


def option_names(name: str) -> tuple[str, ...]:
    """Options that `make_method` takes for `name`, besides `budget`.  Raises ConfigError for an unknown name."""
    _known(name)
    if name in POLICIES:
        return tuple(item.name for item in fields(POLICIES[name]))
    if name in _INDEXES:
        return (*(item.name for item in fields(Config)), *_OF_RETRIEVAL)
    return ("keep_context",)


def budget_options(name: str, budget: int, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options with which one query of `name` attends to about `budget` tokens per step, sinks and window included.

    given: options that are fixed already; they are not part of the result.  What a budget means: each query head
    (of the layers that a method does not leave dense) attends to that many tokens.  Generated tokens come on top
    for snapkv and pyramidkv, which evict nothing after the prompt.  Raises ConfigError for a budget that leaves
    no room.
    """
    _known(name)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 8:
        raise ConfigError(f"budget must be a whole number of tokens >= 8, got {budget!r}; 2048 is the published value")
    fixed = dict(given or {})
    if name in POLICIES:
        made = POLICIES[name].for_budget(budget, fixed)
    elif name in _INDEXES:
        made = _retrieval_budget(budget, fixed)
    else:
        raise ConfigError("method full attends to everything and has no budget; leave the budget out")
    return {key: value for key, value in made.items() if key not in fixed}


def _retrieval_budget(budget: int, given: dict[str, Any]) -> dict[str, Any]:
    """The paper's static part where at least 8 tokens remain to retrieve, else an eighth and half of the budget."""
    small = budget < SINK + WINDOW + 8
    sink = given.get("sink", budget // 8 if small else SINK)
    window = given.get("window", budget // 2 if small else WINDOW)
    if budget - sink - window < 1:
        raise ConfigError(f"budget={budget} leaves nothing to retrieve beside sink={sink} and window={window}")
    return {"sink": sink, "window": window, "retrieve": budget - sink - window}


def make_method(
    name: str, model: Any, tokenizer: Any, *, budget: int | None = None, shared: Any = None, **options: Any
) -> Method:
    """The method called `name` for a model and its tokenizer, with its paper's parameters unless `options` say else.

    budget: tokens attended per step, sets the parameters that decide it (`budget_options`).
    shared: a ContextReader of the same model: methods that read with full attention then share one reading.
    Raises ConfigError for an unknown name or option, UnsupportedModelError, with the reason, for a model that the
    method cannot run on.
    """
    settled, own = settle_options(name, {**options, **({} if budget is None else {"budget": budget})})
    if isinstance(settled, Config):
        from retrieval_attn_eval.baselines.retrieval import RetrievalAttention

        return RetrievalAttention(model, tokenizer, settled, name=name, **own)
    if isinstance(settled, Options):
        from retrieval_attn_eval.baselines.method import PolicyMethod

        return PolicyMethod(name, model, tokenizer, settled, shared)
    from retrieval_attn_eval.baselines.full import FullAttention

    return FullAttention(model, tokenizer, **own)


def settle_options(name: str, options: Mapping[str, Any]) -> tuple[Config | Options | None, dict[str, Any]]:
    """A method's checked options, `budget` spent, and those that are the method's own keywords.

    Raises ConfigError for an unknown name or option, or a value that cannot be.
    """
    given = dict(options)
    budget = given.pop("budget", None)
    _require_options(name, given)
    if budget is not None:
        given = {**budget_options(name, budget, given), **given}
    if name in _INDEXES:
        own = {key: given.pop(key) for key in _OF_RETRIEVAL if key in given}
        return Config.from_dict({**_INDEXES[name], **given}), own
    if name in POLICIES:
        checked: Options = POLICIES[name].of(given)
        return checked, {}
    return None, given


def parse_method_options(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Options by method of every METHOD.KEY=VALUE; the value is JSON where it is some.  Raises ConfigError."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)\.(\w+)=(.*)", text)
        if not match or match[1] not in METHODS:
            raise ConfigError(
                f"--method-option {text!r}: needed METHOD.KEY=VALUE with a method of {', '.join(METHODS)};"
                " write quest.page=16"
            )
        value: Any = match[3]
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        found.setdefault(match[1], {})[match[2]] = value
    return found


def check_options(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError for an unknown name or option, a bad value, or one of "all" that none of the methods has."""
    taken = {key for name in names for key in _takes(name)}
    unused = sorted(set(options.get("all", {})) - taken)
    if unused:
        raise ConfigError(f"none of {', '.join(names)} has an option {', '.join(unused)}; leave it out")
    for name, own in options.items():
        if name != "all":
            _require_options(name, own)
    for name in names:
        settle_options(name, _own_options(name, options))


def _own_options(name: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Those of "all" that the method has, and its own on top."""
    shared = {key: value for key, value in options.get("all", {}).items() if key in _takes(name)}
    return {**shared, **options.get(name, {})}


def _takes(name: str) -> tuple[str, ...]:
    """Every option of a method, `budget` included where it has one."""
    return tuple(dict.fromkeys((*option_names(name), *(() if name == "full" else ("budget",)))))


def _require_options(name: str, given: Iterable[str]) -> None:
    unknown = sorted(set(given).difference(_takes(name)))
    if unknown:
        raise ConfigError(f"method {name} has no option {', '.join(unknown)}; its options: {', '.join(_takes(name))}")


def build_methods(
    names: Sequence[str],
    model: Any,
    tokenizer: Any,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    threads: int | None = None,
) -> dict[str, Method]:
    """Methods by name, full attention first.

    options: per name, as keywords of `make_method` (budget too); "all": for every method that has them.
    threads: of the methods that search on the host; None: all cores.

    Methods that read with full attention and attend by their own rule (streaming_llm, snapkv, pyramidkv, quest,
    infinigen, magicpig) share one reading of each context. flat, ivf, hnsw, retrieval and retrieval_tail each keep
    their own, since its host memory and index belong together; infllm reads in its own way; full keeps transformers'
    cache.
    A small model on the CPU is copied for `full`, so that nothing ever touches the baseline's.
    """
    from retrieval_attn.model.loading import launched_processes

    check_options(names, options or {})
    given = {name: _own_options(name, options or {}) for name in names}
    for name, own_options in given.items():
        if threads is not None and "threads" in _takes(name):
            own_options.setdefault("threads", threads)
    methods: dict[str, Method] = {}
    if "full" in names:
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        own = len(given) > 1 and model.device.type == "cpu" and size < _COPY_BELOW_BYTES
        own = own and launched_processes() == 1  # shared heads cannot be copied
        full = {"keep_context": True, **given["full"]}
        methods["full"] = make_method("full", copy.deepcopy(model) if own else model, tokenizer, **full)
    shared = None
    if any(name in POLICIES for name in names):
        from retrieval_attn_eval.baselines.reader import ContextReader

        shared = ContextReader(model)
    for name in given:
        if name != "full":
            methods[name] = make_method(name, model, tokenizer, shared=shared, **given[name])
    return methods


def _known(name: str) -> None:
    if name not in METHODS:
        raise ConfigError(f"method {name!r} is unknown; choose from {', '.join(METHODS)}")
