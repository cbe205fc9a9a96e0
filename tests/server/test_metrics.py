"""What a server's metrics say of its engine: each is made to move, on a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from retrieval_attn.engine.background_saves import DiskCounts
from retrieval_attn.engine.counts import Counts, TierTokens
from retrieval_attn.server.metrics import PREFIX_CACHE, PREFIX_CACHE_EVENTS, Metrics
from retrieval_attn.store import ContextStore
from tests.server.process import QUESTION, document, saved, serving
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
SECONDS = ("engine_step_seconds_total", "host_stall_seconds_total", "engine_host_seconds_total")


def samples(http: httpx.Client) -> dict[str, float]:
    """Numbers by name and labels, without the prefix."""
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith("retrieval_attn:")]
    return {
        name.removeprefix("retrieval_attn:"): float(value) for name, _, value in (one.rpartition(" ") for one in lines)
    }


def moved(http: httpx.Client, before: dict[str, float], what: str) -> dict[str, float]:
    """By tier, how much more there is of it."""
    now = samples(http)
    keys = {tier: f'tier_{what}_total{{tier="{tier}"}}' for tier in TierTokens._fields}
    return {tier: now[key] - before[key] for tier, key in keys.items()}


def asked(http: httpx.Client, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    if "model" not in options:
        messages.insert(0, {"role": "system", "content": document()})
    body = {"model": "bundled", "messages": messages, "temperature": 0, "max_tokens": 12, **options}
    reply = http.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.slow
def test_steps_spills_and_tiers(tmp_path: Path) -> None:
    """Of a server that saves a context, and of the one that opens it and has prefixes beside the model."""
    store = "--store", str(tmp_path / "store"), "--warm-up", "0"
    with serving(*store, "--window", "64", preloaded=True) as served, served.client() as http:
        first = samples(http)
        assert first["engine_steps_total"] == first["window_evictions_total"] == first["damaged_blocks_total"] == 0
        assert cached(asked(http)) == 0 and not any(moved(http, first, "hits").values())
        known = cached(asked(http))
        assert known > 800
        assert moved(http, first, "hits") == {"device": 0, "memory": 1, "disk": 0}
        assert moved(http, first, "hit_tokens") == {"device": 0, "memory": known, "disk": 0}
        some = samples(http)
        step, waiting, host = (some[name] for name in SECONDS)
        assert some["engine_steps_total"] >= 10 and 0 < host <= waiting < step
        assert some["window_evictions_total"] == 0
        # as many tokens as the window has gather behind it, then they move to the host
        body = {"model": "bundled", "prompt": document(), "max_tokens": 80, "temperature": 0}
        tokens = http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"]
        assert tokens > 64 and samples(http)["window_evictions_total"] == tokens // 64
        record = saved(http, name="book", text=document())
    with serving(*store, "--paged-prefix-tokens", "1024", preloaded=True) as served, served.client() as http:
        first = samples(http)
        assert cached(asked(http, model="bundled@book")) == record["tokens"]
        assert moved(http, first, "hit_tokens") == {"device": 0, "memory": 0, "disk": record["tokens"]}
        assert cached(asked(http, model="bundled@book")) == record["tokens"]
        assert moved(http, first, "hits") == {"device": 0, "memory": 1, "disk": 1}
        asked(http)
        known = cached(asked(http))
        assert moved(http, first, "hits") == {"device": 1, "memory": 1, "disk": 1}
        assert moved(http, first, "hit_tokens")["device"] == known > 800
        assert samples(http)["damaged_blocks_total"] == 0


@pytest.mark.slow
def test_texts_that_memory_has_no_room_for(tmp_path: Path) -> None:
    """They come back from the disk with equal answers, by the server's own choices; only prompts reach them."""
    texts = [f"{number} {document(70)}" for number in range(6)]
    bounded = "--prefix-cache-memory", "32MiB", "--retrieve", "all", "--warm-up", "0"
    with serving("--store", str(tmp_path / "store"), *bounded, preloaded=True) as served, served.client() as http:

        def told(text: str) -> dict[str, Any]:
            body = {"model": "bundled", "prompt": f"{text} {QUESTION}", "temperature": 0, "max_tokens": 12}
            reply = http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            found: dict[str, Any] = reply.json()
            return found

        first = [told(text) for text in texts]
        before = samples(http)
        again = [told(text) for text in texts]
        now = samples(http)
        assert [one["choices"][0]["text"] for one in again] == [one["choices"][0]["text"] for one in first]
        loads, evictions = now["prefix_cache_disk_loads_total"], now["prefix_cache_disk_evictions_total"]
        assert before["prefix_cache_disk_loads_total"] == 0 and loads >= 3 and evictions >= 3
        assert now["prefix_cache_disk_saves_total"] >= evictions and now["prefix_cache_disk_removals_total"] == 0
        assert now["prefix_cache_disk_saved_bytes_total"] > now["prefix_cache_disk_loaded_bytes_total"] / 3 > 0

        def sizes() -> tuple[float, float, float]:
            """Bytes of arrays, with the headers of their files, with the records of nodes."""
            numbers = samples(http)
            names = "prefix_cache_disk_saved_bytes_total", "prefix_cache_disk_bytes"
            return numbers[names[0]], numbers[names[1]], ContextStore(tmp_path / "store").nbytes()

        def are_right(arrays: float, files: float, nodes: float) -> bool:
            return arrays < files < nodes < 1.01 * arrays

        wait_until(lambda: are_right(*sizes()), sizes, pause=0.1)  # a write may be under way
        assert moved(http, before, "hits")["disk"] == loads and moved(http, before, "hit_tokens")["disk"] > 1000 * loads
        assert sum(cached(one) > 1000 for one in again) == len(texts), [cached(one) for one in again]
        name = next(one.name for one in ContextStore(tmp_path / "store").list())
        assert http.get("/v1/contexts").json()["data"] == []
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["bundled"]
        body = {"model": f"bundled@{name}", "messages": [{"role": "user", "content": QUESTION}]}
        replies = http.get(f"/v1/contexts/{name}"), http.delete(f"/v1/contexts/{name}"), http.post(CHAT, json=body)
        assert [one.status_code for one in replies] == [404] * 3
        fork = http.post(f"/v1/contexts/{name}/fork", json={"name": "mine"})
        more = http.post(f"/v1/contexts/{name}/save", json={"name": "mine", "text": "more"})
        assert (fork.status_code, more.status_code) == (404, 404)


