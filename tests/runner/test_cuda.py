"""The runtime on a CUDA device: exact against eager, constant device memory, answers from the bundled model."""

from __future__ import annotations

import copy
import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

import retrieval_attn as ra
from tests.tiny_models import CONFIGS, QUESTION, random_ids, tiny_model

pytestmark = pytest.mark.cuda

ALL = ra.Config(sink=4, window=16, retrieve="all")


def logits_of(model: Any, cache: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Prompt, then one token at a time; (1, tokens, vocabulary)."""
    pieces = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    with torch.no_grad():
        return torch.cat([model(input_ids=piece, past_key_values=cache).logits for piece in pieces], dim=1)


@pytest.mark.parametrize("chunk", [4096, 37], ids=["one-shot", "layer-major"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_float32_equals_eager(name: str, chunk: int) -> None:
    """Every model type on the device, keys on the host, float32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model: Any = copy.deepcopy(tiny_model(name)).cuda()
    ids = random_ids(1, 162).cuda()
    expected = logits_of(model, DynamicCache(config=model.config), ids, 150)
    ra.enable(model, ALL, prefill_chunk=chunk)
    got = logits_of(model, ra.RetrievalCache(model, ALL), ids, 150)
    assert (got - expected).abs().max() <= 2e-5


class Routes:
    """Which experts each token went to: where rounding turns a close call, logits change by far more than rounding."""

    def __init__(self, model: Any) -> None:
        self._seen: dict[str, list[torch.Tensor]] = {}
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Router"):
                module.register_forward_hook(functools.partial(self._note, name))

    def _note(self, name: str, module: Any, given: Any, out: Any) -> None:
        self._seen.setdefault(name, []).append(out[-1].sort(dim=-1).values)

    def take(self, tokens: int) -> torch.Tensor:
        """(tokens, experts chosen in all layers) of the pass since the last call."""
        rows = [torch.cat(parts) for parts in self._seen.values()]
        self._seen.clear()
        return torch.cat(rows, dim=1) if rows else torch.zeros(tokens, 0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_bfloat16_is_as_close_as_rounding(name: str) -> None:
    """bf16 on the device against float32 logits: at most twice the error of eager bf16, where routes are the same."""
    reference: Any = copy.deepcopy(tiny_model(name)).cuda()
    routes = Routes(reference)
    ids = random_ids(1, 162).cuda()
    exact = logits_of(reference, DynamicCache(config=reference.config), ids, 150)
    wanted = routes.take(162)
    model = reference.to(torch.bfloat16)

    def error(cache: Any) -> torch.Tensor:
        difference = (logits_of(model, cache, ids, 150).float() - exact).abs().amax(dim=-1)[0]
        same = (routes.take(162) == wanted).all(dim=1)
        assert same.float().mean() >= 0.9
        return difference[same].max()

    rounding = error(DynamicCache(config=model.config))
    ra.enable(model, ALL)
    assert error(ra.RetrievalCache(model, ALL)) <= 2 * rounding


def test_device_memory_does_not_grow_with_the_context(needle_model_path: Path) -> None:
    """After reading 8K and 64K tokens the same bytes stay on the device (the cache's windows), with an index on the
    host. What earlier tests left in cycles must not be freed meanwhile, nor what is made once count.
    """
    llm = ra.LLM(needle_model_path, device="cuda", config=ra.Config(prefill_chunk=4096, index="sketch"))
    vocabulary = llm.model.config.vocab_size
    held = []
    for tokens in (2048, 8192, 65536):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        context = llm.read(torch.randint(3, vocabulary, (tokens,)).tolist(), progress=False)
        held.append(torch.cuda.memory_allocated() - before)
        del context
    assert held[1] > 2**20 and abs(held[2] - held[1]) < 2**20


def test_the_bundled_model_answers_from_128k(needle_model_path: Path) -> None:
    """A needle 60K tokens back, question after the context was read, its tokens retrieved too."""
    from retrieval_attn_eval.text.prose import prose

    tokenizer = AutoTokenizer.from_pretrained(needle_model_path)
    text = prose(700_000, seed=11)
    middle = text.index(". ", 250_000) + 2
    needle = "The special magic Bergen number is: 7391846. "
    ids = tokenizer(text[:middle] + needle + text[middle:])["input_ids"][:130_900]
    loaded: Any = AutoModelForCausalLM.from_pretrained(needle_model_path, dtype=torch.bfloat16)
    model = loaded.cuda().eval()
    context = ra.Context(model, tokenizer).read(ids, progress=False)
    answer = context.ask(QUESTION, max_new_tokens=24, question_attention="retrieval")
    assert "7391846" in answer.text
    assert context.ask(QUESTION, max_new_tokens=24, question_attention="exact").text
