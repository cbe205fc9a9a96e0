"""Service: state that all routes of a server share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest

from retrieval_attn.server.access import AllowedHosts, Caller, Keys
from retrieval_attn.server.admission import Admission
from retrieval_attn.server.answer_parts import AnswerFormat
from retrieval_attn.server.bodies import Bodies
from retrieval_attn.server.client import EngineClient
from retrieval_attn.server.contexts import Contexts
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.metrics import Metrics
from retrieval_attn.server.prompts import Prompts
from retrieval_attn.server.settings import Settings
from retrieval_attn.server.stored_responses import StoredResponses
from retrieval_attn.server.token_texts import TokenTexts


@dataclass(frozen=True)
class Service:
    """State that all routes share.

    created: Unix time in seconds when the model was loaded. hosts: allowed host names; None if there are API keys.
    sampling: default fields of `SamplingParams`. answer_format: of the model's chat answers.
    """

    settings: Settings
    keys: Keys
    prompts: Prompts
    texts: TokenTexts
    client: EngineClient
    contexts: Contexts
    admission: Admission
    metrics: Metrics
    created: int
    bodies: Bodies
    hosts: AllowedHosts | None
    sampling: Mapping[str, Any]
    answer_format: AnswerFormat
    responses: StoredResponses

    def context_of(self, model: str, context: str | None) -> str | None:
        """Return the saved context of a request, from MODEL@NAME or its `context` field; None without one.

        Raises ApiError for another model, or two different contexts.
        """
        name, at, behind = model.partition("@")
        if name not in self.settings.names and not self.settings.any_name:
            raise ApiError(
                404, f"There is no model {model[:80]!r}; this server has {self.settings.name!r}.", param="model",
                code="model_not_found",
            )  # fmt: skip
        if at and not behind:
            raise ApiError(
                400, f"The model {model[:80]!r} names no context; give MODEL@NAME, or the model's name alone.",
                param="model",
            )  # fmt: skip
        if behind and context and behind != context:
            raise ApiError(
                400,
                f"The model names the context {behind[:80]!r}, but the field context is {context!r}; give one of them.",
                param="context",
            )
        return context or behind or None


def service_of(request: HttpRequest) -> Service:
    """Return the service of the app that answers."""
    service: Service = request.app.state.service
    return service


def caller_of(request: HttpRequest) -> Caller:
    """Return the caller; see `authorize`."""
    caller: Caller = request.scope["caller"]
    return caller
