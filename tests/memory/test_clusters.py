"""What clusters take of host and device: the plan's arithmetic against what is really held."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import retrieval_attn as ra
from retrieval_attn.cpu.store import SequenceKV, held_memory
from retrieval_attn.memory.device import mass_bytes
from retrieval_attn.memory.plan import plan
from tests.memory.test_plan import item, llama3_8b
from tests.tiny_models import build_model, random_ids

CONFIG = ra.Config(index="device", sink=4, window=16, retrieve=2)
ON_DEVICE = "clusters of coded keys"


def paths_of(cache: ra.RetrievalCache) -> list[SequenceKV]:
    return [host for number in range(len(cache.layers)) for host in cache.batch.hosts(number)]


def clusters_on_device(cache: ra.RetrievalCache) -> int:
    return sum(path.clusters.nbytes.device for path in paths_of(cache) if path.clusters is not None)


def read(config: ra.Config, tokens: int, batch: int = 1) -> tuple[Any, ra.RetrievalCache]:
    model: Any = ra.enable(build_model("llama"), config)
    cache = ra.RetrievalCache(model, config)
    with torch.no_grad():
        model(random_ids(batch, tokens), past_key_values=cache)
    return model, cache


def test_on_the_device_of_an_8b_model() -> None:
    """At 128K: a byte per key and head, 16 MiB of mean values, and 5.4 MiB more: what tells scores from codes, room
    for 4,096 keys, and the sums of a layer. Nothing without an estimate, and nothing where the host searches.
    """
    config = ra.Config(index="device")
    answer = plan(llama3_8b(), host_memory="64GiB", config=config)
    heads, tokens = 32 * 8, 1 << 17
    fixed = heads * (256 * 128 * 2 + 2 * 128 * 4 + 4096) + 32 * 132 * 256 * 4
    assert item(answer.device, ON_DEVICE) == heads * tokens + fixed
    assert fixed / 2**20 == pytest.approx(21.4, abs=0.05)
    for other in (config.replace(tail=False), config.replace(retrieve="all"), config.replace(index="flat")):
        assert item(plan(llama3_8b(), host_memory="64GiB", config=other).device, ON_DEVICE) == 0
    paper = plan(llama3_8b(), host_memory="64GiB", config=config.replace(tail=False))
    assert answer.device_bytes - paper.device_bytes == item(answer.device, ON_DEVICE)
    assert answer.decode_bytes - paper.decode_bytes == item(answer.device, ON_DEVICE)
    assert item(answer.host, "clusters") - heads * tokens == pytest.approx(232 * 2**20, rel=0.1)


@pytest.mark.parametrize("index", ["auto", "device"])
@pytest.mark.parametrize("tokens", [60, 300, 1500])
def test_on_the_host_what_a_read_made(index: str, tokens: int) -> None:
    """A byte for each key between sinks and window, and every array; two rows that share nothing."""
    model, cache = read(CONFIG.replace(index=index), tokens, batch=2)
    paths = paths_of(cache)
    found = [path.clusters for path in paths if path.clusters is not None]
    assert len(found) == len(paths)
    for late in (one.late for one in found):  # made when tokens come that have no codes
        assert (late is not None) == (index == "device")
    answer = plan(model.config, tokens, batch=2, config=CONFIG.replace(index=index), host_memory="4GiB")
    held = sum(path.clusters.nbytes.host for path in paths if path.clusters is not None)
    assert held == item(answer.host, "clusters") > 0
    stored = sum(held_memory([path]).host for path in paths)
    assert cache.host_nbytes == stored
    fork = cache.fork()
    assert held_memory(paths_of(fork)).host > sum(path.nbytes for path in paths)
    assert fork.host_nbytes == stored, "a fork has clusters of its own only once it changes them"


def test_on_the_device_what_generating_made() -> None:
    """On a CPU, too, codes and members lie on the model's device. The plan counts sinks and window as coded keys."""
    tokens = 1500
    model, cache = read(CONFIG, tokens)
    before = cache.device_nbytes
    assert clusters_on_device(cache) == 0
    with torch.no_grad():
        model(random_ids(1, 1), past_key_values=cache)
    held = clusters_on_device(cache)
    assert cache.device_nbytes == before + held > before
    indexes: list[Any] = cache.coded_indexes
    estimates = sum(index.codes.device.space.estimate.nbytes for index in indexes)
    shape = model.config
    planned = item(plan(shape, tokens, config=CONFIG, host_memory="4GiB").device, ON_DEVICE)
    sums = mass_bytes(1, shape.num_key_value_heads, shape.num_attention_heads)
    assert planned == held + estimates + sums + len(indexes) * (CONFIG.sink + CONFIG.window)


def allocated() -> int:
    """Bytes of a GPU's tensors; memory that another stream used counts until the allocator looks after its work."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


@pytest.mark.cuda
def test_a_gpu_holds_what_is_planned() -> None:
    """Allocated beside a read without estimates, in eager steps: what the plan says, but for a layer's sums."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 97}
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    shape = LlamaConfig(**sizes, **heads, max_position_embeddings=1 << 16, dtype="bfloat16")
    tokens, held = 40_000, {}
    for tail in (False, True, False, True):  # twice: what is kept between contexts is there then
        config = ra.Config(index="device", graph=False, tail=tail)
        before = allocated()  # of the last turn
        model: Any = ra.enable(AutoModelForCausalLM.from_config(shape).cuda(), config)
        cache = ra.RetrievalCache(model, config)
        with torch.no_grad():
            model(torch.randint(97, (1, tokens), device="cuda"), past_key_values=cache)
            for _ in range(3):
                model(torch.randint(97, (1, 1), device="cuda"), past_key_values=cache)
        held[tail] = allocated() - before
        del model, cache
    planned = item(plan(shape, tokens, config=ra.Config(index="device"), host_memory="4GiB").device, ON_DEVICE)
    expected = planned - mass_bytes(1, 8, 32)
    assert expected - (1 << 19) < held[True] - held[False] < expected + (1 << 19)
