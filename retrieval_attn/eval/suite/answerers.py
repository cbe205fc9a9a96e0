"""Methods by name for a run, with the options given on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrieval_attn.errors import ConfigError

__all__ = ["build", "known_methods"]


def known_methods() -> tuple[str, ...]:
    """Names of all methods, full attention first.  Loads neither torch nor a model."""
    from retrieval_attn.eval.methods import METHODS

    return tuple(METHODS)


def build(names: Sequence[str], model: Any, tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Methods by name.  options: "all" holds those of every method, a method's name those of its own.

    Raises ConfigError for an unknown method or option, UnsupportedModelError if one cannot run on the model.
    """
    known = known_methods()
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(f"method {unknown[0] if unknown else 'nothing'!r} is unknown; choose from {', '.join(known)}")
    import retrieval_attn as ra
    from retrieval_attn.eval.methods import build_methods

    shared = {**options.get("all", {}), **options.get("retrieval", {})}
    append = shared.pop("append", "retrieval")
    return dict(build_methods(names, model, tokenizer, ra.Config(**shared), append))
