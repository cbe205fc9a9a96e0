"""What the tests of captured decode steps share: configurations, a greedy decoding step by step, and an error."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import retrieval_attn as ra
from retrieval_attn.attention.cache import RetrievalCache
from retrieval_attn.config import GraphMode
from retrieval_attn.errors import BackendError
from retrieval_attn.index.device import PLANNED
from retrieval_attn.runner.decode import DecodeSteps, forward, positions
from retrieval_attn.runner.forget import forget_tokens
from retrieval_attn.runner.graph import pool as graph_pool
from retrieval_attn.runner.graph.decoder import GraphDecoder
from retrieval_attn.runner.graph_runner import GraphRunner
from retrieval_attn.runner.rows import RowsFailedError
from tests.tiny_models import random_ids, tiny_model

SMALL: dict[str, Any] = {"sink": 4, "window": 16, "retrieve": 12, "index": "flat"}
CONFIG = ra.Config(**SMALL)
# so few keys that even a small retrieve is needed for a graph to be searched at all
ROARGRAPH: dict[str, Any] = {"index": "roargraph", "retrieve": 2}
"""With the fixture `small_graphs`."""
DEVICE: dict[str, Any] = {"index": "device", "retrieve": 2, "index_options": {"key_bytes": 64}}
# so many keys per key that is wanted that more are picked than named, and so long a prompt that codes are asked at all
FINER: dict[str, Any] = {
    **DEVICE, "index": PLANNED, "index_options": {"key_bytes": 8, "rescore": 36, "finer_bytes": 16},
}  # fmt: skip
DEVICE_CASES: dict[str, dict[str, Any]] = {
    "device": {"config": CONFIG.replace(**DEVICE), "prompt": 200},
    "device padded": {"config": CONFIG.replace(**DEVICE), "prompt": 200, "batch": 2, "padded": 5},
    "device one short": {"config": CONFIG.replace(**DEVICE), "prompt": 200, "batch": 2, "padded": 190, "new": 30},
    "device shared": {"config": CONFIG.replace(**DEVICE), "prompt": 400, "repeats": 2},
    "device finer": {"config": CONFIG.replace(**FINER), "prompt": 400, "batch": 2, "seed": 1},
}
CASES: dict[str, dict[str, Any]] = {
    "batch": {"batch": 2},
    "padded": {"batch": 2, "padded": 5},
    "shared": {"repeats": 3},
    "shared budgets": {"repeats": 3, "prompt": 500, "config": CONFIG.replace(retrieve="auto")},
    "shared padded": {"batch": 2, "repeats": 2, "padded": 5},
    "spill always": {"config": CONFIG.replace(window=1, sink=0), "new": 5},
    "grows into retrieval": {"prompt": 14, "new": 40},
    "padded grows": {"batch": 2, "padded": 5, "prompt": 14, "new": 40},
    "roargraph": {"config": CONFIG.replace(**ROARGRAPH), "prompt": 200},
    **DEVICE_CASES,
}
MODELS = ("llama31", "qwen3", "gemma2", "gemma3", "gemma4", "mistral_sliding", "gpt_oss", "qwen3_moe")
PROMPT, NEW = 60, 12  # spills after 8 tokens


def enabled(name: str) -> Any:
    """A copy of the model that retrieves."""
    return ra.enable(copy.deepcopy(tiny_model(name)), CONFIG)


def graph_step(
    runner: GraphRunner, caches: Sequence[RetrievalCache], tokens: Sequence[int], places: Sequence[int]
) -> Tensor:
    """Append one token to each cache, unsampled. Returns logits (rows, vocabulary). Raises as `rows.step`."""
    stepped = runner.advance(caches, list(zip(tokens, places, strict=True)))
    assert stepped.logits is not None
    if stepped.errors:
        raise RowsFailedError(stepped.errors, stepped.logits)
    return stepped.logits


def decoder_of(steps: DecodeSteps) -> Any:
    """Memory and graphs of the steps of a cache; None if they run eagerly."""
    return None if steps.pool is None else next((one.decoder for one in steps.pool.graphs.values()), None)


def idle_decoders(model: Any) -> list[GraphDecoder]:
    """Those that a model keeps for its next cache, the newest last."""
    return [graph.decoder for pool in graph_pool._idle.get(model, []) for graph in pool.graphs.values()]


def padded_mask(batch: int, tokens: int, padded: int) -> Tensor:
    """Row i begins with padded * i padded columns."""
    return torch.arange(tokens)[None] >= padded * torch.arange(batch)[:, None]


class Decoded:
    """Logits of the prompt's last token and of `new` tokens after it, chosen greedily; and what decoded them.

    follows: decode the tokens that this one chose instead. seed: of the prompt.
    """

    def __init__(
        self,
        model: Any,
        graph: GraphMode,
        *,
        config: ra.Config = CONFIG,
        batch: int = 1,
        repeats: int = 1,
        padded: int = 0,
        prompt: int = PROMPT,
        new: int = NEW,
        forgotten: tuple[int, int] | None = None,
        seed: int = 0,
        follows: Decoded | None = None,
    ) -> None:
        self.cache = ra.RetrievalCache(model, config, check=False)
        device = model.device
        mask = padded_mask(batch, prompt, padded).to(device) if padded else None
        place = positions(torch.ones(batch, prompt, device=device) if mask is None else mask)
        with torch.no_grad():
            logits = forward(
                model, self.cache, random_ids(batch, prompt, seed).to(device), mask=mask, position_ids=place
            )
        if forgotten is not None:
            forget_tokens(self.cache, model, *forgotten)
        self.cache.batch_repeat_interleave(repeats)
        logits, position = logits.repeat_interleave(repeats, 0), place[:, -1].repeat_interleave(repeats)
        # rows that share a path must not stay equal
        logits = logits + 3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(device)
        mask = None if mask is None else mask.repeat_interleave(repeats, 0)
        self.logits = [logits]
        self._tokens = self.logits if follows is None else follows.logits
        self.steps = DecodeSteps(model, self.cache, graph)
        try:
            self._decode(new, position, mask)
        finally:
            self.decoder: Any = decoder_of(self.steps)
            self.steps.close()

    @torch.no_grad()
    def _decode(self, new: int, position: Tensor, mask: Tensor | None) -> None:
        for step in range(new):
            position = position + 1
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = self.steps.step(self._tokens[step].argmax(-1), position, mask)
            self.logits.append(logits.clone())
            self.logits[-1].tolist()  # waits for the device
            self.steps.confirm()

    def difference(self, other: Decoded) -> float:
        """Largest difference of logits; the tokens must be the same."""
        return float(self.differences(other).max())

    def differences(self, other: Decoded) -> Tensor:
        """Largest difference of logits in each step; tokens that both chose must be the same."""
        mine, others = torch.stack(self.logits), torch.stack(other.logits)
        found = (mine - others).abs().flatten(1).amax(dim=1)
        if self._tokens is self.logits:
            assert torch.equal(mine.argmax(-1), others.argmax(-1)), found.tolist()
        return found


def broken_search(model: Any, graph: GraphMode) -> None:
    """A graph whose index names tokens that are not there: an error of that search, then repaired, then equal."""
    decoded = Decoded(model, graph, config=CONFIG.replace(**ROARGRAPH), prompt=200, new=1)
    host: Any = decoded.cache.layers[1]
    found = host.hosts[0].segments[0].indexes[1].search_arguments().graph
    ids, before = found.ids.copy(), decoded.cache.get_seq_length()
    token, place = torch.tensor([5], device=model.device), torch.tensor([before], device=model.device)
    expected = decoded.cache.fork()
    steps = DecodeSteps(model, decoded.cache, graph)
    found.ids[:] = -5
    steps.step(token, place, None).tolist()
    with pytest.raises(BackendError, match="layer 1, sequence 0, key-value head 1, query . of its group: its index"):
        steps.confirm()
    assert decoded.cache.get_seq_length() == before
    found.ids[:] = ids
    again = steps.step(token, place, None).clone()
    again.tolist()
    steps.confirm()
    steps.close()
    assert decoded.decoder.captures == 1 and decoded.cache.get_seq_length() == before + 1
    wanted = forward(model, expected, token[None], mask=None, position_ids=place[None])
    assert (again - wanted).abs().max() <= 2e-5


def greedily(model: Any, ids: Tensor, graph: GraphMode) -> Tensor:
    """Twelve tokens by transformers' generate and our loop, from a new cache."""
    cache = ra.RetrievalCache(model, CONFIG.replace(graph=graph))
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
    out: Tensor = model.generate(ids, custom_generate=ra.generate, past_key_values=cache, **options)
    return out
