"""Room of an engine's tree for a workload's own texts, by `plan`: none is read twice for lack of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import retrieval_attn as ra
from retrieval_attn_eval.bench.serve.call import Call

__all__ = ["Room", "tree_bytes"]

NOT_HELD = ("process and staging",)
"""Of the plan's items for the host: what no text holds."""
HELD = ("sinks and window", "codes of keys", "clusters of coded keys")
"""Of the plan's items for the device: what a text that was read holds there."""


class Room(NamedTuple):
    """Bytes on the host, and on a GPU; of a model on a CPU, both are the host's."""

    host: int = 0
    device: int = 0


def tree_bytes(calls: Sequence[Call], model: Any, config: ra.Config, paged_prefix_tokens: int = 0) -> Room:
    """Most bytes, on the host and on a GPU, that the beginnings of these requests take while a tree holds all.

    A beginning is every part of a prompt but its last one. paged_prefix_tokens: beginnings of so many tokens have
    their keys in pages, which the number for the host bounds. Raises as `plan`.
    """
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    ends, parents = [0], [0]  # of each text: its tokens, and the text before its last part; 0: the empty text
    for parts in dict.fromkeys(call.request.parts[:-1] for call in calls):
        text = 0
        for part in parts:
            number = numbers.setdefault((text, part), len(ends))
            if number == len(ends):
                ends.append(ends[text] + len(part))
                parents.append(text)
            text = number
    held = {tokens: _held(tokens, model, config, paged_prefix_tokens) for tokens in set(ends[1:])}
    host = device = 0
    for number in range(1, len(ends)):  # a node holds what the text before it does not, and windows of its own
        tokens, before = ends[number], held.get(ends[parents[number]], Room())
        host += max(0, held[tokens].host - before.host)
        device += max(0, held[tokens].device - before.device) + _windows(model, config, tokens)
    return Room(host, device)


def _held(tokens: int, model: Any, config: ra.Config, paged_prefix_tokens: int) -> Room:
    """Of a text of so many tokens, sinks and windows left out."""
    # int8 rows take fewer bytes than pages in the model's dtype
    stored = config.replace(host_dtype="auto") if tokens <= paged_prefix_tokens else config
    ways = [stored]
    if stored.index == "auto" and on_gpu(model):  # what it chooses is known when it reads
        ways.append(stored.replace(index="device"))
    host = device = 0
    for way in ways:
        needs = ra.plan(model, context=tokens, gpu_memory=1 << 50, config=way, decide=False)
        host = max(host, sum(item.bytes for item in needs.host if item.name not in NOT_HELD))
        device = max(device, sum(item.bytes for item in needs.device if item.name in HELD[1:]))
    return Room(host, device)


def on_gpu(model: Any) -> bool:
    """Whether indexes of kind "device" are possible."""
    return bool(model.device.type == "cuda")


def _windows(model: Any, config: ra.Config, tokens: int) -> int:
    """Of one text: each node's cache has its own."""
    needs = ra.plan(model, context=tokens, gpu_memory=1 << 50, config=config, decide=False)
    return sum(item.bytes for item in needs.device if item.name == HELD[0])
