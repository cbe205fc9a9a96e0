"""Ways to answer a question about a context: plain full attention, and retrieval attention.

The baseline is the unmodified model with PyTorch's attention and the transformers library's own cache: nothing of
this package takes part in it.  Answers are read from the output ids only, never from the echoed prompt.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from retrieval_attn.eval.prompts import Prompt

__all__ = ["METHODS", "POSITIONS", "FullAttention", "Method", "Reply", "RetrievalAttention", "load_model"]

METHODS = ("full", "retrieval")
POSITIONS = ("inside", "after")
_COPY_BELOW_BYTES = 1 << 30
_QUERY_FREE_INDEXES = ("auto", "flat")  # "auto" is flat as long as no other index exists


@dataclass(frozen=True)
class Reply:
    """One answer.  ids: output ids, without the prompt and the end-of-sequence token.

    seconds: prefill (the question included), index and decode; wall clock.
    """

    text: str
    ids: list[int]
    finish_reason: str
    seconds: dict[str, float]
    stats: dict[str, Any] = field(default_factory=dict)


class Method(Protocol):
    """A way to answer.  `answers` gives one Reply for each asked question position, greedy decoding."""

    name: str

    def answers(self, prompt: Prompt, positions: Sequence[str], max_new_tokens: int) -> dict[str, Reply]: ...


class FullAttention:
    """transformers' own generate with SDPA attention and its DynamicCache.

    Where the question stands makes no difference to exact attention: the ids are the same, so one generation
    answers both positions (the second Reply repeats the first).
    """

    name = "full"

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def answers(self, prompt: Prompt, positions: Sequence[str], max_new_tokens: int) -> dict[str, Reply]:
        import torch
        from transformers import GenerationConfig

        model = self._model
        if model.config._attn_implementation != "sdpa":
            model.set_attn_implementation("sdpa")
        ids = torch.from_numpy(prompt.ids)[None].to(model.device)
        stops = _stop_ids(model, self._tokenizer)
        pad = stops[0] if stops else 0
        options = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stops or None, pad_token_id=pad
        )
        clock = _FirstToken()
        begin = time.perf_counter()
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=options,
            stopping_criteria=[clock],
        )
        new = out[0, ids.shape[1] :].tolist()
        end = time.perf_counter()
        seconds = {"prefill": clock.at - begin, "index": 0.0, "decode": end - clock.at}
        reply = _reply(self._tokenizer, new, stops, seconds)
        return {position: reply for position in positions}


class RetrievalAttention:
    """This package: the context is read and indexed, then the question is asked.

    "inside": the question's tokens attend to the context exactly, as in one prefill of the whole prompt; only the
    answer is decoded through retrieval.  "after": the question comes when the index is finished, and its tokens
    go through retrieval too (append="retrieval"; "exact" turns that off).
    Both positions share one reading of the context if the index does not learn from the queries it saw while it was
    built; otherwise "inside" reads its whole prompt anew, as a user's would.
    Raises UnsupportedModelError or ConfigError when made, not at the first answer.
    """

    name = "retrieval"

    def __init__(self, model: Any, tokenizer: Any, config: Any, append: str = "retrieval") -> None:
        import retrieval_attn as ra

        self._new_context = lambda: ra.Context(model, tokenizer, config)
        self._new_context()
        self._append = append
        self._query_free_index = config.index in _QUERY_FREE_INDEXES

    def answers(self, prompt: Prompt, positions: Sequence[str], max_new_tokens: int) -> dict[str, Reply]:
        replies: dict[str, Reply] = {}
        alone = [] if self._query_free_index else [p for p in positions if p == "inside"]
        for position in alone:
            ids = prompt.ids.tolist()
            context, read = self._read(ids[:-1])
            begin = time.perf_counter()
            answer = context.continue_with(ids[-1:], max_new_tokens=max_new_tokens)
            replies[position] = _from_answer(answer, context, read, time.perf_counter() - begin)
        together = [p for p in positions if p not in alone]
        if together:
            context, read = self._read(prompt.context_ids.tolist())
            for position in together:
                append: Any = "exact" if position == "inside" else self._append
                begin = time.perf_counter()
                answer = context.ask(prompt.question_text, raw=True, append=append, max_new_tokens=max_new_tokens)
                replies[position] = _from_answer(answer, context, read, time.perf_counter() - begin)
        return replies

    def _read(self, ids: list[int]) -> tuple[Any, float]:
        begin = time.perf_counter()
        context = self._new_context().read(ids, progress=False)
        return context, time.perf_counter() - begin


def load_model(name: str, device: str, dtype: str) -> Any:
    """A causal language model in evaluation mode with PyTorch's SDPA attention.

    device: "auto", "cpu", "cuda" or "cuda:N".  dtype: "auto" is float32 on the CPU and the stored dtype elsewhere.
    Raises InputDataError if it cannot be loaded, ConfigError for a device that is not there.
    """
    from transformers import AutoModelForCausalLM

    from retrieval_attn.loading import choose_device, choose_dtype, load

    place = choose_device(device)
    model = load(AutoModelForCausalLM, name, dtype=choose_dtype(dtype, place), attn_implementation="sdpa")
    return model.to(place).eval()


def build_methods(names: Sequence[str], model: Any, tokenizer: Any, config: Any, append: str) -> dict[str, Method]:
    """Methods by name, the baseline first.

    A small model on the CPU is copied, so that nothing ever touches the baseline's; otherwise the methods share the
    weights, and retrieval leaves the model as it found it after every answer.
    """
    methods: dict[str, Method] = {}
    if "full" in names:
        methods["full"] = FullAttention(model, tokenizer)
    if "retrieval" in names:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        own = "full" in names and model.device.type == "cpu" and size < _COPY_BELOW_BYTES
        methods["retrieval"] = RetrievalAttention(copy.deepcopy(model) if own else model, tokenizer, config, append)
    return methods


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


def _stop_ids(model: Any, tokenizer: Any) -> list[int]:
    found = model.generation_config.eos_token_id
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return []
    return [int(i) for i in found] if isinstance(found, Sequence) else [int(found)]


def _reply(tokenizer: Any, ids: list[int], stops: Sequence[int], seconds: dict[str, float]) -> Reply:
    stopped = bool(ids) and ids[-1] in stops
    ids = ids[:-1] if stopped else ids
    return Reply(tokenizer.decode(ids, skip_special_tokens=True), ids, "stop" if stopped else "length", seconds)


def _from_answer(answer: Any, context: Any, read: float, asked: float) -> Reply:
    """Reply from a Context's answer; read and asked: wall-clock seconds, the question's own reading is prefill."""
    stats = answer.stats.to_dict()
    built, question = stats["index_seconds"], stats["prefill_seconds"]
    seconds = {"prefill": max(read - built, 0.0) + question, "index": built, "decode": max(asked - question, 0.0)}
    return Reply(answer.text, list(answer.tokens), answer.finish_reason, seconds, stats)


def model_digest(name: str) -> str | None:
    """SHA-256 over what a local model folder holds (weights by size and their first MiB); None for a hub id."""
    import hashlib

    folder = Path(name)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".bin", ".model")):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        with open(file, "rb") as data:
            digest.update(data.read(1 << 20))
    return digest.hexdigest()
