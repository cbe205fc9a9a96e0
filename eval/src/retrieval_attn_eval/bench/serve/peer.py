"""transformers' own continuous batching on the same requests, where it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from retrieval_attn.model.loading import choose_device
from retrieval_attn_eval.bench.random_model import random_model
from retrieval_attn_eval.bench.serve.answered import Answered
from retrieval_attn_eval.bench.serve.call import Call
from retrieval_attn_eval.bench.serve.row import Bounds, Row, row_of
from retrieval_attn_eval.bench.session.subject import Settings
from retrieval_attn_eval.models import model_path

__all__ = ["peer_row"]

BLOCK_TOKENS = 256
"""Tokens of a block of its cache; transformers' own choice."""
ROOM = 2
"""Times the tokens of all requests: what its cache is made for."""
BATCH_TOKENS = 1024
"""Of a forward, at most: its own choice on a CPU takes minutes to set up."""


def peer_row(settings: Settings, calls: Sequence[Call], bounds: Bounds, most_tokens: int) -> Row:
    """The row of its manager (full attention), or why there is none. most_tokens: of a prompt."""
    way = "transformers"
    longest = max(call.request.prompt_tokens for call in calls)
    if longest > most_tokens:
        return Row(way, "not run", f"prompts have up to {longest:,} tokens, --peer-tokens allows {most_tokens:,}")
    try:
        model = _model(settings)
        _generate(model, [call._replace(arrival=0.0) for call in calls[:2]])  # what it compiles and allocates
        found = _generate(model, calls)
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
        model: Any = random_model(settings.shape, dtype, settings.seed, device, settings.layers)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_path(settings.model), dtype=dtype)
    model = model.to(device).eval()
    model.set_attn_implementation("sdpa")
    return model


def _generate(model: Any, calls: Sequence[Call]) -> list[Any]:
    """Outputs in the order of the calls, each of which comes at its time. Raises RuntimeError where one is missing."""
    from transformers import ContinuousBatchingConfig

    blocks = sum(-(-(call.request.prompt_tokens + call.request.max_tokens) // BLOCK_TOKENS) for call in calls)
    options = ContinuousBatchingConfig(block_size=BLOCK_TOKENS, num_blocks=ROOM * blocks, max_batch_tokens=BATCH_TOKENS)
    longest = max(call.request.max_tokens for call in calls)
    greedy = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found: dict[str, Any] = {}
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=options) as manager:
        began = time.perf_counter()
        for number, call in sorted(enumerate(calls), key=lambda one: one[1].arrival):
            time.sleep(max(0.0, began + call.arrival - time.perf_counter()))
            manager.add_request(
                call.request.ids, str(number), call.request.max_tokens, record_timestamps=True, eos_token_id=-1
            )
        while len(found) < len(calls) and manager.is_running():
            one = manager.get_result(timeout=1)
            if one is not None and one.is_finished():
                found[one.request_id] = one
    wrong = next((one.error for one in found.values() if one.error), None)
    if wrong is not None or len(found) != len(calls):
        raise RuntimeError(f"its manager answered {len(found)} of {len(calls)} requests: {wrong}")
    return [found[str(number)] for number in range(len(calls))]


def _answered(call: Call, one: Any) -> Answered:
    """Its clock starts when the request is there, so that its manager's set-up does not count.

    Raises RuntimeError for an answer of another length.
    """
    if len(one.generated_tokens) != call.request.max_tokens or len(one.timestamps) != len(one.generated_tokens):
        raise RuntimeError(
            f"its manager gave {len(one.generated_tokens)} tokens at {len(one.timestamps)} times, "
            f"{call.request.max_tokens} were asked for"
        )
    return Answered(one.created_time, tuple(one.timestamps), tuple(one.generated_tokens), call.request.prompt_tokens, 0)
