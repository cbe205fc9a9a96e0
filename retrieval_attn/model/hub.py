"""Names of models on the Hugging Face hub: whether one can be downloaded, asked once and without retries."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["require_reachable"]

PROBE_SECONDS = 10.0


def require_reachable(name: str | Path) -> None:
    """Raise OSError, with one line, if a model is neither on this machine nor can be downloaded.

    huggingface_hub itself retries a download five times, for a minute, before it says so.
    """
    if os.path.exists(name):
        return
    import httpx
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(str(name), "config.json"), str):
            return
        get_hf_file_metadata(hf_hub_url(str(name), "config.json"), timeout=PROBE_SECONDS)
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
