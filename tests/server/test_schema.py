"""schemathesis asks what the server's schema allows, and what it does not: no status of 500, answers as described.

With hypothesis' own seed, so that a run can be repeated.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

from tests.server.process import Served

schemathesis = pytest.importorskip("schemathesis", reason="tests of the server need schemathesis")

EXAMPLES = int(os.environ.get("RETRIEVAL_ATTN_SCHEMA_EXAMPLES", "10"))
"""Of each operation, as the schema says, and as many otherwise."""
MAX_TOKENS = 4
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/contexts"),
    ("POST", "/v1/contexts"),
    ("POST", "/v1/contexts/files"),
    ("GET", "/v1/contexts/{name}"),
    ("DELETE", "/v1/contexts/{name}"),
    ("POST", "/v1/contexts/{name}/save"),
    ("POST", "/v1/contexts/{name}/fork"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/"),
    ("GET", "/status"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/props"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def schema(served: Served) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def test_all_operations_are_asked(schema: Any) -> None:
    found = [result.ok() for result in schema.get_all_operations()]
    assert sorted((one.method.upper(), one.path) for one in found) == sorted(OPERATIONS)


def bounded(case: Any) -> Any:
    """The model is one that is there, or nothing behind it would be reached; answers are short."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "bundled"
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if type(case.body.get(name)) is int:
                case.body[name] = min(case.body[name], MAX_TOKENS)
        if case.path != "/v1/messages/count_tokens":
            case.body.setdefault("max_output_tokens" if case.path == "/v1/responses" else "max_tokens", MAX_TOKENS)
        if type(case.body.get("n")) is int:
            case.body["n"] = min(case.body["n"], 2)
    return case


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "not-allowed"])
@pytest.mark.parametrize("method, path", OPERATIONS, ids=[f"{method} {path}" for method, path in OPERATIONS])
def test_answers_are_as_the_schema_says(method: str, path: str, allowed: bool, schema: Any) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    described = (checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance)
    modes = schemathesis.GenerationMode
    operation = schema[path][method]
    answered: list[int] = []

    @hypothesis.given(case=operation.as_strategy(modes.POSITIVE if allowed else modes.NEGATIVE))
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def ask(case: Any) -> None:
        reply = bounded(case).call(timeout=60)
        answered.append(reply.status_code)
        case.validate_response(reply, checks=(not_a_server_error, *described))

    try:
        ask()
    except (hypothesis.errors.Unsatisfiable, schemathesis.errors.InvalidSchema) as error:
        pytest.skip(f"nothing to ask: {error}")
    assert answered
