"""transformers' own continuous batching on the same requests, where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from retrieval_attn.eval.bench.random_model import random_model
from retrieval_attn.eval.bench.serve.answered import Answered
from retrieval_attn.eval.bench.serve.call import Call
from retrieval_attn.eval.bench.serve.row import Bounds, Row, row_of
from retrieval_attn.eval.bench.session.subject import Settings
from retrieval_attn.eval.models import model_path
from retrieval_attn.model.loading import choose_device

__all__ = ["peer_row"]

BLOCK_TOKENS = 256
"""Tokens of a block of its cache; transformers' own choice."""
ROOM = 2
"""Times the tokens of all requests: what its cache is made for."""
BATCH_TOKENS = 1024
"""Of a forward, at most: its own choice on a CPU takes minutes to set up."""


def peer_row(settings: Settings, calls: Sequence[Call], bounds: Bounds, most_tokens: int) -> Row:
    """The row of `generate_batch` (full attention), or why there is none. most_tokens: of a prompt."""
    way = "transformers"
    longest = max(call.request.prompt_tokens for call in calls)
    if longest > most_tokens:
        return Row(way, "not run", f"prompts have up to {longest:,} tokens, --peer-tokens allows {most_tokens:,}")
    if any(call.arrival for call in calls):
        return Row(way, "not run", "generate_batch takes all requests at once, and these come one by one")
    if len({call.request.max_tokens for call in calls}) > 1:
        return Row(way, "not run", "generate_batch takes one number of tokens for all answers")
    try:
        model = _model(settings)
        _generate(model, calls[:2], 2)  # what it compiles and allocates
        found = _generate(model, calls, calls[0].request.max_tokens)
        answers = [_answered(call, one) for call, one in zip(calls, found, strict=True)]
    except Exception as error:  # it is another one's, and what else was measured is to be reported
        said = str(error).splitlines()
        return Row(way, "not run", f"{type(error).__name__}: {said[0] if said else ''}"[:300])
    return row_of(way, answers, bounds, None)


def _model(settings: Settings) -> Any:
    device = choose_device(settings.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if settings.dtype != "auto":
        dtype = getattr(torch, settings.dtype)
    if settings.shape is not None:
        model: Any = random_model(settings.shape, dtype, settings.seed, device)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_path(settings.model), dtype=dtype)
    model = model.to(device).eval()
    model.set_attn_implementation("sdpa")
    return model


def _generate(model: Any, calls: Sequence[Call], tokens: int) -> list[Any]:
    """Outputs in the order of the calls. Raises RuntimeError where some are missing."""
    from transformers import ContinuousBatchingConfig

    blocks = sum(-(-(call.request.prompt_tokens + call.request.max_tokens) // BLOCK_TOKENS) for call in calls)
    options = ContinuousBatchingConfig(block_size=BLOCK_TOKENS, num_blocks=ROOM * blocks, max_batch_tokens=BATCH_TOKENS)
    greedy = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [call.request.ids for call in calls]
    found = list(
        model.generate_batch(
            prompts, generation_config=greedy, continuous_batching_config=options, record_timestamps=True
        ).values()
    )
    wrong = next((one.error for one in found if one.error), None)
    if wrong is not None or len(found) != len(calls):
        raise RuntimeError(f"generate_batch answered {len(found)} of {len(calls)} requests: {wrong}")
    return found


def _answered(call: Call, one: Any) -> Answered:
    """Its clock starts when the request is there, so that its manager's set-up does not count.

    Raises RuntimeError for an answer of another length.
    """
    if len(one.generated_tokens) != call.request.max_tokens or len(one.timestamps) != len(one.generated_tokens):
        raise RuntimeError(
            f"generate_batch gave {len(one.generated_tokens)} tokens at {len(one.timestamps)} times, "
            f"{call.request.max_tokens} were asked for"
        )
    return Answered(one.created_time, tuple(one.timestamps), tuple(one.generated_tokens), call.request.prompt_tokens, 0)
