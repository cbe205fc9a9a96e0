"""Reading a text and feeding what follows it, token by token, through full attention and through each method.

All get the same ids at the same positions. Full attention, the reference, is transformers' own over its DynamicCache:
nothing of this package takes part. Everything decodes eagerly, one token per forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrieval_attn import RetrievalCache
from retrieval_attn.config import Config
from retrieval_attn.errors import ConfigError, UnsupportedModelError
from retrieval_attn.testing import DecodeSteps, RetrievalLayer, finish_prefill, forward, spare_bytes, using_retrieval
from retrieval_attn_eval.baselines.reader import ContextReader, forward_at
from retrieval_attn_eval.baselines.registry import make_method
from retrieval_attn_eval.baselines.retrieval import attended_tokens
from retrieval_attn_eval.bench.fidelity.captured_mass import CapturedMass
from retrieval_attn_eval.bench.fidelity.head_error import HeadErrors
from retrieval_attn_eval.bench.fidelity.texts import FedText

__all__ = ["Budget", "Fed", "feed_full", "feed_index", "feed_policies", "read"]

Budget = int | float | str
"""Keys that a head retrieves, as `Config.retrieve`: a number, "all" or "auto"."""


@dataclass(frozen=True)
class Fed:
    """What came out. logits: (tokens, vocabulary) float32 on the CPU, row i after forced token i. tail: whether what
    was not retrieved was estimated.

    attended: tokens that a query attended to, mean over tokens, layers and key-value heads; None: not counted.
    captured: share of exact attention's weight that was attended to; None: not measured. estimated: share of the run's
    own weight that was estimated, mean over heads and layers; None: nothing was. head_errors: per layer, (q_heads,
    tokens), relative errors of heads' outputs (`head_error.py`); empty: not measured. refused: why there are no logits.
    """

    budget: Budget | None
    logits: Tensor
    tail: bool = False
    attended: float | None = None
    captured: float | None = None
    estimated: float | None = None
    head_errors: Sequence[Tensor] = ()
    refused: str = ""


SCORE_BYTES = 2 << 30
"""Of one layer at most that full attention holds at once without a GPU: float32, of all heads."""
MASK_BYTES, MASK_SHARE = 8, 4
"""Of a query and a key where a GPU masks them, and the share of its free memory that masks may take: kernels hold the
mask and copies of it, and no scores. 2,048 queries take hardly longer than 512, 70 and 57 ms over 512K keys (H100)."""


@torch.no_grad()
def read(model: Any, config: Config, ids: Tensor) -> tuple[RetrievalCache, Tensor]:
    """Prefill ids (batch, tokens) as `Context.read` does. Return the cache and the last logits (batch, vocabulary).

    Index builds may still be running.
    """
    cache = RetrievalCache(model, config)
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    with using_retrieval(model, config.prefill_chunk):
        return cache, forward(model, cache, ids, mask=None, position_ids=positions)


@torch.no_grad()
def feed_full(model: Any, text: FedText) -> Fed:
    """Full attention by the model as transformers made it."""
    from transformers import DynamicCache

    text_config = model.config.get_text_config(decoder=True)
    cache: Any = DynamicCache(config=text_config)
    ids = text.ids[: text.context].tolist()
    if model.device.type == "cuda":
        held, pair_bytes = spare_bytes(model.device) // MASK_SHARE, MASK_BYTES
    else:
        held, pair_bytes = SCORE_BYTES, 4 * text_config.num_attention_heads
    at_once = max(1, held // (pair_bytes * len(ids)))
    for start in range(0, len(ids), at_once):
        forward_at(model, cache, ids[start : start + at_once], start)
    rows = [forward_at(model, cache, [token], text.context + at) for at, token in enumerate(text.forced.tolist())]
    return Fed(None, torch.cat(rows).cpu(), attended=text.context + (len(rows) + 1) / 2)


def feed_index(
    model: Any,
    config: Config,
    text: FedText,
    budgets: Sequence[Budget],
    mass_heads: int,
    *,
    head_error: bool = False,
    tails: Sequence[bool] | None = None,
    captured: bool = False,
) -> Iterator[Fed]:
    """This package, with `config`'s index: one reading for all budgets, each on a fork of it.

    mass_heads: query heads per layer whose captured weight is measured, in turn; 0: none. head_error: whether heads'
    outputs are compared with exact attention. tails: every budget once with each of these; None: with `config.tail`.
    Where everything is retrieved nothing is estimated: once, and without. "auto": with a tail only. captured: tokens
    are fed by captured steps, without what is measured beside logits, but not where everything is retrieved.
    """
    tails = (bool(config.tail),) if tails is None else tails
    ids = torch.from_numpy(text.ids[None, : text.context].copy()).to(model.device)
    # what each head gets is measured when the text is read
    measured = {"retrieve": "auto"} if "auto" in budgets and any(tails) else {}
    held, _ = read(model, config.replace(tail=any(tails), **measured), ids)
    finish_prefill(held)
    runs = [(budget, tail and budget != "all") for tail in tails for budget in budgets]
    runs = [(budget, tail) for budget, tail in runs if tail or budget != "auto"]
    for budget, tail in dict.fromkeys(runs):
        errors = HeadErrors() if head_error else None
        fork = _fork(held, budget, tail)
        mass = CapturedMass(fork, mass_heads) if mass_heads else None
        fed = (
            _feed_captured(model, fork, text)
            if captured and budget != "all"
            else _feed_fork(model, fork, text, errors, mass)
        )
        yield replace(fed, budget=budget, tail=tail)


def _fork(held: RetrievalCache, budget: Budget, tail: bool) -> RetrievalCache:
    """A continuation of its own with these options; without a tail it forgets the clusters that it shares."""
    cache = held.fork()
    for layer in _layers(cache):
        layer.config = layer.config.replace(retrieve=budget, tail=tail)
        for host in layer.hosts if not tail else ():
            host.clusters = None
    return cache


def _layers(cache: RetrievalCache) -> list[RetrievalLayer]:
    return [layer for layer in cache.layers if isinstance(layer, RetrievalLayer)]


@torch.no_grad()
def _feed_fork(
    model: Any, cache: RetrievalCache, text: FedText, errors: HeadErrors | None, mass: CapturedMass | None
) -> Fed:
    rows, attended = [], []
    watched = nullcontext() if errors is None else errors.watching(cache, text.context)
    with using_retrieval(model, cache.config.prefill_chunk), watched:
        for at, token in enumerate(text.forced.tolist()):
            rows.append(forward_at(model, cache, [token], text.context + at))
            attended += [seen for layer in _layers(cache) if (seen := attended_tokens(layer, 1)) is not None]
    shares = [layer.means() for layer in cache.tail_shares().values()]
    return Fed(
        None,
        torch.cat(rows).cpu(),
        attended=sum(attended) / len(attended) if attended else None,
        captured=None if mass is None else mass.mean(),
        estimated=float(np.concatenate(shares).mean()) if any(map(len, shares)) else None,
        head_errors=() if errors is None else errors.result(),
    )


@torch.no_grad()
def _feed_captured(model: Any, cache: RetrievalCache, text: FedText) -> Fed:
    rows, steps = [], DecodeSteps(model, cache, True)
    with using_retrieval(model, cache.config.prefill_chunk):
        try:
            for at, token in enumerate(text.forced.tolist()):
                place = torch.tensor([text.context + at], device=model.device)
                rows.append(steps.step(torch.full_like(place, token), place, None).clone().cpu())
                steps.confirm()
        finally:
            steps.close()
    return Fed(None, torch.cat(rows))


def feed_policies(
    model: Any,
    tokenizer: Any,
    names: Sequence[str],
    config: Config,
    text: FedText,
    budgets: Sequence[Budget],
    head_error: bool = False,
) -> Iterator[tuple[str, Fed]]:
    """The published methods. A method attends to as many tokens as this package does: sinks, window and budget.

    One exact reading serves all that read with full attention; a method that cannot run so is refused, with the reason.
    """
    reader = ContextReader(model, Config(index="flat", prefill_chunk=config.prefill_chunk, threads=config.threads))
    nothing = torch.empty(0, 0)
    made: list[tuple[str, Budget, Any]] = []
    for name in names:
        for budget in budgets:
            try:
                tokens = _attended_with(config, budget, text)
                made.append((name, budget, make_method(name, model, tokenizer, budget=tokens, shared=reader)))
            except (ConfigError, UnsupportedModelError) as error:
                yield name, Fed(budget, nothing, refused=str(error))
    for name, budget, method in made:
        errors = HeadErrors() if head_error else None
        watch = None if errors is None else errors.watching
        logits, stats = method.forced(text.ids[: text.context], text.forced.tolist(), watch)
        attended = stats["tokens_attended_per_step"]
        found = () if errors is None else errors.result()
        yield name, Fed(budget, logits.cpu(), attended=attended, head_errors=found)
        if method.reads_alone:
            method.release()


def _attended_with(config: Config, budget: Budget, text: FedText) -> int:
    """Tokens that this package attends to with a budget; "all": the fed ones too."""
    static = config.sink + config.window
    count = config.replace(retrieve=budget).retrieve_count(text.context - static)
    return len(text.ids) if count is None else static + count
