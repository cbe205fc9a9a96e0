"""Whether a checkpoint's config can be a model's at all, and what is said of one that is damaged."""

from __future__ import annotations

from typing import Any

from retrieval_attn.errors import InputDataError

MAX_LAYERS = 4096
"""More than any model has. Building one of a billion layers, even without weights, does not end."""
_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "head_dim")


def require_sizes(config: Any, name: object) -> None:
    """Raise InputDataError unless the sizes in `config` that its decoder has are whole numbers above 0.

    config: a transformers config. name: of the model, for the message.
    """
    text = config.get_text_config(decoder=True)
    sizes = {size: getattr(text, size, None) for size in _SIZES}
    for size, value in sizes.items():
        if value is None or isinstance(value, list | tuple):  # some models have one for each layer
            continue
        most = MAX_LAYERS if size == "num_hidden_layers" else 2**31
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InputDataError(
                f"The config of {str(name)!r} must have {size} from 1 to {most}, got {value!r}; restore its "
                "config.json."
            )


def reason(error: BaseException) -> str:
    """What an exception says, in one line: its first, and the next one if that only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    plain = isinstance(error, OSError | ValueError) and said
    return said if plain else f"{type(error).__name__}: {said}"