def test_the_share_of_waiting() -> None:
    """What the model did not take of a step, and what the host took of the model's time, is waiting."""
    counts = Counts()
    for host, device, seconds in ((0.25, 0.75, 1.0), (0.0, 1.0, 1.0)):
        counts.add_step(2, 1, seconds, host, device)
    plain = counts.plain
    assert (plain["steps"], plain["window_evictions"], counts.rows) == (2, 2, 4)
    assert (plain["step_seconds"], plain["host_seconds"], plain["host_stall_seconds"]) == (2.0, 0.25, 0.5)


def stats_of(counts: Counts) -> dict[str, Any]:
    """Statistics of an idle engine with these counts."""
    return {
        "rows": 0,
        "waiting": 0,
        "saves_running": 0,
        "saves_failed": 0,
        "slot_utilization": 0.0,
        "waiting_gpu_memory": 0,
        "shared": dict.fromkeys([*PREFIX_CACHE, *PREFIX_CACHE_EVENTS], 0),
        **counts.plain,
        **DiskCounts()._asdict(),
    }


def test_counters_go_on_when_an_engine_begins_anew() -> None:
    """A process of its own that was lost counts from 0 again; the server's counters never go back."""
    metrics, stats = Metrics(), stats_of(Counts())
    for evictions, total in ((3, 3), (5, 5), (0, 5), (2, 7)):
        text = metrics.text({**stats, "window_evictions": evictions}, 0).decode()
        assert f"retrieval_attn:window_evictions_total {total}.0" in text


def test_drafts_have_the_names_of_vllm() -> None:
    counts = Counts()
    counts.add_drafts(7, 5)
    counts.add_drafts(3, 0)
    text = Metrics().text(stats_of(counts), 0).decode()
    assert "retrieval_attn:spec_decode_num_draft_tokens_total 10.0" in text
    assert "retrieval_attn:spec_decode_num_accepted_tokens_total 5.0" in text


def damage(store: ContextStore, name: str, array: str) -> None:
    """Change 64 bytes in the middle of an array of the context's last layer."""
    node = store.get(store.resolve(name).digest)
    path = max(path for path in store.files(node.digest) if path.stem.startswith("layer"))
    flat = node.bundle(path.stem, verify=False).arrays[array].reshape(-1).view(np.uint8)
    middle = flat[len(flat) // 2 :][:4096].tobytes()
    data = bytearray(path.read_bytes())
    at = data.find(middle)
    assert at > 0 and len(middle) > 64
    data[at : at + 64] = bytes(one ^ 0x55 for one in data[at : at + 64])
    del node, flat
    path.chmod(0o600)
    path.write_bytes(bytes(data))


@pytest.mark.slow
def test_a_damaged_context_is_read_again(tmp_path: Path) -> None:
    """Keys of one, and an index of another: after a restart the answers are those from before, what was read is told,
    and the log names the context. One whose token ids are damaged is an error, and the server goes on.
    """
    store = ContextStore(tmp_path / "store")
    arguments = "--store", str(tmp_path / "store"), "--warm-up", "0", "--index", "sketch"
    names = {"keys": "host/0/keys", "index": "host/0/index/all/rows"}
    with serving(*arguments, preloaded=True) as served, served.client() as http:
        records = {
            name: saved(http, name=name, text=document(30 + 10 * number)) for number, name in enumerate((*names, "ids"))
        }
        before = {name: asked(http, model=f"bundled@{name}", logprobs=True) for name in names}
    for name, array in names.items():
        damage(store, name, array)
    (path,) = [one for one in store.files(store.resolve("ids").digest) if one.stem == "ids"]
    data = bytearray(path.read_bytes())
    data[4096 + 40] ^= 1
    path.chmod(0o600)
    path.write_bytes(bytes(data))
    with serving(*arguments, preloaded=True) as served, served.client() as http:
        for number, name in enumerate(names):
            first, second = (asked(http, model=f"bundled@{name}", logprobs=True) for _ in range(2))
            assert first["choices"] == second["choices"] == before[name]["choices"]
            assert (cached(first), cached(second)) == (0, records[name]["tokens"])
            assert samples(http)["damaged_blocks_total"] == number + 1
            assert [line for line in served.log if f"{name!r} is damaged" in str(line)], served.log
        body = {"model": "bundled@ids", "messages": [{"role": "user", "content": QUESTION}]}
        for _ in range(2):
            reply = http.post(CHAT, json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (500, "context_damaged"), reply.text
        assert http.get("/health").status_code == 200 and cached(asked(http, model="bundled@keys")) > 0
