"""The models that a server has."""

from __future__ import annotations

from retrieval_attn.errors import RemoteError
from retrieval_attn.remote.endpoint import Endpoint, http_client, refusal

__all__ = ["model_names"]


def model_names(endpoint: Endpoint, timeout: float = 60.0) -> list[str]:
    """What `GET /v1/models` lists, at least one. Raises RemoteError, with what was said; ConfigError without httpx."""
    httpx = http_client()
    url = endpoint.at("models")
    try:
        response = httpx.get(url, headers=endpoint.headers, timeout=timeout)
    except httpx.HTTPError as error:
        raise RemoteError(
            f"{url} could not be asked ({type(error).__name__}: {error}); see that a server runs there"
        ) from None
    if response.status_code != 200:
        raise RemoteError(f"{url} answered {response.status_code}: {refusal(response.content)}")
    try:
        names = [str(one["id"]) for one in response.json()["data"]]
    except (ValueError, TypeError, KeyError):
        raise RemoteError(f"{url} answered no list of models, but {refusal(response.content)}") from None
    if not names:
        raise RemoteError(f"{url} lists no model; name one with --model")
    return names
