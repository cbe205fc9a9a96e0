"""A published method, as a way to answer: read the context, compress or index it, then decode through the method."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from retrieval_attn.testing import PromptState, TokenChoice, run, using_retrieval
from retrieval_attn_eval.baselines.cache import ContextCache, PolicyFactory, attention_modules
from retrieval_attn_eval.baselines.infinigen import LayerInputs, Speculation, require_projection
from retrieval_attn_eval.baselines.infllm import Blocks, require_rotation
from retrieval_attn_eval.baselines.magicpig import LshSampling
from retrieval_attn_eval.baselines.options import InfiniGen, InfLLM, MagicPIG, Options, Quest, SnapKV, StreamingLLM
from retrieval_attn_eval.baselines.policy import Dense, Policy
from retrieval_attn_eval.baselines.quest import QuestPages
from retrieval_attn_eval.baselines.reader import ContextReader, feed
from retrieval_attn_eval.baselines.reply import Reply, make_reply, stop_ids
from retrieval_attn_eval.baselines.snapkv import Snap
from retrieval_attn_eval.baselines.streaming import Streaming
from retrieval_attn_eval.prompts import Prompt

__all__ = ["PolicyMethod", "policies_of"]

Watch = Callable[[ContextCache, int], contextlib.AbstractContextManager[None]]
"""(cache, tokens of its context) -> what watches its layers."""


class PolicyMethod:
    """One of the published methods that decide per layer what a query attends to.

    "inside": the question is the end of the prompt, which is read as a whole; the first answer token comes from
    that reading, as in the papers.  "after": the context alone is compressed or indexed, and the question's tokens
    go through the method as generated ones do.
    reads_alone: no other method shares its readings.
    Raises UnsupportedModelError when made if the method cannot run on the model.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, options: Options, reader: ContextReader | None) -> None:
        self.name, self.options = name, options.to_dict()
        self._model, self._tokenizer = model, tokenizer
        self._inputs: LayerInputs | None = None
        modules = attention_modules(model)
        if isinstance(options, InfiniGen):
            require_projection(modules)
            self._inputs = LayerInputs(modules)
        if isinstance(options, InfLLM) and options.positions == "unified":
            require_rotation(model, modules[0])
        self.reads_alone = reader is None or options.reads
        self._reader = ContextReader(model) if self.reads_alone or reader is None else reader
        self._key = f"{name}-{id(self)}"
        self._reader.attach(self._key, policies_of(options, model, self._inputs))

    def release(self) -> None:
        """Free the memory of the last context."""
        self._reader.release()

    def answers(self, prompt: Prompt, positions: Sequence[str], max_new_tokens: int) -> dict[str, Reply]:
        replies = {}
        for position in positions:
            cache, read = self._reader.open(prompt.context_ids)
            try:
                replies[position] = self._answer(cache, read, prompt, position, max_new_tokens)
            finally:
                cache.rewind()
        return replies

    def forced(
        self, context_ids: NDArray[np.int64], token_ids: Sequence[int], watch: Watch | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Logits after each of `token_ids`, which go through the method one by one after the context.

        The context is compressed or indexed first, as with "after". watch: entered with the cache and its tokens while
        `token_ids` are fed. Returns (tokens, vocabulary) float32 on the model's device, and what was attended to, by
        the names of `Reply.stats`.
        """
        chunk = self._reader.config.prefill_chunk
        cache, _ = self._reader.open(context_ids)
        try:
            cache.act(self._key)
            with self._inputs or contextlib.nullcontext():
                cache.start()
                with contextlib.nullcontext() if watch is None else watch(cache, len(context_ids)):
                    rows = [
                        feed(self._model, cache, [token], len(context_ids) + at, chunk)
                        for at, token in enumerate(token_ids)
                    ]
            return torch.cat(rows), _measured(cache)
        finally:
            cache.rewind()

    def _answer(self, cache: ContextCache, read: float, prompt: Prompt, position: str, max_new_tokens: int) -> Reply:
        chunk = self._reader.config.prefill_chunk
        question, context = prompt.question_ids.tolist(), len(prompt.context_ids)
        cache.act(self._key)
        with self._inputs or contextlib.nullcontext():
            index = cache.start() if position == "after" else 0.0
            began = time.perf_counter()
            logits = feed(self._model, cache, question, context, chunk)
            asked = time.perf_counter() - began
            if position == "inside":
                index = cache.start()
            began = time.perf_counter()
            new = self._generate(cache, prompt, logits, max_new_tokens)
            decode = time.perf_counter() - began
        seconds = {"prefill": read + asked, "index": index, "decode": decode}
        stats = {**_measured(cache), "shared_prefill": read == 0.0}
        return make_reply(self._tokenizer, new, stop_ids(self._model, self._tokenizer), seconds, stats)

    @torch.no_grad()
    def _generate(self, cache: ContextCache, prompt: Prompt, logits: torch.Tensor, max_new_tokens: int) -> list[int]:
        model = self._model
        stops = stop_ids(model, self._tokenizer)
        sequence = torch.from_numpy(prompt.ids)[None].to(model.device)
        cache.require_room(max_new_tokens, len(prompt))
        criteria = StoppingCriteriaList([MaxLengthCriteria(len(prompt) + max_new_tokens)])
        if stops:
            criteria.append(EosTokenCriteria(stops))
        with using_retrieval(model, self._reader.config.prefill_chunk):
            position = torch.tensor([len(prompt) - 1], device=model.device)
            choice = TokenChoice(criteria, pad_id=stops[0] if stops else 0)
            done = run(model, cache, PromptState(sequence, logits, position), choice)
        new: list[int] = done.sequences[0, len(prompt) :].tolist()
        return new


def policies_of(options: Options, model: Any, inputs: LayerInputs | None = None) -> PolicyFactory:
    """What makes the policy of each layer. inputs: the layers' own, which InfiniGen needs."""

    def policy(layer: int, layers: int) -> Policy:
        if layer < getattr(options, "dense_layers", 0):
            return Dense(options, layer, layers)
        if isinstance(options, InfLLM):
            return Blocks(options, layer, layers, model)
        if isinstance(options, InfiniGen):
            assert inputs is not None
            return Speculation(options, layer, layers, inputs)
        kinds = ((StreamingLLM, Streaming), (SnapKV, Snap), (Quest, QuestPages), (MagicPIG, LshSampling))
        kind = next(kind for of, kind in kinds if isinstance(options, of))
        return kind(options, layer, layers)

    return policy


def _measured(cache: ContextCache) -> dict[str, Any]:
    """Tokens attended and read per step: mean over layers of what their meters counted."""
    meters = [meter for meter in cache.meters() if meter.queries]
    if not meters:
        return {"tokens_attended_per_step": None, "tokens_read_per_step": None, "tokens_attended_by_layer": []}
    attended = [meter.attended / meter.queries for meter in meters]
    read = [meter.read / meter.queries for meter in meters]
    return {
        "tokens_attended_per_step": sum(attended) / len(attended),
        "tokens_read_per_step": sum(read) / len(read),
        "tokens_attended_by_layer": [round(value, 2) for value in attended],
    }
