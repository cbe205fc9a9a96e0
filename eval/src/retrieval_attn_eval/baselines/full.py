"""Full attention: the unmodified model with PyTorch's attention and transformers' own cache.

Nothing of this package takes part in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrieval_attn_eval.baselines.reply import Reply, make_reply, stop_ids
from retrieval_attn_eval.prompts import Prompt

__all__ = ["FullAttention"]


class FullAttention:
    """transformers' own generate with SDPA attention and its DynamicCache.

    Where the question stands makes no difference to exact attention: the ids are the same, so one generation
    answers both positions (the second Reply repeats the first).
    keep_context: the keys and values of the last context stay for its next question (not for models whose cache
    cannot be cropped); `release` frees them.
    """

    name = "full"

    def __init__(self, model: Any, tokenizer: Any, keep_context: bool = False) -> None:
        self.options: dict[str, Any] = {}
        self._model, self._tokenizer, self._keep = model, tokenizer, keep_context
        self._last: tuple[Any, Any] | None = None  # context ids, their cache

    def release(self) -> None:
        """Free the memory of the last context."""
        self._last = None

    def answers(self, prompt: Prompt, positions: Sequence[str], max_new_tokens: int) -> dict[str, Reply]:
        import torch
        from transformers import GenerationConfig

        model = self._model
        if model.config._attn_implementation != "sdpa":
            model.set_attn_implementation("sdpa")
        ids = torch.from_numpy(prompt.ids)[None].to(model.device)
        stops = stop_ids(model, self._tokenizer)
        pad = stops[0] if stops else 0
        options = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stops or None, pad_token_id=pad
        )
        clock = _FirstToken()
        begin = time.perf_counter()
        cache, reused = self._cache(prompt)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=options,
            stopping_criteria=[clock],
            **({} if cache is None else {"past_key_values": cache}),
        )
        new = out[0, ids.shape[1] :].tolist()
        end = time.perf_counter()
        if cache is not None:
            cache.crop(len(prompt.context_ids) - cache.get_seq_length())
            self._last = prompt.context_ids, cache
        seconds = {"prefill": clock.at - begin, "index": 0.0, "decode": end - clock.at}
        # the first token comes from the prompt's own forward; token i > 0 is a step that sees i tokens more
        steps = len(new) - 1
        attended = len(prompt) + (steps + 1) / 2 if steps else None
        stats = {"tokens_attended_per_step": attended, "tokens_read_per_step": attended, "shared_prefill": reused}
        reply = make_reply(self._tokenizer, new, stops, seconds, stats)
        return {position: reply for position in positions}

    def _cache(self, prompt: Prompt) -> tuple[Any, bool]:
        """A cache to generate with (None: transformers makes its own), and whether it holds the context."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        last, self._last = self._last, None
        if not self._keep:
            return None, False
        if last is not None and np.array_equal(last[0], prompt.context_ids):
            return last[1], True
        del last
        cache = DynamicCache(config=self._model.config)
        croppable = all(type(layer) is DynamicLayer for layer in cache.layers)
        return (cache if croppable else None), False


class _FirstToken:
    """Stopping criterion that never stops; it notes when the first token was ready."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        if not self.at:
            if input_ids.is_cuda:
                torch.cuda.synchronize(input_ids.device)
            self.at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
