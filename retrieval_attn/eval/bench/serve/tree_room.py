"""Room of an engine's tree for a workload's own texts, by `plan`: none is read twice for lack of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import retrieval_attn as ra
from retrieval_attn.eval.bench.serve.call import Call

__all__ = ["tree_bytes"]

NOT_HELD = ("process and staging",)
"""Of the plan's items for the host: what no text holds."""
HELD = ("sinks and window", "codes of keys", "clusters of coded keys")
"""Of the plan's items for the device: what a text that was read holds there."""


def tree_bytes(calls: Sequence[Call], model: Any, config: ra.Config, exact_tokens: int = 0) -> int:
    """Most bytes, on the host and on the device, that the beginnings of these requests take while a tree holds all.

    A beginning is every part of a prompt but its last one. exact_tokens: beginnings of so many tokens have their keys
    in pages, which the same number bounds. Raises as `plan`.
    """
    texts: dict[tuple[tuple[int, ...], ...], int] = {}
    for parts in dict.fromkeys(call.request.parts[:-1] for call in calls):
        for end in range(1, len(parts) + 1):
            texts[parts[:end]] = sum(map(len, parts[:end]))
    sizes = {tokens: _whole_bytes(tokens, model, config, exact_tokens) for tokens in set(texts.values())}
    sizes[0] = 0
    # a node holds what the text before it does not
    return sum(
        max(0, sizes[tokens] - sizes[texts.get(parts[:-1], 0)]) + _windows(model, config, tokens)
        for parts, tokens in texts.items()
    )


def _whole_bytes(tokens: int, model: Any, config: ra.Config, exact_tokens: int) -> int:
    """Of a text of so many tokens, sinks and windows left out."""
    # int8 rows take fewer bytes than pages in the model's dtype
    stored = config.replace(host_dtype="auto") if tokens <= exact_tokens else config
    needs = ra.plan(model, context=tokens, gpu_memory=1 << 50, config=stored)
    host = sum(item.bytes for item in needs.host if item.name not in NOT_HELD)
    return host + sum(item.bytes for item in needs.device if item.name in HELD[1:])


def _windows(model: Any, config: ra.Config, tokens: int) -> int:
    """Of one text: each node's cache has its own."""
    needs = ra.plan(model, context=tokens, gpu_memory=1 << 50, config=config)
    return sum(item.bytes for item in needs.device if item.name == HELD[0])
