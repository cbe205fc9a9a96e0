"""Checks of a checkpoint before it is loaded: reachable, with plausible sizes; errors in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from retrieval_attn.errors import InputDataError

MAX_LAYERS = 4096
"""More than any model has. Building one of a billion layers, even without weights, does not end."""
PROBE_SECONDS = 10.0
_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "head_dim")


def require_sizes(config: Any, name: object) -> None:
    """Raise InputDataError unless the sizes in `config` that its decoder has are whole numbers above 0.

    config: a transformers config. name: of the model, for the message.
    """
    text = config.get_text_config(decoder=True)
    heads = heads_config(text)
    sizes = {size: getattr(heads, size, None) for size in _SIZES}
    for size, value in sizes.items():
        if value is None or isinstance(value, list | tuple):  # some models have one for each layer
            continue
        most = MAX_LAYERS if size == "num_hidden_layers" else 2**31
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InputDataError(
                f"The config of {str(name)!r} must have {size} from 1 to {most}, got {value!r}; restore its "
                "config.json."
            )


def heads_config(text: Any, kind: str = "full_attention") -> Any:
    """Return the config with the head counts and sizes of layers of a kind: of the first one, where layers differ.

    Gemma 4 has fewer and wider heads in layers that attend to everything. text: a transformers text config.
    """
    if not getattr(text, "is_heterogeneous", False):
        return text
    kinds = list(text.layer_types)
    return text.per_layer_config[kinds.index(kind) if kind in kinds else 0]


def reason(error: BaseException) -> str:
    """Return an exception's message in one line: its first line, and the second if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    plain = isinstance(error, OSError | ValueError) and said
    return said if plain else f"{type(error).__name__}: {said}"


def require_reachable(name: str | Path, file: str = "config.json") -> None:
    """Raise OSError, with one line, if a model's file is neither on this machine nor can be downloaded.

    Takes PROBE_SECONDS at most: huggingface_hub itself retries for a minute.
    """
    if os.path.exists(name):
        return
    import httpx
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(str(name), file), str):
            return
        get_hf_file_metadata(hf_hub_url(str(name), file), timeout=PROBE_SECONDS)
    except EntryNotFoundError:
        return  # transformers names the file that is missing
    except HFValidationError:
        raise OSError("there is no such folder, and no model on huggingface.co can have this name") from None
    except GatedRepoError:
        raise OSError(f"its access must be granted at https://huggingface.co/{name}, and HF_TOKEN set") from None
    except RepositoryNotFoundError:
        raise OSError("there is no such folder, and huggingface.co has no public model of this name") from None
    except (httpx.HTTPError, OSError) as error:
        raise OSError(
            f"it is not on this machine, and huggingface.co could not be reached: {type(error).__name__}"
        ) from None
