"""Methods by name for a run, with the options given on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from retrieval_attn.errors import ConfigError

__all__ = ["build", "check_options", "known_methods", "options_of", "parse_method_options"]


def known_methods() -> tuple[str, ...]:
    """Names of all methods, full attention first.  Loads neither torch nor a model."""
    from retrieval_attn.eval.baselines import METHODS

    return tuple(METHODS)


def parse_method_options(texts: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """(method, {key: value}) of every METHOD.KEY=VALUE; the value is JSON where it is some.  Raises ConfigError."""
    known, found = known_methods(), []
    for text in texts:
        match = re.fullmatch(r"(\w+)\.(\w+)=(.*)", text)
        if not match or match[1] not in known:
            raise ConfigError(
                f"--method-option {text!r}: needed METHOD.KEY=VALUE with a method of {', '.join(known)};"
                " write quest.page=16"
            )
        found.append((match[1], {match[2]: _value(match[3])}))
    return found


def _value(text: str) -> Any:
    """A JSON value where the text is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def options_of(name: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Options of one method: those of "all" that it has, and its own on top."""
    known = _options_known(name)
    shared = {key: value for key, value in options.get("all", {}).items() if key in known}
    return {**shared, **options.get(name, {})}


def check_options(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError for an option of "all" that none of the methods has, an unknown own one, or a bad value."""
    from retrieval_attn.eval.baselines import settle_options

    taken = {key for name in names for key in _options_known(name)}
    unused = sorted(set(options.get("all", {})) - taken)
    if unused:
        raise ConfigError(f"none of {', '.join(names)} has an option {', '.join(unused)}; leave it out")
    for name, own in options.items():
        unknown = sorted(set(own) - _options_known(name)) if name != "all" else []
        if unknown:
            known = ", ".join(sorted(_options_known(name)))
            raise ConfigError(f"method {name} has no option {', '.join(unknown)}; its options: {known}")
    for name in names:
        settle_options(name, options_of(name, options))


def _options_known(name: str) -> set[str]:
    from retrieval_attn.eval.baselines import option_names

    return {*option_names(name), *(() if name == "full" else ("budget",))}


def build(
    names: Sequence[str],
    model: Any,
    tokenizer: Any,
    options: Mapping[str, Mapping[str, Any]],
    threads: int | None = None,
) -> dict[str, Any]:
    """Methods by name.  options: "all" holds those of every method that has them, a method's name those of its own.

    threads: of the methods that search on the host; None: all cores.
    Raises ConfigError for an unknown method or option, UnsupportedModelError if one cannot run on the model.
    """
    from retrieval_attn.eval.baselines import build_methods

    known = known_methods()
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(f"method {unknown[0] if unknown else 'nothing'!r} is unknown; choose from {', '.join(known)}")
    check_options(names, options)
    own = {name: options_of(name, options) for name in names}
    if threads is not None:
        own = {name: {"threads": threads, **o} if "threads" in _options_known(name) else o for name, o in own.items()}
    return dict(build_methods(names, model, tokenizer, own))
