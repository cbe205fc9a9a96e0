"""More positions than a checkpoint was made for, by YaRN (Peng et al., 2023; arXiv 2309.00071, section 3).

Rotary frequencies that turn slower than once in the known positions are stretched by the factor, fast ones stay, those
between are mixed, and logits are scaled with the factor's logarithm. transformers computes it; here the config is made
to ask for it. A factor larger than the text needs costs accuracy: it holds for short texts, too.
"""

from __future__ import annotations

import copy
from typing import Any

from retrieval_attn.errors import ConfigError


def with_yarn(config: Any, factor: float | None) -> Any:
    """A copy of a checkpoint's config with `factor` times as many positions; the config itself for None.

    Raises ConfigError for a factor below 1, and where positions are no plain rotary embedding of one kind.
    """
    if factor is None:
        return config
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor >= 1:
        raise ConfigError(f"yarn must be a factor of 1 or more, such as 4, got {factor!r}.")
    found = copy.deepcopy(config)
    text = found.get_text_config(decoder=True)
    rope, known = getattr(text, "rope_parameters", None), getattr(text, "max_position_embeddings", None)
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    if kind != "default" or known is None:
        raise ConfigError(
            f"yarn={factor:g} was given, but YaRN stretches plain rotary embeddings (rope_type 'default'), and the "
            f"positions of this {text.model_type} are {'not of one kind' if kind is None else f'of type {kind!r}'}. "
            "Leave it out."
        )
    text.rope_parameters = {
        **dict(rope or {}),
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": known,
    }
    text.max_position_embeddings = int(known * factor)
    return found
