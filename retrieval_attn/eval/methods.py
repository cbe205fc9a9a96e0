"""Ways to answer a question about a context: plain full attention, and retrieval attention.

The baseline is the unmodified model with PyTorch's attention and the transformers library's own cache: nothing of
this package takes part in it.  Answers are read from the output ids only, never from the echoed prompt.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from retrieval_attn.errors import ConfigError, InputDataError
from retrieval_attn.eval.prompts import Prompt

__all__ = ["METHODS", "POSITIONS", "FullAttention", "Method", "Reply", "RetrievalAttention", "load_model"]

METHODS = ("full", "retrieval")
POSITIONS = ("inside", "after")
_COPY_BELOW_BYTES = 1 << 30


@dataclass(frozen=True)
class Reply:
    """One answer.  ids: output ids without the prompt.  seconds: prefill, index and decode, where known."""

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
    Both positions share one reading of the context when the index does not depend on the queries it saw.
    """

    name = "retrieval"

    def __init__(self, model: Any, tokenizer: Any, config: Any, append: str = "retrieval") -> None:
        self._model, self._tokenizer, self._config, self._append = model, tokenizer, config, append

    def answers(self, prompt: Prompt, positions: Sequence[str], max_new_tokens: int) -> dict[str, Reply]:
        import retrieval_attn as ra

        replies: dict[str, Reply] = {}
        try:
            context = ra.Context(self._model, self._tokenizer, self._config)
            begin = time.perf_counter()
            context.read(prompt.context_ids.tolist(), progress=False)
            read = time.perf_counter() - begin
            for position in positions:
                append = "exact" if position == "inside" else self._append
                begin = time.perf_counter()
                answer = context.fork().ask(prompt.question_ids.tolist(), max_new_tokens=max_new_tokens, append=append)
                asked = time.perf_counter() - begin
                stats = _plain(answer.stats)
                index = float(stats.get("index_seconds") or 0.0)
                seconds = {"prefill": max(read - index, 0.0), "index": index, "decode": asked}
                replies[position] = Reply(answer.text, list(answer.tokens), answer.finish_reason, seconds, stats)
        finally:
            ra.disable(self._model)
        return replies


def load_model(name: str, device: str, dtype: str) -> Any:
    """A causal language model in evaluation mode with SDPA attention.

    dtype: "auto" is float32 on the CPU and the stored dtype elsewhere.  Raises InputDataError if it cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if dtype == "auto":
        wanted: Any = torch.float32 if device == "cpu" else "auto"
    else:
        wanted = getattr(torch, dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=wanted, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputDataError(
            f"model {name}: could not be loaded ({reason}); give a model folder or a hub id that is available here"
        ) from error
    return model.to(device).eval()


def pick_device(device: str) -> str:
    """ "auto" becomes "cuda" where there is one, else "cpu".  Raises ConfigError for a device that is not there."""
    import torch

    available = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if available else "cpu"
    if device.startswith("cuda") and not available:
        raise ConfigError(f"--device {device} needs a CUDA GPU, none was found; use --device cpu")
    return device


def build_methods(names: Sequence[str], model: Any, tokenizer: Any, config: Any, append: str) -> dict[str, Method]:
    """Methods by name, the baseline first.  A small model on the CPU is copied, so that the baseline stays untouched;
    otherwise the methods share the weights and the baseline restores SDPA before each answer."""
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
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Reply(text, ids, "stop" if ids and ids[-1] in stops else "length", seconds)


def _plain(stats: Any) -> dict[str, Any]:
    """Statistics as JSON values."""
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        stats = dataclasses.asdict(stats)
    if not isinstance(stats, Mapping):
        return {}
    return {str(k): v for k, v in stats.items() if isinstance(v, str | int | float | bool | type(None))}


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
