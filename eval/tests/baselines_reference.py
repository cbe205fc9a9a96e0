"""The second computation that baselines are compared with: transformers' eager attention with a dense mask per head.

A small llama with random weights; attention weights, queries and keys are read with hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from retrieval_attn.config import Config
from retrieval_attn_eval.baselines.cache import ContextCache, attention_modules
from retrieval_attn_eval.baselines.reader import feed
from tests.tiny_models import config_of, random_ids

CONTEXT, QUESTION = 150, 6
HEADS, KV_HEADS, DIM = 6, 2, 16
GROUP = HEADS // KV_HEADS
SCALE = DIM**-0.5


def model(layers: int = 1) -> Any:
    """A llama with random weights whose attention is far from uniform. Shared: leave it as it was."""
    return _model(layers)


@cache
def _model(layers: int) -> Any:
    from transformers import AutoModelForCausalLM

    config = config_of(
        "llama", vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(layers)
    made: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(12.0)
    return made


def ids() -> Tensor:
    return random_ids(1, CONTEXT + QUESTION)


@torch.no_grad()
def eager(allowed: Tensor, layers: int = 1, **options: Any) -> Any:
    """transformers' own forward; allowed: bool, broadcastable to (heads, tokens, tokens)."""
    tokens = allowed.shape[-1]
    mask = torch.zeros(1, *allowed.shape).masked_fill(~allowed[None], torch.finfo(torch.float32).min)
    return model(layers)(input_ids=ids()[:, :tokens], attention_mask=mask, use_cache=False, **options)


def causal(tokens: int = CONTEXT + QUESTION) -> Tensor:
    """(1, tokens, tokens) bool."""
    return torch.ones(1, tokens, tokens, dtype=torch.bool).tril()


def make_cache(policy: Callable[[int, int], Any], layers: int = 1, context: int = CONTEXT, chunk: int = 64) -> Any:
    """A cache that has read the context (in chunks) and acts as `policy`; `start` is the caller's."""
    made = ContextCache(model(layers), {"it": policy}, Config(index="flat"))
    feed(model(layers), made, ids()[0, :context].tolist(), 0, chunk)
    made.context_tokens = context
    made.act("it")
    return made


def answer(made: Any, one_by_one: bool = True, layers: int = 1) -> Tensor:
    """Logits of the question's last token, the question fed after the context was finished."""
    made.start()
    question = ids()[0, CONTEXT:].tolist()
    if not one_by_one:
        return feed(model(layers), made, question, CONTEXT, 4096)[0]
    for place, token in enumerate(question):
        logits = feed(model(layers), made, [token], CONTEXT + place, 4096)
    return logits[0]


@cache
def full_pass() -> dict[str, Any]:
    """Weights, queries and keys of the one layer over all tokens, as numpy; heads first."""
    module: Any = attention_modules(model())[0]
    seen: dict[str, Any] = {}
    from transformers.models.llama import modeling_llama

    with torch.no_grad(), watch(module, seen):
        out = eager(causal(), output_attentions=True)
        hidden, (cos, sin) = seen["hidden"], seen["rotary"]
        query = module.q_proj(hidden).view(1, -1, HEADS, DIM).transpose(1, 2)
        key = module.k_proj(hidden).view(1, -1, KV_HEADS, DIM).transpose(1, 2)
        value = module.v_proj(hidden).view(1, -1, KV_HEADS, DIM).transpose(1, 2)
        plain = query[0].numpy(), key[0].numpy()
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
    return {
        "weights": out.attentions[0][0].numpy(),
        "query": query[0].numpy(),
        "key": key[0].numpy(),
        "value": value[0].numpy(),
        "plain_query": plain[0],
        "plain_key": plain[1],
        "logits": out.logits[0, -1],
    }


@contextmanager
def watch(module: Any, seen: dict[str, Any]) -> Iterator[None]:
    """Notes the module's input, rotary tables, and what enters its output projection."""

    def before(_: Any, args: Any, kwargs: Any) -> None:
        seen["hidden"], seen["rotary"] = kwargs["hidden_states"], kwargs["position_embeddings"]

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.o_proj.register_forward_pre_hook(lambda _, args: seen.update(heads=args[0])),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def close(left: Tensor, right: Tensor, tolerance: float = 1e-4) -> bool:
    return float((left - right).abs().max()) <= tolerance
