"""Runs two replicas of the bundled model, asks them, kills one; the last line is JSON of what was found."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from typing import Any

import httpx
import ray
from ray import serve

from deploy.ray_app import Options, app

TEXTS, TIMES = 10, 6
WORDS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def said(number: int, question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Text {number}. {WORDS * 8}\n\n{question}"}]


async def sessions(client: httpx.AsyncClient) -> dict[str, list[str]]:
    """Who answered each turn of sessions by the Messages API and of conversations by the Responses API."""
    found: dict[str, list[str]] = {}
    system = [{"type": "text", "text": WORDS * 8}]
    previous: dict[int, str] = {}
    for turn in range(TIMES):
        for number in range(TEXTS // 2):
            said_now = {"role": "user", "content": f"Turn {turn} of {number}?"}
            body = {"model": "bundled", "max_tokens": 4, "system": system, "messages": [said_now]}
            answer = await client.post("/v1/messages", json=body, headers={"x-session-id": f"session {number}"})
            assert answer.status_code == 200, answer.text
            found.setdefault(f"messages {number}", []).append(answer.headers["x-replica"])
            one: dict[str, Any] = {
                "model": "bundled",
                "max_output_tokens": 4,
                "input": f"Input {turn} of {number}? {WORDS}",
            }
            if number in previous:
                one["previous_response_id"] = previous[number]
            answer = await client.post("/v1/responses", json=one)
            assert answer.status_code == 200, answer.text
            previous[number] = answer.json()["id"]
            found.setdefault(f"responses {number}", []).append(answer.headers["x-replica"])
    found["last"] = list(previous.values())
    return found


async def ask(client: httpx.AsyncClient, **body: Any) -> tuple[str, str, dict[str, Any]]:
    """Its status, "broken" for a stream that ended early; who answered; usage."""
    body = {"max_tokens": 4, "temperature": 0, "model": "bundled", **body}
    try:
        answer = await client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError:
        return "broken", "", {}
    broken = "The replica ended" in answer.text
    if answer.status_code != 200 or broken:
        print(answer.status_code, answer.text[-500:], file=sys.stderr)
    usage = answer.json().get("usage", {}) if answer.status_code == 200 and not body.get("stream") else {}
    return "broken" if broken else str(answer.status_code), answer.headers.get("x-replica", ""), usage


async def measured(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = {"documents": {}, "contexts": {}}
    cached = prompts = 0
    for turn in range(TIMES):
        for number in range(TEXTS):
            _, place, usage = await ask(client, messages=said(number, f"Question {turn}?"))
            found["documents"].setdefault(str(number), []).append(place)
            if turn:
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                prompts += usage["prompt_tokens"]
    found["cached"] = cached / prompts
    for number in range(TEXTS // 2):
        await client.post("/v1/contexts", json={"name": f"text-{number}", "text": f"Saved {number}. {WORDS * 8}"})
    for turn in range(TIMES):
        for number in range(TEXTS // 2):
            question = [{"role": "user", "content": f"Question {turn}?"}]
            _, place, _ = await ask(client, messages=question, context=f"text-{number}")
            found["contexts"].setdefault(str(number), []).append(place)
    found["sessions"] = await sessions(client)
    found["last"] = found["sessions"].pop("last")
    found["unknown"] = int((await ask(client, messages=said(0, "?"), context="nobody"))[0])
    found["too_large"] = (await client.post("/v1/completions", content=b"x" * (2 << 20))).status_code
    await disconnects(client)
    found["running_after_disconnects"] = await running(client)
    metrics = (await client.get("/metrics")).text
    found["replicas_in_metrics"] = sum(line.startswith("retrieval_attn:engine_up{") for line in metrics.splitlines())
    found["contexts_before_kill"] = await contexts(client)
    await killed(client, found)
    return found


async def disconnects(client: httpx.AsyncClient) -> None:
    for number in range(4):
        body = {"model": "bundled", "max_tokens": 2000, "temperature": 2.0, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json={**body, "messages": said(number, "?")}) as one:
            async for _ in one.aiter_lines():
                break


async def running(client: httpx.AsyncClient) -> float:
    """Rows of all replicas, once they had time to hear that nobody listens."""
    rows = 1.0
    deadline = time.monotonic() + 60
    while rows and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        lines = (await client.get("/metrics")).text.splitlines()
        rows = sum(float(line.split()[-1]) for line in lines if line.startswith("retrieval_attn:num_requests_running{"))
    return rows


async def contexts(client: httpx.AsyncClient) -> list[str]:
    return sorted(one["id"] for one in (await client.get("/v1/contexts")).json()["data"])


async def killed(client: httpx.AsyncClient, found: dict[str, Any]) -> None:
    """One replica, while both have work; then each saved context is asked."""
    handle = serve.get_deployment_handle("Replica", "default")
    pids = await handle.broadcast("pid").results_async(timeout_s=20)
    asked = [
        asyncio.create_task(ask(client, messages=said(number, "?"), max_tokens=150, temperature=2.0, stream=True))
        for number in range(TEXTS)
    ]
    await asyncio.sleep(1.0)
    os.kill(pids[0], signal.SIGKILL)
    found["under_way"] = dict(Counter([(await one)[0] for one in asked]))
    names = await contexts(client)
    found["contexts_after_kill"] = names
    after = [await ask(client, messages=[{"role": "user", "content": "?"}], context=name) for name in names]
    found["after_kill"] = dict(Counter(status for status, _, _ in after))
    found["asked_after_kill"] = len(names)
    found["responses_after_kill"] = [(await client.get(f"/v1/responses/{one}")).status_code for one in found["last"]]


async def main(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await measured(client)


if __name__ == "__main__":
    ray.init(num_cpus=4, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = Options(store=sys.argv[1], cpus=0.5, warm_up=0, max_context=8192, body_bytes=1 << 20)
    serve.run(app(options), name="default")
    result = asyncio.run(main(f"http://127.0.0.1:{port}"))
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(result))
