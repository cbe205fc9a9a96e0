"""Clients that are not ours, unmodified: `llm`, LangChain's ChatOpenAI, and the requests of vLLM's benchmark.

The extra `dev` brings `llm`; `pip install langchain-openai` the second.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import ANSWER, QUESTION, Served, document


def llm(folder: Path, *arguments: str, given: str | None = None) -> str:
    """What the client prints."""
    command = [sys.executable, "-m", "llm", *arguments]
    variables = {**os.environ, "LLM_USER_PATH": str(folder)}
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("llm") is None, reason="needs the client llm: pip install llm")
def test_llm_lists_asks_and_goes_on(served: Served, tmp_path: Path) -> None:
    """A document from its input, a stream, and a second turn of the conversation that it kept."""
    models = tmp_path / "extra-openai-models.yaml"
    models.write_text(f"- model_id: here\n  model_name: bundled\n  api_base: {served.url}/v1\n  api_key_name: none\n")
    assert "here" in llm(tmp_path, "models", "list")
    options = ("-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "16", "--key", "none")
    assert ANSWER in llm(tmp_path, "prompt", *options, "-s", document(), QUESTION)
    assert ANSWER in llm(tmp_path, "prompt", *options, "--no-stream", "-s", document(), QUESTION)
    assert ANSWER in llm(tmp_path, "prompt", *options, "-c", QUESTION)
    with served.client() as http:
        assert http.post("/v1/contexts", json={"name": "book", "text": document()}).status_code == 200
    models.write_text(
        f"- model_id: book\n  model_name: bundled@book\n  api_base: {served.url}/v1\n  api_key_name: none\n"
    )
    options = ("-m", "book", *options[2:])
    assert ANSWER in llm(tmp_path, "prompt", *options, QUESTION)


LANGCHAIN = """
import json, sys
import openai
from langchain_openai import ChatOpenAI

url, document, question = sys.argv[1:]
chat = ChatOpenAI(model="bundled", base_url=url, api_key="none", temperature=0, max_tokens=16, max_retries=0)
asked = [("system", document), ("human", question)]
whole = chat.invoke(asked)
pieces = [chunk.content for chunk in chat.stream(asked)]
again = chat.invoke([*asked, whole, ("human", question)])
logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(asked).response_metadata["logprobs"]["content"]
try:
    chat.invoke([("human", "the sky " * 70_000)])
    refused = None
except openai.BadRequestError as error:
    refused = error.code
print(json.dumps({
    "whole": whole.content, "pieces": pieces, "again": again.content, "usage": whole.usage_metadata["total_tokens"],
    "tokens": [one["token"] for one in logprobs], "refused": refused,
}))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("langchain_openai") is None, reason="needs LangChain: pip install langchain-openai"
)
def test_langchain_asks_streams_and_goes_on(served: Served) -> None:
    """In a process of its own: it warns of what other packages do."""
    command = [sys.executable, "-c", LANGCHAIN, f"{served.url}/v1", document(), QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert ANSWER in found["whole"] and "".join(found["pieces"]) == found["whole"] and ANSWER in found["again"]
    assert "".join(found["tokens"]) == found["whole"] and found["usage"] > 0
    assert found["refused"] == "context_length_exceeded"


def benchmark(served: Served, path: str, body: dict[str, Any]) -> tuple[str, int | None, list[Any]]:
    """Text, tokens and other chunks of a stream, read as vLLM's benchmark reads it (`endpoint_request_func.py`): a
    chunk has choices, or else the usage.
    """
    text, tokens, rest = "", None, []
    with served.client() as http, http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, reply.read().decode()
        for line in reply.iter_lines():
            if not line or line.startswith(":"):
                continue
            chunk = line.removeprefix("data: ")
            if chunk == "[DONE]":
                continue
            data = json.loads(chunk)
            if choices := data.get("choices"):
                delta = choices[0].get("delta")
                text += (choices[0].get("text") if delta is None else delta.get("content")) or ""
            elif usage := data.get("usage"):
                tokens = usage.get("completion_tokens")
            else:
                rest.append(data)
    return text, tokens, rest


def test_vllms_benchmark_of_completions(served: Served) -> None:
    """Every field that it sends; `ignore_eos` makes as many tokens as it asks for."""
    body = {
        "model": "bundled",
        "prompt": f"{document()}\n\nQuestion: {QUESTION}\nAnswer:",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 24,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    text, tokens, rest = benchmark(served, "/v1/completions", body)
    assert ANSWER in text and tokens == 24 and not rest


def test_vllms_benchmark_of_chat(served: Served) -> None:
    """The same with messages in parts, and `max_completion_tokens`."""
    body = {
        "model": "bundled",
        "messages": [{"role": "user", "content": [{"type": "text", "text": f"{document()}\n\n{QUESTION}"}]}],
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_completion_tokens": 24,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    text, tokens, rest = benchmark(served, "/v1/chat/completions", body)
    assert ANSWER in text and tokens == 24 and not rest
