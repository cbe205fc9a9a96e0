"""Names of the model, and what clients ask about it: its length, its tokens, its facts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from retrieval_attn.errors import ConfigError
from retrieval_attn.server.settings import Settings
from tests.server.inside import Inside
from tests.server.process import Served

anthropic = pytest.importorskip("anthropic", reason="tests of the server need anthropic")


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    inside = Inside(tmp_path_factory.mktemp("store"), aliases=("small", "gpt-4o"))
    inside.wait_until_it_serves()
    with inside.client() as client:
        yield client
    inside.end()


def answered(client: httpx.Client, model: str) -> int:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 2}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code != 200 or reply.json()["model"] == model
    return reply.status_code


def test_a_model_has_several_names(named: httpx.Client) -> None:
    assert [one["id"] for one in named.get("/v1/models").json()["data"]] == ["tiny", "small", "gpt-4o"]
    assert [answered(named, name) for name in ("tiny", "small", "gpt-4o", "other")] == [200, 200, 200, 404]
    assert named.get("/v1/models/small").status_code == 200 and named.get("/v1/models/other").status_code == 404
    with pytest.raises(ConfigError, match="@"):
        Settings(name="a", aliases=("b@c",))


def test_any_name_is_the_models(tmp_path: Path) -> None:
    inside = Inside(tmp_path, any_name=True)
    inside.wait_until_it_serves()
    try:
        with inside.client() as client:
            assert answered(client, "claude-sonnet-9") == answered(client, "tiny") == 200
            assert answered(client, "claude-sonnet-9@nothing") == 404  # a saved context that is not there
    finally:
        inside.end()


def test_tokens_become_text_again(served: Served) -> None:
    with served.client() as client:
        text = "</s>The sea, naïvely."
        told = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert len(told["token_strs"]) == told["count"] == len(told["tokens"])
        assert "token_strs" not in client.post("/tokenize", json={"prompt": text}).json()
        back = client.post("/detokenize", json={"model": "bundled", "tokens": told["tokens"]}).json()
        assert back["prompt"].endswith(text)
        assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
        assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
        assert client.post("/detokenize", json={"model": "other", "tokens": [5]}).status_code == 404


def test_facts_of_the_model(served: Served) -> None:
    with served.client() as client:
        facts = client.get("/props").json()
        (model,) = [one for one in client.get("/v1/models").json()["data"] if "@" not in one["id"]]
        assert facts["default_generation_settings"]["n_ctx"] == model["max_model_len"] == 131072
        assert facts["model_alias"] == "bundled" and facts["tool_format"] is None
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as claude:
        (found,) = [one for one in claude.models.list() if "@" not in one.id]
    assert (found.id, found.max_input_tokens, found.type) == ("bundled", 131072, "model")


def test_a_suffix_is_refused_by_name(served: Served) -> None:
    with served.client() as client:
        body: dict[str, Any] = {"model": "bundled", "prompt": "a", "max_tokens": 2, "suffix": "b"}
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 400 and "suffix" in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == "suffix"
        assert client.post("/v1/completions", json=body | {"suffix": ""}).status_code == 200
